"""What a job's metrics count, folded from the lines of its event log and from its members' heartbeats.

Pure: no clock, no socket, nothing of Prometheus. `metrics_families` says it in Prometheus' words; docs/metrics.md has
the names. What is folded from the log is whole again after a restart of the coordinator, once the log was read
(`chronicle`); heartbeats are not in it, so what comes from them begins anew.
"""

from __future__ import annotations

import bisect
import collections
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_ft.event_log import RECOVERIES
from lightning_ft.history import fold
from lightning_ft.history.state import PHASES, History, Incident, Outcome
from lightning_ft.membership.effects import Cause

RECOVERY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From a ring that is built again in a millisecond to a member that is waited for."""

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

CHECKPOINT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

NUM_SAVES = 1000
"""The latest saves, from which the percentile is taken."""

NUM_INTERVALS = 100
"""The latest intervals between saves, whose median is the interval."""


_MAX = 1e18
"""No number in a log is as large."""


class Histogram:
    """Counts of values up to each bound, as Prometheus has them.

    Attributes:
        bounds: Upper ones, ascending; the last bucket has none.
        counts: One for each bucket, not cumulated.
        total: Sum of the values.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` >= 0 times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


class Pace:
    """How fast the job's steps follow one another, as far as heartbeats tell.

    A heartbeat says how many steps its sender has committed. No rank is more than one step ahead of another, so the
    most that was heard is the job's. If a heartbeat tells of `n` more steps than the one before it, whoever sent that,
    each of them took an n-th of the time between the two, and the first of them the time before, too.

    Attributes:
        seconds: From each commit to the next.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(STEP_BOUNDS_S)
        self._step: int | None = None
        self._since_s = 0.0
        self._quiet_s = 0.0
        self._heard: set[str] = set()
        self._is_known = False

    def hear(self, member: str, step: int, now_s: float) -> None:
        """Take in that a member has committed `step` steps; `now_s` never decreases."""
        if not self._is_known:
            self._heard.add(member)
        if self._step is None:
            self._step, self._since_s = step, now_s
        elif step > self._step:
            each_s = (now_s - self._quiet_s) / (step - self._step)
            if self._step > 0:  # the first one began with the start of the members
                self.seconds.observe(self._quiet_s - self._since_s + each_s)
            self.seconds.observe(each_s, step - self._step - 1)
            self._step, self._since_s = step, now_s
        self._quiet_s = now_s

    def steps(self, members: Iterable[str]) -> int | None:
        """How many steps are committed.

        Returns: None until all members of the job were heard: one of them alone may be a step behind what an earlier
            coordinator has told, and a counter that goes back counts from 0.
        """
        self._is_known = self._is_known or self._heard.issuperset(members)
        return self._step if self._is_known else None


class JobMetrics:
    """The counts of one job.

    Attributes:
        history: What the same lines say of incidents, members and goodput.
        failures: Members that were lost, by cause.
        phases: Of recoveries, in seconds, by cause and phase.
        latency: Of each recovery, in seconds, from rank 0's noticing.
        joins: How long training was held up by those who joined, in seconds.
        saves: How long each checkpoint took, in seconds.
        checkpoints: How many were `saved`, `skipped`, `failed` and `restored`.
        checkpoint_bytes: What was stored, by kind.
        checkpoint_blocked_s: How long training stood still for checkpoints.
        saved_s: When the last one was saved, in Unix seconds; None: none was yet.
        divergence: The largest relative difference of the gradients that were last compared; None: none were yet.
        counts: Of other events, by name.
    """

    def __init__(self) -> None:
        self.history = History()
        self.failures: dict[str, int] = {cause.value: 0 for cause in Cause if cause is not Cause.LEAVE}
        self.phases: dict[tuple[str, str], Histogram] = {}
        self.latency = Histogram(RECOVERY_BOUNDS_S)
        self.joins = Histogram(RECOVERY_BOUNDS_S)
        self.saves = Histogram(CHECKPOINT_BOUNDS_S)
        self.checkpoints = dict.fromkeys(("saved", "skipped", "failed", "restored"), 0)
        self.checkpoint_bytes = {"base": 0, "delta": 0}
        self.checkpoint_blocked_s = 0.0
        self.saved_s: float | None = None
        self.divergence: float | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self._durations_s: collections.deque[float] = collections.deque(maxlen=NUM_SAVES)
        self._intervals_s: collections.deque[float] = collections.deque(maxlen=NUM_INTERVALS)
        self._due_s: float | None = None

    def add(self, line: str | bytes) -> None:
        """Take a line of the event log in; one that is damaged counts in `history` alone."""
        num_damaged = self.history.num_damaged
        ended = fold.add(self.history, line)
        if self.history.num_damaged > num_damaged:
            return
        event: dict[str, Any] = json.loads(line)
        name = event["event"]
        if name in RECOVERIES and ended is None:
            return  # it was said before
        self.counts[name] += 1
        handler = _HANDLERS.get(name)
        if handler is not None:
            handler(self, event)
        if ended is not None:
            self._note_incident(ended, _number(event, "latency_s"))
        if (divergence := _number(event, "gradient_divergence")) is not None:
            self.divergence = divergence

    def latency_avg_s(self) -> float | None:
        """Mean latency of the recoveries; None: there was none."""
        return self.latency.total / self.latency.num if self.latency.num else None

    def checkpoint_p99_s(self) -> float | None:
        """The duration that 99 % of the last saves did not exceed; None: there was none."""
        ordered = sorted(self._durations_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None

    def checkpoint_interval_s(self) -> float | None:
        """How far apart the last saves began, in the median; None: there were fewer than two."""
        return statistics.median(self._intervals_s) if self._intervals_s else None

    def _note_incident(self, incident: Incident, latency_s: float | None) -> None:
        is_recovery = incident.outcome is Outcome.RECOVERED or (
            incident.outcome is Outcome.ADMITTED and bool(incident.losses)
        )
        if not is_recovery:
            return
        for phase in PHASES:
            key = (incident.cause, phase)
            self.phases.setdefault(key, Histogram(RECOVERY_BOUNDS_S)).observe(incident.phases.get(phase, 0.0))
        self.latency.observe(latency_s or 0.0)

    def _on_failure(self, event: Mapping[str, Any]) -> None:
        cause = str(event.get("cause"))
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def _on_admitted(self, event: Mapping[str, Any]) -> None:
        self.joins.observe(_number(event, "latency_s") or 0.0)
        self.counts["joined"] += len(event["joined"])

    def _on_saved(self, event: Mapping[str, Any]) -> None:
        duration_s = _number(event, "duration_s") or 0.0
        kind = str(event.get("kind"))
        due_s = event["time"] - duration_s
        self.checkpoints["saved"] += 1
        self.saves.observe(duration_s)
        self.checkpoint_bytes[kind] = self.checkpoint_bytes.get(kind, 0) + int(_number(event, "bytes") or 0)
        self.checkpoint_blocked_s += _number(event, "blocked_s") or 0.0
        self.saved_s = event["time"]
        self._durations_s.append(duration_s)
        if self._due_s is not None and due_s > self._due_s:
            self._intervals_s.append(due_s - self._due_s)
        self._due_s = due_s

    def _on_skipped(self, _: Mapping[str, Any]) -> None:
        self.checkpoints["skipped"] += 1

    def _on_failed(self, _: Mapping[str, Any]) -> None:
        self.checkpoints["failed"] += 1

    def _on_restored(self, _: Mapping[str, Any]) -> None:
        self.checkpoints["restored"] += 1


_HANDLERS: dict[str, Callable[[JobMetrics, Mapping[str, Any]], None]] = {
    "failure_detected": JobMetrics._on_failure,
    "members_admitted": JobMetrics._on_admitted,
    "checkpoint_saved": JobMetrics._on_saved,
    "checkpoint_skipped": JobMetrics._on_skipped,
    "checkpoint_failed": JobMetrics._on_failed,
    "checkpoint_restored": JobMetrics._on_restored,
}


def _number(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MAX:
        return None
    return float(value)
