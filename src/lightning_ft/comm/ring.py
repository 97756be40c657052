"""The member's side of the resilient group: runs numbered collectives, and recovers when one breaks.

Threads: everything here belongs to the training thread (a lock keeps others out), but for `_on_suspend`, `_on_leaving`,
`_on_evicted` and `LiveView.sever`, which the monitor thread calls to free it from a blocking collective, or end it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lightning_ft.child import end_at_once
from lightning_ft.comm.gloo import CallerError, GlooTransport, RingBrokenError
from lightning_ft.comm.live_view import LiveView
from lightning_ft.comm.operations import Kind, Operation, Reduce
from lightning_ft.comm.place import Place
from lightning_ft.comm.recovery import Recovery, redone
from lightning_ft.comm.sequence import CollectiveSequence, Settled
from lightning_ft.comm.transfer import Cargo, State, StateTransfer, pack
from lightning_ft.config import Settings
from lightning_ft.coordinator.activity import Activity
from lightning_ft.coordinator.client import MembershipClient, NextView
from lightning_ft.coordinator.fingerprint import Fingerprint
from lightning_ft.errors import FaultToleranceError, LaunchError, signature_of
from lightning_ft.faultpoints import reach
from lightning_ft.membership.settle import SettlePlan

_log = logging.getLogger("lightning_ft")

_QUICK_ROUNDS = 8

_BROKEN = (RingBrokenError, RuntimeError, ValueError, TypeError, LookupError)
"""What a collective raises that fails, because of a peer or because torch can't do it."""


class Carrier(Protocol):
    """A part of a process that keeps what the others' have agreed on since the job began: DDP's buckets."""

    def prepare(self) -> None:
        """Called on all members before a boundary where others may join; may run numbered collectives."""

    def give(self) -> Any:
        """Return what it is."""

    def take(self, part: Any) -> None:
        """Take it over from another member."""


