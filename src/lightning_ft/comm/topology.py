"""Which all-reduces of a group go around the ring, and which along the tree: the same choice on all its members.

So it depends on what all know alike: the setting, who is in the group, type and size of what is reduced, and times that
all have agreed on. Around the ring sums come out bit for bit as from stock `ddp`; along the tree they are added up in
another order. Of integers the sum is the same either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
        num_members: How many they were.
        num_levels: How many levels their tree had.
        ring_tiny: Of `TINY_BYTES` around the ring.
        tree_tiny: Of `TINY_BYTES` along the tree.
        ring_largest: Of `LARGEST_BYTES` around the ring.
        tree_largest: Of `LARGEST_BYTES` along the tree.
    """

    num_members: int
    num_levels: int
    ring_tiny: int
    tree_tiny: int
    ring_largest: int
    tree_largest: int


NUM_TIMES = len(dataclasses.fields(Times))


def choose(topology: str, members: Sequence[str], times: Times | None) -> Choice:
    """Choose for a group.

    Args:
        topology: The setting.
        members: Of the group, in rank order.
        times: As agreed, for `auto`; None: they were not measured.
    """
    if topology == TREE:
        return Choice(is_all=True)
    if topology != AUTO or times is None or len(members) < FEWEST:
        return RING_ONLY
    # Both take so long for each hop: what other members take follows from their number.
    hops = (len(members) - 1) / (times.num_members - 1)
    levels = num_levels(tree(members)) / times.num_levels
    gain_tiny = times.ring_tiny * hops - times.tree_tiny * levels
    gain_largest = times.ring_largest * hops - times.tree_largest * levels
    if gain_tiny <= 0:
        return RING_ONLY
    if gain_largest >= 0:
        return Choice(LARGEST_BYTES)
    return Choice(int(LARGEST_BYTES * gain_tiny / (gain_tiny - gain_largest)))


def needs_times(topology: str, members: Sequence[str]) -> bool:
    """Whether times have to be known, in a view of these members."""
    return topology == AUTO and len(members) >= FEWEST
