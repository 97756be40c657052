"""The coordinator over real sockets, with members that are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_ft.config import Settings
from lightning_ft.coordinator import decisions as decisions_module
from lightning_ft.coordinator.channel import AGENT_PATH, MEMBER_PATH, VERSION_HEADER
from lightning_ft.coordinator.client import MembershipClient, NextView
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.errors import CoordinatorLostError, EvictedError, ProtocolViolationError, QuorumLostError
from lightning_ft.event_log import EventLog
from lightning_ft.membership import events, machine, wire
from lightning_ft.membership.events import Address

DEADLINE_S = 30.0
TOKEN = "the-token"
PATIENT = Settings(heartbeat_interval=0.05, heartbeat_timeout=20, timeout=60)
"""No deadline of these is reached within a test: what is noticed is noticed by itself."""

MEMBER = textwrap.dedent(
    """
    import json, os, socket, sys, threading
    from lightning_ft.config import Settings
    from lightning_ft.coordinator.client import MembershipClient
    from lightning_ft.membership.events import Address

    assert "torch" not in sys.modules
    port, token, member, *expected = sys.argv[1:]
    store = socket.create_server(("127.0.0.1", 0))
    suspended = threading.Event()
    client = MembershipClient(
        endpoint=f"127.0.0.1:{port}", token=token, member=member, incarnation=1,
        address=Address("127.0.0.1", store.getsockname()[1]), on_suspend=lambda _: suspended.set(), expected=expected,
        settings=Settings(heartbeat_interval=0.05, heartbeat_timeout=20, timeout=60),
    )
    client.start()

    def say(following):
        view, meeting = following.view, following.meeting
        print(json.dumps([view.generation, view.members, meeting.store_port]), flush=True)

    say(client.park(0, "start"))
    while True:
        suspended.wait()
        suspended.clear()
        say(client.park(0, "suspended"))
    """
)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition of another process or thread."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.002)
    return value


class Coordinator:
    """A server in a thread of its own; `seen` are the events that its core was given."""

    def __init__(self, settings: Settings, expected: list[str], log: Path, port: int = 0) -> None:
        self.log = log
        self.settings = settings
        self.expected = expected
        self.seen: list[events.Event] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.event_log = EventLog(log)
        self.server = self.call(self._make())
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self.call(self.server.start(listener))

    async def _make(self) -> CoordinatorServer:
        return CoordinatorServer(self.settings, self.expected, TOKEN, self.event_log)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    @property
    def generation(self) -> int:
        return self.server.generation

    def logged(self, event: str) -> list[dict[str, Any]]:
        assert self.event_log.flush()
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line for line in lines if line["event"] == event]

    def stop(self) -> None:
        if self.loop.is_running():
            self.call(self.server.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(DEADLINE_S)
            self.loop.close()
            self.event_log.close()


class Stage:
    """Everything that a test starts, ended with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cleanups = contextlib.ExitStack()
        self.num_coordinators = 0

    def coordinator(self, settings: Settings, *expected: str, port: int = 0) -> Coordinator:
        self.num_coordinators += 1
        log = self.directory / f"events{self.num_coordinators}.jsonl"
        coordinator = Coordinator(settings, list(expected), log, port)
        self.cleanups.callback(coordinator.stop)
        return coordinator

    def store(self) -> socket.socket:
        store = socket.create_server(("127.0.0.1", 0))
        self.cleanups.callback(store.close)
        return store

    def client(self, coordinator: Coordinator | int, member: str, **changes: Any) -> MembershipClient:
        store: socket.socket = changes.pop("store", None) or self.store()
        port = coordinator if isinstance(coordinator, int) else coordinator.port
        arguments = {
            "endpoint": f"127.0.0.1:{port}",
            "token": TOKEN,
            "incarnation": 1,
            "address": Address("127.0.0.1", store.getsockname()[1]),
            "expected": () if isinstance(coordinator, int) else coordinator.expected,
            "settings": PATIENT,
            **changes,
        }
        client = MembershipClient(member=member, **arguments)
        client.start()
        self.cleanups.callback(client.close)
        return client

    def process(self, coordinator: Coordinator, member: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(coordinator.port), TOKEN, member, *coordinator.expected],
            stdout=subprocess.PIPE,
            text=True,
        )

        def end() -> None:
            process.kill()
            process.communicate()

        self.cleanups.callback(end)
        return process


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Stage]:
    """Ends what the test started, also when its deadline passes."""
    caplog.set_level(logging.DEBUG, "lightning_ft")
    del monkeypatch
    stage = Stage(tmp_path)
    timer = threading.Timer(3 * DEADLINE_S, os._exit, (3,))  # only if even the single deadlines failed
    timer.start()
    with stage.cleanups:
        yield stage
    timer.cancel()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[events.Event]:
    """All events that the core is given, except ticks and heartbeats."""
    found: list[events.Event] = []

    def step(settings: Settings, state: Any, event: events.Event, now_s: float) -> Any:
        if not isinstance(event, (events.Tick, events.Heartbeat)):
            found.append(event)
        return machine.step(settings, state, event, now_s)

    class Spy:
        pass

    spy = Spy()
    spy.step = step  # type: ignore[attr-defined]
    monkeypatch.setattr(decisions_module, "machine", spy)
    return found