class Ring:
    """All groups of this process: WORLD's sequence, the sub-groups', and the view that they run on.

    Args:
        client: Connected to the coordinator by `start`.
        transport: Makes the inner groups.
        member: Own logical id.
        settings: Of the job.

    Attributes:
        world: The sequence of the group of all members.
        step: Number of commits that are final here.
        on_renumbered: Called in the training thread when the visible members have changed.
        on_lost: Called in the training thread when this member can't go on, before the error is raised.
        is_outside: This process asks to join a job that runs, and was not admitted yet: to its calls it gets the
            answers that copies of itself would give.
        is_admission_due: With a commit all members have learned that somebody waits to join.
    """

    def __init__(
        self,
        client: MembershipClient,
        transport: GlooTransport,
        member: str,
        settings: Settings,
        *,
        is_joiner: bool = False,
    ) -> None:
        self.world = CollectiveSequence("world")
        self.member = member
        self.settings = settings
        self.step = 0
        self.on_renumbered: list[Callable[[], None]] = []
        self.on_lost: list[Callable[[], None]] = []
        self._client = client
        self._transport = transport
        self._lock = threading.RLock()
        self._groups: dict[CollectiveSequence, tuple[str, ...]] = {}  # sub-groups, in order of creation
        self._retired: dict[CollectiveSequence, int] = {}
        self._views: dict[int, tuple[str, ...]] = {}
        self._view: LiveView | None = None
        self._suspended_generation = 0
        self._leavers: dict[str, int] = {}
        self._defers_until = 0
        self._recovery: Recovery | None = None
        self._settled: Settled | None = None
        self._settled_step = 0
        self._num_made: dict[str, int] = {}
        self._suspects: tuple[str, ...] = ()
        self._broken: tuple[str, ...] = ()
        self._is_closed = False
        self._carriers: list[weakref.ref[Carrier]] = []
        self._why_closed: str | None = None
        self._admit: Callable[[Place, SettlePlan], None] | None = None
        self.is_outside = is_joiner
        self.is_admission_due = False
        client.on_suspend = self._on_suspend
        client.on_leaving = self._on_leaving
        client.on_evicted = self._on_evicted

    # -- what the group's methods need ------------------------------------------------------------------------------

    @property
    def activity(self) -> Activity:
        """Where progress is said."""
        return self._client.activity

    @property
    def view(self) -> LiveView:
        """The view that this member is in."""
        assert self._view is not None, "the ring was not started"
        return self._view

    @property
    def starts_early(self) -> bool:
        """Whether buckets may be started during backward (PROTOCOL.md#T3)."""
        last, shown = self.world.last, self.world.shown
        is_waited_for = last is None or last.number <= shown
        return is_waited_for and shown >= self._defers_until and not self.view.is_severed

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Return the members of a view that this member was in."""
        return self._views[generation]

    def start(self, expected: tuple[str, ...]) -> None:
        """Connect and take part in the first view; a joiner only has itself and its copies until it joins.

        Args:
            expected: The members that the job started with.

        Raises:
            FaultToleranceError: There will be none for this member.
        """
        if self.is_outside:  # not rank 0 whoever it is: it is none yet that writes for all
            others = [member for member in expected if member != self.member]
            self.world.visible = (*others[: max(1, len(expected) - 1)], self.member)
            self.world.has_state = False
            return
        self._client.start()
        with self._lock:
            self._recover("start")
            self._recovery = None

    @property
    def was_admitted(self) -> bool:
        """Whether this process has been in a view."""
        return self._view is not None

    @property
    def is_join_pending(self) -> bool:
        """Whether somebody waits to join."""
        return self._client.is_join_pending

    @property
    def is_closed_to_joiners(self) -> bool:
        """Whether this member has something that a joiner could not take over."""
        return bool(self._groups) or self._why_closed is not None

    def close_to_joiners(self, reason: str) -> None:
        """Let nobody join from now on.

        Raises:
            LaunchError: This process itself wants to.
        """
        if self.is_outside:
            raise LaunchError(
                f"joining the job failed: {reason}, which a process that was started while the job ran can't take "
                "over. Set respawn=False.",
                member=self.member,
            )
        self._why_closed = self._why_closed or reason

    def describe(self, fingerprint: Fingerprint) -> None:
        """Say what this process trains. A joiner says it before `join`, a member before others do."""
        self._client.describe(fingerprint)

    def join(self, give: Callable[[], State], take: Callable[[State], None]) -> bool:
        """Say that all slow work is done, wait until the members admit this process, and take the job's state.

        Args:
            give: Returns the state for later joiners, should others fail meanwhile.
            take: Called with the job's state.

        Returns: Whether it is a member now; False if the job ended before.

        Raises:
            FaultToleranceError: It was not admitted, or can't go on.
        """
        with self._lock, _caller_errors:
            self._client.start()
            following = self._client.join()
            if following is None:
                self._is_closed = True
                self._close()
                return False
            self.is_outside = False
            self._pass_boundary(give, take, following)
        return True

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Answer collectives as before the join: the others have run them before this process was there."""
        self.is_outside = True
        try:
            yield
        finally:
            self.is_outside = False

    def admit(self, give: Callable[[], State], take: Callable[[State], None]) -> None:
        """Let those join that wait, at a boundary that all members reach after the same commit. Arguments as `join`.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        with self._lock, _caller_errors:
            self.is_admission_due = False
            self._pass_boundary(give, take)

    def carry(self, carrier: Carrier) -> None:
        """Have something of a part of this process handed to joiners, for as long as that part lives."""
        self._carriers.append(weakref.ref(carrier))

    def _live_carriers(self) -> list[Carrier]:
        return [carrier for reference in self._carriers if (carrier := reference()) is not None]

    def forget(self, carrier: Carrier) -> None:
        """Have it handed over no more. All members must do so alike: what the collector frees, it frees at any time."""
        self._carriers = [reference for reference in self._carriers if reference() is not carrier]

    def _pass_boundary(
        self, give: Callable[[], State], take: Callable[[State], None], following: NextView | None = None
    ) -> None:
        """Every member passes it once, with one number at its end: with it rank and world size follow the view."""
        if self.world.last is not None:
            self._complete(self.world, self.world.last)
        carriers = self._live_carriers()
        for carrier in carriers:
            carrier.prepare()

        def load() -> Cargo:
            state = give()
            return pack(State(state.replicated, (self.step, [carrier.give() for carrier in carriers], state.own)))

        def take_all(state: State) -> None:
            self.activity.go_on()  # from here on the others wait for this process
            step, carried, own = state.own
            for carrier, part in zip(carriers, carried, strict=True):
                carrier.take(part)
            take(State(state.replicated, own))
            self.step = self._client.step = step
            self.activity.wait("a boundary")

        # Before anybody waits: what a user's hooks do in it may fail, or take collectives of their own.
        cargo = self._load_or_close(load) if following is None else None
        self._admit = StateTransfer(load if cargo is None else lambda: cargo, take_all, self._say_progress).run
        self._recovery = Recovery(time.monotonic(), before=() if self._view is None else self._view.members)
        self.activity.wait("a boundary")
        try:
            self._recover("join", following=following, admits=cargo is not None or following is not None)
        finally:
            self._admit = None
            self.activity.go_on()
        self.run(self.world, Reduce([torch.zeros(1)]))

    def _load_or_close(self, load: Callable[[], Cargo]) -> Cargo | None:
        try:
            return load()
        except FaultToleranceError:
            raise
        except Exception as error:  # noqa: BLE001 - a joiner is no reason for those that train to end
            _log.exception(
                "[%s g%d] nobody can join: the state can't be handed over", self.member, self.view.generation
            )
            self.close_to_joiners(f"its state can't be handed over ({error})")
            return None

    def _say_progress(self, what: str) -> None:
        self.activity.progress(what)
        self.activity.start_anew()

    def submit(self, sequence: CollectiveSequence, operation: Operation) -> None:
        """Enter the next number of a sequence, after the one before it is final.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        if self.is_outside:
            operation.echo(len(sequence.visible))
            operation.final_members = sequence.visible
            operation.is_final = True
            return
        with self._lock, _caller_errors:
            visible = sequence.visible  # what the arguments were made for; finishing the last number may change it
            if sequence.last is not None:
                self._complete(sequence, sequence.last)  # its error, if any, is raised by its own wait
            sequence.enter(operation, visible)
            reach(f"{operation.name}.enter")
            self._start(sequence)

    def finish(self, sequence: CollectiveSequence, operation: Operation) -> None:
        """Block until an operation is final, recovering as often as needed.

        Raises:
            MembershipChangedError: The operation is unredoable.
            FaultToleranceError: This member can't go on.
            RuntimeError: The operation failed again and again among the same members: torch can't do it.
        """
        with self._lock, _caller_errors:
            self._complete(sequence, operation)
        if operation.error is not None:
            raise operation.error

    def run(self, sequence: CollectiveSequence, operation: Operation) -> None:
        """Submit and finish."""
        self.submit(sequence, operation)
        self.finish(sequence, operation)

    def poll(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        """Whether an operation is final; makes it so if that takes no waiting, or if it has to be repaired.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        with self._lock, _caller_errors:
            works = sequence.works
            if not operation.is_final and works is not None and not all(work.is_completed() for work in works):
                self.activity.progress(f"polling {operation.name} {operation.number} of {sequence.name}")
                return False
            self._finish(sequence, operation)
            return True

    def add_group(self, name: str, ranks: tuple[int, ...]) -> CollectiveSequence:
        """Make a sub-group of the visible members with these ranks; its members meet in it.

        They must meet now, not at the first use: in a recovery, a member that has made the group waits there for one
        that has not, which would not come if it used the group only after a number that needs the waiting one.
        """
        if self.is_outside:
            raise LaunchError(
                "making a sub-group failed: this process was started while the job ran, and a job that has sub-groups "
                "can't be joined yet. Set respawn=False.",
                member=self.member,
            )
        with self._lock:
            members = tuple(self.world.visible[rank] for rank in ranks)
            number = self._num_made[name] = self._num_made.get(name, 0) + 1
            sequence = CollectiveSequence(name if number == 1 else f"{name}.{number}", members)
            self._groups[sequence] = members
            view = self.view
            if any(member in self._leavers for member in self._members_in(sequence, view.generation)):
                view.sever()
            if not view.is_severed:
                try:
                    self._establish_group(sequence, view)
                except (RingBrokenError, RuntimeError) as error:
                    _log.debug("[%s g%d] making %s failed: %s", self.member, view.generation, name, error)
                    view.sever()  # it is made with the next view
            return sequence

    def retire_group(self, sequence: CollectiveSequence) -> None:
        """Forget a sub-group once no member can need its results: when the next number of `world` is final."""
        with self._lock:  # one that was entered before says nothing of what the others have done since
            is_pending = self.world.pending is not None
            self._retired[sequence] = self.world.completed + (2 if is_pending else 1)

    def leave(self) -> None:
        """Tell the others that this member enters nothing any more, and wait until they can do without it."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            try:
                while (following := self._client.leave(self.world.completed)) is not None:
                    self._break_view()
                    with contextlib.suppress(RingBrokenError, RuntimeError):
                        self._establish(self._take(following), Recovery(time.monotonic()))
            except FaultToleranceError as error:  # evicted, or no coordinator: nothing is left to do for the others
                _log.debug("[%s] left without being released: %s", self.member, error)
        self._close()

    def depart(self) -> None:
        """Leave while the others go on, to end this process: what it still calls is answered as before a join."""
        self.leave()
        self.is_outside = True
        others = (member for member in self.world.visible if member != self.member)
        self.world.visible = (*others, self.member)  # not rank 0: it is none any more that writes for all

    def crash(self, error: BaseException) -> None:
        """End with an exception: the others are told why, and go on without waiting."""
        if self._is_closed:
            return
        self._is_closed = True
        self._client.fail("".join(traceback.format_exception(error)), signature_of(error))
        self._close()

    def _close(self) -> None:
        self._client.close()
        self._break_view()  # what still ran when the interpreter ends would keep it from ending
        self._transport.close()

    @property
    def is_stuck(self) -> bool:
        """Whether the interpreter can't end in peace: see `GlooTransport.is_stuck`."""
        return self._transport.is_stuck

    def confirm_membership(self, *, waits_for_coordinator: bool = True) -> None:
        """Make sure that this process is a member still, before it writes what others may read (see `Lease`).

        Args:
            waits_for_coordinator: Whether to wait even if only the coordinator is away; else just if this process was.

        Raises:
            FaultToleranceError: It is none, or can't find out.
        """
        if self._is_closed or self.is_outside:
            return
        with self._silent_if_lost():
            if waits_for_coordinator:
                self._client.confirm()
            else:
                self._client.confirm_if_in_doubt()

    def report(self, event: str, **fields: object) -> None:
        """Put a line into the job's event log."""
        self._client.report(event, **fields)

    # -- running ----------------------------------------------------------------------------------------------------

    def _start(self, sequence: CollectiveSequence) -> None:
        operation, view = sequence.pending, self.view
        if operation is None:
            return
        if self._is_blocked_by_leaver(sequence, operation):
            view.sever()
        if view.is_severed:
            return
        try:
            if sequence.place is None:
                self._establish_group(sequence, view)
            sequence.start()
        except _BROKEN as error:
            sequence.works = None
            sequence.note_failure(error)
            _log.debug("[%s g%d] starting %s failed: %s", self.member, view.generation, operation.name, error)
        reach(f"{operation.name}.issued")

    def _finish(self, sequence: CollectiveSequence, operation: Operation) -> None:
        while not operation.is_final:
            if sequence.works is None:
                self._recover_from_break()
            elif self._try_to_finish(sequence, operation):
                self._finalized(sequence, operation)
                reach(f"{operation.name}.done")
            else:  # not within an except clause: what recovering raises has nothing to do with how the group broke
                self._recover_from_break()

    def _try_to_finish(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        """Returns: Whether it is final. Not the error: that refers to this frame, and this to the caller's.

        In a variable of the caller it would keep all frames, and the gradients in them, until the garbage is collected.
        """
        try:
            sequence.finish()
        except _BROKEN as error:
            sequence.note_failure(error)
            _log.debug("[%s g%d] %s broke: %s", self.member, self.view.generation, operation.name, error)
            return False
        return True

    def _complete(self, sequence: CollectiveSequence, operation: Operation) -> None:
        if not operation.is_final:
            self.activity.wait(f"{operation.name} {operation.number} of {sequence.name}")
            try:
                self._finish(sequence, operation)
            finally:
                self.activity.go_on()
        if sequence.show(operation):
            for callback in self.on_renumbered:
                callback()
        self._report_recovery()

    def _finalized(self, sequence: CollectiveSequence, operation: Operation) -> None:
        if sequence is not self.world:
            return
        for retired in [group for group, number in self._retired.items() if number <= operation.number]:
            del self._retired[retired], self._groups[retired]
            if retired.place is not None:
                self.view.forget(retired.place.inner)
                self._transport.free(retired.place.inner)
        if operation.kind is Kind.COMMIT:
            self.step += 1
            self._client.step = self.step
            self.activity.step()

    def _is_blocked_by_leaver(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        leavers, members = self._leavers, self.view.members
        if sequence is self.world:
            return any(leavers[member] < operation.number for member in members if member in leavers)
        return any(member in leavers for member in self._groups[sequence] if member in members)

    # -- recovering -------------------------------------------------------------------------------------------------

    def _recover_from_break(self) -> None:
        if self.view.is_severed:
            self._recover("suspended")
        else:
            place = self.world.place
            ranks = () if place is None else place.inner.broken_peers()
            self._recover("connection", tuple(self.view.members[rank] for rank in ranks))

    def _recover(
        self,
        reason: str,
        suspects: tuple[str, ...] = (),
        *,
        following: NextView | None = None,
        admits: bool = False,
    ) -> None:
        recovery = self._recovery = self._recovery or Recovery(time.monotonic())
        while True:
            recovery.rounds += 1
            reach("recover.sever")
            self._break_view()
            reach("recover.park")
            started_s = time.monotonic()
            view = self._take(following or self._park(reason, suspects, admits=admits))
            following = None
            self.activity.start_anew()
            parked_s = time.monotonic()
            recovery.park_s += parked_s - started_s
            try:
                self._establish(view, recovery)
            except (RingBrokenError, RuntimeError) as error:
                _log.debug("[%s g%d] establishing failed: %s", self.member, view.generation, error)
                if recovery.rounds > _QUICK_ROUNDS:  # nobody is gone, and still it can't be done: don't spin
                    time.sleep(min(1.0, 0.01 * 2.0 ** (recovery.rounds - _QUICK_ROUNDS)))
                reason = "unreachable" if self._suspects else "connection"
                suspects = self._suspects or self._broken
                self._suspects = self._broken = ()
                continue
            return

    def _park(self, reason: str, suspects: tuple[str, ...], *, admits: bool) -> NextView:
        completed = self.world.completed if self.world.has_state else None
        with self._silent_if_lost():
            return self._client.park(completed, reason, suspects=suspects, admits=admits)

    @contextlib.contextmanager
    def _silent_if_lost(self) -> Iterator[None]:
        try:
            yield
        except FaultToleranceError:
            for callback in self.on_lost:
                callback()
            raise

    def _take(self, following: NextView) -> LiveView:
        view = LiveView(following.view.generation, following.view.members, following.meeting)
        self._view = view
        if self._suspended_generation >= view.generation:  # the news overtook the view
            view.sever()
        self._views[view.generation] = view.members
        self._leavers = self._client.leavers  # of this view
        return view

    def _break_view(self) -> None:
        """Sever the view and wait until nothing of it runs any more, since it writes into the callers' tensors."""
        if self._view is None:
            return
        self.activity.progress(f"leaving generation {self._view.generation}")
        self._view.sever()
        for sequence in (self.world, *self._groups):
            place, sequence.place = sequence.place, None
            if place is not None:
                for work in sequence.works or ():
                    with contextlib.suppress(RingBrokenError, RuntimeError):
                        place.inner.wait(work)
                self._view.forget(place.inner)
                self._transport.free(place.inner)
            sequence.works = None

    def _establish(self, view: LiveView, recovery: Recovery) -> None:
        reach("recover.build")
        self._suspects = ()
        started_s = time.monotonic()
        place = self._place(self.world, view, view.members)
        built_s = time.monotonic()
        recovery.rebuild_s += built_s - started_s
        self._settle(self.world, place, self._views.__getitem__)
        self._start(self.world)  # before the sub-groups: who has not made one yet waits for this number first
        for sequence in tuple(self._groups):
            self._establish_group(sequence, view)
            self._start(sequence)
        recovery.settle_s += time.monotonic() - built_s

    def _establish_group(self, sequence: CollectiveSequence, view: LiveView) -> None:
        place = self._place(sequence, view, self._members_in(sequence, view.generation))
        self._settle(sequence, place, lambda generation: self._members_in(sequence, generation))

    def _members_in(self, sequence: CollectiveSequence, generation: int) -> tuple[str, ...]:
        return tuple(member for member in self._groups[sequence] if member in self._views[generation])

    def _settle(self, sequence: CollectiveSequence, place: Place, members_of: Callable[[int], tuple[str, ...]]) -> None:
        pending = sequence.pending
        try:
            settled = sequence.settle(place, members_of, self._admit if sequence is self.world else None)
        except BaseException:
            if not self.view.is_severed:
                self._broken = tuple(place.members[rank] for rank in place.inner.broken_peers())
            self.view.forget(place.inner)
            self._transport.free(place.inner)
            raise
        finally:  # what was adopted stays, even if settling has to be repeated
            if pending is not None and pending.is_final:
                self._finalized(sequence, pending)
        sequence.place = place
        if sequence is self.world:
            self._settled, self._settled_step = settled, self.step
            self._defers_until = settled.target + 1

    def _place(self, sequence: CollectiveSequence, view: LiveView, members: tuple[str, ...]) -> Place:
        rank = members.index(self.member)
        prefix = f"g{view.generation}/{sequence.name}"
        try:
            inner = view.add(self._transport.build(prefix, rank, len(members), view.meeting))
        except RingBrokenError as error:
            self._suspects = tuple(members[suspect] for suspect in error.suspects)
            raise
        return Place(inner, members, rank, view.generation)

    def _report_recovery(self) -> None:
        recovery, settled = self._recovery, self._settled
        if recovery is None or settled is None:
            return
        self._recovery, view = None, self.view
        if view.members[0] != self.member:
            return
        facts = recovery.facts(self._settled_step)
        if joined := [member for member in view.members if recovery.before and member not in recovery.before]:
            self.report("members_admitted", **facts, joined=joined)
            return
        is_reduced = settled.kept is Kind.REDUCTION
        self.report(
            "recovered",
            **facts,
            redone=redone(settled),
            contributors=list(self.members_of(settled.kept_generation) if is_reduced else view.members),
        )

    # -- called by the monitor thread -------------------------------------------------------------------------------

    def _on_suspend(self, generation: int) -> None:
        self._suspended_generation = max(self._suspended_generation, generation)
        view = self._view
        if view is not None and view.generation <= generation:
            view.sever()

    def _on_leaving(self, member: str, completed: int) -> None:
        self._leavers = {**self._leavers, member: completed}
        view, operation = self._view, self.world.pending
        if view is None or member not in view.members:
            return
        if operation is not None and operation.number > completed:
            view.sever()
        for sequence, members in tuple(self._groups.items()):
            if member in members and (sequence.pending is not None or sequence.place is None):  # used, or being made
                view.sever()

    def _on_evicted(self) -> None:
        """The others go on without this process: whatever its threads are about to do, they must write nothing more."""
        if not self._is_closed:  # else it is ending already, with an error to be shown
            end_at_once(f"lightning_ft: {self._client.error}")


class _CallerErrors:
    """Raises what a signal handler raised in a wait as it was. No generator: this is in every collective's path."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CallerError):
            raise error.error from None


_caller_errors = _CallerErrors()
