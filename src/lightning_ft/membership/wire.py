"""Messages as JSON text: strict, versioned, table-driven.

A message is a dataclass: the core's events and effects, and the few below that the core does not see. What the
connection itself says is not repeated in each message: once `hello` or `ready` named the member at its end, the caller
passes it as `peer`, and `decode` fills `member` and `incarnation` in. `heartbeat` means `Heartbeat` from a member and
`AgentHeartbeat` from an agent; therefore `decode` is told which messages it may `expect`.

Source: PROTOCOL.md section 7. Both ends must have the same `PROTOCOL_VERSION`; unknown types and fields are errors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning_ft.membership import effects, events
from lightning_ft.membership import wire_fields as read
from lightning_ft.membership.replication import Entry
from lightning_ft.membership.wire_fields import short

PROTOCOL_VERSION = 7
"""Sent in the upgrade request; raised whenever a message changes."""

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message accepted or sent. A view of 10,000 members is below 0.2 MiB."""


class WireError(ValueError):
    """A text is not a valid message.

    Args:
        problem: What is wrong, with the value.
        type_name: Type of the message, if it got that far.
        field: The field in question, if it is about one.
    """

    def __init__(self, problem: str, *, type_name: str | None = None, field: str | None = None) -> None:
        where = "message" if type_name is None else f"message {type_name!r}"
        where += "" if field is None else f", field {field!r}"
        super().__init__(f"{where}: {problem}")
        self.type_name = type_name
        self.field = field


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """The member at the far end of the coordinator's connection (at the member's end: itself)."""

    member: str
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A member's line for the event log; `fields` holds JSON scalars or tuples of them."""

    member: str
    incarnation: int
    event: str
    fields: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class AgentHello:
    """The supervisor of a node connected.

    Attributes:
        node: Number of its node.
        incarnations: The running members of the node, each with its incarnation.
        replica: What it keeps of the coordinator's decisions has this id.
        term: The highest that it has promised to follow.
        standby: `host:port` where it would start a successor of the coordinator; empty: nowhere.
    """

    node: int
    incarnations: tuple[tuple[str, int], ...]
    replica: int = 0
    term: int = 0
    standby: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentHeartbeat:
    """The supervisor of a node is alive.

    Attributes:
        computing: The members of its node whose processes have used the processor since it last said so, or wait for it
            to be given to them; each with its incarnation.
        heard_s: The time of the last `CoordinatorHeartbeat` that it got; 0: none yet.
    """

    computing: tuple[tuple[str, int], ...] = ()
    heard_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class AgentDone:
    """All processes of the supervisor's node have ended, and it will start no other."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobStopped:
    """Said to agents: there will be no other view.

    Attributes:
        is_failed: Not all members left in peace.
        members: The agent's processes, with incarnations, that were in the last view or in one before. Any other of its
            processes has come too late.
    """

    reason: str
    is_failed: bool
    members: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class JobEnded:
    """Said to agents: the job is over, with this exit status."""

    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class NodeArrived:
    """Said by an agent before it starts any member, before the job begins or while it runs.

    Attributes:
        num_slots: Members of its node.
        node: Number of its node; None: any.
    """

    num_slots: int
    node: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class JobBegins:
    """The answer to `NodeArrived`.

    Attributes:
        node: Number of the node.
        expected: The members that the job begins with, as ranges.
        incarnations: Of the node's members and spares, the last that there may have been, if there was any.
    """

    node: int
    expected: str
    incarnations: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer to `hello`, `ready` and `agent_hello`.

    Attributes:
        term: Its own; 0: it has no successors.
    """

    heartbeat_interval_s: float
    term: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Promised:
    """Said by an agent that has promised to follow no coordinator of a lower term; after the `Entry` that it keeps."""

    term: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Said by an agent: it has kept the entry, and so all earlier ones of the same term."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinatorHeartbeat:
    """Said to agents: the coordinator lives, and this is its clock."""

    sent_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Standbys:
    """Said to agents and members: where a successor of the coordinator may be found."""

    endpoints: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Dismissed:
    """Said to an agent that is done: nobody needs what it keeps."""


Message = (
    events.Hello
    | events.Parked
    | events.Leaving
    | events.Heartbeat
    | events.Ready
    | events.Exited
    | events.Described
    | Report
    | AgentHello
    | AgentHeartbeat
    | AgentDone
    | JobStopped
    | JobEnded
    | NodeArrived
    | JobBegins
    | Welcome
    | Entry
    | Promised
    | Kept
    | CoordinatorHeartbeat
    | Standbys
    | Dismissed
    | effects.Suspend
    | effects.CommitView
    | effects.Acknowledge
    | effects.NotifyLeaving
    | effects.Release
    | effects.Evict
    | effects.Decline
    | effects.Stop
    | effects.AnnounceJoin
    | effects.Kill
)

