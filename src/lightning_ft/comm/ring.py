"""The member's side of the resilient group: runs numbered collectives, and recovers when one breaks.

Threads: everything here belongs to the training thread (a lock keeps others out), but for `_on_evicted`, which the
monitor thread calls to end this process, and what `views` says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import torch

from lightning_ft.child import end_at_once
from lightning_ft.comm import catch_up
from lightning_ft.comm.admission import Admission, Carrier
from lightning_ft.comm.catch_up import CatchUp, Feed, Follower
from lightning_ft.comm.gloo import CallerError, GlooTransport, RingBrokenError
from lightning_ft.comm.live_view import LiveView
from lightning_ft.comm.operations import BroadcastBytes, Operation, Reduce
from lightning_ft.comm.recovery import Recovery
from lightning_ft.comm.replay import Trained, num_bytes
from lightning_ft.comm.sequence import CollectiveSequence
from lightning_ft.comm.sockets import ForkGuard
from lightning_ft.comm.transfer import Cargo, State, pack
from lightning_ft.comm.views import BROKEN, Views
from lightning_ft.config import PIPELINED, Settings
from lightning_ft.coordinator.activity import Activity
from lightning_ft.coordinator.client import MembershipClient, NextView
from lightning_ft.coordinator.fingerprint import Fingerprint
from lightning_ft.errors import FaultToleranceError, LaunchError, signature_of
from lightning_ft.faultpoints import reach
from lightning_ft.membership.events import Address

_log = logging.getLogger("lightning_ft")


class Ring:
    """All groups of this process: WORLD's sequence, the sub-groups', and the view that they run on.

    Args:
        client: Connected to the coordinator by `start`.
        transport: Makes the inner groups.
        member: Own logical id.
        settings: Of the job.
        token: Its secret.
        is_joiner: Whether this process asks to join a job that runs.

    Attributes:
        world: The sequence of the group of all members.
        on_renumbered: Called in the training thread when the visible members have changed.
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
        token: str,
        *,
        is_joiner: bool = False,
    ) -> None:
        self.world = CollectiveSequence("world")
        self.member = member
        self.settings = settings
        self.on_renumbered: list[Callable[[], None]] = []
        self._client = client
        self._transport = transport
        self._lock = threading.RLock()
        self._num_made: dict[str, int] = {}
        self._is_closed = False
        self._views = Views(self.world, client, transport, member, settings.topology)
        self._catch_up = CatchUp(settings.catch_up_slowdown)
        self._token = token
        ForkGuard(lambda: self._catch_up.descriptors)
        self._admission = Admission(self._views, client.activity, member)
        self.is_outside = is_joiner
        self.is_admission_due = False
        client.on_evicted = self._on_evicted

    # -- what the group's methods need ------------------------------------------------------------------------------

    def follow_reports(self, follower: Callable[[str, Mapping[str, object]], None]) -> None:
        """Have a function called with each event that all members know, and its fields."""
        self._views.on_report = follower

    @property
    def activity(self) -> Activity:
        """Where progress is said."""
        return self._client.activity

    @property
    def step(self) -> int:
        """Number of commits that are final here."""
        return self._views.step

    @property
    def on_lost(self) -> list[Callable[[], None]]:
        """Called in the training thread when this member can't go on, before the error is raised."""
        return self._views.on_lost

    @property
    def view(self) -> LiveView:
        """The view that this member is in."""
        return self._views.view

    @property
    def starts_early(self) -> bool:
        """Whether buckets may be started during backward (PROTOCOL.md#T3)."""
        return self._views.starts_early

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Return the members of a view that this member was in."""
        return self._views.members_of(generation)

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
            self._views.recover("start")
            self._views.recovery = None

    @property
    def was_admitted(self) -> bool:
        """Whether this process has been in a view."""
        return self._views.live is not None

    @property
    def is_join_pending(self) -> bool:
        """Whether somebody waits to join, and all members should come to the next boundary for it."""
        return self._client.needs_joiners or (
            self._client.is_join_pending
            and (not self._is_pipelined or self._catch_up.is_due(self._views.view.generation))
        )

    @property
    def _is_pipelined(self) -> bool:
        return self.settings.catch_up == PIPELINED

    @property
    def is_closed_to_joiners(self) -> bool:
        """Whether this member has something that a joiner could not take over."""
        return bool(self._views.groups) or self._admission.why_closed is not None

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
        self._admission.why_closed = self._admission.why_closed or reason

    def describe(self, fingerprint: Fingerprint) -> None:
        """Say what this process trains. A joiner says it before `join`, a member before others do."""
        self._client.describe(fingerprint)

    def join(self, give: Callable[[], State], take: Callable[[State], None], trained: Callable[[], Trained]) -> bool:
        """Say that all slow work is done, wait until the members admit this process, and take the job's state.

        Args:
            give: Returns the state for later joiners, should others fail meanwhile.
            take: Called with the job's state.
            trained: Returns what of it optimizers change. Members may change it from now on.

        Returns: Whether it is a member now; False if the job ended before.

        Raises:
            FaultToleranceError: It was not admitted, or can't go on.
        """
        own = self._follow(trained()) if self._is_pipelined else None
        with self._lock, _caller_errors:
            self._client.start()
            following = self._client.join()
            if following is None:
                self._catch_up.stop()
                self._is_closed = True
                self._close()
                return False
            self.is_outside = False
            self._pass_boundary(give, take, own, following)
            self._catch_up.follower = None
        return True

    def _follow(self, trained: Trained) -> Callable[[], Cargo]:
        host, patience_s = self._transport.host, self._patience_s
        follower = Follower(trained, host, self._transport.publish_catch_up, self._token, patience_s)
        self._catch_up.follower = follower

        def own() -> Cargo:
            self.activity.progress("catching up")
            follower.finish()
            with self.outside():
                return pack(State(trained.replicated(), None))

        return own

    @property
    def _patience_s(self) -> float:
        """Longer than the coordinator's: a joiner that is silent must not be admitted because it was given up here."""
        return 2 * self.settings.heartbeat_timeout

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Answer collectives as before the join: the others have run them before this process was there."""
        self.is_outside = True
        try:
            yield
        finally:
            self.is_outside = False

    def boundary(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        trained: Callable[[], Trained],
        *,
        can_admit: bool = True,
    ) -> None:
        """Pass a place between two steps that all members reach after the same commit; let those join that wait.

        Args:
            give: As `join`.
            take: As `join`.
            trained: As `join`; called when somebody begins to catch up.
            can_admit: Whether somebody may join here; the same on all members.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        with self._lock, _caller_errors:
            is_due, self.is_admission_due = self.is_admission_due and can_admit, self.is_admission_due and not can_admit
            if is_due and (not self._is_pipelined or self._agree_to_admit(trained)):
                self._catch_up.end()
                self._pass_boundary(give, take, (lambda: Cargo(b"", [])) if self._is_pipelined else None)
            else:
                self._catch_up.at_boundary(self._views.view.generation)

    def stop_catching_up(self) -> None:
        """Send nothing more to those that wait, and let nobody join before somebody asks again."""
        self.is_admission_due = False
        self._catch_up.stop()

    def _agree_to_admit(self, trained: Callable[[], Trained]) -> bool:
        """Learn what the first member has decided: to admit who waits, to begin to send the state, or nothing."""
        generation = self._views.view.generation
        mine = trained()

        def decide() -> bytes:
            waiting = [[joiner.host, joiner.store_port] for joiner in self._client.joiners]
            feed = self._catch_up.feed
            is_urgent = self._client.needs_joiners or num_bytes(mine) <= catch_up.SMALL_BYTES
            if is_urgent or (feed is not None and feed.generation == self._views.view.generation and feed.is_over):
                waiting = []
            is_asked = self._client.needs_joiners or bool(self._client.joiners)
            return json.dumps({"admits": is_asked and not waiting, "joiners": waiting}).encode()

        operation = BroadcastBytes(decide, 0)
        self.run(self.world, operation)
        decided = json.loads(operation.data.numpy().tobytes())
        if decided["joiners"] and operation.final_generation == generation:
            self._catch_up.stop()
            reach("catch_up.begin")
            if self.member == operation.final_members[0]:
                self.report("catch_up_begun", num_joiners=len(decided["joiners"]), total_bytes=num_bytes(mine))
            self._catch_up.feed = Feed(
                mine,
                [Address(host, port) for host, port in decided["joiners"]],
                donors=operation.final_members,
                member=self.member,
                generation=generation,
                token=self._token,
                pace=self._catch_up.pace,
                patience_s=self._patience_s,
            )
        return bool(decided["admits"])

    def carry(self, carrier: Carrier) -> None:
        """As `Admission.carry`."""
        self._admission.carry(carrier)

    def forget(self, carrier: Carrier) -> None:
        """As `Admission.forget`."""
        self._admission.forget(carrier)

    def _pass_boundary(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        own: Callable[[], Cargo] | None,
        following: NextView | None = None,
    ) -> None:
        """Every member passes it once, with one number at its end: with it rank and world size follow the view."""
        if self.world.last is not None:
            self._complete(self.world, self.world.last)
        self._admission.run(give, take, own, following)
        self.run(self.world, Reduce([torch.zeros(1, dtype=torch.int32)]))

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
            self._views.start(sequence)

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
            self._views.groups[sequence] = members
            view = self.view
            if any(member in self._views.leavers for member in self._views.members_in(sequence, view.generation)):
                view.sever()
            if not view.is_severed:
                try:
                    self._views.establish_group(sequence, view)
                except (RingBrokenError, RuntimeError) as error:
                    _log.debug("[%s g%d] making %s failed: %s", self.member, view.generation, name, error)
                    view.sever()  # it is made with the next view
            return sequence

    def retire_group(self, sequence: CollectiveSequence) -> None:
        """Forget a sub-group once no member can need its results: when the next number of `world` is final."""
        with self._lock:  # one that was entered before says nothing of what the others have done since
            is_pending = self.world.pending is not None
            self._views.retired[sequence] = self.world.completed + (2 if is_pending else 1)

    def leave(self) -> None:
        """Tell the others that this member enters nothing any more, and wait until they can do without it."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            try:
                while (following := self._client.leave(self.world.completed)) is not None:
                    self._views.break_view()
                    with contextlib.suppress(RingBrokenError, RuntimeError):
                        self._views.establish(self._views.take(following), Recovery(time.monotonic()))
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
        self._catch_up.close()
        self._client.close()
        self._views.break_view()  # what still ran when the interpreter ends would keep it from ending
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
        with self._views.silent_if_lost():
            if waits_for_coordinator:
                self._client.confirm()
            else:
                self._client.confirm_if_in_doubt()

    def report(self, event: str, **fields: object) -> None:
        """Put a line into the job's event log."""
        self._client.report(event, **fields)

    def record(self, event: str, **fields: object) -> None:
        """Tell this process what all members know; the first of them puts it into the event log."""
        self._views.record(event, **fields)

    # -- running ----------------------------------------------------------------------------------------------------

    def _finish(self, sequence: CollectiveSequence, operation: Operation) -> None:
        while not operation.is_final:
            if sequence.works is None:
                self._views.recover_from_break()
            elif self._try_to_finish(sequence, operation):
                self._views.finalized(sequence, operation)
                reach(f"{operation.name}.done")
            else:  # not within an except clause: what recovering raises has nothing to do with how the group broke
                self._views.recover_from_break()

    def _try_to_finish(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        """Returns: Whether it is final. Not the error: that refers to this frame, and this to the caller's.

        In a variable of the caller it would keep all frames, and the gradients in them, until the garbage is collected.
        """
        try:
            sequence.finish()
        except BROKEN as error:
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
        self._views.report_recovery()

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
