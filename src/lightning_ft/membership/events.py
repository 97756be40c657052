"""What the coordinator's core is told: frozen inputs of `machine.step`.

Times are not part of an event: the caller passes its own monotonic `now_s` beside it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a member can be met.

    Attributes:
        host: Name or address that the other members can reach.
        store_port: Port of the member's TCPStore; refuses connections once the process is dead.
    """

    host: str
    store_port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """A member connected, for the first time or again.

    Attributes:
        generation: The last view that it established (0: none).
        pid: Process id on its host, for the event log (0: not known).
    """

    member: str
    incarnation: int
    generation: int
    address: Address
    pid: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Parked:
    """A member waits for the next view, having finished number `completed`.

    Attributes:
        generation: The last view that this member was given (0 before the first).
        completed: None: it has joined, and does not hold the job's state yet.
        reason: `start`, `connection`, `unreachable`, `suspended`, `leave` or `join`.
        admits: Whether it stands at a boundary where joiners may be admitted.
        suspects: Members whose connection to it broke, or could not be made; they may be as well as it is.
        is_quiet: It stands at a boundary that no other member of the view has passed, and has not severed it: whoever
            is not there yet needs to know nothing (C1).
    """

    member: str
    incarnation: int
    generation: int
    completed: int | None
    reason: str
    admits: bool = False
    suspects: tuple[str, ...] = ()
    is_quiet: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Leaving:
    """A member has no more work and waits to be released; it has finished number `completed`."""

    member: str
    incarnation: int
    generation: int
    completed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """A process that is in no view has done all slow work and asks to join.

    Attributes:
        pid: As in `Hello`.
        fingerprint: Digest of what it trains, as in `Described`; "" if it does not say.
    """

    member: str
    incarnation: int
    address: Address
    pid: int = 0
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A member says what the job trains; whoever joins must train the same.

    Attributes:
        fingerprint: Digest of the description.
        description: For whoever joins, to find out where it differs; not read here.
    """

    member: str
    incarnation: int
    fingerprint: str
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive.

    Attributes:
        step: Number of gradient steps that it committed; None: it has joined, and does not hold the job's state yet.
        waits_s: How long it has been waiting for others in the collective that it is in; None if it is in none.
        idle_s: How long it has shown no progress: has entered and finished no collective, and said nothing else.
        doing: What it is doing, for a person: `training_step`, `reduction 12`.
        patience_s: How long what it does may take; None: `timeout` says it.
        busy_s: How long it works for a gradient step itself, without waiting for others; None: not known yet.
        sent_s: On the member's own clock, which only itself can read; the answer repeats it.
    """

    member: str
    incarnation: int
    step: int | None = 0
    waits_s: float | None = None
    idle_s: float = 0.0
    doing: str = ""
    patience_s: float | None = None
    busy_s: float | None = None
    sent_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Vouched:
    """An agent sees that processes of its node compute, whether their interpreters come to say so or not.

    Attributes:
        processes: Members and incarnations.
    """

    processes: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Disconnected:
    """The member's connection broke; nothing is known yet of its process."""

    member: str
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeRefused:
    """A live host refused a connection to the member's liveness port: the process does not run any more."""

    member: str
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Exited:
    """An agent saw the member's process end.

    Attributes:
        status: Exit code, or minus the signal number.
        detail: For a person: `killed by SIGKILL`, `exited with status 1`.
        stacks: Where its threads were before it was killed; empty if nobody asked.
        is_last: The agent will start no other process of this member.
    """

    member: str
    incarnation: int
    status: int
    detail: str
    stacks: str = ""
    is_last: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A process says which uncaught exception it ends with; it comes back to no collective.

    Attributes:
        detail: For a person: `failed with ValueError: no such file`.
        signature: The exception's class and the line that raised it; "" if it is none of the user's code.
    """

    member: str
    incarnation: int
    detail: str
    signature: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are judged only here."""


Event = (
    Hello
    | Parked
    | Leaving
    | Ready
    | Described
    | Heartbeat
    | Vouched
    | Disconnected
    | ProbeRefused
    | Exited
    | Failed
    | Tick
)