FROM_MEMBER = (
    events.Hello,
    events.Parked,
    events.Leaving,
    events.Heartbeat,
    events.Ready,
    events.Described,
    Report,
)
FROM_AGENT = (AgentHello, AgentHeartbeat, AgentDone, events.Exited, Entry, Promised, Kept)
TO_MEMBER = (
    Welcome,
    Standbys,
    effects.Suspend,
    effects.CommitView,
    effects.Acknowledge,
    effects.NotifyLeaving,
    effects.Release,
    effects.Evict,
    effects.Decline,
    effects.Stop,
    effects.AnnounceJoin,
)
TO_AGENT = (
    Welcome,
    Standbys,
    Entry,
    CoordinatorHeartbeat,
    Dismissed,
    effects.Kill,
    JobStopped,
    JobEnded,
)


def encode(message: Message) -> str:
    """Write a message as one line of JSON, `type` first.

    Raises:
        TypeError: It is not a message (`Probe`, `Record`, `Tick`, ... stay inside the coordinator).
        WireError: It would be longer than `MAX_MESSAGE_BYTES`, or a number in it is not finite.
    """
    schema = _BY_CLASS.get(type(message))
    if schema is None:
        raise TypeError(f"{type(message).__name__} is not a message")
    body: dict[str, object] = {"type": schema.type_name}
    for field in schema.fields:
        value: Any = message
        for attribute in field.path:
            value = getattr(value, attribute)
        body[field.name] = dict(value) if field.is_mapping else value
    try:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False, default=dataclasses.asdict)
    except ValueError as error:
        raise WireError(str(error), type_name=schema.type_name) from None
    if len(text) > MAX_MESSAGE_BYTES:  # json.dumps writes ASCII: characters are bytes
        raise WireError(f"{len(text)} bytes, the limit is {MAX_MESSAGE_BYTES}", type_name=schema.type_name)
    return text


def decode(text: str, *, expect: tuple[type, ...], peer: Peer | None = None) -> Message:
    """Read one message and check all of it.

    Args:
        text: One text frame.
        expect: The classes that may come now, such as `FROM_MEMBER`, or one of them for the first message.
        peer: The member of this connection, once known; fills in `member` and `incarnation` where the wire has none.

    Raises:
        WireError: It isn't JSON, too long, of another type than expected, or a field is missing, unknown, of the wrong
            type or out of range; or it needs a `peer` and there is none; or it names another member than `peer`.
    """
    body = _parse(text)
    type_name = body.pop("type", None)
    by_name = {_BY_CLASS[expected].type_name: _BY_CLASS[expected] for expected in expect}
    if not isinstance(type_name, str) or type_name not in by_name:
        raise WireError(f"expected one of {sorted(by_name)}, got {short(type_name)}", field="type")
    schema = by_name[type_name]
    values = _read_fields(schema, body)
    if schema.names_peer and peer is not None:
        named = Peer(values["member"], values["incarnation"])
        if named != peer:
            raise WireError(f"this connection is {peer}'s, got {named}", type_name=type_name, field="member")
    for attribute in schema.implied:
        if peer is None:
            raise WireError("the sender is not known yet: hello or ready must come first", type_name=type_name)
        values[attribute] = getattr(peer, attribute)
    message: Message = schema.message(**values)
    return message


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_MESSAGE_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_MESSAGE_BYTES:
        raise WireError(f"longer than the limit of {MAX_MESSAGE_BYTES} bytes")
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError(f"expected a JSON object, got {short(body)}")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        names = [name for name, _ in pairs]
        raise WireError("given twice", field=next(name for name in names if names.count(name) > 1))
    return body


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"numbers must be finite, got {name}")


