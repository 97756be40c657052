"""What the coordinator knows: immutable, with the invariants on its fields."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from lightning_ft.membership.effects import Cause
from lightning_ft.membership.events import Address
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.links import LinkFailure
from lightning_ft.membership.table import Table


class Phase(enum.Enum):
    """Where the current view stands."""

    HEALTHY = "healthy"
    """All members of the view run."""
    SUSPENDED = "suspended"
    """At least one parked or is gone; the others are about to park. Generation 0 is never anything else."""
    STOPPED = "stopped"
    """Final: there will be no other view."""


class Status(enum.Enum):
    """Where one member stands in the current view."""

    RUNNING = "running"
    """In training, or (in generation 0) expected."""
    PARKED = "parked"
    LEAVING = "leaving"
    """It promised to enter no other number, and waits to be released."""
    GONE = "gone"
    """Final for the incarnation."""
    RELEASED = "released"
    """It left in peace, or died when it had promised to. Final for the incarnation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A logical id that is or was in a view, or is expected in the first.

    Attributes:
        incarnation: None until it is heard of.
        address: None until it said hello; present in every view but generation 0.
        generation: Last view that holds it.
        is_connected: False from a drop of its connection until it is heard of again.
        dropped_s: On the coordinator's clock, when its connection dropped; None: it has not since it was last heard of.
        is_unseen: Its connection ended with the last coordinator, not by itself; False once it was heard of.
        last_heard_s: On the coordinator's clock; None until it said hello.
        vouched_s: On the coordinator's clock, when its agent last saw it compute; None: not yet.
        has_state: Whether it holds the job's state: joiners do not, until they say so.
        completed: As it said when it parked or left; without meaning if it does not hold the state.
        admits: It parked where joiners may be admitted.
        is_proven: Its process is known not to run any more; only if it is gone.
        stays_away: Its agent has said that it will not start it again.
        waits_since_s: On the coordinator's clock, since when it waits in a collective; None: it does not.
        progress_s: On the coordinator's clock, when it last showed progress; None until it said hello.
        doing: As it last said.
        patience_s: As it last said, how long that may take; None: `timeout`.
        busy_s: As it last said, how long it works for a step.
        step: As it last said, how many gradient steps it has done.
        pid: Of its process, on its host; 0: it has not said it to this coordinator.
        slow_since: Since when it has been slow, on the coordinator's clock and in steps; None: it is not.
        is_straggler: It has been slow for long enough to be reported.
    """

    member: str
    incarnation: int | None = None
    address: Address | None = None
    generation: int = 0
    status: Status = Status.RUNNING
    is_connected: bool = False
    dropped_s: float | None = None
    is_unseen: bool = False
    last_heard_s: float | None = None
    vouched_s: float | None = None
    has_state: bool = True
    completed: int = 0
    admits: bool = False
    is_proven: bool = False
    cause: Cause | None = None
    stays_away: bool = False
    waits_since_s: float | None = None
    progress_s: float | None = None
    doing: str = ""
    patience_s: float | None = None
    busy_s: float | None = None
    step: int = 0
    pid: int = 0
    slow_since: tuple[float, int] | None = None
    is_straggler: bool = False

    def __post_init__(self) -> None:
        assert (self.cause is not None) == (self.status is Status.GONE), "gone if and only if there is a cause"
        assert self.status is Status.GONE or not self.is_proven, "proven means gone"
        assert self.status is Status.PARKED or not self.admits, "only a parked member admits"
        assert self.incarnation is not None or self.last_heard_s is None, "whoever is heard of has an incarnation"

    @property
    def holds(self) -> bool:
        """Whether it is parked with the job's state."""
        return self.status is Status.PARKED and self.has_state

    @property
    def opposes(self) -> bool:
        """Whether it may still run with the job's state, where nobody can ask it."""
        return self.status is Status.GONE and not self.is_proven and self.has_state


