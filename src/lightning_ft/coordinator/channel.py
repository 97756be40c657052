"""What both ends of a connection have in common: the upgrade's headers, the socket's options, the frames to send."""

from __future__ import annotations

import asyncio
import asyncio.trsock
import logging
import os
import socket
from collections import deque
from typing import Protocol

from lightning_ft.config import parse_endpoint

logger = logging.getLogger("lightning_ft")

MEMBER_PATH = "/v1/member"
AGENT_PATH = "/v1/agent"
GATHERING_PATH = "/v1/nodes"
TOKEN_HEADER = "Authorization"  # noqa: S105  (a name, no secret)
VERSION_HEADER = "X-Lightning-FT-Protocol"

NOT_IN_OFFICE = 4
"""Exit status of a coordinator's process that is none, or none any more."""

MAX_WAITING_FRAMES = 1024
"""A peer that leaves this many frames unread is stuck: a healthy one has a handful outstanding."""


class WebSocket(Protocol):
    """The part that aiohttp's two WebSocket classes share."""

    async def send_str(self, data: str) -> None:
        """Send one text frame; waits while the peer does not read."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Look up a property of the transport."""


def reachable_host(endpoint: str) -> str:
    """Return the address under which this machine is reached: `LIGHTNING_FT_HOST`, else that of the way to `endpoint`.

    Raises:
        OSError: There is no way.
    """
    configured = os.environ.get("LIGHTNING_FT_HOST")
    if configured:
        return configured
    host, port = parse_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)  # sends nothing: it only chooses the way
        return str(way.getsockname()[0])


def bearer(token: str) -> str:
    """Value of the token's header."""
    return f"Bearer {token}"


def tune(websocket: WebSocket, timeout_s: float) -> None:
    """Send without delay, and have the kernel notice within `timeout_s` that the peer's host is unreachable."""
    sock = socket_of(websocket)
    if sock is not None:
        notice_silence(sock, timeout_s)


def notice_silence(sock: socket.socket | asyncio.trsock.TransportSocket, timeout_s: float) -> None:
    """Have the kernel end a TCP connection whose peer's host acknowledges nothing for `timeout_s`, whatever is sent."""
    options = [(socket.IPPROTO_TCP, "TCP_NODELAY", 1), (socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    num_probes = 3
    pause_s = max(1, int(timeout_s / (num_probes + 1)))
    options += [
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", pause_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", pause_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", num_probes),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", max(1, int(timeout_s * 1000))),
    ]
    for level, name, value in options:
        option = getattr(socket, name, None)  # TCP_USER_TIMEOUT and others exist on Linux only
        if option is not None:
            try:
                sock.setsockopt(level, option, value)
            except OSError as error:
                logger.debug("setting %s failed: %s", name, error)


def socket_of(websocket: WebSocket) -> asyncio.trsock.TransportSocket | None:
    """The connection's socket, while it is open."""
    sock = websocket.get_extra_info("socket")
    return sock if isinstance(sock, asyncio.trsock.TransportSocket) and sock.fileno() >= 0 else None


def cut(websocket: WebSocket) -> None:
    """End a connection at once, without the closing handshake that a stuck peer would not answer."""
    sock = socket_of(websocket)
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            return


class Outbox:
    """The frames that wait to be sent over one connection, in order.

    `put` never waits. A peer that doesn't read fills the box and is cut off; nobody else notices.

    Threads: the event loop's only.
    """

    def __init__(self, websocket: WebSocket, peer: str) -> None:
        self._websocket = websocket
        self._peer = peer
        self._frames: deque[str] = deque()
        self._has_work = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._task = asyncio.get_running_loop().create_task(self._send_forever())

    def put(self, frame: str) -> bool:
        """Queue a frame.

        Returns: False if the connection is broken, or is now cut because the peer does not read.
        """
        if self._task.done():
            return False
        if len(self._frames) >= MAX_WAITING_FRAMES:
            logger.warning(
                "%s does not read its messages (%d are waiting); cutting it off", self._peer, len(self._frames)
            )
            self._task.cancel()
            cut(self._websocket)
            return False
        self._frames.append(frame)
        self._has_work.set()
        self._is_empty.clear()
        return True

    async def flush(self) -> bool:
        """Wait until everything was handed to the kernel.

        Returns: False if the connection broke before.
        """
        empty = asyncio.ensure_future(self._is_empty.wait())
        try:
            await asyncio.wait((empty, self._task), return_when=asyncio.FIRST_COMPLETED)
            return self._is_empty.is_set()
        finally:
            empty.cancel()

    def close(self) -> None:
        """Drop what was not sent yet."""
        self._task.cancel()

    async def _send_forever(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                while self._frames:
                    await self._websocket.send_str(self._frames[0])
                    self._frames.popleft()
                self._has_work.clear()
                self._is_empty.set()
        except (OSError, RuntimeError) as error:  # aiohttp: ClientConnectionResetError is an OSError
            logger.debug("sending to %s failed: %s", self._peer, error)
            cut(self._websocket)
