"""The views that this process is in: parks, takes the next one, and establishes it (PROTOCOL.md, section 4).

Threads: everything here belongs to the training thread, but for `_on_suspend`, `_on_leaving` and `LiveView.sever`,
which the monitor thread calls to free it from a blocking collective.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from lightning_ft.comm.gloo import GlooTransport, RingBrokenError
from lightning_ft.comm.live_view import LiveView
from lightning_ft.comm.measuring import measure
from lightning_ft.comm.operations import Kind, Operation
from lightning_ft.comm.place import Place
from lightning_ft.comm.recovery import Recovery, redone
from lightning_ft.comm.sequence import CollectiveSequence, Settled
from lightning_ft.comm.topology import choose, needs_times
from lightning_ft.coordinator.client import MembershipClient, NextView
from lightning_ft.errors import FaultToleranceError
from lightning_ft.faultpoints import reach
from lightning_ft.membership.settle import SettlePlan

_log = logging.getLogger("lightning_ft")

_QUICK_ROUNDS = 8

BROKEN = (RingBrokenError, RuntimeError, ValueError, TypeError, LookupError)
"""What a collective raises that fails, because of a peer or because torch can't do it."""


class Views:
    """All groups of this process on the view that it is in.

    Args:
        world: The sequence of the group of all members.
        client: Connected to the coordinator before the first `recover`.
        transport: Makes the inner groups.
        member: Own logical id.
        topology: The setting.

    Attributes:
        groups: Sub-groups and their members, in order of creation.
        retired: Sub-groups that nobody uses any more, each with the number of `world` with which it is forgotten.
        leavers: Members of the view that will leave, with their last number.
        recovery: The one that is not reported yet.
        admit: Hands the job's state to those that have joined, at a boundary.
        step: Number of commits that are final here.
        on_lost: Called when this member can't go on, before the error is raised.
        on_report: Called with an event that all members know, and its fields.
    """

    def __init__(
        self,
        world: CollectiveSequence,
        client: MembershipClient,
        transport: GlooTransport,
        member: str,
        topology: str,
    ) -> None:
        self.groups: dict[CollectiveSequence, tuple[str, ...]] = {}
        self.retired: dict[CollectiveSequence, int] = {}
        self.leavers: dict[str, int] = {}
        self.recovery: Recovery | None = None
        self.admit: Callable[[Place, SettlePlan], None] | None = None
        self.step = 0
        self.on_lost: list[Callable[[], None]] = []
        self.on_report: Callable[[str, Mapping[str, object]], None] = lambda _event, _fields: None
        self._world = world
        self._client = client
        self._transport = transport
        self._member = member
        self._topology = topology
        self._live: LiveView | None = None
        self._members_of: dict[int, tuple[str, ...]] = {}
        self._suspended_generation = 0
        self._defers_until = 0
        self._settled: Settled | None = None
        self._settled_step = 0
        self._suspects: tuple[str, ...] = ()
        self._broken: tuple[str, ...] = ()
        client.on_suspend = self._on_suspend
        client.on_leaving = self._on_leaving

    @property
    def live(self) -> LiveView | None:
        """The view that this member is in; None before the first."""
        return self._live

    @property
    def view(self) -> LiveView:
        """The view that this member is in."""
        assert self._live is not None, "the ring was not started"
        return self._live

    @property
    def starts_early(self) -> bool:
        """Whether buckets may be started during backward (PROTOCOL.md#T3)."""
        last, shown = self._world.last, self._world.shown
        is_waited_for = last is None or last.number <= shown
        return is_waited_for and shown >= self._defers_until and not self.view.is_severed

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Return the members of a view that this member was in."""
        return self._members_of[generation]

    def members_in(self, sequence: CollectiveSequence, generation: int) -> tuple[str, ...]:
        """Return a sub-group's members in a view that this member was in."""
        return tuple(member for member in self.groups[sequence] if member in self._members_of[generation])

    def start_at(self, step: int) -> None:
        """Take over how many commits were final before this process joined."""
        self.step = self._client.step = step

    def start(self, sequence: CollectiveSequence) -> None:
        """Issue a sequence's pending number on the view, if that can be done; else it is left to a recovery."""
        operation, view = sequence.pending, self.view
        if operation is None:
            return
        if self._is_blocked_by_leaver(sequence, operation):
            view.sever()
        if view.is_severed:
            return
        try:
            if sequence.place is None:
                self.establish_group(sequence, view)
            sequence.start()
        except BROKEN as error:
            sequence.works = None
            sequence.note_failure(error)
            _log.debug("[%s g%d] starting %s failed: %s", self._member, view.generation, operation.name, error)
        reach(f"{operation.name}.issued")

    def finalized(self, sequence: CollectiveSequence, operation: Operation) -> None:
        """Account for a number that has become final."""
        if sequence is not self._world:
            return
        for retired in [group for group, number in self.retired.items() if number <= operation.number]:
            del self.retired[retired], self.groups[retired]
            if retired.place is not None:
                self.view.forget(retired.place.inner)
                self._transport.free(retired.place.inner)
        if operation.kind is Kind.COMMIT:
            self.step += 1
            self._client.step = self.step
            self._client.activity.step()
            if self.step == 1 and self.view.members[0] == self._member:
                self._client.report("training_started")

    def _is_blocked_by_leaver(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        leavers, members = self.leavers, self.view.members
        if sequence is self._world:
            return any(leavers[member] < operation.number for member in members if member in leavers)
        return any(member in leavers for member in self.groups[sequence] if member in members)

    def recover_from_break(self) -> None:
        """Recover from a work that failed, or could not be started."""
        if self.view.is_severed:
            self.recover("suspended")
        else:
            place = self._world.place
            ranks = () if place is None else place.inner.broken_peers()
            self.recover("connection", tuple(self.view.members[rank] for rank in ranks))

    def recover(
        self,
        reason: str,
        suspects: tuple[str, ...] = (),
        *,
        following: NextView | None = None,
        admits: bool = False,
    ) -> None:
        """Park and establish views until one holds.

        Args:
            reason: As for `MembershipClient.park`.
            suspects: As there.
            following: The first view, if it was given already.
            admits: As for `MembershipClient.park`.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        recovery = self.recovery = self.recovery or Recovery(time.monotonic())
        is_quiet = admits and following is None and self._is_unpassed_boundary
        while True:
            recovery.rounds += 1
            reach("recover.sever")
            if not is_quiet:
                self.break_view()
            reach("recover.park")
            started_s = time.monotonic()
            given = following or self._park(reason, suspects, admits=admits, is_quiet=is_quiet)
            if is_quiet:  # by now all have parked
                self.break_view()
            view = self.take(given)
            following, is_quiet = None, False
            self._client.activity.start_anew()
            parked_s = time.monotonic()
            recovery.park_s += parked_s - started_s
            try:
                self.establish(view, recovery)
            except (RingBrokenError, RuntimeError) as error:
                _log.debug("[%s g%d] establishing failed: %s", self._member, view.generation, error)
                if recovery.rounds > _QUICK_ROUNDS:  # nobody is gone, and still it can't be done: don't spin
                    time.sleep(min(1.0, 0.01 * 2.0 ** (recovery.rounds - _QUICK_ROUNDS)))
                reason = "unreachable" if self._suspects else "connection"
                suspects = self._suspects or self._broken
                self._suspects = self._broken = ()
                continue
            return

    @property
    def _is_unpassed_boundary(self) -> bool:
        """Whether nobody in the view can have entered a number after the last one, and it is whole (M3a)."""
        view, last = self.view, self._world.last
        return last is not None and last.final_generation == view.generation and not view.is_severed

    def _park(self, reason: str, suspects: tuple[str, ...], *, admits: bool, is_quiet: bool) -> NextView:
        completed = self._world.completed if self._world.has_state else None
        with self.silent_if_lost():
            return self._client.park(completed, reason, suspects=suspects, admits=admits, is_quiet=is_quiet)

    @contextlib.contextmanager
    def silent_if_lost(self) -> Iterator[None]:
        """Call `on_lost` if this member can't go on."""
        try:
            yield
        except FaultToleranceError:
            for callback in self.on_lost:
                callback()
            raise

    def take(self, following: NextView) -> LiveView:
        """Enter a view, without any group yet."""
        view = LiveView(following.view.generation, following.view.members, following.meeting)
        self._live = view
        if self._suspended_generation >= view.generation:  # the news overtook the view
            view.sever()
        self._members_of[view.generation] = view.members
        self.leavers = self._client.leavers  # of this view
        return view

    def break_view(self) -> None:
        """Sever the view and wait until nothing of it runs any more, since it writes into the callers' tensors."""
        if self._live is None:
            return
        self._client.activity.progress(f"leaving generation {self._live.generation}")
        self._live.sever()
        for sequence in (self._world, *self.groups):
            place, sequence.place = sequence.place, None
            if place is not None:
                for work in sequence.works or ():
                    with contextlib.suppress(RingBrokenError, RuntimeError):
                        place.inner.wait(work)
                self._live.forget(place.inner)
                self._transport.free(place.inner)
            sequence.works = None

    def establish(self, view: LiveView, recovery: Recovery) -> None:
        """Make all groups on a view, and settle them (PROTOCOL.md#M3).

        Raises:
            RingBrokenError: A member is gone.
            RuntimeError: The same, found by torch.
        """
        reach("recover.build")
        self._suspects = ()
        started_s = time.monotonic()
        place = self._place(self._world, view, view.members)
        built_s = time.monotonic()
        recovery.rebuild_s += built_s - started_s
        self._settle(self._world, place, self._members_of.__getitem__)
        self.start(self._world)  # before the sub-groups: who has not made one yet waits for this number first
        for sequence in tuple(self.groups):
            self.establish_group(sequence, view)
            self.start(sequence)
        recovery.settle_s += time.monotonic() - built_s

    def establish_group(self, sequence: CollectiveSequence, view: LiveView) -> None:
        """Make a sub-group among its members on a view; raises as `establish`."""
        place = self._place(sequence, view, self.members_in(sequence, view.generation))
        self._settle(sequence, place, lambda generation: self.members_in(sequence, generation))

    def _settle(self, sequence: CollectiveSequence, place: Place, members_of: Callable[[int], tuple[str, ...]]) -> None:
        pending = sequence.pending
        try:
            settled = sequence.settle(place, members_of, self.admit if sequence is self._world else None)
            if sequence is self._world and sequence.times is None and needs_times(self._topology, place.members):
                sequence.times = measure(place)
        except BaseException:
            if not self.view.is_severed:
                self._broken = tuple(place.members[rank] for rank in place.inner.broken_peers())
            self.view.forget(place.inner)
            self._transport.free(place.inner)
            raise
        finally:  # what was adopted stays, even if settling has to be repeated
            if pending is not None and pending.is_final:
                self.finalized(sequence, pending)
        place.choice = choose(self._topology, place.members, self._world.times)
        sequence.place = place
        if sequence is self._world:
            _log.debug("[%s g%d] %s, from %s", self._member, place.generation, place.choice, sequence.times)
            self._settled, self._settled_step = settled, self.step
            self._defers_until = settled.target + 1

    def _place(self, sequence: CollectiveSequence, view: LiveView, members: tuple[str, ...]) -> Place:
        rank = members.index(self._member)
        prefix = f"g{view.generation}/{sequence.name}"
        try:
            inner = view.add(self._transport.build(prefix, rank, len(members), view.meeting))
        except RingBrokenError as error:
            self._suspects = tuple(members[suspect] for suspect in error.suspects)
            raise
        return Place(inner, members, rank, view.generation, self._topology)

    def report(self, event: str, **fields: object) -> None:
        """Put a line into the job's event log."""
        self._client.report(event, **fields)

    def report_recovery(self) -> None:
        """Put a recovery that is over into the event log."""
        recovery, settled = self.recovery, self._settled
        if recovery is None or settled is None:
            return
        self.recovery, view = None, self.view
        facts = recovery.facts(self._settled_step)
        if joined := [member for member in view.members if recovery.before and member not in recovery.before]:
            self.record("members_admitted", **facts, joined=joined)
            return
        is_reduced = settled.kept is Kind.REDUCTION
        self.record(
            "recovered",
            **facts,
            redone=redone(settled),
            contributors=list(self.members_of(settled.kept_generation) if is_reduced else view.members),
        )

    def record(self, event: str, **fields: object) -> None:
        """Tell this process what all members know; the first of them puts it into the event log."""
        self.on_report(event, fields)
        if self.view.members[0] == self._member:
            self._client.report(event, **fields)

    def _on_suspend(self, generation: int) -> None:
        self._suspended_generation = max(self._suspended_generation, generation)
        view = self._live
        if view is not None and view.generation <= generation:
            view.sever()

    def _on_leaving(self, member: str, completed: int) -> None:
        self.leavers = {**self.leavers, member: completed}
        view, operation = self._live, self._world.pending
        if view is None or member not in view.members:
            return
        if operation is not None and operation.number > completed:
            view.sever()
        for sequence, members in tuple(self.groups.items()):
            if member in members and (sequence.pending is not None or sequence.place is None):  # used, or being made
                view.sever()
