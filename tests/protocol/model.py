"""A model of one member (PROTOCOL.md, section 4): what its training and monitor threads do, without tensors."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from lightning_ft.errors import QuorumLostError
from lightning_ft.membership import effects, events, settle
from lightning_ft.membership.arrangement import with_joined
from lightning_ft.membership.events import Address

if TYPE_CHECKING:
    from network import Connection, Group
    from simulation import Simulation

KINDS = ("gather", "reduction", "commit", "broadcast")


def kind_of(number: int) -> str:
    """What all members call as their number-th collective: a reduction is followed by its commit."""
    return KINDS[number % len(KINDS)]


@dataclasses.dataclass(frozen=True)
class Result:
    """A final number's value, the same on every member that keeps it; `joins` are a commit's control words."""

    value: tuple[object, ...]
    generation: int
    is_void: bool = False
    joins: bool = False


OUTCOMES: dict[type, str] = {
    effects.Release: "released",
    effects.Evict: "evicted",
    effects.Stop: "stopped",
    effects.Decline: "declined",
}


class Mode(enum.Enum):
    """What the training thread is doing."""

    OUTSIDE = "outside"
    PARKED = "parked"
    ESTABLISHING = "establishing"
    COMPUTING = "computing"
    IN_NUMBER = "in number"
    LEAVING = "leaving"
    ENDED = "ended"


class Member:
    """One process.

    Attributes:
        completed: None for a joiner that holds no state yet.
        pending: The number that it is in; kept over views until it is final.
        given: The last generation that it was given; `established` the last that it confirmed.
        is_stuck: Its training thread hangs, its monitor thread lives.
        frozen: Neither of them runs.
        is_computing: Though it is frozen, its agent sees it compute: its interpreter's lock is held.
    """

    def __init__(self, sim: Simulation, name: str, incarnation: int, *, last: int, is_joiner: bool) -> None:
        self.sim, self.name, self.incarnation, self.last, self.is_joiner = sim, name, incarnation, last, is_joiner
        self.mode = Mode.OUTSIDE
        self.completed: int | None = None if is_joiner else 0
        self.kept: Result | None = None
        self.trains = "another" if is_joiner and sim.chance(0.1) else "model"
        self.visible: tuple[str, ...] = ()
        self.views: dict[int, tuple[str, ...]] = {0: sim.views[0]}
        self.pending: int | None = None
        self.joins_in_pending = False
        self.is_boundary_due = self.is_at_boundary = False
        self.given = self.established = 0
        self.group: Group | None = None
        self.severed = True
        self.notice: int | None = None
        self.join_announced = False
        self.park: events.Parked | None = None
        self.leave: events.Leaving | None = None
        self.connection: Connection | None = None
        self.alive = True
        self.port_open = True
        self.is_stuck = False
        self.frozen = False
        self.is_computing = self.is_cut_off = False
        self.vouched_s = -math.inf
        self.backlog: list[object] = []
        self.outcome = ""
        self.plan: settle.SettlePlan | None = None
        self.finished: dict[int, Result] = {}
        self.num_finished_when_gone: int | None = None
        self.progress_s = sim.now
        self.renewed_s = -math.inf

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    # --- monitor thread ---------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Say who it is and repeat what it waits for (A4)."""
        address = Address(self.name, 1)
        if self.is_joiner and self.given == 0:
            self.send(events.Ready(self.name, self.incarnation, address, fingerprint=self.trains))
            return
        self.send(events.Hello(self.name, self.incarnation, self.established, address))
        self._describe()
        if self.mode is Mode.OUTSIDE:
            self._park("start")
        elif self.park is not None and self.mode is Mode.PARKED:
            self.send(self.park)
        elif self.leave is not None and self.mode is Mode.LEAVING:
            self.send(self.leave)

    def _describe(self) -> None:
        if self.established and self.views[self.established][0] == self.name:
            self.send(events.Described(self.name, self.incarnation, self.trains, "what it trains"))

    def send(self, event: events.Event) -> None:
        """Give a message to the monitor's connection, if there is one."""
        if self.connection is not None:
            self.connection.to_coordinator(event)

    def receive(self, effect: effects.Effect) -> None:
        """The monitor thread got a message."""
        if self.mode is Mode.ENDED:
            return
        match effect:
            case effects.Suspend():
                if effect.generation == self.given and self.mode is not Mode.PARKED:
                    self._suspended()
            case effects.CommitView():
                self._given_view(effect)
            case effects.NotifyLeaving():
                self.notice = effect.completed if self.notice is None else min(self.notice, effect.completed)
                self._leave_noticed(self.notice)
            case effects.AnnounceJoin():
                self.join_announced = True
            case effects.Acknowledge():
                self.renewed_s = max(self.renewed_s, effect.sent_s)
            case effects.Release() | effects.Evict() | effects.Stop() | effects.Decline():
                is_release = isinstance(effect, effects.Release)
                assert not is_release or self.mode is Mode.LEAVING or self.is_joiner, f"released while {self.mode}"
                assert not isinstance(effect, effects.Decline) or self.given == 0, "a member is not declined"
                self._end(OUTCOMES[type(effect)])

    def _leave_noticed(self, notice: int) -> None:
        if self.mode is Mode.IN_NUMBER and self.pending is not None and self.pending > notice:
            self.sever()
            self._fail("leave")

    def _suspended(self) -> None:
        self.sever()
        if self.mode in (Mode.IN_NUMBER, Mode.ESTABLISHING):
            self._fail("suspended")

    def _end(self, outcome: str) -> None:
        self.mode, self.outcome = Mode.ENDED, outcome
        self.sim.later(self.sim.delay(), lambda: self.sim.die(self))

    # --- training thread --------------------------------------------------------------------------------------------

    def sever(self) -> None:
        """Break the inner group, here and at the peers. Work may turn out to have succeeded before (M2)."""
        if self.group is not None and not self.severed:
            self.severed = True
            self.group.broken_by(self)

    def _fail(self, reason: str) -> None:
        """The sever freed the training thread from the inner group: park, unless the work succeeded in spite of it."""
        if self.is_stuck or self.mode not in (Mode.IN_NUMBER, Mode.ESTABLISHING):
            return
        group = self.group
        assert group is not None
        if self.mode is Mode.IN_NUMBER and group.all_entered(self.operation()) and self.sim.chance(0.3):
            self._finish_number(group)
            return
        self.sim.later(self.sim.delay(), lambda: self.sim.at(self, lambda: self._park_from(group, reason)))
        self.mode = Mode.PARKED
        self.park = None

    def _park_from(self, group: Group, reason: str) -> None:
        if self.group is group and self.mode is Mode.PARKED:
            self._park(reason)

    def _park(self, reason: str, *, is_quiet: bool = False) -> None:
        self.mode = Mode.PARKED
        admits = self.is_at_boundary  # also when establishing the view after it has failed
        self.park = events.Parked(
            self.name, self.incarnation, self.given, self.completed, reason, admits, is_quiet=is_quiet
        )
        self.send(self.park)

    def broken(self, group: Group) -> None:
        """The inner group failed because a peer died or severed."""
        if group is not self.group or self.severed:
            return
        if self.mode in (Mode.IN_NUMBER, Mode.ESTABLISHING):
            self.sever()
            self._fail("connection")

    def heartbeat(self) -> events.Heartbeat:
        """Say whether it waits, and since when it shows no progress."""
        if not self.is_stuck and self.mode is Mode.COMPUTING:
            self.progress_s = self.sim.now
        waits = self.mode in (Mode.IN_NUMBER, Mode.ESTABLISHING) and not self.is_stuck
        waits_s = self.sim.now - self.progress_s if waits else None
        now = self.sim.now
        step = None if self.completed is None else 0
        return events.Heartbeat(self.name, self.incarnation, step, waits_s, now - self.progress_s, sent_s=now)

    def _given_view(self, view: effects.CommitView) -> None:
        if view.generation <= self.given:
            return
        assert self.mode in (Mode.PARKED, Mode.LEAVING, Mode.OUTSIDE), f"{self} got a view while {self.mode}"
        before = () if view.base is None else self.views[view.base]
        members = with_joined((member for member in before if member not in view.left), view.joined)
        assert len(members) == view.size
        self.views[view.generation] = members
        self.given = view.generation
        self.sim.given(self, view.generation, members)
        self.sever()  # after a quiet park
        self.group = self.sim.group(view.generation, members)
        self.severed, self.notice, self.join_announced = False, None, False
        self.mode, self.park, self.leave = Mode.ESTABLISHING, None, None
        self.issue(
            ("exchange",),
            settle.Standing(
                self.completed, self.kept is not None and self.kept.is_void, self.kept.generation if self.kept else 0
            ),
        )

    def issue(self, operation: tuple[object, ...], payload: object = None) -> None:
        """Enter an operation of the inner group."""
        assert self.group is not None
        self.progress_s = self.sim.now
        self.sim.reached(self, str(operation[0]))
        if self.alive and not self.frozen:
            self.group.enter(self, operation, payload)

    def succeeded(self, group: Group, operation: tuple[object, ...]) -> None:
        """An inner operation finished here."""
        if group is not self.group or self.severed or self.is_stuck or group.last(self) != operation:
            return
        if self.mode is Mode.IN_NUMBER:
            self._finish_number(group)
        elif self.mode is Mode.ESTABLISHING:
            self._settle(group, operation)

    def _settle(self, group: Group, operation: tuple[object, ...]) -> None:
        if operation == ("exchange",):
            standings = [group.payload(operation, member) for member in group.members]
            try:
                self.plan = settle.plan(standings)  # type: ignore[arg-type]
            except QuorumLostError:
                self._end("stopped")
                return
            is_needed = self.plan.donor is not None or self.plan.joiners
            self.issue(("handover",) if is_needed else ("confirm",), self.kept)
        elif operation == ("handover",):
            assert self.plan is not None
            rank = group.members.index(self.name)
            if rank in self.plan.laggards:
                donor = self.plan.donor
                assert donor is not None
                assert self.pending == self.plan.target
                self._adopt(group.payload(operation, group.members[donor]))
            elif self.completed is None:
                self._receive_state(group)
            self.issue(("confirm",))
        else:
            self._confirmed(group)

    def _adopt(self, result: object) -> None:
        assert isinstance(result, Result)
        assert self.pending is not None
        self._final(self.pending, result)

    def _receive_state(self, group: Group) -> None:
        """A joiner is given M, and what the others keep of it."""
        assert self.plan is not None
        behind = self.plan.joiners + self.plan.laggards
        leader = next(member for rank, member in enumerate(group.members) if rank not in behind)
        self.completed = self.plan.target
        kept = group.payload(("handover",), leader)
        if kept is not None:
            assert isinstance(kept, Result)
            self.kept = kept
            self.visible = self.sim.views[kept.generation]

    def _confirmed(self, group: Group) -> None:
        assert self.plan is not None
        self.established = group.generation
        assert self.completed == self.plan.target
        self.is_at_boundary = False
        self._describe()
        if not self.visible:  # nothing was final before the first view
            self.visible = group.members
        self.sim.confirmed(self, group)
        if self.pending is None:
            self._compute()
        else:
            self._issue_number(group)

    def _compute(self) -> None:
        self.mode = Mode.COMPUTING
        assert self.completed is not None
        if self.completed < self.last and self.sim.chance(0.02):
            self.last = self.completed  # preempted: it leaves before the others
        group = self.group
        self.sim.later(self.sim.compute_time(), lambda: self.sim.at(self, lambda: self._next(group)))

    def _next(self, group: Group | None) -> None:
        if self.mode is not Mode.COMPUTING or self.group is not group or self.is_stuck or group is None:
            return
        assert self.completed is not None
        if self.completed >= self.last:
            self.mode = Mode.LEAVING
            self.leave = events.Leaving(self.name, self.incarnation, self.given, self.completed)
            self.send(self.leave)
            leave = self.leave
            self.sim.later(self.sim.settings.timeout, lambda: self.sim.at(self, lambda: self._waited_to_leave(leave)))
            return
        if self.is_boundary_due:  # M3a: all pass it before the next number
            self.is_boundary_due, self.is_at_boundary = False, True
            is_unpassed = self.kept is not None and self.kept.generation == self.given
            is_quiet = is_unpassed and not self.severed
            if not is_quiet:
                self.sever()
            self._park("join", is_quiet=is_quiet)
            return
        number = self.completed + 1
        self.pending = number
        self.joins_in_pending = self.join_announced
        if self.severed or (self.notice is not None and self.notice < number):
            self.sever()
            self._park("leave" if self.notice is not None else "suspended")
            return
        self._issue_number(group)

    def _waited_to_leave(self, leave: events.Leaving) -> None:
        if self.leave is leave and self.mode is Mode.LEAVING:  # the others may hang
            self._end("left")

    def operation(self) -> tuple[object, ...]:
        """What it issues for its pending number in its present view."""
        assert self.pending is not None
        assert self.group is not None
        return ("number", self.pending, self._is_unredoable(self.pending, self.group.members))

    def _is_unredoable(self, number: int, members: tuple[str, ...]) -> bool:
        if kind_of(number) == "gather":
            return members != self.visible
        return kind_of(number) == "broadcast" and members[0] != self.visible[0]

    def _issue_number(self, group: Group) -> None:
        self.mode = Mode.IN_NUMBER
        self.issue(self.operation(), self.joins_in_pending)
        if group.is_broken_for(self):
            self.sim.later(self.sim.delay(), lambda: self.sim.at(self, lambda: self.broken(group)))

    def _finish_number(self, group: Group) -> None:
        assert self.pending is not None
        number, operation = self.pending, self.operation()
        is_void = bool(operation[2])
        joins = kind_of(number) == "commit" and any(group.payload(operation, member) for member in group.members)
        value = ("void", number) if is_void else (kind_of(number), number, group.members, joins)
        self._final(number, Result(value, group.generation, is_void, joins))
        self._compute()

    def _final(self, number: int, result: Result) -> None:
        self.completed, self.kept, self.pending = number, result, None
        self.is_boundary_due |= result.joins
        self.visible = self.sim.views[result.generation]
        self.finished[number] = result
        self.sim.finished(self, number, result)
