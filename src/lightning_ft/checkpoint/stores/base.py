"""What every store promises, and the part of it that does not depend on the kind of storage."""

from __future__ import annotations

import abc
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeAlias, TypeVar

from lightning_ft.checkpoint.stores.failures import no_such_object, store_error
from lightning_ft.checkpoint.stores.paths import check_path, check_prefix
from lightning_ft.checkpoint.stores.source import Source, bounded
from lightning_ft.errors import AlreadyThereError, StoreError

T = TypeVar("T")

_NO_OBJECT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

Paths: TypeAlias = list[str]
"""Inside the class `list` is a method."""

_COMPARE_BYTES = 8 << 20
"""An object that may be ours is read in ranges of this size to compare it."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One call of `create`, as the driver sees it.

    Attributes:
        source: The object's pieces.
        token: Names the attempt; a retry of an attempt that is in doubt has the same.
        was_in_doubt: Whether an earlier call with this token may have made the object.
        is_in_doubt: Whether any call with this token may have.
    """

    source: Source
    token: str
    was_in_doubt: bool
    is_in_doubt: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_in_doubt = self.was_in_doubt

    def begin_commit(self) -> None:
        """To be called right before the operation that makes the object visible.

        Raises:
            RevokedError: The caller has given up.
        """
        # In this order: whoever gives up revokes first and then looks, so that one of the two sees the other.
        self.is_in_doubt = True
        self.source.check()

    def was_refused(self) -> None:
        """To be called if the answer to that operation was a clear no."""
        self.is_in_doubt = self.was_in_doubt