@dataclasses.dataclass(frozen=True, slots=True)
class Joiner:
    """A process in no view that is ready for one. `pid` and `fingerprint` as in `events.Ready`."""

    member: str
    incarnation: int
    address: Address
    last_heard_s: float
    pid: int = 0
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The uncaught exception that ended the last process of a logical id.

    Attributes:
        signature: As in `events.Failed`.
        count: How many processes in a row it ended, >= 1.
    """

    incarnation: int
    signature: str
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Who is in the job. Rank = position in `members`.

    Attributes:
        generation: Only grows, >= 0.
        members: Different logical ids.
    """

    generation: int
    members: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.generation >= 0, self.generation
        assert len(set(self.members)) == len(self.members), "a member is in a view once"


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """How many members of the current view stand where, so that no park has to look at all members.

    Attributes:
        admitting: Of the parked.
        proven: Of the gone.
        holding: Of the parked, those that hold the job's state.
        opposing: Of the gone that are not proven, those that hold the job's state.
    """

    running: int = 0
    parked: int = 0
    leaving: int = 0
    gone: int = 0
    released: int = 0
    admitting: int = 0
    proven: int = 0
    holding: int = 0
    opposing: int = 0

    @classmethod
    def of(cls, members: Iterable[Member]) -> Tally:
        """Count the members of a view."""
        tally = cls()
        for member in members:
            tally = tally.moved(None, member)
        return tally

    def moved(self, before: Member | None, after: Member) -> Tally:
        """The tally after one member of the view changed, or was counted for the first time."""
        was, now = None if before is None else before.status, after.status
        return Tally(
            running=self.running - (was is Status.RUNNING) + (now is Status.RUNNING),
            parked=self.parked - (was is Status.PARKED) + (now is Status.PARKED),
            leaving=self.leaving - (was is Status.LEAVING) + (now is Status.LEAVING),
            gone=self.gone - (was is Status.GONE) + (now is Status.GONE),
            released=self.released - (was is Status.RELEASED) + (now is Status.RELEASED),
            admitting=self.admitting - (before is not None and before.admits) + after.admits,
            proven=self.proven - (before is not None and before.is_proven) + after.is_proven,
            holding=self.holding - (before is not None and before.holds) + after.holds,
            opposing=self.opposing - (before is not None and before.opposes) + after.opposes,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything that `machine.step` depends on. All times are on the coordinator's clock, see `clock_s`.

    Attributes:
        view: The current view.
        phase: `SUSPENDED` from the start of generation 0.
        members: Everyone who is or was in a view; whoever isn't in the current one is gone or released.
        joiners: Whoever said ready and is in no view.
        tally: Of the current view; without meaning once stopped.
        target: Members that the job should have: those expected at first, more after joins, fewer after leaves. The
            leavers of the current view still count.
        num_expected: How many were expected at first, >= 1.
        fingerprint: As in `events.Described`, what the job trains; "" until a member says it.
        description: The same; "" too after a restart of the coordinator, until it is said again.
        hang_deadline_s: From when a member that has not parked, and shows no progress, may count as hung; None unless
            suspended.
        quiet_until_s: Until when members that have not parked are not told that the view is suspended; None: they
            were, or it is not.
        no_quorum_since_s: Since when nobody is waited for and there is still no next view; None unless suspended.
        needs_joiners: The current view may go on for the sake of joiners that wait alone (C4a).
        reason: The last reason why there is no next view, or why the job stopped; "" if there is none.
        is_final: The job stopped, and there is no use in resuming it.
        failures: By logical id; whoever never ended with an exception is not in it.
        link_failures: Recent ones, oldest first.
        leave_notice: The leaver of the view with the lowest `completed`, if the others were told of it.
        last_tick_s: On the caller's clock.
        skipped_s: Total time that the coordinator itself was starved, >= 0.
    """

    view: View
    phase: Phase
    members: Table[Member]
    joiners: Table[Joiner]
    tally: Tally
    target: int
    num_expected: int
    hang_deadline_s: float | None
    no_quorum_since_s: float | None
    reason: str
    leave_notice: tuple[str, int] | None
    last_tick_s: float
    skipped_s: float
    link_failures: tuple[LinkFailure, ...] = ()
    quiet_until_s: float | None = None
    needs_joiners: bool = False
    is_final: bool = False
    failures: Table[Failure] = dataclasses.field(default_factory=Table)
    fingerprint: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        tally = self.tally
        if self.phase is not Phase.STOPPED:
            total = tally.running + tally.parked + tally.leaving + tally.gone + tally.released
            assert total == len(self.view.members), (tally, len(self.view.members))
        assert 0 <= tally.admitting <= tally.parked, tally
        assert 0 <= tally.proven <= tally.gone - tally.opposing, tally
        assert 0 <= tally.holding <= tally.parked, tally
        assert (self.hang_deadline_s is not None) == (self.phase is Phase.SUSPENDED), self.phase
        assert self.quiet_until_s is None or self.phase is Phase.SUSPENDED, self.phase
        assert self.no_quorum_since_s is None or self.phase is Phase.SUSPENDED, self.phase
        assert self.skipped_s >= 0, self.skipped_s

    def check(self) -> None:
        """Assert what holds between steps, though not in the middle of one."""
        tally = self.tally
        if self.phase is Phase.HEALTHY:
            assert tally.parked == tally.gone == 0, "a parked or gone member suspends"
            assert tally.running, "a view with nobody in training is over"

    @property
    def generation(self) -> int:
        """Generation of the current view."""
        return self.view.generation

    def clock_s(self, now_s: float) -> float:
        """The coordinator's clock: the caller's without the time in which the coordinator itself was starved (C8).

        Every deadline is judged on it, so that one addition moves them all.
        """
        return now_s - self.skipped_s

    def is_current(self, member: Member) -> bool:
        """Whether the current view holds the member (who may be gone from it)."""
        return member.generation == self.view.generation


def initial(expected: Iterable[str], now_s: float, timeout_s: float) -> State:
    """The state of a new job: generation 0, every expected member awaited.

    Args:
        expected: Logical ids, in any order; they are ranked by node, then slot.
        now_s: Caller's monotonic clock.
        timeout_s: How long members may take to say hello and to park (`Settings.timeout`).

    Raises:
        ValueError: No member, one twice, or one that isn't `node/slot`.
    """
    members = in_order(expected)
    if not members or len(set(members)) != len(members):
        raise ValueError(f"expected one or more different logical ids, got {list(members)}")
    return State(
        view=View(0, members),
        phase=Phase.SUSPENDED,
        members=Table((member, Member(member)) for member in members),
        joiners=Table(),
        tally=Tally(running=len(members)),
        target=len(members),
        num_expected=len(members),
        hang_deadline_s=now_s + timeout_s,
        no_quorum_since_s=None,
        reason="",
        leave_notice=None,
        last_tick_s=now_s,
        skipped_s=0.0,
    )