def park_all(clients: list[MembershipClient], completed: int = 0, reason: str = "start") -> list[NextView]:
    with ThreadPoolExecutor(len(clients)) as threads:
        return list(threads.map(lambda client: client.park(completed, reason), clients))


def read_view(process: subprocess.Popen[str]) -> list[Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a member ended with status {process.wait()}"
    return json.loads(line)  # type: ignore[no-any-return]


async def frames_of(
    port: int, *frames: str | bytes, headers: dict[str, str] | None = None, path: str = MEMBER_PATH
) -> aiohttp.WSMessage:
    """Connect, send, and read until the server closes."""
    good = {"Authorization": f"Bearer {TOKEN}", VERSION_HEADER: str(wire.PROTOCOL_VERSION)}
    url = f"http://127.0.0.1:{port}{path}"
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession() as session,
        session.ws_connect(url, headers=good if headers is None else headers) as websocket,
    ):
        for frame in frames:
            await (websocket.send_str(frame) if isinstance(frame, str) else websocket.send_bytes(frame))
        while True:
            message = await websocket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                return message


def hello(member: str, port: int = 1, incarnation: int = 1) -> str:
    return wire.encode(events.Hello(member, incarnation, 0, Address("127.0.0.1", port)))


# Views.


def test_all_members_are_given_the_same_view(stage: Stage) -> None:
    """I1, with many members in threads, in the order of their ids."""
    expected = [f"{node}/{slot}" for node in range(2) for slot in range(8)]
    coordinator = stage.coordinator(PATIENT, *expected)
    views = park_all([stage.client(coordinator, member) for member in reversed(expected)])
    assert {view.view.members for view in views} == {tuple(expected)}
    assert {view.view.generation for view in views} == {1}
    assert len({view.meeting for view in views}) == 1


def test_killed_member_is_left_out_of_the_next_view(stage: Stage) -> None:
    """SIGKILL to a process: the others are told to suspend, and get the same view without it."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1", "0/2")
    processes = [stage.process(coordinator, f"0/{slot}") for slot in range(3)]
    first = [read_view(process) for process in processes]
    assert first[0] == first[1] == first[2]
    processes[0].kill()  # the meeting place goes with it
    second = [read_view(process) for process in processes[1:]]
    assert second[0] == second[1]
    assert second[0][:2] == [2, ["0/1", "0/2"]]
    assert second[0][2] != first[0][2]
    (failure,) = coordinator.logged("failure_detected")
    assert (failure["member"], failure["cause"]) == ("0/0", "connection")


def test_cascade_leaves_the_last_member(stage: Stage) -> None:
    """Each death adds a round; half with the lowest id goes on, and proven deaths need no majority."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1", "0/2")
    processes = [stage.process(coordinator, f"0/{slot}") for slot in range(3)]
    for process in processes:
        read_view(process)
    processes[0].kill()
    processes[1].kill()
    view = read_view(processes[2])
    if view[0] == 2 and "0/1" in view[1]:
        view = read_view(processes[2])
    assert view[1] == ["0/2"]


