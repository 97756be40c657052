"""The coordinator's end of a connection: who is let in, what is read, how it ends."""

from __future__ import annotations

import asyncio
import hmac
import logging

from aiohttp import WSCloseCode, WSMsgType, web

from lightning_ft.coordinator.channel import TOKEN_HEADER, VERSION_HEADER, Outbox, bearer, cut, tune
from lightning_ft.membership import wire

logger = logging.getLogger("lightning_ft")

CLOSING_TIME_S = 1.0
"""How long a peer may take to answer a close."""


class RefusedError(Exception):
    """A frame that this connection may not send; the connection is closed, with the reason."""


class Connection:
    """One accepted WebSocket.

    Attributes:
        peer: Who is at the other end, for a person.
        is_replaced: Its owner has a newer one, so that its end means nothing.

    Threads: the event loop's.
    """

    def __init__(self, websocket: web.WebSocketResponse, peer: str) -> None:
        self.websocket = websocket
        self.outbox = Outbox(websocket, peer)
        self.peer = peer
        self.is_replaced = False

    def send(self, message: wire.Message) -> bool:
        """Queue a message. Returns: False if the connection is broken."""
        return self.outbox.put(wire.encode(message))

    async def receive(self) -> str | None:
        """Wait for a frame.

        Returns: Its text; None at the end of the connection.

        Raises:
            RefusedError: It is no text frame, or breaks the limits.
        """
        message = await self.websocket.receive()
        if self.is_replaced:
            return None
        if message.type is WSMsgType.TEXT:
            return str(message.data)
        if message.type is WSMsgType.BINARY:
            raise RefusedError("a binary frame; all messages are text")
        if message.type is WSMsgType.ERROR:
            raise RefusedError(f"a broken frame: {message.data}")
        return None

    def replace(self) -> None:
        """End it because its owner has a newer one."""
        self.is_replaced = True
        self.outbox.close()
        cut(self.websocket)

    async def refuse(self, reason: str) -> None:
        """Close it because of what came over it."""
        logger.warning("closing the connection of %s: %s", self.peer, reason)
        self.outbox.close()
        await self.websocket.close(code=WSCloseCode.POLICY_VIOLATION, message=reason.encode()[:120])

    async def say_goodbye(self) -> None:
        """Deliver what was said, then close it."""
        try:
            async with asyncio.timeout(CLOSING_TIME_S):
                await self.outbox.flush()
                await self.websocket.close(code=WSCloseCode.GOING_AWAY, message=b"the coordinator ends")
        except TimeoutError:
            cut(self.websocket)


def check_token(request: web.Request, token: str) -> None:
    """Make sure that a request comes from somebody who knows the job's secret.

    Raises:
        web.HTTPException: The token is not the job's (401).
    """
    given = request.headers.get(TOKEN_HEADER, "").encode(errors="surrogateescape")
    if not hmac.compare_digest(given, bearer(token).encode()):
        logger.warning("refused %s from %s: the token is not this job's", request.path, request.remote)
        raise web.HTTPUnauthorized(text="the token is not this job's")


async def accept(request: web.Request, token: str, timeout_s: float) -> Connection:
    """Upgrade a request of a process that belongs to the job.

    Args:
        request: The upgrade request.
        token: The job's secret.
        timeout_s: Time after which an unreachable host is noticed.

    Raises:
        web.HTTPException: The token is not the job's (401), the protocol version is another (426), or whoever asked has
            gone meanwhile (400).
    """
    check_token(request, token)
    peer = f"{request.path} from {request.remote}"
    version = request.headers.get(VERSION_HEADER, "")
    if version != str(wire.PROTOCOL_VERSION):
        reason = f"expected protocol version {wire.PROTOCOL_VERSION}, got {version[:20]!r}"
        logger.warning("refused %s: %s. Use one version of lightning_ft in all processes", peer, reason)
        raise web.HTTPUpgradeRequired(text=reason)
    websocket = web.WebSocketResponse(timeout=CLOSING_TIME_S, max_msg_size=wire.MAX_MESSAGE_BYTES, compress=False)
    try:
        await websocket.prepare(request)
    except (
        ConnectionResetError
    ):  # on a busy machine it lost patience; it asks again, and aiohttp would show a traceback
        raise web.HTTPBadRequest(text="the connection is closed") from None
    tune(websocket, timeout_s)
    return Connection(websocket, peer)
