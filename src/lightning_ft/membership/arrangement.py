"""The order of a view's members, and the tree over them: functions of logical ids alone, so the same for all.

Members of one node are neighbours. So a ring crosses each border between nodes once, and a tree as seldom as can be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from lightning_ft.membership.ids import parse_logical_id


def with_joined(members: Iterable[str], joined: Iterable[str]) -> tuple[str, ...]:
    """Add joiners to members: behind the last of their node, or at the end if it has none yet.

    The others keep their order, and the first stays the first.

    Args:
        members: In rank order; those of one node are neighbours.
        joined: In the order in which they are added; none of `members`.

    Returns: All in rank order; those of one node are neighbours.
    """
    of_node: dict[int, list[str]] = {}
    for member in itertools.chain(members, joined):
        of_node.setdefault(_node(member), []).append(member)
    return tuple(itertools.chain.from_iterable(of_node.values()))


def tree(members: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each member the rank of the one above it in the tree; None for the root, rank 0.

    It is a binomial tree among the members of each node, and one among the first members of the nodes. So each node is
    entered once; and with `n` nodes and at most `m` members on each it has ceil(log2 n) + ceil(log2 m) levels at most.

    Args:
        members: In rank order.
    """
    above: list[int | None] = []
    firsts: list[int] = []
    for number, (_, on_node) in enumerate(itertools.groupby(members, key=_node)):
        first = len(above)
        firsts.append(first)
        above.append(firsts[_above(number)] if number else None)
        above += [first + _above(slot) for slot, _ in enumerate(on_node) if slot]
    return tuple(above)


def num_levels(above: Sequence[int | None]) -> int:
    """Return how many messages one after the other lead from the farthest member of a tree to its root."""
    depths: list[int] = []
    for upper in above:
        depths.append(0 if upper is None else depths[upper] + 1)
    return max(depths)


def _above(number: int) -> int:
    """In a binomial tree over numbers: without the last of its binary ones."""
    return number & (number - 1)


def _node(member: str) -> int:
    return parse_logical_id(member)[0]