def test_member_whose_port_lives_on_is_not_given_up(stage: Stage, seen: list[events.Event]) -> None:
    """A dropped connection alone proves nothing; the closed port does, and is noticed without any deadline."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    store = stage.store()
    client = stage.client(coordinator, "0/0")
    other = stage.client(coordinator, "0/1", store=store)
    park_all([client, other])
    other.close()
    until(lambda: events.Disconnected("0/1", 1) in seen, "the drop is noticed")
    assert not coordinator.logged("failure_detected")
    store.close()
    until(lambda: coordinator.logged("failure_detected"), "the closed port is noticed")
    assert client.park(0, "suspended").view.members == ("0/0",)


def test_leaver_is_announced_and_released(stage: Stage) -> None:
    """The others hear at once who enters no more; all are released when all leave."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    told: list[tuple[str, int]] = []
    client = stage.client(coordinator, "0/0", on_leaving=lambda member, completed: told.append((member, completed)))
    other = stage.client(coordinator, "0/1")
    park_all([client, other])
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(other.leave, 5)
        until(lambda: told, "the leaver is announced")
        assert told == [("0/1", 5)]
        assert client.leavers == {"0/1": 5}
        assert client.leave(5) is None
        assert leaving.result(DEADLINE_S) is None
    assert client.is_released
    assert other.is_released
    assert coordinator.server._decisions.ending.released == {("0/0", 1), ("0/1", 1)}
    assert not coordinator.server.is_failed


# Reconnecting.


def cut(client: MembershipClient) -> None:
    """Break a client's connection under it."""
    sock = socket.socket(fileno=os.dup(client.fileno()))
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def test_running_member_reconnects_without_disturbing_the_job(stage: Stage, seen: list[events.Event]) -> None:
    """Hello again, in the same view; nobody is suspended."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    suspended: list[int] = []
    clients = [stage.client(coordinator, f"0/{slot}", on_suspend=suspended.append) for slot in range(2)]
    park_all(clients)
    cut(clients[1])
    again = until(lambda: [e for e in seen if isinstance(e, events.Hello) and e.generation == 1], "it says hello again")
    assert (again[0].member, again[0].incarnation) == ("0/1", 1)
    assert not suspended
    assert coordinator.generation == 1


def test_parked_member_that_reconnects_is_given_its_view(stage: Stage, seen: list[events.Event]) -> None:
    """What it waits for is said again on the new connection."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(coordinator, "0/0")
    with ThreadPoolExecutor(1) as threads:
        parked = threads.submit(client.park, 0, "start")
        until(lambda: [e for e in seen if isinstance(e, events.Parked)], "it is parked")
        cut(client)
        until(lambda: len([e for e in seen if isinstance(e, events.Parked)]) > 1, "it is parked again")
        stage.client(coordinator, "0/1").park(0, "start")
        assert parked.result(DEADLINE_S).view.members == ("0/0", "0/1")


def test_replaced_connection_is_not_a_disconnect(stage: Stage, seen: list[events.Event]) -> None:
    """The end of a connection that its owner has replaced means nothing."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")

    async def story() -> None:
        first = asyncio.create_task(frames_of(coordinator.port, hello("0/0")))
        async with asyncio.timeout(DEADLINE_S):
            while not seen:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(frames_of(coordinator.port, hello("0/0")))
            ended = await first
            assert ended.type is not aiohttp.WSMsgType.TEXT
            while len(seen) < 2:
                await asyncio.sleep(0.001)
            assert not second.done()
            assert [type(event) for event in seen] == [events.Hello, events.Hello]
            second.cancel()
            while events.Disconnected("0/0", 1) not in seen:
                await asyncio.sleep(0.001)

    asyncio.run(story())


def test_member_finds_a_coordinator_that_was_started_again(stage: Stage) -> None:
    """The client keeps trying; what was not answered is asked again, and the end of an incident told again."""
    first = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(first, "0/0")
    until(lambda: client.is_connected, "the first coordinator is reached")
    client.report("recovered", generation=0, latency_s=0.5)
    until(lambda: first.logged("recovered"), "it is logged")
    first.stop()
    until(lambda: not client.is_connected, "the loss is noticed")
    second = stage.coordinator(PATIENT, "0/0", "0/1", port=first.port)
    assert len(park_all([client, stage.client(second, "0/1")])) == 2
    until(lambda: second.logged("recovered"), "the next coordinator is told, too")


# Refusing.


@pytest.mark.parametrize("path", [MEMBER_PATH, AGENT_PATH])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong", VERSION_HEADER: "1"}, 401),
        ({"Authorization": TOKEN, VERSION_HEADER: "1"}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 426),
        ({"Authorization": f"Bearer {TOKEN}", VERSION_HEADER: "999"}, 426),
    ],
    ids=["nothing", "wrong-token", "no-scheme", "no-version", "other-version"],
)
def test_stranger_is_refused(  # noqa: PLR0917 - fixtures
    stage: Stage,
    headers: dict[str, str],
    status: int,
    path: str,
    caplog: pytest.LogCaptureFixture,
    seen: list[events.Event],
) -> None:
    """Before the upgrade, with a logged reason that doesn't hold the token."""
    coordinator = stage.coordinator(PATIENT, "0/0")
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        asyncio.run(frames_of(coordinator.port, hello("0/0"), headers=headers, path=path))
    assert caught.value.status == status
    assert f"refused {path}" in caplog.text
    assert TOKEN not in caplog.text
    assert not seen


