"""The wire format: round trips, and each way to be malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_ft.membership import effects, events, wire
from lightning_ft.membership.events import Address
from lightning_ft.membership.replication import Entry

PEER = wire.Peer("0/1", 3)
ADDRESS = Address("node0", 4711)
STORE = {"store_host": "node0", "store_port": 4711}

MESSAGES: list[tuple[Any, tuple[type, ...]]] = [
    (events.Hello("0/1", 3, 2, ADDRESS, 99), wire.FROM_MEMBER),
    (events.Parked("0/1", 3, 2, 7, "connection", admits=True, suspects=("0/0",), is_quiet=True), wire.FROM_MEMBER),
    (events.Leaving("0/1", 3, 2, 7), wire.FROM_MEMBER),
    (events.Heartbeat("0/1", 3, 12, 1.5, 2.5, "reduction 7", 60.0, 0.25, 12.5), wire.FROM_MEMBER),
    (events.Heartbeat("0/1", 3, 12, None, 0.0, ""), wire.FROM_MEMBER),
    (events.Ready("0/1", 3, ADDRESS, 99, "cafe"), wire.FROM_MEMBER),
    (events.Described("0/1", 3, "cafe", "a net"), wire.FROM_MEMBER),
    (wire.Report("0/1", 3, "recovered", (("s", 0.5), ("by", ("0/0", 1)), ("x", None), ("ok", True))), wire.FROM_MEMBER),
    (wire.AgentDone(), wire.FROM_AGENT),
    (wire.JobStopped("too few", is_failed=True, members=(("0/1", 2),)), wire.TO_AGENT),
    (wire.JobEnded(143), wire.TO_AGENT),
    (wire.AgentHello(0, (("0/0", 1), ("0/1", 3))), wire.FROM_AGENT),
    (wire.AgentHello(1, (), 1_000_000_007, 3, "node1:29400"), wire.FROM_AGENT),
    (wire.AgentHeartbeat(), wire.FROM_AGENT),
    (wire.AgentHeartbeat((("0/1", 3),), 12.5), wire.FROM_AGENT),
    (Entry(3, 8, (0,), (0, 1_000_000_007), "eJw="), wire.FROM_AGENT),
    (wire.Promised(3), wire.FROM_AGENT),
    (wire.Kept(8), wire.FROM_AGENT),
    (wire.CoordinatorHeartbeat(12.5), wire.TO_AGENT),
    (wire.Standbys(("node1:29400", "node2:29400")), wire.TO_MEMBER),
    (wire.Dismissed(), wire.TO_AGENT),
    (wire.NodeArrived(4, None), (wire.NodeArrived,)),
    (wire.JobBegins(1, "0-1/0-3"), (wire.JobBegins,)),
    (events.Exited("0/1", 3, -9, "killed by SIGKILL"), wire.FROM_AGENT),
    (wire.Welcome(1.0, 3), wire.TO_MEMBER),
    (effects.Suspend("0/1", 2, "0/0 is gone"), wire.TO_MEMBER),
    (effects.CommitView("0/1", 3, 2, ("0/0",), ("1/0", "1/1"), 5, ADDRESS), wire.TO_MEMBER),
    (effects.Acknowledge("0/1", 12.5), wire.TO_MEMBER),
    (effects.NotifyLeaving("0/1", "0/0", 7), wire.TO_MEMBER),
    (effects.Release("0/1", 3, "done"), wire.TO_MEMBER),
    (effects.Evict("0/1", 3, "silent"), wire.TO_MEMBER),
    (effects.Decline("0/1", 3, "it trains something else", "a net"), wire.TO_MEMBER),
    (effects.Stop("0/1", "no quorum"), wire.TO_MEMBER),
    (effects.Stop("0/1", "a bug", is_final=True), wire.TO_MEMBER),
    (effects.AnnounceJoin("0/1", "ready: 2/0", (ADDRESS, Address("::1", 7))), wire.TO_MEMBER),
    (effects.Kill("0/1", 3, "hang"), wire.TO_AGENT),
]


@pytest.mark.parametrize(("message", "expect"), MESSAGES, ids=lambda value: type(value).__name__)
def test_round_trip(message: wire.Message, expect: tuple[type, ...]) -> None:
    """What is written is read, and `type` comes first."""
    text = wire.encode(message)
    assert text.startswith('{"type":"')
    assert wire.decode(text, expect=expect, peer=PEER) == message


def test_every_message_is_tested() -> None:
    """The list above has every class that may travel."""
    classes = {*wire.FROM_MEMBER, *wire.FROM_AGENT, *wire.TO_MEMBER, *wire.TO_AGENT, wire.NodeArrived, wire.JobBegins}
    assert {type(message) for message, _ in MESSAGES} == classes


def test_fields_are_those_of_the_protocol() -> None:
    """The flattened address and the leaver's name, as PROTOCOL.md section 7 spells them."""
    assert json.loads(wire.encode(MESSAGES[0][0])) == {
        "type": "hello",
        "member": "0/1",
        "incarnation": 3,
        "generation": 2,
        "host": "node0",
        "store_port": 4711,
        "pid": 99,
    }
    assert json.loads(wire.encode(effects.NotifyLeaving("0/1", "0/0", 7))) == {
        "type": "leaving",
        "member": "0/0",
        "completed": 7,
    }


