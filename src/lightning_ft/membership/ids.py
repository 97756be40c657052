"""Logical ids `node/slot`: how they are read and ordered."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
