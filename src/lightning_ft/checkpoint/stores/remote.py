"""What all fsspec file systems have in common, and the drivers that need little more."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from fsspec import AbstractFileSystem

from lightning_ft.checkpoint.stores.base import Attempt, Paths, Store
from lightning_ft.checkpoint.stores.paths import is_temporary, temporary_path


class RemoteStore(Store):
    """Reads, lists and deletes through fsspec. How an object is made is the driver's own.

    Args:
        url: Where the objects are, for messages.
        fs: The file system, which nobody else uses: what it caches of listings is dropped before each look.
        root: The directory as the file system names it.
        timeout_s: As `Store`.
    """

    def __init__(self, url: str, fs: AbstractFileSystem, root: str, *, timeout_s: float | None) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._fs: Any = fs  # fsspec has no types
        self._root = root.rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _exists(self, path: str) -> bool:
        try:
            self._size(path)
        except FileNotFoundError:
            return False
        return True

    def _read(self, path: str, start: int, end: int | None) -> bytes:
        data: bytes = self._fs.cat_file(self._full(path), start=start or None, end=end)
        if not data:
            self._size(path)  # some take a directory for an empty file
        return data

    def _size(self, path: str) -> int:
        self._fs.invalidate_cache()
        info = self._fs.info(self._full(path))
        if info["type"] != "file":
            raise IsADirectoryError(path)
        return int(info["size"])

    def _list(self, prefix: str) -> Iterable[str]:
        self._fs.invalidate_cache()
        return [
            path
            for path in self._files(prefix.rpartition("/")[0])
            if path.startswith(prefix) and not is_temporary(path)
        ]

    def _files(self, top: str) -> Iterator[str]:
        try:
            entries = self._fs.ls(self._full(top), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = entry["name"].rstrip("/")
            if name.strip("/") == self._full(top).strip("/"):
                continue  # a file of that name, or an object store's sign that there is such a directory
            path = f"{top}/{name.rpartition('/')[2]}".lstrip("/")
            if entry["type"] == "directory":
                yield from self._files(path)
            else:
                yield path

    def _delete(self, paths: Paths) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._full(path))

    @contextlib.contextmanager
    def _temporary(self, path: str, pieces: Iterable[bytes | memoryview]) -> Iterator[str]:
        """Write a file beside a path, yield its full name, and remove it afterwards if it is still there."""
        self._fs.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)
        temporary = self._full(temporary_path(path))
        try:
            with self._fs.open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
            yield temporary
        finally:
            with contextlib.suppress(Exception):  # renamed; or no harm is done
                self._fs.rm_file(temporary)


class MemoryStore(RemoteStore):
    """Objects in this process's memory (`memory://`): for tests and trials. They end with the process."""

    _lock = threading.Lock()  # fsspec's dictionary is one for the whole process, too

    def _create(self, path: str, attempt: Attempt) -> None:
        if self._exists(path):
            raise FileExistsError(path)
        data = b"".join(attempt.source)
        with self._lock:
            if self._exists(path):
                raise FileExistsError(path)
            attempt.begin_commit()
            self._fs.pipe_file(self._full(path), data)

    def _replace(self, path: str, data: bytes) -> None:
        with self._lock:
            self._fs.pipe_file(self._full(path), data)


class ConditionalStore(RemoteStore):
    """Object stores whose fsspec file system lets the server refuse to overwrite: Google's and Azure's.

    Read in gcsfs 2026.10.1 (`mode="create"` sends `ifGenerationMatch=0`) and adlfs 2026.8.0 (`overwrite=False`).
    """

    def _create(self, path: str, attempt: Attempt) -> None:
        if self._exists(path):
            raise FileExistsError(path)
        data = b"".join(attempt.source)
        attempt.begin_commit()  # a refusal is no clear no: the client library repeats by itself what had no answer
        self._fs.pipe_file(self._full(path), data, mode="create")

    def _replace(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._full(path), data)


class WebHdfsStore(RemoteStore):
    """HDFS through its REST interface, whose rename never overwrites and says whether it was done.

    Source: Hadoop's "WebHDFS REST API", Rename a File/Directory, and FileSystem specification, rename.
    """

    def _create(self, path: str, attempt: Attempt) -> None:
        if self._exists(path):
            raise FileExistsError(path)
        with self._temporary(path, attempt.source) as temporary:
            attempt.begin_commit()
            if not self._rename(temporary, path):
                attempt.was_refused()
                if self._exists(path):
                    raise FileExistsError(path)
                raise OSError(f"HDFS did not rename {temporary} to {self._full(path)}, and does not say why")

    def _replace(self, path: str, data: bytes) -> None:
        with self._temporary(path, [data]) as temporary:
            if not self._rename(temporary, path):
                self._delete([path])  # its readers can do without for a moment
                if not self._rename(temporary, path):
                    raise OSError(f"HDFS did not rename {temporary} to {self._full(path)}, and does not say why")

    def _rename(self, temporary: str, path: str) -> bool:
        answer = self._fs._call("RENAME", method="put", path=temporary, destination=self._full(path))  # `mv` drops it
        return bool(answer.json()["boolean"])


class PlainStore(RemoteStore):
    """Any other file system: it is asked whether the object exists, then the object is written.

    Weaker than the other drivers: of two writers that ask at the same time both succeed, and the later one's object
    stays. Durability is whatever the file system offers. Where it has a rename of its own an object is written under
    another name first; where it has none its upload is taken to be atomic, as object stores' are.
    """

    def __init__(self, url: str, fs: AbstractFileSystem, root: str, *, timeout_s: float | None) -> None:
        super().__init__(url, fs, root, timeout_s=timeout_s)
        self._can_rename = type(fs).mv is not AbstractFileSystem.mv
        warnings.warn(
            f"{self.url}: fsspec's {type(fs).__name__} has no way to create an object only if there is none. Two jobs "
            "that write there at the same time may overwrite each other's checkpoints: see that only one does."
            + (" webhdfs:// has one." if url.startswith("hdfs:") else ""),
            stacklevel=3,
        )

    def _create(self, path: str, attempt: Attempt) -> None:
        if self._exists(path):
            raise FileExistsError(path)
        self._put(path, attempt.source, attempt)

    def _replace(self, path: str, data: bytes) -> None:
        self._put(path, [data])

    def _put(self, path: str, pieces: Iterable[bytes | memoryview], attempt: Attempt | None = None) -> None:
        if not self._can_rename:
            data = b"".join(pieces)
            if attempt is not None:
                attempt.begin_commit()
            self._fs.pipe_file(self._full(path), data)
            return
        with self._temporary(path, pieces) as temporary:
            if attempt is not None and self._exists(path):
                raise FileExistsError(path)  # much may have happened while it was written
            if attempt is not None:
                attempt.begin_commit()
            self._fs.mv(temporary, self._full(path))
