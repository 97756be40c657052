"""A job's history, folded from the lines of its event log: who was there, what happened, how long training stood still.

Pure: no clock, no file. Lines that can't be read, or that say something this version does not know, are counted and
change nothing else; a log may begin or end anywhere.

Words:

* An **incident** is one suspension of the view, from the moment the job failed to the moment training goes on, however
  many rounds that took. Its phases add up to all of it:

      failed ─ detect ─> rank 0 knows ─ park ─> next view ─ rebuild ─> ring ─ settle ─> all equal ─ catch up ─> trains

  All but `detect` are measured by rank 0, on its own clock. `catch_up` is what it took besides: to leave the broken
  view, and to do the broken step again.
* The job **makes progress** from its first committed step to its end, except within incidents. **Goodput** at a moment
  is the share of the time since the first committed step in which it made progress. Where the log does not have the
  first step, the first view takes its place.
* **Capacity** is the share of its members that the job had on average since then.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_ft.event_log import describe

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
        self.sentences: collections.deque[Sentence] = collections.deque(maxlen=MAX_SENTENCES)
        self.num_events = 0
        self.num_unknown = 0
        self.num_damaged = 0
        self._first_step_s: float | None = None
        self._not_restored: list[Incident] = []
        self._lost_in_view: set[str] = set()
        self._ended: Incident | None = None

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

    def add(self, line: str | bytes) -> Incident | None:
        """Take one line in; it changes everything that it says, or only a counter.

        Returns: The incident that it ended, if it did.
        """
        fields = _read(line)
        if fields is None:
            self.num_damaged += 1
            return None
        self._ended = None
        handler = HANDLERS.get(fields.event)
        try:
            sentence = Sentence(fields.time_s, fields.member, fields.generation, *describe(fields.event, fields.own()))
            if handler is not None:
                handler(self, fields)
        except (_DamagedError, RecursionError):
            self.num_damaged += 1
            return None
        self.sentences.append(sentence)
        if handler is None and fields.event not in ONLY_TOLD:
            self.num_unknown += 1
        else:
            self.num_events += 1
        self.started_s = fields.time_s if self.started_s is None else self.started_s
        self.last_s = fields.time_s if self.last_s is None else max(self.last_s, fields.time_s)
        return self._ended

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


def histories(lines: Iterable[str | bytes]) -> list[History]:
    """Fold a file's lines: one history for each run, since a job that is started again appends to its event log.

    Returns: In order, at least one.
    """
    found = [History()]
    for line in lines:
        if is_start(line) and found[-1].num_events:
            found.append(History())
        found[-1].add(line)
    return found


class _DamagedError(Exception):
    """A field is missing, or is none that this version writes."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """A line whose common fields are sound."""

    time_s: float
    event: str
    generation: int
    member: str | None
    values: Mapping[str, Any]

    def own(self) -> dict[str, Any]:
        """The event's own fields."""
        return {name: value for name, value in self.values.items() if name not in _COMMON}

    @property
    def subject(self) -> str:
        """The member that it is about."""
        if self.member is None:
            raise _DamagedError
        return self.member

    def number(self, name: str) -> float | None:
        """A number >= 0 that may be missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MAX:
            raise _DamagedError
        return float(value)

    def count(self, name: str) -> int | None:
        """An integer >= 0 that may be missing."""
        value = self.number(name)
        if value is not None and not value.is_integer():
            raise _DamagedError
        return None if value is None else int(value)

    def text(self, name: str) -> str:
        """A text; "" if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise _DamagedError
        return value or ""

    def names(self, name: str) -> tuple[str, ...]:
        """A list of different logical ids."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _DamagedError
        if len(set(value)) != len(value):
            raise _DamagedError
        return tuple(value)


_COMMON = ("time", "event", "generation", "member")

_MAX = 1e18
"""No number in a log is as large; floats hold integers below exactly enough."""

_LAST_S = 253402300800.0
"""The year 10000: what a calendar can show."""


def _read(line: str | bytes) -> _Line | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    time_s, event, generation, member = (values.get(name) for name in _COMMON)
    if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not 0 <= time_s < _LAST_S:
        return None
    if not isinstance(event, str) or isinstance(generation, bool) or not isinstance(generation, int):
        return None
    if generation < 0 or not isinstance(member, (str, type(None))):
        return None
    return _Line(float(time_s), event, generation, member, values)


def is_start(line: str | bytes) -> bool:
    """Whether another run of the job begins with this line."""
    if "job_started" not in (line if isinstance(line, str) else line.decode(errors="replace")):
        return False  # at once, for nearly all lines
    read = _read(line)
    return read is not None and read.event == "job_started"


# What each event changes. A handler reads all that it needs before it changes anything.


def _on_job_started(history: History, line: _Line) -> None:
    members, settings = line.names("members"), line.values.get("settings")
    if isinstance(settings, dict):
        history.settings = settings
    history.target = len(members)
    for member in members:
        history.members.setdefault(member, Member(member, MemberState.EXPECTED, line.time_s))


def _on_member_joined(history: History, line: _Line) -> None:
    _note_process(history, line, MemberState.ACTIVE)


def _on_spare_ready(history: History, line: _Line) -> None:
    _note_process(history, line, MemberState.SPARE)


def _note_process(history: History, line: _Line, state: MemberState) -> None:
    incarnation, host, pid = line.count("incarnation") or 0, line.text("host"), line.count("pid")
    member = _member(history, line.subject, line.time_s)
    member.restarts += 0 < member.incarnation < incarnation
    member.incarnation = max(member.incarnation, incarnation)
    member.host, member.pid, member.is_straggler = host or None, pid or None, False
    _become(member, state, line.time_s, "")


def _on_failure_detected(history: History, line: _Line) -> None:
    detect_s, late_s, host = line.number("detect_s"), line.number("late_s") or 0.0, line.text("host") or None
    if detect_s is None:  # an older version's log, or nothing was ever heard of it
        detect_s = late_s if line.text("cause") in _SILENT else 0.0
    loss = Loss(line.subject, line.time_s, host, line.text("cause"), line.text("detail"), line.text("doing"))
    member = _member(history, line.subject, line.time_s)
    member.is_straggler = False
    if member.rank is not None:
        history._lost_in_view.add(member.member)
        size = len(history.view) - len(history._lost_in_view)
        history.sizes.append((line.time_s, size, history.sizes[-1][2]))
    _become(member, MemberState.LOST, line.time_s, loss.detail)
    if history.stopped_s is not None or not history.views:  # nothing trained that could stand still
        return
    incident = history.incident
    if incident is None:
        incident = _open(history, line, began_s=line.time_s - detect_s)
    if not incident.losses:
        incident.cause = loss.cause
    incident.losses.append(loss)


def _on_view_suspended(history: History, line: _Line) -> None:
    reason = line.text("reason")
    if history.stopped_s is not None or not history.views:
        return
    incident = history.incident or _open(history, line, began_s=line.time_s)
    incident.reason = incident.reason or reason
    if incident.cause == "unknown" and reason.endswith((": join", ": leave")):
        incident.cause = reason.rpartition(": ")[2]


def _on_link_failed(history: History, _line: _Line) -> None:
    incident = history.incident
    if incident is not None and not incident.losses:
        incident.cause = "link"


def _on_view_committed(history: History, line: _Line) -> None:
    members, reason = line.names("members"), line.text("reason")
    history.target = max(history.target, len(members), 1)
    view = View(line.time_s, line.generation, members, reason)
    history.views.append(view)
    history.sizes.append((line.time_s, len(members), history.target))
    history._lost_in_view.clear()
    history.generation, history.reason = line.generation, ""
    if history.stopped_s is not None:  # said by a coordinator that was cut off, of its own side alone
        history.stopped_s = history.status = None
        if history.incidents and history.incidents[-1].outcome is Outcome.STOPPED:
            history.incidents[-1].outcome, history.incidents[-1].ended_s = Outcome.OPEN, None
    for member in history.members.values():
        member.rank = None
    for rank, name in enumerate(view.members):
        member = _member(history, name, line.time_s)
        member.rank = rank
        _become(member, MemberState.ACTIVE, line.time_s, "")
    for incident in history._not_restored:
        if len(view.members) >= incident.size:
            incident.restored_s = line.time_s
    history._not_restored = [incident for incident in history._not_restored if incident.restored_s is None]


def _on_recovered(history: History, line: _Line) -> None:
    _go_on(history, line, Outcome.RECOVERED, ())


def _on_members_admitted(history: History, line: _Line) -> None:
    _go_on(history, line, Outcome.ADMITTED, line.names("joined"))


def _go_on(history: History, line: _Line, outcome: Outcome, joined: tuple[str, ...]) -> None:
    latency_s, rounds, step = line.number("latency_s"), line.count("rounds"), line.count("step")
    parts = [(name, line.number(f"{name}_s")) for name in ("park", "rebuild", "settle")]
    redone = line.text("redone") or None
    if latency_s is None:
        raise _DamagedError
    noticed_s = line.time_s - latency_s  # by rank 0
    incident = history.incident or _open(history, line, began_s=noticed_s)  # if its beginning was lost
    if joined and not incident.losses:
        incident.cause = "join"
    incident.joined, incident.rounds, incident.step, incident.redone = joined, rounds or 0, step, redone
    incident.began_s = max(0.0, min(incident.began_s, noticed_s))  # rank 0 may have known before the coordinator
    _end(history, incident, line.time_s, outcome)
    rest_s = incident.duration_s(line.time_s)
    for name, part_s in (("detect", noticed_s - incident.began_s), *parts):
        incident.phases[name] = min(rest_s, max(0.0, part_s or 0.0))
        rest_s -= incident.phases[name]
    incident.phases["catch_up"] = rest_s
    if step is not None:
        history.step = step if history.step is None else max(history.step, step)
        for name in {*history.view, *(loss.member for loss in incident.losses)}:
            _member(history, name, line.time_s).last_step = step
    history.reason = ""


def _on_training_started(history: History, line: _Line) -> None:
    if history._first_step_s is None:
        history._first_step_s = line.time_s


def _on_quorum_missing(history: History, line: _Line) -> None:
    history.reason = line.text("reason")


def _on_member_left(history: History, line: _Line) -> None:
    detail = line.text("detail")
    history.target = max(0, history.target - (history.stopped_s is None and line.subject in history.members))
    _become(_member(history, line.subject, line.time_s), MemberState.LEFT, line.time_s, detail)


def _on_member_exited(history: History, line: _Line) -> None:
    detail, incarnation = line.text("detail"), line.count("incarnation")
    member = _member(history, line.subject, line.time_s)
    if incarnation is not None and incarnation < member.incarnation:
        return  # of a process whose successor is there already
    if member.state in (MemberState.LOST, MemberState.LEFT):
        return
    _become(member, MemberState.ENDED, line.time_s, detail)


def _on_straggler_detected(history: History, line: _Line) -> None:
    _member(history, line.subject, line.time_s).is_straggler = True


def _on_straggler_recovered(history: History, line: _Line) -> None:
    _member(history, line.subject, line.time_s).is_straggler = False


def _on_node_silent(history: History, line: _Line) -> None:
    node = line.count("node")
    if node is None:
        raise _DamagedError
    history.silent_nodes[node] = line.time_s


def _on_node_heard(history: History, line: _Line) -> None:
    node = line.count("node")
    if node is None:
        raise _DamagedError
    history.silent_nodes.pop(node, None)


def _on_checkpoint_saved(history: History, line: _Line) -> None:
    step, kind, size_bytes = line.count("step"), line.text("kind"), line.count("bytes")
    duration_s, blocked_s = line.number("duration_s"), line.number("blocked_s")
    history.checkpoints.append(Checkpoint(line.time_s, step, kind, size_bytes, duration_s, blocked_s))


def _on_checkpoint_failed(history: History, _line: _Line) -> None:
    history.num_checkpoints_failed += 1


def _on_checkpoint_skipped(history: History, _line: _Line) -> None:
    history.num_checkpoints_skipped += 1


def _on_job_stopped(history: History, line: _Line) -> None:
    history.reason = line.text("reason")
    _stop(history, line)


def _on_job_finished(history: History, line: _Line) -> None:
    history.status = line.count("status")
    _stop(history, line)


def _stop(history: History, line: _Line) -> None:
    if history.stopped_s is None:
        history.stopped_s = line.time_s
    if history.incident is not None:
        _end(history, history.incident, line.time_s, Outcome.STOPPED)


def _open(history: History, line: _Line, began_s: float) -> Incident:
    incident = Incident(max(0.0, began_s), line.time_s, history.generation, len(history.view))
    history.incidents.append(incident)
    history._not_restored.append(incident)
    return incident


def _end(history: History, incident: Incident, time_s: float, outcome: Outcome) -> None:
    incident.ended_s, incident.outcome = max(time_s, incident.began_s), outcome
    history._ended = incident


def _member(history: History, name: str, time_s: float) -> Member:
    return history.members.setdefault(name, Member(name, MemberState.EXPECTED, time_s))


def _become(member: Member, state: MemberState, time_s: float, detail: str) -> None:
    if member.state is not state:
        member.state, member.since_s = state, time_s
    member.detail = detail


HANDLERS: dict[str, Callable[[History, _Line], None]] = {
    "job_started": _on_job_started,
    "member_joined": _on_member_joined,
    "spare_ready": _on_spare_ready,
    "failure_detected": _on_failure_detected,
    "view_suspended": _on_view_suspended,
    "link_failed": _on_link_failed,
    "view_committed": _on_view_committed,
    "recovered": _on_recovered,
    "members_admitted": _on_members_admitted,
    "training_started": _on_training_started,
    "quorum_missing": _on_quorum_missing,
    "member_left": _on_member_left,
    "member_exited": _on_member_exited,
    "straggler_detected": _on_straggler_detected,
    "straggler_recovered": _on_straggler_recovered,
    "node_silent": _on_node_silent,
    "node_heard": _on_node_heard,
    "checkpoint_saved": _on_checkpoint_saved,
    "checkpoint_failed": _on_checkpoint_failed,
    "checkpoint_skipped": _on_checkpoint_skipped,
    "job_stopped": _on_job_stopped,
    "job_finished": _on_job_finished,
}

ONLY_TOLD = frozenset(
    {
        "catch_up_begun",
        "caught_up",
        "checkpoint_restored",
        "coordinator_restarted",
        "evaluation_incomplete",
        "evaluation_redealt",
        "failed",
        "join_declined",
        "member_stacks",
        "rollback_requested",
    }
)
"""Events that change nothing here."""

_SILENT = ("connection", "heartbeat", "hang")
"""Causes of a loss that had happened some time before it was noticed."""
