"""Parts of tensors are given to all by whoever has them, as one number that outlives the loss of some of those."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ft.comm.operations import Operation
from lightning_ft.comm.place import Place, acknowledge, broadcast


class ChunkTransfer(Operation):
    """Everybody gets chunks from members that hold them right.

    Args:
        pieces: A copy of each chunk as it is here, and the members that hold it right: any of them is a root.

    Attributes:
        values: The chunks as those members have them, once it is final.
    """

    name = "verify_transfer"

    def __init__(self, pieces: Sequence[tuple[Tensor, frozenset[str]]]) -> None:
        super().__init__()
        self._pieces = pieces
        self._flats: dict[int, Tensor] = {}
        self._roots: list[int] = []
        self.values: list[Tensor] = []

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        self._roots = [
            next(rank for rank, member in enumerate(place.members) if member in holders) for _, holders in self._pieces
        ]
        self._flats = {}
        for root in sorted(set(self._roots)):
            own = [
                piece.view(torch.uint8) for (piece, _), of in zip(self._pieces, self._roots, strict=True) if of == root
            ]
            self._flats[root] = torch.cat(own)
        return [*(broadcast(place, flat, root) for root, flat in self._flats.items()), acknowledge(place)]

    @override
    def finish(self, place: Place) -> None:
        ends = dict.fromkeys(self._flats, 0)
        received = []
        for (piece, _), root in zip(self._pieces, self._roots, strict=True):
            start, ends[root] = ends[root], ends[root] + piece.nbytes
            received.append(self._flats[root][start : ends[root]].clone())
        self.adopt(received)

    @override
    def payload(self) -> list[Tensor]:
        return [value.view(torch.uint8) for value in self.values]

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        self.values = [value.view(piece.dtype) for value, (piece, _) in zip(payload, self._pieces, strict=True)]
        self._flats = {}

    @override
    def is_redoable(self, members: tuple[str, ...]) -> bool:
        return all(holders.intersection(members) for _, holders in self._pieces)
