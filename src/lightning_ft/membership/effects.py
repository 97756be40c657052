"""What the coordinator's core wants done: frozen outputs of `machine.step`, executed in order by the server."""

from __future__ import annotations

import dataclasses
import enum

from lightning_ft.membership.events import Address


class Cause(enum.StrEnum):
    """Why a member is gone, as written into the event log."""

    EXIT = "exit"
    CONNECTION = "connection"
    HEARTBEAT = "heartbeat"
    HANG = "hang"
    LEAVE = "leave"
    SLOW = "slow"


@dataclasses.dataclass(frozen=True, slots=True)
class Suspend:
    """Tell a member that the view is broken: sever, then park."""

    member: str
    generation: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CommitView:
    """Tell a member its next view, as the difference to generation `base`.

    Attributes:
        base: Generation that `left` and `joined` refer to (0: the expected members, whom every member knows from its
            environment); None: the empty view, so `joined` is the whole new one.
        left: Logical ids that are taken out of it first.
        joined: Logical ids then added to it as `arrangement.with_joined` does; one that also left is a new process of
            that name.
        size: How many members the new view has, to check the sum.
        meeting: Address of the first member, at whose store the inner group meets.
        needs_joiners: Its members are too few, and go on for the sake of joiners that wait (C4a).
    """

    member: str
    generation: int
    base: int | None
    left: tuple[str, ...]
    joined: tuple[str, ...]
    size: int
    meeting: Address
    needs_joiners: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell a member that the heartbeat which it sent at `sent_s`, on its own clock, was heard."""

    member: str
    sent_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class NotifyLeaving:
    """Tell a member that another one will enter no number larger than `completed`."""

    member: str
    leaver: str
    completed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Tell a leaver, or a joiner that comes when all have left, that nobody needs it any more."""

    member: str
    incarnation: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Evict:
    """Tell a process that it is not a member (any more)."""

    member: str
    incarnation: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Decline:
    """Tell a process that it can't join, nor can another one like it.

    Attributes:
        description: What the job trains, as in `events.Described`, if the process trains something else.
    """

    member: str
    incarnation: int
    reason: str
    description: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Tell a parked member that there will be no next view; `is_final` if there is no use in resuming the job."""

    member: str
    reason: str
    is_final: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """Ask the member's agent to kill its process."""

    member: str
    incarnation: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Try to connect to the member's liveness port; report `ProbeRefused` if a live host refuses."""

    member: str
    incarnation: int
    address: Address


@dataclasses.dataclass(frozen=True, slots=True)
class AnnounceJoin:
    """Tell a member of the view (its first) that joiners are ready, and where those are that it has room for."""

    member: str
    reason: str
    addresses: tuple[Address, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Append a line to the event log."""

    event: str
    generation: int
    member: str | None = None
    fields: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """An event was dropped and changed nothing; the reason is logged. What its sender is told, if anything, follows."""

    member: str
    reason: str


Effect = (
    Suspend
    | CommitView
    | Acknowledge
    | NotifyLeaving
    | Release
    | Evict
    | Decline
    | Stop
    | Kill
    | Probe
    | AnnounceJoin
    | Record
    | Refuse
)
