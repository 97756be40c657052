"""A store that tells how much is read of it: the progress of what takes long."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import NoReturn

from typing_extensions import override

from lightning_ft.checkpoint.stores.base import Attempt, Store


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
