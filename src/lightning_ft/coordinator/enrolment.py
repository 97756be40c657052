"""A member's enrolment in its job: which view it was given, what it waits for, whether it is still in.

Pure bookkeeping without threads, sockets or time; `client` carries out what it says.
"""

from __future__ import annotations

import dataclasses

from lightning_ft.coordinator.fingerprint import Fingerprint, first_difference
from lightning_ft.errors import (
    EvictedError,
    FaultToleranceError,
    LaunchError,
    ProtocolViolationError,
    QuorumLostError,
    RepeatedFailureError,
)
from lightning_ft.membership import effects, events, wire
from lightning_ft.membership.arrangement import with_joined
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import View


@dataclasses.dataclass(frozen=True, slots=True)
class NextView:
    """A view to establish.

    Attributes:
        view: Generation and ordered members; this member is one of them.
        meeting: The first member's store, where the inner group meets.
    """

    view: View
    meeting: Address


@dataclasses.dataclass(frozen=True, slots=True)
class Sever:
    """The view of `generation` is broken: free whoever is blocked in it."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """`member` will enter no number larger than `completed`."""

    member: str
    completed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Resync:
    """What came does not fit what this member was given: connect anew and say so."""

    reason: str


Advice = Sever | Left | Resync


class Enrolment:
    """Where one member stands in the coordinator's eyes.

    Args:
        hello: What this member says when it connects; its generation is kept current here.
        expected: The members of generation 0, to which the first view is a difference.
        is_joiner: It is none of them, but says that it is ready, and waits to be given a whole view.

    Attributes:
        view: The last view that this member was given; generation 0 before the first.
        request: The park or leave that the coordinator has not answered yet.
        following: The answer to the last park or leave, until `collect` takes it.
        leavers: Members of the view that will leave, with their last number.
        error: Why this member is out of the job; final.
        is_released: Nobody needs this member any more; final.
        joiners: Where those are that wait to be admitted.
        needs_joiners: As in `effects.CommitView`, of the last view.
        fingerprint: Of what this process trains; None: not known yet.

    Invariants: I1 (`view` changes only by whole differences to itself). Threads: the owner's lock.
    """

    def __init__(self, hello: events.Hello, expected: tuple[str, ...], *, is_joiner: bool = False) -> None:
        self._hello = hello
        self._is_joiner = is_joiner
        self._num_mismatches = 0
        self._severed = 0
        self.view = View(0, expected)
        self.request: events.Parked | events.Leaving | None = None
        self.following: NextView | None = None
        self.leavers: dict[str, int] = {}
        self.error: FaultToleranceError | None = None
        self.is_released = False
        self.joiners: tuple[Address, ...] = ()
        self.needs_joiners = False
        self.fingerprint: Fingerprint | None = None

    @property
    def peer(self) -> wire.Peer:
        """Whose connection this is, for the wire."""
        return wire.Peer(self._hello.member, self._hello.incarnation)

    def hello(self) -> events.Hello | events.Ready:
        """The first message of a connection. The `request` follows it, if there is one."""
        hello = self._hello
        if self._waits_to_join:
            digest = "" if self.fingerprint is None else self.fingerprint.digest
            return events.Ready(hello.member, hello.incarnation, hello.address, hello.pid, digest)
        return dataclasses.replace(hello, generation=self.view.generation)

    def description(self) -> events.Described | None:
        """What the first member of a view says of what the job trains; None of any other."""
        peer, told = self.peer, self.fingerprint
        if told is None or self.view.generation == 0 or self.view.members[0] != peer.member:
            return None
        return events.Described(peer.member, peer.incarnation, told.digest, told.description)

    @property
    def _waits_to_join(self) -> bool:
        return self._is_joiner and self.view.generation == 0

    def park(
        self,
        completed: int | None,
        reason: str,
        *,
        admits: bool,
        suspects: tuple[str, ...] = (),
        is_quiet: bool = False,
    ) -> events.Parked:
        """Begin to wait for the view after the current one. Raises: ValueError, changing nothing."""
        peer = self.peer
        parked = events.Parked(
            peer.member, peer.incarnation, self.view.generation, completed, reason, admits, suspects, is_quiet
        )
        checked(parked)
        self.request, self.following = parked, None
        return parked

    def leave(self, completed: int) -> events.Leaving:
        """Begin to wait for the release, or for a view in which this member's last result is still needed.

        Raises: ValueError, changing nothing.
        """
        peer = self.peer
        leaving = events.Leaving(peer.member, peer.incarnation, self.view.generation, completed)
        checked(leaving)
        self.request, self.following = leaving, None
        return leaving

    def collect(self) -> NextView | None:
        """Take the view that answers the request, if it came."""
        following, self.following = self.following, None
        return following

    def take(self, message: wire.Message) -> tuple[Advice, ...]:
        """Account for a message from the coordinator.

        Returns: What is to be done now, in order.

        Raises:
            ProtocolViolationError: The message contradicts what went before; it changed nothing.
        """
        match message:
            case effects.CommitView():
                return self._take_view(message)
            case effects.Suspend():
                return self._take_suspend(message)
            case effects.NotifyLeaving():
                return self._take_leaving(message)
            case effects.Evict():
                return self._end(EvictedError, f"the job goes on without this process: {message.reason}")
            case effects.Decline():
                return self._decline(message)
            case effects.Stop():
                kind = RepeatedFailureError if message.is_final else QuorumLostError
                return self._end(kind, f"the coordinator stopped the job: {message.reason}")
            case effects.Release():
                self.is_released = True
            case effects.AnnounceJoin():
                self.joiners = message.addresses
        return ()

    def violation(self, problem: str) -> ProtocolViolationError:
        """Make the error for a coordinator that broke the protocol."""
        hello, generation = self._hello, self.view.generation
        return ProtocolViolationError(
            f"the coordinator broke the protocol: {problem} (member={hello.member}, generation={generation}). "
            "Check that all processes use one version of lightning_ft.",
            member=hello.member,
            generation=generation,
        )

    def _take_view(self, message: effects.CommitView) -> tuple[Advice, ...]:
        if message.generation <= self.view.generation:
            return ()  # the answer to a park that was sent again on a new connection
        if self.request is None and not self._waits_to_join:
            raise self.violation(f"view {message.generation} came, but this member waits for none")
        if message.base not in (None, self.view.generation):
            self._num_mismatches += 1
            if self._num_mismatches > 1:
                raise self.violation(f"view {message.generation} builds on {message.base}, which was never given")
            return (
                Resync(f"view {message.generation} builds on {message.base}, this member has {self.view.generation}"),
            )
        base = () if message.base is None else self.view.members
        stayed = tuple(member for member in base if member not in set(message.left))
        members = with_joined(stayed, message.joined)
        if len(stayed) + len(message.left) != len(base) or len(set(members)) != len(members):
            raise self.violation(f"the difference of view {message.generation} to {message.base} does not fit")
        if len(members) != message.size:
            raise self.violation(
                f"view {message.generation} has {message.size} members, but {len(members)} as this member adds up; "
                "were all nodes started with the same numbers of nodes and devices?"
            )
        if self._hello.member not in members:
            raise self.violation(f"view {message.generation} does not hold this member")
        self.view = View(message.generation, members)
        self.request = None
        self.following = NextView(self.view, message.meeting)
        self.leavers = {}  # whoever is needed once more leaves again, and whoever has come back has not left
        self.joiners = ()
        self.needs_joiners = message.needs_joiners
        self._num_mismatches = 0
        return (Sever(message.generation),) if self._severed >= message.generation else ()

    def _take_suspend(self, message: effects.Suspend) -> tuple[Advice, ...]:
        self._severed = max(self._severed, message.generation)  # perhaps of a view that is still to come
        return (Sever(message.generation),) if message.generation == self.view.generation else ()

    def _take_leaving(self, message: effects.NotifyLeaving) -> tuple[Advice, ...]:
        if self.leavers.get(message.leaver) == message.completed:
            return ()
        self.leavers = {**self.leavers, message.leaver: message.completed}
        return (Left(message.leaver, message.completed),)

    def _decline(self, message: effects.Decline) -> tuple[Advice, ...]:
        if self.error is None:
            difference = (
                "" if self.fingerprint is None else first_difference(message.description, self.fingerprint.description)
            )
            where = f" ({difference})" if difference else ""
            hint = " Start it with the script, the arguments and the data that the job has." if where else ""
            self.error = LaunchError(
                f"joining the job failed: {message.reason}{where}.{hint} The job goes on without this process.",
                member=self._hello.member,
            )
        return ()

    def _end(self, kind: type[FaultToleranceError], cause: str) -> tuple[Advice, ...]:
        if self.error is None:
            hello, generation = self._hello, self.view.generation
            self.error = kind(
                f"{cause} (member={hello.member}, incarnation={hello.incarnation}, generation={generation}). "
                "Write nothing more and exit; the run can be resumed from its last checkpoint.",
                member=hello.member,
                generation=generation,
            )
        return (Sever(self.view.generation),)  # whoever is blocked in a collective must finish no other (I8)


def checked(message: events.Parked | events.Leaving | wire.Report) -> str:
    """Encode a message that the coordinator will accept.

    Raises:
        ValueError: It would not; better here than at the far end, which would close the connection.
    """
    frame = wire.encode(message)
    wire.decode(frame, expect=(type(message),), peer=wire.Peer(message.member, message.incarnation))
    return frame
