"""Where collectives run, and the smallest of them, of which the others are made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.comm.gloo import InnerGroup
from lightning_ft.comm.topology import RING_ONLY
from lightning_ft.comm.tree import combiner
from lightning_ft.config import RING
from lightning_ft.membership.arrangement import tree

SMALL_BYTES = 64 * 1024
"""Up to here a broadcast is one all-reduce; above, a broadcast and an acknowledgement, which moves fewer bytes."""


class Place:
    """Where an operation runs: an inner group and the ordered members on it.

    Attributes:
        inner: The inner group.
        members: Logical ids in rank order.
        rank: Own position.
        generation: Of the view.
        topology: The setting.

    Attributes:
        choice: What goes along the tree; nothing until all members have agreed on it.
    """

    def __init__(
        self, inner: InnerGroup, members: tuple[str, ...], rank: int, generation: int, topology: str = RING
    ) -> None:
        self.inner = inner
        self.members = members
        self.rank = rank
        self.generation = generation
        self.topology = topology
        self.choice = RING_ONLY

    @property
    def group(self) -> Any:  # torch's stubs leave out its methods
        """The inner torch group."""
        return self.inner.group

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def allreduce(self, tensor: Tensor, options: dist.AllreduceOptions | None = None) -> dist.Work:
        """Start to reduce a contiguous tensor over the members, in place: around the ring or along the tree.

        Args:
            tensor: Not empty.
            options: With the reduction; None: a sum.
        """
        combine = None
        if self.size > 2 and self.choice.is_tree(tensor):  # among two it is the same way, and Gloo's has fewer threads
            combine = combiner(dist.ReduceOp.SUM if options is None else options.reduceOp, tensor.dtype)
        if combine is not None:
            return self.inner.tree(self.rank, lambda: tree(self.members)).allreduce(tensor, combine)
        work: dist.Work = self.group.allreduce([tensor], options or dist.AllreduceOptions())
        return work


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as flat uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def acknowledge(place: Place) -> dist.Work:
    """Start the smallest full-dependency collective."""
    return place.allreduce(torch.zeros(1, dtype=torch.int32))


def broadcast(place: Place, tensor: Tensor, root: int) -> dist.Work:
    """Start to copy the root's contiguous tensor to all members, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    work: dist.Work = place.group.broadcast([tensor], options)
    return work


def gather_rows(place: Place, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Start to give everybody everybody's tensor, all of one size.

    Not by Gloo's allgather: when one fails, torch 2.13.0 frees its buffer before Gloo has stopped to write into it,
    which corrupts the heap (tests/unit/comm/test_operations.py breaks many). What is written into here is the works'.

    Returns: The tensors' bytes, uint8, shape [number of members, bytes of each], to be read when the works have ended.
        Nobody's works end before everybody has started.
    """
    own = as_bytes(tensor.contiguous())
    rows = own.new_zeros(place.size, own.numel())
    rows[place.rank] = own
    if not rows.numel():
        return rows, [acknowledge(place)]
    if rows.numel() <= SMALL_BYTES:
        return rows, [place.allreduce(rows)]
    return rows, [broadcast(place, row, root) for root, row in enumerate(rows)]


def gather_now(place: Place, tensor: Tensor) -> Tensor:
    """As `gather_rows`, and wait. Raises: RuntimeError: A member failed."""
    rows, works = gather_rows(place, tensor)
    for work in works:
        place.inner.wait(work)
    return rows