def _read_fields(schema: _Schema, body: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in schema.fields:
        if field.name not in body:
            raise WireError("missing", type_name=schema.type_name, field=field.name)
        try:
            value = field.reader(body.pop(field.name))
        except ValueError as error:
            raise WireError(str(error), type_name=schema.type_name, field=field.name) from None
        target = values
        for attribute in field.path[:-1]:
            target = target.setdefault(attribute, {})
        target[field.path[-1]] = value
    if body:
        raise WireError("not a field of this message", type_name=schema.type_name, field=min(body))
    for attribute, value in values.items():
        if isinstance(value, dict):
            values[attribute] = events.Address(**value)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field on the wire, its reader, and the path of attributes that it is in the dataclass."""

    name: str
    reader: Callable[[object], Any]
    path: tuple[str, ...]
    is_mapping: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Schema:
    """`implied` attributes are not on the wire, as the connection says them; a message that `names_peer` says them."""

    type_name: str
    message: Callable[..., Any]
    fields: tuple[_Field, ...]
    implied: tuple[str, ...]
    names_peer: bool


def _schema(
    type_name: str,
    message: type,
    fields: dict[str, Callable[[object], Any]],
    *,
    renamed: Mapping[str, str] | None = None,
    names_peer: bool = False,
) -> _Schema:
    paths = {name: tuple((renamed or {}).get(name, name).split(".")) for name in fields}
    given = {path[0] for path in paths.values()}
    implied = tuple(field.name for field in dataclasses.fields(message) if field.name not in given)
    assert set(implied) <= {"member", "incarnation"}, f"{message.__name__}: {implied} would not travel"
    wire_fields = tuple(
        _Field(name, reader, paths[name], is_mapping=reader in (read.read_incarnations, read.read_log_fields))
        for name, reader in fields.items()
    )
    return _Schema(type_name, message, wire_fields, implied, names_peer)


_ADDRESS = {"host": "address.host", "store_port": "address.store_port"}
_MEETING = {"store_host": "meeting.host", "store_port": "meeting.store_port"}
_IDENTITY: dict[str, Callable[[object], Any]] = {"member": read.read_member, "incarnation": read.read_natural}
_HOST: dict[str, Callable[[object], Any]] = {
    "host": read.read_name,
    "store_port": read.read_port,
    "pid": read.read_natural,
}

_SCHEMAS: tuple[_Schema, ...] = (
    _schema(
        "hello",
        events.Hello,
        {**_IDENTITY, "generation": read.read_natural, **_HOST},
        renamed=_ADDRESS,
        names_peer=True,
    ),
    _schema(
        "park",
        events.Parked,
        {
            "generation": read.read_natural,
            "completed": read.read_optional_natural,
            "reason": read.read_name,
            "admits": read.read_flag,
            "suspects": read.read_members,
            "is_quiet": read.read_flag,
        },
    ),
    _schema("leave", events.Leaving, {"generation": read.read_natural, "completed": read.read_natural}),
    _schema(
        "heartbeat",
        events.Heartbeat,
        {
            "step": read.read_optional_natural,
            "waits_s": read.read_optional_seconds,
            "idle_s": read.read_seconds,
            "doing": read.read_text,
            "patience_s": read.read_optional_seconds,
            "busy_s": read.read_optional_seconds,
            "sent_s": read.read_seconds,
        },
    ),
    _schema(
        "ready", events.Ready, {**_IDENTITY, **_HOST, "fingerprint": read.read_text}, renamed=_ADDRESS, names_peer=True
    ),
    _schema("described", events.Described, {"fingerprint": read.read_name, "description": read.read_text}),
    _schema("report", Report, {"event": read.read_name, "fields": read.read_log_fields}),
    _schema(
        "agent_hello",
        AgentHello,
        {
            "node": read.read_natural,
            "incarnations": read.read_incarnations,
            "replica": read.read_natural,
            "term": read.read_natural,
            "standby": read.read_text,
        },
    ),
    _schema(
        "exited",
        events.Exited,
        {
            **_IDENTITY,
            "status": read.read_status,
            "detail": read.read_text,
            "stacks": read.read_text,
            "is_last": read.read_flag,
        },
    ),
    _schema("heartbeat", AgentHeartbeat, {"computing": read.read_incarnations, "heard_s": read.read_seconds}),
    _schema("done", AgentDone, {}),
    _schema(
        "job_stopped",
        JobStopped,
        {"reason": read.read_text, "is_failed": read.read_flag, "members": read.read_incarnations},
    ),
    _schema("job_ended", JobEnded, {"status": read.read_status}),
    _schema("arrived", NodeArrived, {"num_slots": read.read_small, "node": read.read_optional_small}),
    _schema(
        "begins",
        JobBegins,
        {"node": read.read_natural, "expected": read.read_name, "incarnations": read.read_incarnations},
    ),
    _schema("welcome", Welcome, {"heartbeat_interval_s": read.read_seconds, "term": read.read_natural}),
    _schema(
        "entry",
        Entry,
        {
            "term": read.read_natural,
            "number": read.read_natural,
            "before": read.read_naturals,
            "replicas": read.read_naturals,
            "text": read.read_name,
        },
    ),
    _schema("promised", Promised, {"term": read.read_natural}),
    _schema("kept", Kept, {"number": read.read_natural}),
    _schema("alive", CoordinatorHeartbeat, {"sent_s": read.read_seconds}),
    _schema("standbys", Standbys, {"endpoints": read.read_names}),
    _schema("dismissed", Dismissed, {}),
    _schema("suspend", effects.Suspend, {"generation": read.read_natural, "reason": read.read_text}),
    _schema(
        "view",
        effects.CommitView,
        {
            "generation": read.read_natural,
            "base": read.read_optional_natural,
            "left": read.read_members,
            "joined": read.read_members,
            "size": read.read_natural,
            "store_host": read.read_name,
            "store_port": read.read_port,
            "needs_joiners": read.read_flag,
        },
        renamed=_MEETING,
    ),
    _schema("heard", effects.Acknowledge, {"sent_s": read.read_seconds}),
    _schema(
        "leaving",
        effects.NotifyLeaving,
        {"member": read.read_member, "completed": read.read_natural},
        renamed={"member": "leaver"},
    ),
    _schema("released", effects.Release, {"reason": read.read_text}),
    _schema("evicted", effects.Evict, {"reason": read.read_text}),
    _schema("declined", effects.Decline, {"reason": read.read_text, "description": read.read_text}),
    _schema("stopped", effects.Stop, {"reason": read.read_text, "is_final": read.read_flag}),
    _schema("join_pending", effects.AnnounceJoin, {"reason": read.read_text, "addresses": read.read_addresses}),
    _schema("kill", effects.Kill, {**_IDENTITY, "reason": read.read_text}),
)

_BY_CLASS: dict[Any, _Schema] = {schema.message: schema for schema in _SCHEMAS}