class Store(abc.ABC):
    """Immutable objects under one URL.

    A path is relative to that URL: names joined by `/`, none of them empty or beginning with a dot. An object is absent
    or whole, never half, whatever process or machine dies when. Nothing is remembered of what was listed or read.

    Args:
        url: Where the objects are, for messages.
        timeout_s: Longest time in which an operation may make no progress; None: no bound.

    Threads: any, but one for each path.
    Source: FORMAT.md, Storage.
    """

    bounds_itself: ClassVar[bool] = False
    """Whether the driver gives up by itself what makes no progress for `timeout_s`."""

    def __init__(self, url: str, *, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, or None for no bound, got {timeout_s!r}")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._in_doubt: dict[str, str] = {}  # path -> token of an attempt whose end is unknown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def create(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Make an object. When it returns the object is durable: no crash takes it away.

        Of several callers, in any processes, one succeeds. A call that failed in doubt may be repeated with the same
        bytes: it succeeds if the object was made by the earlier one.

        Args:
            path: Where; what directories it needs are made.
            pieces: The bytes in order. Taken once, perhaps in another thread, and not at all if the path is taken. They
                may be changed once the call has returned or raised.

        Raises:
            AlreadyThereError: There is such an object by another writer, or by an earlier call that succeeded; it was
                left as it is.
            StoreError: It could not be made; `is_in_doubt` tells if it may be there all the same.
            ValueError: Not a path as described above.
        """
        check_path(path)
        token = self._in_doubt.get(path)
        attempt = Attempt(Source(pieces), token or secrets.token_hex(16), was_in_doubt=token is not None)
        try:
            self._guard("create", path, lambda: self._create_or_recognize(path, attempt), attempt)
        finally:
            if attempt.is_in_doubt:
                self._in_doubt[path] = attempt.token
            else:
                self._in_doubt.pop(path, None)

    def replace(self, path: str, data: bytes) -> None:
        """Make an object or put another in its place, atomically: for hints, which no reader may rely on.

        Raises:
            StoreError: It failed; the old or the new object is there.
            ValueError: Not a path.
        """
        check_path(path)
        self._guard("replace", path, lambda: self._replace(path, data))

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Return an object's bytes.

        Args:
            path: Which object.
            start: First byte, >= 0.
            end: One after the last byte; None: to the end.

        Raises:
            FileNotFoundError: There is no such object.
            StoreError: It could not be read, or is shorter than asked for (`reason` is `short read`).
            ValueError: Not a path, or not `0 <= start <= end`.
        """
        check_path(path)
        if start < 0 or (end is not None and end < start):
            raise ValueError(f"0 <= start <= end must hold, got start={start!r}, end={end!r}")
        return self._guard("read", path, lambda: self._checked_read(path, start, end))

    def size(self, path: str) -> int:
        """Return an object's size in bytes, as the storage has it now.

        Raises:
            FileNotFoundError: There is no such object.
            StoreError: It could not be asked for.
            ValueError: Not a path.
        """
        check_path(path)
        return self._guard("size", path, lambda: self._size(path))

    def list(self, prefix: str) -> Paths:
        """Return the paths that begin with a prefix, sorted; [] if there are none.

        Args:
            prefix: Compared as text, as object stores do: `manifests/` for a directory, "" for all.

        Raises:
            StoreError: The listing failed. It is never cut short silently.
            ValueError: The prefix does not begin a path.
        """
        check_prefix(prefix)
        return self._guard("list", prefix, lambda: sorted(self._list(prefix)))

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; one that is missing is fine. When it returns they stay away, whatever crashes.

        Of the order within one call nothing is promised: call it twice where one must go before the other.

        Raises:
            StoreError: Some may be deleted, some not.
            ValueError: Not a path; nothing was deleted.
        """
        doomed = list(paths)
        for path in doomed:
            check_path(path)
        if doomed:
            self._guard("delete", ", ".join(doomed[:3]), lambda: self._delete(doomed))

    def recover(self) -> None:
        """Clean up after writers that died: whoever goes on from what is visible, or deletes, calls it first.

        What is visible, and what was deleted, stays so from now on, though the process that did it was killed before
        it could see to that. Unfinished files of dead writers are removed where the storage can tell that they died.

        Raises:
            StoreError: It failed.
        """
        self._guard("recover", "", self._recover)

    # What a driver has to offer. Each may raise whatever its file system does.

    @abc.abstractmethod
    def _create(self, path: str, attempt: Attempt) -> None:
        """Make an object; raise FileExistsError if there is one."""

    @abc.abstractmethod
    def _replace(self, path: str, data: bytes) -> None: ...

    @abc.abstractmethod
    def _read(self, path: str, start: int, end: int | None) -> bytes: ...

    @abc.abstractmethod
    def _size(self, path: str) -> int: ...

    @abc.abstractmethod
    def _list(self, prefix: str) -> Iterable[str]: ...

    @abc.abstractmethod
    def _delete(self, paths: Paths) -> None: ...

    def _recover(self) -> None:  # noqa: B027 - most have nothing to do
        """Overridden where what is visible is not durable by itself."""

    def _is_ours(self, path: str, attempt: Attempt) -> bool:
        """Whether an object that an attempt in doubt met is of its token; the bytes are compared besides."""
        return True

    def _confirm(self, path: str) -> None:  # noqa: B027 - most have nothing to do
        """Make durable an object that an attempt in doubt has left visible."""

    def _create_or_recognize(self, path: str, attempt: Attempt) -> None:
        try:
            self._create(path, attempt)
        except FileExistsError as error:
            if error is attempt.source.failure:
                raise
            if not (attempt.is_in_doubt and self._is_ours(path, attempt) and self._holds(path, attempt.source)):
                attempt.is_in_doubt = False
                raise AlreadyThereError(
                    f"create of {self._where(path)} failed: there is such an object, by another writer or an "
                    "earlier call. It was left as it is.",
                    operation="create",
                    path=self._where(path),
                    reason="AlreadyThereError",
                ) from error
            self._confirm(path)
        attempt.is_in_doubt = False

    def _holds(self, path: str, source: Source) -> bool:
        """Whether an object has exactly the bytes of a source."""
        digest = source.digest()
        if self._size(path) != source.size:
            return False

        def pieces() -> Iterator[bytes]:
            for start in range(0, source.size, _COMPARE_BYTES):
                yield self._checked_read(path, start, min(start + _COMPARE_BYTES, source.size))
                source.num_taken += 1  # progress

        return Source(pieces()).digest() == digest

    def _checked_read(self, path: str, start: int, end: int | None) -> bytes:
        if end is None and start == 0:
            return self._read(path, 0, None)
        if end is None or end == start:  # storages differ in what they answer to an empty range
            size = self._size(path)
            if size < start:
                raise self._short_read(path, f"expected at least {start} bytes, got {size}")
            end = size if end is None else end
            if end == start:
                return b""
        data = self._read(path, start, end)
        if len(data) != end - start:
            raise self._short_read(path, f"expected {end - start} bytes from {start}, got {len(data)}")
        return data

    def _short_read(self, path: str, what: str) -> StoreError:
        return StoreError(
            f"read of {self._where(path)} failed: {what}. The object is cut short, or not the one that was written.",
            operation="read",
            path=self._where(path),
            reason="short read",
        )

    def _guard(self, operation: str, path: str, function: Callable[[], T], attempt: Attempt | None = None) -> T:
        """Run a driver's operation within the bound in time, and raise what this layer promises."""
        source = attempt.source if attempt else Source(())
        try:
            if self._timeout_s is None or self.bounds_itself:
                return function()
            return bounded(function, source, self._timeout_s)
        except StoreError:
            raise
        except Exception as error:
            if error is source.failure:  # the caller's own
                raise
            if isinstance(error, _NO_OBJECT) and operation in {"read", "size"}:
                raise no_such_object(self._where(path)) from error
            is_in_doubt = attempt is not None and attempt.is_in_doubt
            raise store_error(error, operation=operation, path=self._where(path), is_in_doubt=is_in_doubt) from error

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"
