"""A store that tells how much is read of it: the progress of long commands."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from typing_extensions import override

from lightning_ft.checkpoint.stores.base import Attempt, Store
from lightning_ft.cli.common import in_bytes

_PAUSE_S = 0.1


class WatchedStore(Store):
    """Reads from another store, and changes nothing there.

    Args:
        store: The other one.
        on_read: Told how many bytes were read, each time.
    """

    def __init__(self, store: Store, on_read: Callable[[int], None]) -> None:
        super().__init__(store.url, timeout_s=None)  # the other one has its own bound
        self._store = store
        self._on_read = on_read

    @override
    def _read(self, path: str, start: int, end: int | None) -> bytes:
        data = self._store.read(path, start, end)
        self._on_read(len(data))
        return data

    @override
    def _size(self, path: str) -> int:
        return self._store.size(path)

    @override
    def _list(self, prefix: str) -> Iterable[str]:
        return self._store.list(prefix)

    @override
    def _create(self, path: str, attempt: Attempt) -> NoReturn:
        raise io.UnsupportedOperation(path)

    @override
    def _replace(self, path: str, data: bytes) -> NoReturn:
        raise io.UnsupportedOperation(path)

    @override
    def _delete(self, paths: Iterable[str]) -> NoReturn:
        raise io.UnsupportedOperation


class Progress:
    """Shows in one line of standard error how much of something was read, if that is a terminal.

    Args:
        what: Is done.
        total_bytes: How much there is to read.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._shown_s = 0.0

    def read(self, num_bytes: int) -> None:
        """Note that so much more was read."""
        self._num_bytes = min(self._num_bytes + num_bytes, self._total_bytes)
        if sys.stderr.isatty() and time.monotonic() - self._shown_s > _PAUSE_S:
            self._shown_s = time.monotonic()
            share = 100 * self._num_bytes // max(1, self._total_bytes)
            sys.stderr.write(f"\r\033[K{self._what}: {share} % of {in_bytes(self._total_bytes)}")
            sys.stderr.flush()

    def end(self) -> None:
        """Wipe the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
