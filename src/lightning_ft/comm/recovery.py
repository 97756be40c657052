"""How a recovery went, for the event log."""

from __future__ import annotations

import dataclasses
import time

from lightning_ft.comm.operations import Kind
from lightning_ft.comm.sequence import Settled


@dataclasses.dataclass(slots=True)
class Recovery:
    """One recovery, over all its rounds. Durations in seconds.

    Attributes:
        before: If it is no recovery but a boundary where others may join, the members before it; else empty.
    """

    started_s: float
    before: tuple[str, ...] = ()
    rounds: int = 0
    park_s: float = 0.0
    rebuild_s: float = 0.0
    settle_s: float = 0.0

    def facts(self, step: int) -> dict[str, float | int]:
        """Return what the event log says of it, now that it is over; `step`: how many were committed before."""
        return {
            "latency_s": round(time.monotonic() - self.started_s, 6),
            "park_s": round(self.park_s, 6),
            "rebuild_s": round(self.rebuild_s, 6),
            "settle_s": round(self.settle_s, 6),
            "rounds": self.rounds,
            "step": step,
        }


def redone(settled: Settled) -> str:
    """Say what had to be done again: `reduce`, `commit`, `result` or `none` (docs/events.md)."""
    if settled.handed_over is Kind.COMMIT:
        return "commit"
    if settled.handed_over is not Kind.NONE:
        return "result"
    if settled.pending is Kind.REDUCTION:
        return "reduce"
    if settled.pending is Kind.COMMIT:
        return "commit"
    return "none"
