"""The state of a moment, as far as one rank stores it, so that training may go on while it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ft.checkpoint.records import Stream
from lightning_ft.checkpoint.share import share_of
from lightning_ft.checkpoint.tensors import flat_bytes
from lightning_ft.checkpoint.tree import FlatState


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a state as it was at a moment.

    Attributes:
        flat: The state, of which only the share, and what is neither tensor nor array, can be read.
        rank: Whose share.
        num_ranks: Among how many the state is shared.
        data: The share's bytes of tensors and arrays.
    """

    flat: FlatState
    rank: int
    num_ranks: int
    data: torch.Tensor

    def rest(self) -> dict[int, bytes]:
        """Return, by number, the streams that are neither tensors nor arrays: each rank has all of them."""
        streams = enumerate(self.flat.streams)
        return {index: self.flat.data(index).tobytes() for index, stream in streams if not _is_shared(stream)}


class Snapshots:
    """Takes snapshots into memory that is used again for each: one rank's share of the state.

    Args:
        rank: Whose share.
        num_ranks: Among how many the state is shared.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, state: Mapping[Any, Any]) -> Share:
        """Copy this rank's share. The state may change afterwards; the snapshot before is overwritten.

        Raises:
            ValueError: The state can't be stored.
        """
        flat = FlatState(state)
        spans = list(_spans(flat.streams, self._rank, self._num_ranks))
        num_bytes = sum(end - start for _, start, end in spans)
        self._reserve(num_bytes, flat, spans)
        position = 0
        devices = set()
        for index, start, end in spans:
            held = self._memory[position : position + end - start]
            position += end - start
            tensor = flat.tensor(index)
            if tensor is None:
                held.copy_(torch.from_numpy(flat.data(index, start, end)))
            else:
                held.copy_(flat_bytes(tensor)[start:end], non_blocking=True)
                devices.add(tensor.device)
            flat.hold(index, start, held.numpy())
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        flat.let_go()
        return Share(flat, self._rank, self._num_ranks, self._memory[:num_bytes])

    def _reserve(self, num_bytes: int, flat: FlatState, spans: list[tuple[int, int, int]]) -> None:
        if self._memory.numel() < num_bytes:
            tensors = [flat.tensor(index) for index, _, _ in spans]
            is_pinned = any(tensor is not None and tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def num_share_bytes(streams: Sequence[Stream], rank: int, num_ranks: int) -> int:
    """Return how long a share's `data` is."""
    return sum(end - start for _, start, end in _spans(streams, rank, num_ranks))


def put_share(
    streams: Sequence[Stream], rank: int, num_ranks: int, data: torch.Tensor, contents: Sequence[torch.Tensor]
) -> None:
    """Copy a share's `data` to where it belongs in the bytes of each stream."""
    position = 0
    for index, start, end in _spans(streams, rank, num_ranks):
        contents[index][start:end] = data[position : position + end - start]
        position += end - start


def _is_shared(stream: Stream) -> bool:
    return stream.kind in {"tensor", "array"}


def _spans(streams: Sequence[Stream], rank: int, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield stream, start and end of what a rank stores of tensors and arrays, neighbouring chunks together."""
    last: tuple[int, int, int] | None = None
    for index, start, end in share_of(streams, rank, num_ranks):
        if not _is_shared(streams[index]):
            continue  # these are copies already
        if last is not None and last[0] == index and last[2] == start:
            last = index, last[1], end
            continue
        if last is not None:
            yield last
        last = index, start, end
    if last is not None:
        yield last