UPGRADE = (
    f"GET {MEMBER_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    f"{VERSION_HEADER}: {wire.PROTOCOL_VERSION}\r\nAuthorization: Bearer "
).encode()


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"\x16\x03\x01 hello, is this TLS?\r\n\r\n", b"HTTP/1.0 400"),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 401"),
        (UPGRADE + b"\xff\xfe\r\n\r\n", b"HTTP/1.1 401"),
        (UPGRADE + TOKEN.encode() + b"\r\n\r\n\xff\xff\xff\xff", b"HTTP/1.1 101"),
    ],
    ids=["no-http", "other-path", "page-without-token", "token-in-no-encoding", "broken-websocket"],
)
def test_garbage_disturbs_nobody(stage: Stage, data: bytes, answer: bytes) -> None:
    """Whatever a port scanner sends ends its own connection."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    suspended: list[int] = []
    clients = [stage.client(coordinator, f"0/{slot}", on_suspend=suspended.append) for slot in range(2)]
    park_all(clients)
    with socket.create_connection(("127.0.0.1", coordinator.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(data)
        assert stranger.recv(len(answer)) == answer
    assert not suspended
    assert [view.view.generation for view in park_all(clients, 3, "connection")] == [2, 2]


AGENT_HELLO = '{"type":"agent_hello","node":7,"incarnations":{},"replica":7,"term":0,"standby":""}'

BAD_FRAMES: dict[str, tuple[str | bytes, ...]] = {
    "not-json": ("{",),
    "not-an-object": ("[]",),
    "unknown-type": ('{"type":"abdicate"}',),
    "binary": (b"\x00\xff",),
    "before-hello": ('{"type":"heartbeat","step":1}',),
    "for-agents": (hello("9/9"), '{"type":"exited","member":"0/0","incarnation":1,"status":0,"detail":"","stacks":""}'),
    "for-members": (hello("9/9"), '{"type":"suspend","generation":1,"reason":"x"}'),
    "unknown-field": (hello("9/9"), '{"type":"heartbeat","step":1,"more":2}'),
    "missing-field": (hello("9/9"), '{"type":"park","generation":1}'),
    "wrong-type": (hello("9/9"), '{"type":"heartbeat","step":"1"}'),
    "as-another": (hello("9/9"), hello("0/0")),
    "oversized": (hello("9/9"), json.dumps({"type": "report", "event": "x" * (1 << 20)})),
    "deep": (hello("9/9"), "[" * 100_000),
}

BAD_AGENT_FRAMES: dict[str, tuple[str | bytes, ...]] = {
    "not-json": ("{",),
    "binary": (b"\x00\xff",),
    "before-hello": ('{"type":"heartbeat"}',),
    "for-members": (hello("0/0"),),
    "twice": (AGENT_HELLO, AGENT_HELLO, "["),
    "of-a-member": (AGENT_HELLO, '{"type":"park","generation":1,"completed":9,"reason":"start","admits":false}'),
    "wrong-incarnation": ('{"type":"agent_hello","node":0,"incarnations":{"0/0":-1}}',),
    "missing-field": (AGENT_HELLO, '{"type":"exited","member":"0/0","status":0,"detail":"","stacks":""}'),
    "oversized": (AGENT_HELLO, json.dumps({"type": "heartbeat", "more": "x" * (1 << 20)})),
}


@pytest.mark.parametrize(
    ("path", "frames"),
    [
        *(pytest.param(MEMBER_PATH, frames, id=f"member-{name}") for name, frames in BAD_FRAMES.items()),
        *(pytest.param(AGENT_PATH, frames, id=f"agent-{name}") for name, frames in BAD_AGENT_FRAMES.items()),
    ],
)
def test_bad_frame_ends_its_connection_alone(
    stage: Stage, path: str, frames: tuple[str | bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged, and the others' job goes on in its view."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    suspended: list[int] = []
    clients = [stage.client(coordinator, f"0/{slot}", on_suspend=suspended.append) for slot in range(2)]
    park_all(clients)
    ended = asyncio.run(frames_of(coordinator.port, *frames, path=path))
    assert ended.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)
    until(lambda: "closing the connection of" in caplog.text, "the reason is logged")
    assert not suspended
    assert coordinator.generation == 1
    assert [view.view.generation for view in park_all(clients, 3, "connection")] == [2, 2]


def test_an_agent_speaks_for_its_own_node_alone(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The end of a member that another node's agent reports is no end."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    clients = [stage.client(coordinator, f"0/{slot}") for slot in range(2)]
    park_all(clients)
    exited = '{"type":"exited","member":"0/0","incarnation":1,"status":0,"detail":"","stacks":"","is_last":false}'
    asyncio.run(frames_of(coordinator.port, AGENT_HELLO, exited, "end", path=AGENT_PATH))
    assert "dropped an exit of 0/0 from the agent of node 7" in caplog.text
    assert not coordinator.logged("member_exited")
    assert [view.view.generation for view in park_all(clients, 3, "connection")] == [2, 2]


STALE = {
    "park": events.Parked("0/0", 1, 0, 0, "connection"),
    "leave": events.Leaving("0/0", 1, 0, 0),
}


@pytest.mark.parametrize("message", STALE.values(), ids=STALE.keys())
def test_stale_message_is_dropped(stage: Stage, message: wire.Message, caplog: pytest.LogCaptureFixture) -> None:
    """A message of an older generation is dropped with a reason, and suspends nobody."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    suspended: list[int] = []
    clients = [stage.client(coordinator, f"0/{slot}", on_suspend=suspended.append) for slot in range(2)]
    park_all(clients)
    clients[0]._post(lambda: clients[0]._link.send(wire.encode(message)))
    until(lambda: "a message was dropped" in caplog.text, "it is dropped")
    assert "which is over" in caplog.text
    assert not suspended
    assert [view.view.generation for view in park_all(clients, 3, "connection")] == [2, 2]


