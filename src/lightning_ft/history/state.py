"""What the lines of a job's event log say so far: its members, views, incidents and checkpoints, and its goodput."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import Any

MAX_SENTENCES = 500
"""So many of the latest events are kept in words."""


class MemberState(enum.StrEnum):
    """What became of a member, as far as the log says."""

    EXPECTED = "expected"
    """The job starts with it, and it has not come yet."""
    ACTIVE = "active"
    """It is connected, or in the view."""
    SPARE = "spare"
    """It is ready, and there is no place for it."""
    LOST = "lost"
    """The job goes on without it, and it may come back."""
    LEFT = "left"
    """It ended in peace while others went on."""
    ENDED = "ended"
    """Its process has ended, and that was no loss (any more)."""


class Outcome(enum.StrEnum):
    """How an incident ended."""

    OPEN = "open"
    RECOVERED = "recovered"
    ADMITTED = "admitted"
    """Members joined."""
    STOPPED = "stopped"
    """The job did."""


PHASES = ("detect", "park", "rebuild", "settle", "catch_up")
"""Of an incident, in this order."""


@dataclasses.dataclass(slots=True)
class Member:
    """One logical id.

    Attributes:
        rank: In the current view; None: it is not in it.
        incarnation: Of its newest process; 0: not known.
        restarts: Processes of it that came after the first one.
        last_step: Gradient steps that were committed when it was last known to take part; None: not known.
        is_straggler: It holds the others up.
        detail: What was last said of its end; "" while there is nothing to say.
        since_s: When its state last changed, Unix seconds.
    """

    member: str
    state: MemberState
    since_s: float
    host: str | None = None
    pid: int | None = None
    rank: int | None = None
    incarnation: int = 0
    restarts: int = 0
    last_step: int | None = None
    is_straggler: bool = False
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Who was in the job from `time_s` on, in the order of ranks."""

    time_s: float
    generation: int
    members: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A member that was lost. `cause`, `detail`, `doing` as in `failure_detected`."""

    member: str
    time_s: float
    host: str | None
    cause: str
    detail: str
    doing: str


@dataclasses.dataclass(slots=True)
class Incident:
    """One suspension of the view. Times in Unix seconds.

    Attributes:
        began_s: When the job failed; as far as that is not known, when it was noticed.
        noticed_s: When the coordinator noticed.
        ended_s: When training went on, or the job stopped; None: neither yet.
        generation: The view that was suspended.
        size: How many members that had.
        cause: Of the first loss; else `join`, `leave`, `link` (a connection of live members broke), or `unknown`.
        reason: In words.
        losses: Who was lost.
        joined: Who joined.
        phases: Seconds, by the names in `PHASES`; those that are not known (yet) are missing.
        rounds: Views that it took.
        step: The step that was finished next.
        redone: As in `recovered`.
        restored_s: When the view was as large again as before it, or larger; None: not yet.
    """

    began_s: float
    noticed_s: float
    generation: int
    size: int
    cause: str = "unknown"
    reason: str = ""
    ended_s: float | None = None
    outcome: Outcome = Outcome.OPEN
    losses: list[Loss] = dataclasses.field(default_factory=list)
    joined: tuple[str, ...] = ()
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    rounds: int = 0
    step: int | None = None
    redone: str | None = None
    restored_s: float | None = None

    def duration_s(self, now_s: float) -> float:
        """How long training stood still, or has up to now; >= 0."""
        return max(0.0, (now_s if self.ended_s is None else self.ended_s) - self.began_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was saved; fields as in `checkpoint_saved`, None if they are missing there."""

    time_s: float
    step: int | None
    kind: str
    size_bytes: int | None
    duration_s: float | None
    blocked_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
    """An event in words for a person; `level` as in `logging`."""

    time_s: float
    member: str | None
    generation: int
    level: int
    text: str


