"""Links between members that live: failures are forgiven, until there are too many on one (C10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lightning_ft.membership.ids import parse_logical_id

WINDOW_S = 600.0
"""Failures older than this are forgotten."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkFailure:
    """A member parked because its connection to another broke, or could not be made.

    Attributes:
        time_s: On the coordinator's clock.
        generation: Of the view in which that was.
        reporter: Who says so.
        suspect: The other end.
    """

    time_s: float
    generation: int
    reporter: str
    suspect: str

    @property
    def ends(self) -> tuple[str, str]:
        """Both members, in order."""
        low, high = sorted((self.reporter, self.suspect), key=parse_logical_id)
        return low, high


def recent(failures: Iterable[LinkFailure], now_s: float) -> tuple[LinkFailure, ...]:
    """Leave out what is forgotten."""
    return tuple(failure for failure in failures if now_s - failure.time_s < WINDOW_S)


def counts(failures: Iterable[LinkFailure]) -> dict[tuple[str, str], int]:
    """How many views each link broke, whoever said so."""
    broken = {(failure.ends, failure.generation) for failure in failures}
    totals: dict[tuple[str, str], int] = {}
    for ends, _ in broken:
        totals[ends] = totals.get(ends, 0) + 1
    return totals


def accused(failures: Iterable[LinkFailure], max_failures: int) -> tuple[str, str, int] | None:
    """Find the member to give up because a link of its failed more often than is forgiven.

    Args:
        failures: Recent ones, between members that would go on.
        max_failures: So many on one link are forgiven.

    Returns: The member, the other end and how often; None if there is none. It is the one with the most such links,
        then the one that most others report, then the highest logical id.
    """
    failures = tuple(failures)
    over = {ends: total for ends, total in counts(failures).items() if total > max_failures}
    if not over:
        return None

    def weight(member: str) -> tuple[int, int, tuple[int, int]]:
        links = sum(member in ends for ends in over)
        reporters = {failure.reporter for failure in failures if failure.suspect == member and failure.ends not in over}
        return links, len(reporters), parse_logical_id(member)

    guilty = max({end for ends in over for end in ends}, key=weight)
    ends = next(ends for ends in over if guilty in ends)
    return guilty, next(end for end in ends if end != guilty), over[ends]
