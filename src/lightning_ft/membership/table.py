"""An immutable mapping whose changed copies are cheap."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

_NUM_SHARDS = 128
"""About the square root of the largest expected job: a copy touches one shard of 80 and a tuple of 128, not 10,000."""

Value = TypeVar("Value")


def _shard_of(key: str) -> int:
    # Not hash(): it differs between processes, and with it the order of iteration.
    return zlib.crc32(key.encode()) % _NUM_SHARDS


class Table(Mapping[str, Value], Generic[Value]):
    """A mapping from logical id to a frozen record; changes make a new one that shares what is unchanged.

    A dict would be copied as a whole for each of 10,000 heartbeats and parks. Iteration is in no meaningful order.
    """

    __slots__ = ("_num_items", "_shards")

    def __init__(self, items: Iterable[tuple[str, Value]] = ()) -> None:
        shards: list[dict[str, Value]] = [{} for _ in range(_NUM_SHARDS)]
        for key, value in items:
            shards[_shard_of(key)][key] = value
        self._shards = tuple(shards)
        self._num_items = sum(map(len, shards))

    def __getitem__(self, key: str) -> Value:
        return self._shards[_shard_of(key)][key]

    def __iter__(self) -> Iterator[str]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._num_items

    def scan(self) -> Iterator[Value]:
        """All values, faster than `values()`, which looks each key up."""
        for shard in self._shards:
            yield from shard.values()

    def with_item(self, key: str, value: Value) -> Table[Value]:
        """The table with one item set."""
        index = _shard_of(key)
        return self._with_shard(index, {**self._shards[index], key: value})

    def without(self, key: str) -> Table[Value]:
        """The table without a key that it has."""
        index = _shard_of(key)
        return self._with_shard(index, {other: value for other, value in self._shards[index].items() if other != key})

    def with_items(self, items: Iterable[tuple[str, Value]]) -> Table[Value]:
        """The table with many items set, in time linear in both."""
        return Table([*self.items(), *items])

    def _with_shard(self, index: int, shard: dict[str, Value]) -> Table[Value]:
        table: Table[Value] = Table.__new__(Table)
        table._shards = (*self._shards[:index], shard, *self._shards[index + 1 :])
        table._num_items = self._num_items - len(self._shards[index]) + len(shard)
        return table
