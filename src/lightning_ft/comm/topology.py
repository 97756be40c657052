"""Which all-reduces of a group go around the ring, and which along the tree: the same choice on all its members.

So it depends on what all know alike: the setting, who is in the group, type and size of what is reduced, and times that
all have agreed on. Around the ring sums come out bit for bit as from stock `ddp`; along the tree they are added up in
another order. Of integers the sum is the same either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ft.comm.tree import is_exact
from lightning_ft.config import AUTO, TREE
from lightning_ft.membership.arrangement import num_levels, tree

FEWEST = 8
"""With fewer members `auto` has nothing to gain, and measures nothing (benchmarks/topology.py)."""

TINY_BYTES, LARGEST_BYTES = 8, 64 * 1024
"""Sizes that are measured. `auto` sends nothing larger along the tree."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What goes along the tree; all else around the ring.

    Attributes:
        exact_bytes: Sums whose order does not matter, up to this size.
        is_all: All that the tree can do.
    """

    exact_bytes: int = 0
    is_all: bool = False

    def is_tree(self, tensor: Tensor) -> bool:
        """Whether a tensor is reduced along the tree, if that can be done."""
        return self.is_all or (tensor.nbytes <= self.exact_bytes and is_exact(tensor.dtype))


RING_ONLY = Choice()


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """What all-reduces took among some members, for the slowest of them, in nanoseconds.

    Attributes:
        members: In rank order.
        tiny: Of `TINY_BYTES` around the ring, and along the tree.
        largest: Of `LARGEST_BYTES`, likewise.
    """

    members: tuple[str, ...]
    tiny: tuple[int, int]
    largest: tuple[int, int]


def choose(topology: str, members: Sequence[str], times: Times | None) -> Choice:
    """Choose for a group.

    Args:
        topology: The setting.
        members: Of the group, in rank order.
        times: As agreed in the view, for `auto`; None: they were not measured.
    """
    if topology == TREE:
        return Choice(is_all=True)
    if topology != AUTO or times is None or len(members) < FEWEST:
        return RING_ONLY
    # Both take so long for each hop: the times of a part of the members follow from their number.
    ring = (len(members) - 1) / (len(times.members) - 1)
    levels = num_levels(tree(members)) / num_levels(tree(times.members))
    gain_tiny, gain_largest = (of[0] * ring - of[1] * levels for of in (times.tiny, times.largest))
    if gain_tiny <= 0:
        return RING_ONLY
    if gain_largest >= 0:
        return Choice(LARGEST_BYTES)
    return Choice(int(LARGEST_BYTES * gain_tiny / (gain_tiny - gain_largest)))


def needs_times(topology: str, members: Sequence[str]) -> bool:
    """Whether times have to be measured among all members of a view."""
    return topology == AUTO and len(members) >= FEWEST


def zeros(num_bytes: int) -> Tensor:
    """Return what is reduced to measure how long it takes."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
