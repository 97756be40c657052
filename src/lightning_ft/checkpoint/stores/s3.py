"""Amazon S3 and what speaks its language: the server itself refuses to overwrite, by `If-None-Match: *`.

AWS does so for `PutObject` and for `CompleteMultipartUpload`, as do MinIO, Ceph and Cloudflare R2 in recent versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from lightning_ft.checkpoint.stores.base import Attempt, Paths
from lightning_ft.checkpoint.stores.failures import http_status
from lightning_ft.checkpoint.stores.remote import RemoteStore
from lightning_ft.checkpoint.stores.source import Source

PART_BYTES = 16 << 20
"""An object up to this size is one request, a larger one has parts of it; S3 takes 5 MiB to 5 GiB, 10,000 of them."""

NUM_PARALLEL = 4
"""Parts under way at a time: one connection does not fill a network card."""

_DELETED_AT_ONCE = 1000
"""S3's limit for DeleteObjects."""

_ATTEMPT = "lightning-ft-attempt"
"""Metadata of an object: the token of the `create` that made it."""


class S3Store(RemoteStore):
    """Objects in a bucket below a key prefix.

    An answer may be lost after the server did what it was asked; botocore then repeats the request, and is refused
    because of its own object. So an object carries the token of the call that made it.
    """

    bounds_itself: ClassVar[bool] = True  # a coroutine, unlike a thread, can be cancelled

    def __init__(self, url: str, fs: AbstractFileSystem, root: str, *, timeout_s: float | None) -> None:
        super().__init__(url, fs, root, timeout_s=timeout_s)
        self._is_probed = False

    def _create(self, path: str, attempt: Attempt) -> None:
        if self._exists(path):
            raise FileExistsError(path)
        parts = _parts(attempt.source)
        first = next(parts, b"")
        second = next(parts, None)
        if second is not None:
            self._create_in_parts(path, itertools.chain((first, second), parts), attempt)
            return
        attempt.begin_commit()
        self._put_if_absent(path, first, attempt)
        if not self._is_probed:
            self._probe(path, first, attempt)

    def _put_if_absent(self, path: str, data: bytes, attempt: Attempt) -> None:
        with _refusal():
            self._call("put_object", path, Body=data, IfNoneMatch="*", Metadata={_ATTEMPT: attempt.token})

    def _probe(self, path: str, data: bytes, attempt: Attempt) -> None:
        """Create the first object a second time, which changes nothing, to see whether the server refuses."""
        try:
            self._put_if_absent(path, data, attempt)
        except FileExistsError:
            pass
        else:
            warnings.warn(
                f"{self.url}: the server, or the botocore that is installed, ignores If-None-Match. Two jobs that "
                "write there at the same time may overwrite each other's checkpoints: see that only one does.",
                stacklevel=2,
            )
        self._is_probed = True

    def _create_in_parts(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        upload = self._call("create_multipart_upload", path, Metadata={_ATTEMPT: attempt.token})["UploadId"]
        try:
            done: list[dict[str, Any]] = []
            while batch := list(itertools.islice(parts, NUM_PARALLEL)):
                done += self._upload(path, upload, batch, len(done) + 1)
            attempt.begin_commit()
            with _refusal():
                self._call(
                    "complete_multipart_upload",
                    path,
                    UploadId=upload,
                    MultipartUpload={"Parts": done},
                    IfNoneMatch="*",
                )
        except BaseException:
            with contextlib.suppress(Exception):  # else its parts are kept, and paid for, until a rule of the bucket
                self._call("abort_multipart_upload", path, UploadId=upload)
            raise

    def _upload(self, path: str, upload: str, batch: list[bytes], number: int) -> list[dict[str, Any]]:
        """Upload parts side by side and return what completes them."""

        async def put(number: int, part: bytes) -> dict[str, Any]:
            answer = await self._fs._call_s3(
                "upload_part", **self._place(path), UploadId=upload, PartNumber=number, Body=part
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        async def put_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*(put(number + index, part) for index, part in enumerate(batch)))

        done: list[dict[str, Any]] = sync(self._fs.loop, put_all, timeout=self._timeout_s)
        return done

    def _is_ours(self, path: str, attempt: Attempt) -> bool:
        return bool(self._call("head_object", path)["Metadata"].get(_ATTEMPT) == attempt.token)

    def _replace(self, path: str, data: bytes) -> None:
        self._call("put_object", path, Body=data)

    def _read(self, path: str, start: int, end: int | None) -> bytes:
        try:
            data: bytes = self._fs.cat_file(self._full(path), start=start, end=end, timeout=self._timeout_s)
        except OSError as error:
            if http_status(error) != 416:
                raise
            return b""  # nothing there in this range
        return data

    def _size(self, path: str) -> int:
        return int(self._call("head_object", path)["ContentLength"])

    def _list(self, prefix: str) -> Iterable[str]:
        bucket, root = self._place("").values()
        base = f"{root}/" if root else ""
        token: dict[str, str] = {}
        paths: list[str] = []
        while True:
            answer = self._call_s3("list_objects_v2", Bucket=bucket, Prefix=base + prefix, **token)
            keys = (entry["Key"] for entry in answer.get("Contents", []))
            paths += [key[len(base) :] for key in keys if not key.endswith("/")]  # consoles make "directories"
            if not answer.get("IsTruncated"):
                return paths
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def _delete(self, paths: Paths) -> None:
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            places = [self._place(path) for path in paths[start : start + _DELETED_AT_ONCE]]
            objects = [{"Key": place["Key"]} for place in places]
            answer = self._call_s3(
                "delete_objects", Bucket=places[0]["Bucket"], Delete={"Objects": objects, "Quiet": True}
            )
            for error in answer.get("Errors", []):
                kind = PermissionError if error.get("Code") == "AccessDenied" else OSError
                raise kind(f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def _place(self, path: str) -> dict[str, str]:
        bucket, _, key = self._full(path).partition("/")
        return {"Bucket": bucket, "Key": key}

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._call_s3(method, **self._place(path), **arguments)

    def _call_s3(self, method: str, **arguments: Any) -> Any:
        return self._fs.call_s3(method, timeout=self._timeout_s, **arguments)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    """Raise FileExistsError when the condition does not hold; s3fs does so only if the server names the condition."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if http_status(error) != 412:
            raise
        raise FileExistsError(str(error)) from error


def _parts(source: Source) -> Iterator[bytes]:
    """Join pieces to parts of `PART_BYTES`, the last one smaller."""
    part = bytearray()
    for piece in source:
        rest = piece
        while rest:
            room = PART_BYTES - len(part)
            part += rest[:room]
            rest = rest[room:]
            if len(part) == PART_BYTES:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