class History:
    """What the lines so far say of one run of a job.

    Attributes:
        started_s: Time of the first event; None: there was none.
        last_s: The latest time of an event.
        trains_since_s: When the first step was committed, as far as the log says (see Words).
        stopped_s: When the job was over; None: it is not.
        reason: Why it stopped, or why it can't go on yet; "" if there is nothing to say.
        status: Its exit status; None: not known.
        settings: Those that are known.
        target: Members that it should have.
        step: Gradient steps known to be committed; None: not known.
        generation: Of the newest view.
        members: By logical id.
        views: In order.
        sizes: From when on how many members the job had, and how many it should have had (>= 1).
        incidents: In order.
        checkpoints: In order.
        num_checkpoints_failed: Saves that failed or were given up.
        num_checkpoints_skipped: Saves that were left out.
        silent_nodes: Nodes whose agent is silent, and since when.
        differing: Who held something else than the other members, until all have been alike for a while.
        sentences: The latest events.
        num_events: Lines that were understood.
        num_unknown: Lines of events that this version does not know.
        num_damaged: Lines that can't be read.
    """

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.last_s: float | None = None
        self.stopped_s: float | None = None
        self.reason = ""
        self.status: int | None = None
        self.settings: dict[str, Any] = {}
        self.target = 0
        self.step: int | None = None
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.views: list[View] = []
        self.sizes: list[tuple[float, int, int]] = []
        self.incidents: list[Incident] = []
        self.checkpoints: list[Checkpoint] = []
        self.num_checkpoints_failed = 0
        self.num_checkpoints_skipped = 0
        self.silent_nodes: dict[int, float] = {}
        self.differing: tuple[str, ...] = ()
        self.sentences: collections.deque[Sentence] = collections.deque(maxlen=MAX_SENTENCES)
        self.num_events = 0
        self.num_unknown = 0
        self.num_damaged = 0
        self._first_step_s: float | None = None
        self._not_restored: list[Incident] = []
        self._lost_in_view: set[str] = set()
        self._ended: Incident | None = None
        self._recovery: dict[str, Any] = {}

    @property
    def trains_since_s(self) -> float | None:
        """When the first step was committed, or the first view if the log does not say; None: neither."""
        if self._first_step_s is not None:
            return self._first_step_s
        return self.views[0].time_s if self.views else None

    @property
    def incident(self) -> Incident | None:
        """The one that goes on."""
        return self.incidents[-1] if self.incidents and self.incidents[-1].ended_s is None else None

    @property
    def view(self) -> tuple[str, ...]:
        """The newest view's members, in the order of ranks."""
        return self.views[-1].members if self.views else ()

    def standstills(self, now_s: float) -> list[tuple[float, float]]:
        """When the job made no progress since its first committed step: times that grow, and do not overlap."""
        since_s = self.trains_since_s
        if since_s is None:
            return []
        end_s = self.end_s(now_s)
        found: list[tuple[float, float]] = []
        for began_s, ended_s in sorted(
            (each.began_s, each.began_s + each.duration_s(end_s)) for each in self.incidents
        ):
            first_s, last_s = max(began_s, since_s), min(ended_s, end_s)
            if found and first_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], last_s))
            elif first_s < last_s:
                found.append((first_s, last_s))
        return found

    def end_s(self, now_s: float) -> float:
        """The moment up to which the job is looked at: now, or its end."""
        return now_s if self.stopped_s is None else min(now_s, self.stopped_s)

    def goodput(self, now_s: float) -> float | None:
        """The share of the time since the first committed step in which the job made progress; None before that."""
        since_s, end_s = self.trains_since_s, self.end_s(now_s)
        if since_s is None or end_s <= since_s:
            return None
        lost_s = math.fsum(last_s - first_s for first_s, last_s in self.standstills(now_s))
        return min(1.0, max(0.0, 1 - lost_s / (end_s - since_s)))

    def capacity(self, now_s: float) -> float | None:
        """The share of its members that the job had on average since its first committed step; None before that."""
        since_s, end_s = self.trains_since_s, self.end_s(now_s)
        if since_s is None or end_s <= since_s:
            return None
        ends_s = [*(time_s for time_s, _, _ in self.sizes[1:]), end_s]
        had_s = math.fsum(
            size / target * max(0.0, min(last_s, end_s) - max(time_s, since_s))
            for (time_s, size, target), last_s in zip(self.sizes, ends_s, strict=True)
        )
        return min(1.0, had_s / (end_s - since_s))
