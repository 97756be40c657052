"""`init_process_group("ft")` meets nobody: a member that died while it started would be waited for.

torch's `env://` rendezvous connects all ranks to a store in rank 0's process before it asks for the group. An `ft`
group never uses that store. So a member of a job is given one that is opened when it is first used, by a group of
another backend.
Private API read in torch 2.13.0: `torch.distributed.rendezvous._rendezvous_handlers`, and by which names C++ calls a
store that is written in Python (tests/unit/comm/test_rendezvous.py fails clearly if they change).
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_Rendezvous = Iterator[tuple[dist.Store, int, int]]
_kept: list[dist.Store] = []  # torch holds a store's C++ half only
_StoreBase: Any = dist.Store  # torch's stubs know the names for Python only


class _DeferredStore(_StoreBase):  # type: ignore[misc]
    """A store that is opened at its first use.

    Args:
        open_store: Opens it; may wait for the other ranks.
    """

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        super().__init__()
        self._open_store = open_store
        self._store: Any = None

    def _opened(self) -> Any:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def set(self, key: str, value: Any) -> None:
        self._opened().set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._opened().get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        value: int = self._opened().add(key, amount)
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._opened().compare_set(key, expected, desired)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._opened().check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._opened().wait(keys) if timeout is None else self._opened().wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._opened().delete_key(key))

    def num_keys(self) -> int:
        return int(self._opened().num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what C++ calls


def defer_rendezvous() -> None:
    """Let the members of a job open `env://` stores at their first use only; idempotent, done by importing this."""
    module = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function so named
    handlers = module._rendezvous_handlers
    original = handlers["env"]
    if getattr(original, "is_deferred", False):
        return

    def handler(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **options: Any) -> _Rendezvous:
        is_member = all(os.environ.get(name) for name in ("LIGHTNING_FT_MEMBER", "RANK", "WORLD_SIZE"))
        if not is_member or "?" in url:
            yield from original(url, timeout=timeout, **options)
            return
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _DeferredStore(lambda: next(original(url, timeout=timeout, **options))[0])
        _kept.append(store)
        yield store, rank, world_size

    handler.is_deferred = True  # type: ignore[attr-defined]
    handlers["env"] = handler


defer_rendezvous()