def test_internal_effects_do_not_travel() -> None:
    """A probe is for the coordinator itself."""
    with pytest.raises(TypeError, match="Probe is not a message"):
        wire.encode(effects.Probe("0/1", 1, ADDRESS))  # type: ignore[arg-type]


def test_encode_rejects_what_decode_would() -> None:
    """Numbers that JSON has not, and texts over the limit."""
    with pytest.raises(wire.WireError, match="welcome"):
        wire.encode(wire.Welcome(float("nan")))
    with pytest.raises(wire.WireError, match="the limit is 1048576"):
        wire.encode(effects.Stop("0/1", "x" * wire.MAX_MESSAGE_BYTES))


PARK = {
    "type": "park",
    "generation": 1,
    "completed": 2,
    "reason": "start",
    "admits": False,
    "suspects": [],
    "is_quiet": False,
}
HEARTBEAT = {"type": "heartbeat", "step": 1, "waits_s": None, "idle_s": 0, "doing": ""}
ARRIVED = {"type": "arrived", "num_slots": 1, "node": None}
HELLO = {
    "type": "hello",
    "member": "0/1",
    "incarnation": 3,
    "generation": 0,
    "host": "h",
    "store_port": 1,
    "pid": 1,
}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (PARK, "generation", True),
        (PARK, "generation", 1.0),
        (PARK, "generation", -1),
        (PARK, "generation", 2**63),
        (PARK, "completed", "2"),
        (PARK, "completed", -1),
        (PARK, "reason", ""),
        (PARK, "reason", 5),
        (PARK, "reason", "\ud800"),
        (HEARTBEAT, "idle_s", -0.5),
        (HEARTBEAT, "idle_s", True),
        (HEARTBEAT, "idle_s", 10**400),
        (HEARTBEAT, "idle_s", "1"),
        (PARK, "admits", 0),
        (PARK, "extra", 1),
        (HELLO, "member", "0/01"),
        (HELLO, "member", 1),
        (HELLO, "store_port", 0),
        (HELLO, "store_port", 65536),
        (HELLO, "host", ""),
        (HELLO, "incarnation", 4),
        (ARRIVED, "node", 65536),
        (ARRIVED, "num_slots", 65536),
    ],
)
def test_a_wrong_field_is_named(base: dict[str, object], field: str, value: object) -> None:
    """The error says which field of which message."""
    with pytest.raises(wire.WireError) as caught:
        wire.decode(json.dumps(base | {field: value}), expect=(wire.NodeArrived, *wire.FROM_MEMBER), peer=PEER)
    assert caught.value.type_name == base["type"]
    assert caught.value.field == ("member" if field == "incarnation" else field)
    assert repr(caught.value.field) in str(caught.value)


