"""How much of the state may be sent in one step, so that the step is not much longer for it (PROTOCOL.md#M3c). Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LEAST_BYTES = 4 * 1024 * 1024
"""A step sends at least so much, however long it becomes: a catch-up that never ends costs more."""

_FIRST_BYTES = 16 * 1024 * 1024

_NUM_STEPS = 16
"""Steps whose median is how long one takes by itself."""


class Pace:
    """What a step may send: measured by how much longer steps become that send something.

    Args:
        slowdown: By which part of its time a step may be longer, > 0.

    Attributes:
        budget_bytes: What the next step may send.

    Invariants: LEAST_BYTES <= budget_bytes; it at most doubles or halves with each step.
    """

    def __init__(self, slowdown: float) -> None:
        self.budget_bytes = _FIRST_BYTES
        self._slowdown = slowdown
        self._quiet_s: tuple[float, ...] = ()
        self._cost_s: float | None = None  # of a byte

    @property
    def quiet_s(self) -> float | None:
        """How long a step takes in which nothing is sent; None: not known yet."""
        return statistics.median(self._quiet_s) if self._quiet_s else None

    def stepped(self, duration_s: float, sent_bytes: int) -> None:
        """Learn from a step.

        Args:
            duration_s: How long it took.
            sent_bytes: What it has sent; 0: it is one of those that the others are compared with.
        """
        if sent_bytes == 0:
            self._quiet_s = (*self._quiet_s[-_NUM_STEPS + 1 :], duration_s)
            return
        quiet_s = self.quiet_s
        if quiet_s is None:
            return
        cost_s = max(0.0, duration_s - quiet_s) / sent_bytes
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2
        budget_bytes = self.budget_bytes
        allowed = self._slowdown * quiet_s / self._cost_s if self._cost_s else 2.0 * budget_bytes
        self.budget_bytes = max(LEAST_BYTES, int(min(max(allowed, budget_bytes / 2), 2.0 * budget_bytes)))


def shares(sizes: Sequence[int], num_donors: int) -> list[list[int]]:
    """Deal things of certain sizes to donors so that each has about equally much; the same on all of them.

    Returns: For each donor the positions of what is its, ascending.
    """
    dealt: list[list[int]] = [[] for _ in range(num_donors)]
    totals = [0] * num_donors
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        donor = totals.index(min(totals))
        dealt[donor].append(position)
        totals[donor] += sizes[position]
    return [sorted(positions) for positions in dealt]
