"""The job's state: what the core decides is kept before anybody hears of it, and done once enough nodes keep it."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ft.config import Settings
from lightning_ft.coordinator.ending import Ending
from lightning_ft.coordinator.memory import Memory
from lightning_ft.coordinator.replicas import Replicas
from lightning_ft.event_log import EventLog
from lightning_ft.faultpoints import reach
from lightning_ft.membership import effects, events, machine, snapshot, state
from lightning_ft.membership.replication import Ledger
from lightning_ft.membership.transitions import ALL_LEFT

logger = logging.getLogger("lightning_ft")

START_TIMEOUT_S = 600.0
"""A member may take at least this long from the start of its process to its first sign of life."""

_FROM_ITSELF = (events.Hello, events.Parked, events.Leaving, events.Ready, events.Described, events.Heartbeat)

Execute = Callable[[effects.Effect, int, events.Event], None]
"""Does an effect, which is for this incarnation of the member that it names, because of that event."""


class Decisions:
    """Feeds the core, keeps what it decided, and has it done.

    If an earlier coordinator left some in the memory, this one goes on from there.

    Args:
        settings: The job's.
        expected_members: Logical ids of the members of the first view.
        event_log: Where events go.
        memory: Where decisions are kept; None: nowhere.
        replica: Id of the replica of this node.
        term: This coordinator's; 0: no other node keeps its decisions.
        clock: Monotonic seconds.

    Attributes:
        state: The core's.
        ending: How the job's processes ended.
        enlisted: Members that agents were told to start, each with the incarnation that was its first.
        replicas: Who else keeps the decisions.
        is_resumed: Whether another coordinator began the job.

    Threads: the event loop's.
    """

    def __init__(
        self,
        settings: Settings,
        expected_members: Sequence[str],
        event_log: EventLog,
        *,
        memory: Memory | None,
        replica: int,
        term: int,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._event_log = event_log
        self._clock = clock
        self._memory = memory
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self.ending = Ending()
        self.enlisted: dict[str, int] = {}
        start_timeout_s = max(settings.longest_timeout, START_TIMEOUT_S)
        saved = None if memory is None else memory.load()
        self.is_resumed = saved is not None
        self.replicas = Replicas(_ledger(saved, term, replica), replica, settings.heartbeat_timeout, clock)
        if memory is not None and saved is not None:
            self.state = snapshot.load(saved["core"], clock(), settings.longest_timeout, start_timeout_s)
            self.ending = Ending((member, incarnation) for member, incarnation in saved["released"])
            self.enlisted.update(saved["enlisted"])
            for item in memory.items():
                self.ending.note(events.Exited(*item))
            if saved["event_log"] is not None:
                event_log.open(saved["event_log"])
            event_log.resume(saved["lines"])
            self.record("coordinator_restarted")
        else:
            self.state = state.initial(expected_members, clock(), start_timeout_s)
            shown = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
            self.record("job_started", members=list(self.state.view.members), settings=shown)
        self._execute: Execute | None = None
        self._on_stopped: Callable[[], None] = lambda: None
        self._decided = self.save()  # the last coordinator may have kept it here alone

    def begin(self, execute: Execute, on_stopped: Callable[[], None]) -> None:
        """Have done what the last coordinator may have decided and not done, and from now on all else.

        Args:
            execute: Does an effect. What it raises is logged.
            on_stopped: Called when there will be no other view, after the effects that say so.
        """
        self._execute, self._on_stopped = execute, on_stopped
        again = [(kill, kill.incarnation) for kill in snapshot.pending_kills(self.state)]
        self._outgoing.append(_Outgoing(self._decided, [], again, events.Tick(), self.is_stopped))
        self.carry_out()

    @property
    def generation(self) -> int:
        """The current generation."""
        return self.state.view.generation

    @property
    def is_stopped(self) -> bool:
        """Whether there will be no other view, as far as this coordinator knows."""
        return self.state.phase is state.Phase.STOPPED

    @property
    def is_failed(self) -> bool:
        """Whether the core gave the job up."""
        return self.is_stopped and self.state.reason != ALL_LEFT

    @property
    def are_done(self) -> bool:
        """Whether nothing waits to be kept by enough nodes."""
        return not self._outgoing

    def record(self, event: str, member: str | None = None, **fields: Any) -> None:
        """Append a line about the current generation to the event log."""
        self._event_log.write(event, generation=self.generation, member=member, **fields)

    def note_exit(self, exited: events.Exited) -> bool:
        """Take an exit in, and keep it. Returns: False if it was said before."""
        if not self.ending.note(exited):
            return False
        if self._memory is not None:
            self._memory.append([exited.member, exited.incarnation, exited.status, exited.detail])
        return True

    def apply(self, event: events.Event) -> None:
        """Let the core decide, keep what it decided, then do what it says. An event it can't take changes nothing."""
        before = self.state
        try:
            self.state, todo = machine.step(self._settings, before, event, self._clock())
        except Exception:
            logger.exception("the coordinator dropped %s", event)
            return
        for effect in todo:
            if isinstance(effect, effects.Release) and self.is_stopped:
                self._note_released(effect)
        lines = [self._line(effect) for effect in todo if isinstance(effect, effects.Record)]
        if snapshot.is_decision(before, self.state):
            reach("decision.made")
            self._decided = self.save(lines)  # before anybody hears of it
            reach("decision.saved")
        is_stop = self.is_stopped and before.phase is not state.Phase.STOPPED
        named = [(effect, self._incarnation(effect.member, event)) for effect in todo if effect.member is not None]
        self._outgoing.append(_Outgoing(self._decided, lines, named, event, is_stop))
        self.carry_out()

    def carry_out(self) -> None:
        """Do what was decided, in order, as far as enough nodes keep it."""
        assert self._execute is not None, "begin comes first"
        while self._outgoing and self.replicas.holds(self._outgoing[0].number):
            outgoing = self._outgoing.popleft()
            for line in outgoing.lines:
                self._event_log.append(line)
            for effect, incarnation in outgoing.todo:
                try:
                    self._execute(effect, incarnation, outgoing.cause)
                except Exception:
                    logger.exception("the coordinator failed to carry out %s", effect)
            if outgoing.is_stop:
                self._on_stopped()

    def abandon(self) -> None:
        """Forget what was decided and can't be kept by enough nodes."""
        self._outgoing.clear()

    def renew_replicas(self) -> None:
        """Have those nodes keep the decisions that are there."""
        if self.replicas.are_outdated and not self.is_stopped:
            self.save()

    def save(self, lines: Sequence[str] = ()) -> int:
        """Keep what was decided. If that fails, this process ends: another goes on from what was kept before.

        Returns: Number of the entry that the nodes have to keep before it may be told.
        """
        if self._memory is None:
            return 0
        log_path = self._event_log.path
        waiting = [line for outgoing in self._outgoing for line in outgoing.lines]
        saved = {
            "core": snapshot.dump(self.state),
            "enlisted": self.enlisted,
            "released": sorted(self.ending.released),
            "event_log": None if log_path is None else str(log_path),
            "lines": [*self._event_log.unwritten(), *waiting, *lines],
        }
        entry = self.replicas.propose(saved)
        if entry is None:
            self._memory.save({**saved, "replication": None})
            return 0
        self._memory.save({**saved, "replication": [entry.term, entry.number, entry.before, entry.replicas]})
        self.replicas.send(entry)
        return entry.number

    def _line(self, record: effects.Record) -> str:
        fields = dict(record.fields)
        return self._event_log.line(record.event, generation=record.generation, member=record.member, **fields)

    def _note_released(self, release: effects.Release) -> None:
        known = self.state.members.get(release.member)
        if known is not None and known.incarnation == release.incarnation:  # else it came when the job had ended
            self.ending.released.add((release.member, release.incarnation))

    def _incarnation(self, member: str, cause: events.Event) -> int:
        """The one that the core means when it names a member alone: who asked, or who is waited for."""
        if isinstance(cause, _FROM_ITSELF) and cause.member == member:
            return cause.incarnation
        joiner, known = self.state.joiners.get(member), self.state.members.get(member)
        if joiner is not None:
            return joiner.incarnation
        return known.incarnation if known is not None and known.incarnation is not None else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Outgoing:
    """What is to be done after a step, once the entry `number` holds; each effect with the incarnation it is for."""

    number: int
    lines: list[str]
    todo: list[tuple[Any, int]]
    cause: events.Event
    is_stop: bool


def _ledger(saved: dict[str, Any] | None, term: int, replica: int) -> Ledger | None:
    if not term:
        return None
    if saved is not None:
        _, number, before, replicas = saved["replication"]
        return Ledger(term, number, tuple(before), tuple(replicas))
    return Ledger(term, 0, (replica,), (replica,))
