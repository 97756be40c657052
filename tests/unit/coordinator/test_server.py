"""What the coordinator tells nobody before enough nodes keep it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from lightning_ft.config import Settings
from lightning_ft.coordinator.channel import MEMBER_PATH, TOKEN_HEADER, VERSION_HEADER, bearer
from lightning_ft.coordinator.listening import listen
from lightning_ft.coordinator.memory import Memory, make_files
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog
from lightning_ft.membership import effects, events, wire
from lightning_ft.membership.events import Address
from lightning_ft.membership.replication import Entry, replica_id

HOME = replica_id(0, 7)
MEMBERS = ("0/0", "1/0")


class Peer:
    """Stands for a connection: what was sent over it."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def send(self, message: Any) -> bool:
        self.frames.append(message)
        return True

    def told(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]


@pytest.fixture
def files() -> Iterator[list[int]]:
    """What outlives the coordinator on its node."""
    descriptors = make_files()
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def serve(files: list[int]) -> tuple[CoordinatorServer, dict[str, Peer], Peer]:
    """Start a coordinator, with both members and its own agent connected."""
    server = CoordinatorServer(
        Settings(), MEMBERS, "secret", EventLog(None), memory=Memory(files), replica=HOME, term=2
    )
    members, agent = {name: Peer() for name in MEMBERS}, Peer()
    for name, member in members.items():
        server._members[name, 1] = member  # type: ignore[assignment]
        server._decisions.apply(events.Hello(name, 1, 0, Address(name, 1)))
    server._on_agent_message(wire.Promised(2), 0, HOME, agent)  # type: ignore[arg-type]
    return server, members, agent


def keep(server: CoordinatorServer, agent: Peer) -> None:
    """The agent keeps the newest entry, and says so."""
    number = agent.told(Entry)[-1].number
    server._on_agent_message(wire.Kept(number), 0, HOME, agent)  # type: ignore[arg-type]


def test_view_is_told_once_it_holds(files: list[int]) -> None:
    """Also by a coordinator that finds it in its memory: the last one may have told nobody, and nobody else keep it."""

    async def play() -> None:
        server, members, agent = serve(files)
        keep(server, agent)
        for name in MEMBERS:
            server._decisions.apply(events.Parked(name, 1, 0, 0, "start"))
        assert server.generation == 1
        assert not any(member.told(effects.CommitView) for member in members.values())

        server, members, agent = serve(files)
        assert server.generation == 1
        assert not any(member.told(effects.CommitView) for member in members.values())
        keep(server, agent)
        assert all([view.generation for view in member.told(effects.CommitView)] == [1] for member in members.values())

    asyncio.run(play())


def test_heartbeat_is_answered_only_while_no_other_can_be_in_office(files: list[int]) -> None:
    """Whoever hears the answer writes checkpoints for `heartbeat_timeout`."""

    async def play() -> None:
        server, members, agent = serve(files)
        keep(server, agent)
        server._decisions.apply(events.Heartbeat("0/0", 1, sent_s=1.0))
        assert not members["0/0"].told(effects.Acknowledge)
        clock_s = agent.told(wire.CoordinatorHeartbeat)[-1].sent_s
        server._on_agent_message(wire.AgentHeartbeat((), clock_s), 0, HOME, agent)  # type: ignore[arg-type]
        server._decisions.apply(events.Heartbeat("0/0", 1, sent_s=2.0))
        assert [answer.sent_s for answer in members["0/0"].told(effects.Acknowledge)] == [2.0]

    asyncio.run(play())


def test_coordinator_with_a_successor_steps_down(files: list[int]) -> None:
    """It hears of a higher term from an agent that has promised it."""

    async def play() -> None:
        server, _, _ = serve(files)
        server._attach_agent(Peer(), wire.AgentHello(1, (), replica_id(1, 1), 3))  # type: ignore[arg-type]
        assert server.is_deposed
        assert server.ended.is_set()

    asyncio.run(play())


async def knock(session: aiohttp.ClientSession, port: int) -> int:
    """Return the status with which a member is answered."""
    headers = {TOKEN_HEADER: bearer("secret"), VERSION_HEADER: str(wire.PROTOCOL_VERSION)}
    try:
        async with session.ws_connect(f"http://127.0.0.1:{port}{MEMBER_PATH}", headers=headers):
            return 101
    except aiohttp.WSServerHandshakeError as error:
        return error.status


def test_who_is_started_again_lets_members_in_once_it_can_decide(files: list[int]) -> None:
    """While it was dead the agents may have chosen another, whom its members must find in time."""

    async def play() -> None:
        first, _, agent = serve(files)
        keep(first, agent)
        assert first._replicas.is_in_office, "nothing was decided before"
        listener = listen("127.0.0.1", 0)
        settings = Settings(heartbeat_interval=0.05)
        server = CoordinatorServer(
            settings, MEMBERS, "secret", EventLog(None), memory=Memory(files), replica=HOME, term=2
        )
        await server.start(listener)
        async with aiohttp.ClientSession() as session:
            port = listener.getsockname()[1]
            assert await knock(session, port) == 503
            ticked_s = server._decisions.state.last_tick_s
            await asyncio.sleep(3 * server._pause_s)  # no condition: nothing may happen in that time
            assert server._decisions.state.last_tick_s == ticked_s, "whom it can't hear it does not judge"
            server._attach_agent(Peer(), wire.AgentHello(0, (), HOME, 2))  # type: ignore[arg-type]
            server._on_agent_message(wire.Promised(2), 0, HOME, Peer())  # type: ignore[arg-type]
            assert await knock(session, port) == 101
            server._agents.clear()
        await server.stop()
        listener.close()

    asyncio.run(play())
