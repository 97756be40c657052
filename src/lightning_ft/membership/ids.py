"""Logical ids `node/slot`: how they are read, ordered and listed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_RANGES = re.compile(r"(\d+)(?:-(\d+))?/(\d+)(?:-(\d+))?", re.ASCII)
_LOGICAL_ID = re.compile(r"(0|[1-9][0-9]{0,8})/(0|[1-9][0-9]{0,8})", re.ASCII)


def parse_logical_id(member: str) -> tuple[int, int]:
    """Split a logical id into `(node, slot)`, which is also its sort key: `2/0` comes before `10/0`.

    Raises:
        ValueError: It is not `node/slot` in plain decimal (so that each member has one spelling).
    """
    match = _LOGICAL_ID.fullmatch(member)
    if match is None:
        raise ValueError(f"expected a logical id node/slot such as '0/3', got {member!r}")
    return int(match[1]), int(match[2])


def in_order(members: Iterable[str]) -> tuple[str, ...]:
    """Sort logical ids by node, then slot, so that a ring crosses each host boundary once."""
    return tuple(sorted(members, key=parse_logical_id))


def as_ranges(members: Iterable[str]) -> str:
    """List different logical ids in little space: `0-1/0-7,2/0` for 17 of them. `from_ranges` sorts them."""
    slots_of: dict[int, list[int]] = {}
    for member in in_order(members):
        node, slot = parse_logical_id(member)
        slots_of.setdefault(node, []).append(slot)
    parts = []
    for _, alike in itertools.groupby(enumerate(slots_of), lambda item: (item[1] - item[0], slots_of[item[1]])):
        nodes = [node for _, node in alike]
        parts += [f"{_range(nodes)}/{_range(slots)}" for slots in _runs(slots_of[nodes[0]])]
    return ",".join(parts)


def from_ranges(text: str) -> tuple[str, ...]:
    """Read what `as_ranges` wrote; in order.

    Raises:
        ValueError: It is no such text.
    """
    members = []
    for part in text.split(","):
        match = _RANGES.fullmatch(part)
        if match is None:
            raise ValueError(f"expected ranges of logical ids such as '0-3/0-7', got {text[:80]!r}")
        first_node, last_node, first_slot, last_slot = match.groups()
        for node in range(int(first_node), int(last_node or first_node) + 1):
            members += [f"{node}/{slot}" for slot in range(int(first_slot), int(last_slot or first_slot) + 1)]
    return in_order(members)


def _runs(numbers: list[int]) -> list[list[int]]:
    groups = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    return [[number for _, number in group] for _, group in groups]


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
