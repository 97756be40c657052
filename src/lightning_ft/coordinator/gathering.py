"""Which nodes a job begins with, where that is not known beforehand: the agents meet, then the coordinator starts.

One agent listens where the coordinator will; the others come there and wait. It begins when as many nodes as may be are
there, or when enough are there and the last call is over, and tells each its number and all members.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from lightning_ft.coordinator.accepted import CLOSING_TIME_S, Connection, RefusedError, accept
from lightning_ft.coordinator.channel import GATHERING_PATH, TOKEN_HEADER, VERSION_HEADER, bearer
from lightning_ft.errors import LaunchError
from lightning_ft.membership import wire
from lightning_ft.membership.ids import as_ranges, from_ranges

LAST_CALL_TIMEOUT_S = 30.0
"""How long others may still come once there are enough; as torchrun's."""

JOIN_TIMEOUT_S = 600.0
"""How long it may take until there are enough; as torchrun's."""

_PAUSE_S = 0.2
_NOTICE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What the agents must agree on.

    Attributes:
        token: The job's secret.
        least: Fewest nodes that the job may begin with, >= 1.
        most: Most nodes, >= `least`.
        last_call_timeout_s: As `LAST_CALL_TIMEOUT_S`.
        join_timeout_s: As `JOIN_TIMEOUT_S`.
    """

    token: str
    least: int
    most: int
    last_call_timeout_s: float = LAST_CALL_TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """What the job begins with.

    Attributes:
        node: Number of this node.
        expected: Logical ids of all members, in order.
        incarnations: Of the node's members, the last that the running job knows; empty if it has not begun.
    """

    node: int
    expected: tuple[str, ...]
    incarnations: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class _Guest:
    connection: Connection
    num_slots: int
    node: int | None


class Host:
    """The agent that the others come to. It is node 0.

    Args:
        terms: The same for all agents.
        num_slots: Members of this node.

    Threads: one event loop's.
    """

    def __init__(self, terms: Terms, num_slots: int) -> None:
        self._terms = terms
        self._num_slots = num_slots
        self._guests: list[_Guest] = []
        self._came = asyncio.Event()
        self._is_over = asyncio.Event()

    async def gather(self, listener: socket.socket) -> Beginning:
        """Wait for the others, and tell them.

        Args:
            listener: A listening socket, which is closed at the end.

        Raises:
            LaunchError: Too few came in time; those were told.
        """
        application = web.Application()
        application.add_routes([web.get(GATHERING_PATH, self._serve)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_TIME_S)
        await runner.setup()
        await web.SockSite(runner, listener, backlog=1024).start()
        try:
            await self._wait_for_enough()
            return await self._begin()
        finally:
            self._is_over.set()
            await runner.cleanup()

    async def _wait_for_enough(self) -> None:
        terms = self._terms
        deadline_s, last_call_s = time.monotonic() + terms.join_timeout_s, None
        while len(self._guests) + 1 < terms.most:
            now_s = time.monotonic()
            is_enough = len(self._guests) + 1 >= terms.least
            last_call_s = (last_call_s or now_s + terms.last_call_timeout_s) if is_enough else None
            until_s = deadline_s if last_call_s is None else last_call_s
            if now_s >= until_s:
                break
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s - now_s):
                    await self._came.wait()
        num_nodes = len(self._guests) + 1
        if num_nodes < terms.least:
            reason = f"{num_nodes} of {terms.least} nodes came within {terms.join_timeout_s:g} s"
            await asyncio.gather(*(guest.connection.refuse(reason) for guest in self._guests))
            raise LaunchError(f"starting the job failed: {reason}. Start the agent on the other nodes too.")

    async def _begin(self) -> Beginning:
        taken = {0, *(guest.node for guest in self._guests if guest.node is not None)}
        free = (node for node in range(self._terms.most) if node not in taken)
        num_slots = {0: self._num_slots}
        for guest in self._guests:  # in the order in which they came
            guest.node = next(free) if guest.node is None else guest.node
            num_slots[guest.node] = guest.num_slots
        expected = tuple(f"{node}/{slot}" for node, count in sorted(num_slots.items()) for slot in range(count))
        for guest in self._guests:
            assert guest.node is not None
            guest.connection.send(wire.JobBegins(guest.node, as_ranges(expected)))
        await asyncio.gather(*(guest.connection.say_goodbye() for guest in self._guests))
        return Beginning(0, expected)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        connection = await accept(request, self._terms.token, _NOTICE_S)
        guest: _Guest | None = None
        try:
            guest = self._admit(connection, await connection.receive())
            self._came.set()
            while await connection.receive() is not None:
                continue
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            connection.outbox.close()
            if guest in self._guests and not self._is_over.is_set():
                self._guests.remove(guest)
                self._came.set()
        return connection.websocket

    def _admit(self, connection: Connection, text: str | None) -> _Guest:
        try:
            arrived = wire.decode(text or "", expect=(wire.NodeArrived,))
        except wire.WireError as error:
            raise RefusedError(str(error)) from None
        assert isinstance(arrived, wire.NodeArrived)
        if arrived.num_slots < 1:
            raise RefusedError(f"expected at least one member, got {arrived.num_slots}")
        node = arrived.node
        if node is not None and (node in {0, *(guest.node for guest in self._guests)} or node >= self._terms.most):
            raise RefusedError(f"node {node} is there already, or not below {self._terms.most}")
        if len(self._guests) + 1 >= self._terms.most:
            raise RefusedError(f"all {self._terms.most} nodes are there")
        guest = _Guest(connection, arrived.num_slots, node)
        self._guests.append(guest)
        return guest


async def arrive(endpoint: str, terms: Terms, num_slots: int, node: int | None) -> Beginning:
    """Come to the host, and wait until the job begins.

    Args:
        endpoint: `host:port` of the coordinator.
        terms: The same for all agents.
        num_slots: Members of this node.
        node: Its number, if that was given.

    Raises:
        LaunchError: The host refuses, does not come in time, or the job has begun already.
    """
    headers = {TOKEN_HEADER: bearer(terms.token), VERSION_HEADER: str(wire.PROTOCOL_VERSION)}
    deadline_s = time.monotonic() + terms.join_timeout_s + terms.last_call_timeout_s
    cause = "not tried"
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            try:
                async with session.ws_connect(
                    f"http://{endpoint}{GATHERING_PATH}", headers=headers, heartbeat=_NOTICE_S
                ) as websocket:
                    await websocket.send_str(wire.encode(wire.NodeArrived(num_slots, node)))
                    message = await websocket.receive()
                    if message.type is aiohttp.WSMsgType.TEXT:
                        begins = wire.decode(str(message.data), expect=(wire.JobBegins,))
                        assert isinstance(begins, wire.JobBegins)
                        return Beginning(begins.node, from_ranges(begins.expected), dict(begins.incarnations))
                    if message.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
                        raise _refused(endpoint, str(message.extra))
                    cause = "the connection ended"
            except aiohttp.WSServerHandshakeError as error:
                if error.status in _REFUSALS:
                    raise _refused(endpoint, _REFUSALS[error.status]) from None
                cause = str(error)
            except (aiohttp.ClientError, OSError) as error:
                cause = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_PAUSE_S)
    raise _refused(endpoint, f"no answer in time ({cause})")


_REFUSALS = {
    401: "its token is not this process's (LIGHTNING_FT_TOKEN, --rdzv-id)",
    426: "two versions of lightning_ft in one job",
}


def _refused(endpoint: str, reason: str) -> LaunchError:
    return LaunchError(f"joining the nodes at {endpoint} failed: {reason}.")
