"""How a coordinator that takes a lost one's place finds out what that one had decided (PROTOCOL.md, C11)."""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from lightning_ft.config import Settings
from lightning_ft.coordinator.accepted import CLOSING_TIME_S, Connection, RefusedError, accept
from lightning_ft.coordinator.channel import AGENT_PATH
from lightning_ft.membership import wire
from lightning_ft.membership.replication import Candidacy, Entry

logger = logging.getLogger("lightning_ft")


class Succession:
    """Asks the agents that come for what they keep, until a quorum has answered.

    Args:
        term: Of the coordinator to be.
        token: The job's secret.
        settings: The job's.

    Threads: one event loop's.
    """

    def __init__(self, term: int, token: str, settings: Settings) -> None:
        self._candidacy = Candidacy(term)
        self._token = token
        self._settings = settings
        self._connections: set[Connection] = set()
        self._is_over = asyncio.Event()

    async def run(self, listener: socket.socket, patience_s: float) -> Entry | None:
        """Wait for the agents.

        Args:
            listener: A listening socket; a copy of it is used.
            patience_s: Seconds.

        Returns: The entry to go on from; None if too few came in time, or another coordinator has a higher term.
        """
        application = web.Application()
        application.add_routes([web.get(AGENT_PATH, self._serve)])
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_TIME_S)
        await runner.setup()
        await web.SockSite(runner, listener.dup(), backlog=1024).start()
        try:
            async with asyncio.timeout(patience_s):
                await self._is_over.wait()
        except TimeoutError:
            logger.warning("too few agents answer to take the lost coordinator's place")
        entry = self._candidacy.newest()
        await asyncio.gather(*(connection.say_goodbye() for connection in self._connections))
        await runner.cleanup()
        return entry

    def cancel(self) -> None:
        """Give it up."""
        self._is_over.set()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        self._connections.add(connection)
        try:
            await self._ask(connection)
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            self._connections.discard(connection)
            connection.outbox.close()
        return connection.websocket

    async def _ask(self, connection: Connection) -> None:
        replica: int | None = None
        entry: Entry | None = None
        while (text := await connection.receive()) is not None:
            try:
                message = wire.decode(text, expect=wire.FROM_AGENT)
            except wire.WireError as error:
                raise RefusedError(str(error)) from None
            if isinstance(message, wire.AgentHello):
                replica = message.replica
                if message.term > self._candidacy.term:
                    self.cancel()
                connection.send(wire.Welcome(self._settings.heartbeat_interval, self._candidacy.term))
            elif isinstance(message, Entry):
                entry = message
            elif isinstance(message, wire.Promised) and replica is not None and message.term == self._candidacy.term:
                self._candidacy.take(replica, entry)
                if self._candidacy.newest() is not None:
                    self._is_over.set()