@pytest.mark.parametrize("field", [name for name in PARK if name != "type"])
def test_a_missing_field_is_named(field: str) -> None:
    """Nothing has a default on the wire."""
    body = {name: value for name, value in PARK.items() if name != field}
    with pytest.raises(wire.WireError, match=f"field '{field}': missing"):
        wire.decode(json.dumps(body), expect=wire.FROM_MEMBER, peer=PEER)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[]", "expected a JSON object, got \\[\\]"),
        ("{}", "field 'type': expected one of"),
        ('{"type":"fly"}', "got 'fly'"),
        ('{"type":["park"]}', "field 'type'"),
        ('{"type":"welcome","heartbeat_interval_s":1}', "expected one of"),
        ('{"type":"leave","generation":1,"generation":1,"completed":0}', "field 'generation': given twice"),
        ('{"type":"leave","generation":NaN,"completed":0}', "finite"),
        ("[" * 100_000, "not JSON"),
        ('{"type":"leave","generation":' + "1" * 5000 + "}", "not JSON"),
        (" " * (wire.MAX_MESSAGE_BYTES + 1), "longer than the limit"),
        ('"' + "é" * (wire.MAX_MESSAGE_BYTES // 2) + '"', "longer than the limit"),
        ('{"type":"report","event":"e","fields":[]}', "expected an object"),
        ('{"type":"report","event":"e","fields":{"a":{}}}', "scalar"),
        ('{"type":"report","event":"e","fields":{"a":[[1]]}}', "scalar"),
        ('{"type":"report","event":"e","fields":{"a":1e999}}', "finite"),
        ('{"type":"heartbeat","step":1,"waits_s":null,"idle_s":1e999,"doing":""}', "finite"),
    ],
)
def test_malformed_texts(text: str, problem: str) -> None:
    """Each is refused with its reason, none with another exception."""
    with pytest.raises(wire.WireError, match=problem):
        wire.decode(text, expect=wire.FROM_MEMBER, peer=PEER)


@pytest.mark.parametrize(
    ("body", "expect", "problem"),
    [
        ({"type": "agent_hello", "node": 0, "incarnations": []}, wire.FROM_AGENT, "expected an object"),
        ({"type": "entry", "term": 1, "number": 1, "before": 0}, wire.FROM_AGENT, "a list of integers"),
        ({"type": "standbys", "endpoints": "a:1"}, wire.TO_MEMBER, "a list of strings"),
        ({"type": "join_pending", "reason": "", "addresses": ["h:1"]}, wire.TO_MEMBER, "a list of objects"),
        ({"type": "join_pending", "reason": "", "addresses": [{"host": "h"}]}, wire.TO_MEMBER, "host and store_port"),
        (
            {"type": "exited", "member": "0/1", "incarnation": 1, "status": True, "detail": ""},
            wire.FROM_AGENT,
            "exit code",
        ),
        (
            {"type": "view", "generation": 1, "base": None, "left": [], "joined": "x", "size": 1} | STORE,
            wire.TO_MEMBER,
            "expected a list",
        ),
        (
            {"type": "view", "generation": 1, "base": 0, "left": ["0/0"] * 2, "joined": [], "size": 1} | STORE,
            wire.TO_MEMBER,
            "given twice",
        ),
    ],
)
def test_malformed_fields(body: dict[str, object], expect: tuple[type, ...], problem: str) -> None:
    """Lists and objects are checked item by item."""
    with pytest.raises(wire.WireError, match=problem):
        wire.decode(json.dumps(body), expect=expect, peer=PEER)


def test_the_sender_must_be_known() -> None:
    """Only hello and ready may come from a connection that nobody introduced himself on."""
    assert wire.decode(json.dumps(HELLO), expect=wire.FROM_MEMBER) == events.Hello("0/1", 3, 0, Address("h", 1), 1)
    with pytest.raises(wire.WireError, match="the sender is not known yet"):
        wire.decode(json.dumps(PARK), expect=wire.FROM_MEMBER)


def test_a_view_of_ten_thousand_fits() -> None:
    """The limit has room for the largest job, given as a whole."""
    members = tuple(f"{i // 8}/{i % 8}" for i in range(10_000))
    view = effects.CommitView("0/1", 1, None, (), members, 10_000, ADDRESS)
    text = wire.encode(view)
    assert len(text) < wire.MAX_MESSAGE_BYTES // 4
    assert wire.decode(text, expect=wire.TO_MEMBER, peer=PEER) == view


def test_long_values_are_cut_in_errors() -> None:
    """An error does not repeat a megabyte."""
    with pytest.raises(wire.WireError) as caught:
        wire.decode(json.dumps(PARK | {"admits": "x" * 10_000}), expect=wire.FROM_MEMBER, peer=PEER)
    assert len(str(caught.value)) < 200