def test_stranger_to_the_job_is_evicted(stage: Stage, seen: list[events.Event]) -> None:
    """A process with the token, but in no view, is told so."""
    coordinator = stage.coordinator(PATIENT, "0/0")
    severed: list[int] = []
    client = stage.client(coordinator, "7/7", on_suspend=severed.append)
    with pytest.raises(EvictedError, match="in no view") as caught:
        client.park(0, "start")
    assert caught.value.member == "7/7"
    assert severed
    assert client.leave(0) is None


def test_connection_that_says_nothing_is_closed(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger with the token can't hold a connection for nothing."""
    coordinator = stage.coordinator(Settings(heartbeat_interval=0.02, heartbeat_timeout=0.2, timeout=60), "0/0")
    asyncio.run(frames_of(coordinator.port))
    assert "no hello came in time" in caplog.text


# Errors of the client.


def test_wrong_token_is_raised_at_once(stage: Stage) -> None:
    """Waiting would not help a process of another job."""
    coordinator = stage.coordinator(PATIENT, "0/0")
    client = stage.client(coordinator, "0/0", token="another")
    with pytest.raises(ProtocolViolationError, match="LIGHTNING_FT_TOKEN"):
        client.park(0, "start")


def test_refused_message_is_raised(stage: Stage) -> None:
    """A member whose messages the coordinator can't take hears why."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(coordinator, "0/0")
    until(lambda: client.is_connected, "it is connected")
    client._post(lambda: client._link.send("{"))
    with pytest.raises(ProtocolViolationError, match="not JSON"):
        client.park(0, "start")


def test_broken_frame_from_the_coordinator_is_raised(stage: Stage) -> None:
    """A coordinator of another version is not followed."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    severed: list[int] = []
    client = stage.client(coordinator, "0/0", on_suspend=severed.append)
    until(lambda: ("0/0", 1) in coordinator.server._members, "it is connected")
    connection = coordinator.server._members["0/0", 1]
    coordinator.loop.call_soon_threadsafe(connection.outbox.put, '{"type":"view"}')
    with pytest.raises(ProtocolViolationError, match="missing"):
        client.park(0, "start")
    assert severed == [0]


def test_absent_coordinator_is_lost_after_the_timeout(stage: Stage) -> None:
    """Park is bounded, and says who could not be reached and why."""
    nobody = stage.store()
    port = nobody.getsockname()[1]
    nobody.close()
    client = stage.client(port, "0/0", settings=Settings(heartbeat_interval=0.01, heartbeat_timeout=0.1, timeout=0.3))
    with pytest.raises(CoordinatorLostError, match=f"127.0.0.1:{port} is lost: no contact"):
        client.park(0, "start")
    assert client.leave(0) is None
    assert not client.is_released


def test_silent_coordinator_is_lost_after_the_timeout(stage: Stage) -> None:
    """A stopped process still has its connections; it is found out by its silence."""
    quick = Settings(heartbeat_interval=0.01, heartbeat_timeout=0.1, timeout=1)
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(coordinator, "0/0", settings=quick)
    until(lambda: client.is_connected, "it is connected")
    goes_on = threading.Event()
    coordinator.loop.call_soon_threadsafe(goes_on.wait, DEADLINE_S)
    with pytest.raises(CoordinatorLostError):
        client.park(0, "start")
    goes_on.set()


def test_lost_quorum_is_raised_in_park(stage: Stage) -> None:
    """Too few members are left: each parked one is told why."""
    settings = Settings(min_world_size=2, rejoin_timeout=0, heartbeat_interval=0.05, heartbeat_timeout=20, timeout=60)
    coordinator = stage.coordinator(settings, "0/0", "0/1")
    process = stage.process(coordinator, "0/1")
    client = stage.client(coordinator, "0/0")
    client.park(0, "start")
    process.kill()
    with pytest.raises(QuorumLostError, match="min_world_size is 2") as caught:
        client.park(0, "suspended")
    assert (caught.value.member, caught.value.generation) == ("0/0", 1)
    until(lambda: coordinator.server.is_failed, "the server says so")


def test_close_frees_whoever_is_parked(stage: Stage) -> None:
    """Closing from another thread ends the wait."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(coordinator, "0/0")
    with ThreadPoolExecutor(1) as threads:
        parked = threads.submit(client.park, 0, "start")
        until(lambda: client._enrolment.request, "it is parked")
        client.close()
        with pytest.raises(CoordinatorLostError, match="closed"):
            parked.result(DEADLINE_S)
    assert client.fileno() == -1


# Hangs and silence.


def test_stopped_member_is_given_up_by_its_silence(stage: Stage) -> None:
    """SIGSTOP leaves connection and port open; only the heartbeats end. It is told when it wakes up."""
    settings = Settings(heartbeat_interval=0.05, heartbeat_timeout=1, timeout=60)
    coordinator = stage.coordinator(settings, "0/0", "0/1", "0/2")
    processes = [stage.process(coordinator, f"0/{slot}") for slot in range(3)]
    for process in processes:
        read_view(process)
    processes[1].send_signal(signal.SIGSTOP)
    assert [read_view(process)[1] for process in (processes[0], processes[2])] == [["0/0", "0/2"]] * 2
    processes[1].send_signal(signal.SIGCONT)
    assert processes[1].wait(DEADLINE_S) != 0  # EvictedError ends it
    assert coordinator.generation == 2


def test_membership_is_confirmed_once_a_heartbeat_is_answered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer that is young enough it waits for one; with the coordinator gone it does not know."""
    brief = Settings(heartbeat_interval=0.05, heartbeat_timeout=0.5, timeout=3)
    coordinator = stage.coordinator(brief, "0/0")
    client = stage.client(coordinator, "0/0", settings=brief)
    client.park(0, "start")
    client.confirm()
    assert client._lease.is_valid
    coordinator.stop()
    until(lambda: not client._lease.is_valid, "it expires")
    client.confirm_if_in_doubt()  # this process was not away
    with pytest.raises(CoordinatorLostError, match="no contact"):
        client.confirm()


def test_given_up_member_can_not_be_confirmed(stage: Stage) -> None:
    """It hears why, in the thread that asks and in the callback, however young the last answer is."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    evicted: list[str] = []
    clients = [
        stage.client(coordinator, f"0/{slot}", on_evicted=lambda slot=slot: evicted.append(f"0/{slot}"))
        for slot in range(2)
    ]
    park_all(clients)
    clients[1].fail("ValueError: a bug")
    until(lambda: evicted == ["0/1"], "it is told")
    with pytest.raises(EvictedError, match="without this process"):
        clients[1].confirm()
    clients[0].confirm()


def test_nothing_of_a_member_that_is_given_up_is_logged(stage: Stage) -> None:
    """Its process may go on for a while."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    clients = [stage.client(coordinator, f"0/{slot}") for slot in range(2)]
    park_all(clients)
    clients[1].report("word_before", number=1)
    clients[1].fail("ValueError: a bug")
    clients[1].report("word_after", number=2)
    clients[1]._flush()
    clients[0].report("last_word", number=3)
    until(lambda: "last_word" in coordinator.log.read_text(), "it is logged")
    assert "word_before" in coordinator.log.read_text()
    assert "word_after" not in coordinator.log.read_text()


# Reports.


def test_reports_are_logged(stage: Stage) -> None:
    """With member and generation, in order, also what was said before the connection was made."""
    coordinator = stage.coordinator(PATIENT, "0/0")
    client = stage.client(coordinator, "0/0")
    client.report("recovered", generation=4, seconds=0.5, path=Path("/x"), sizes=[1, 2])
    client.fail("Traceback: boom")
    (recovered,) = until(lambda: coordinator.logged("recovered"), "the report is logged")
    assert (recovered["generation"], recovered["member"], recovered["seconds"]) == (4, "0/0", 0.5)
    assert (recovered["path"], recovered["sizes"]) == ("/x", [1, 2])
    (failed,) = until(lambda: coordinator.logged("failed"), "the failure is logged")
    assert failed["exception"] == "Traceback: boom"


def test_odd_values_never_break_the_connection(stage: Stage) -> None:
    """What the coordinator would refuse is made readable or dropped before it is sent."""
    coordinator = stage.coordinator(PATIENT, "0/0", "0/1")
    client = stage.client(coordinator, "0/0")
    client.report("odd", name="\udcff", nothing=float("nan"), large=10**30, mixed=[object, 1], none=None)
    client.report("")
    client.report("too_long", text="x" * (1 << 20))
    with pytest.raises(ValueError, match="completed"):
        client.park(-1, "start")
    client.report("last")
    until(lambda: coordinator.logged("last"), "the connection still works")
    (odd,) = coordinator.logged("odd")
    assert (odd["name"], odd["nothing"], odd["large"]) == ("\\udcff", "nan", str(10**30))
    assert (odd["mixed"], odd["none"]) == (["<class 'object'>", 1], None)
    assert not coordinator.logged("too_long")


def test_log_directory_of_the_run_is_the_default(stage: Stage, tmp_path: Path) -> None:
    """A job without a configured path logs beside its run; the first directory stays."""
    coordinator = stage.coordinator(PATIENT, "0/0")
    coordinator.server._event_log = EventLog()
    client = stage.client(coordinator, "0/0")
    for name in ("first", "second"):
        client.report("log_directory", path=str(tmp_path / name))
    client.report("recovered")
    until(coordinator.server._event_log.flush, "the path is known")
    path = coordinator.server._event_log.path
    assert path == tmp_path / "first" / "ft_events.jsonl"
    until(lambda: path.exists() and "recovered" in path.read_text(), "it is used")
    coordinator.server._event_log.close()
