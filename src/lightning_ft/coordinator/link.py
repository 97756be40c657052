"""One process's connection to the coordinator, made again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

import aiohttp

from lightning_ft.config import Settings, parse_endpoint
from lightning_ft.coordinator.channel import TOKEN_HEADER, VERSION_HEADER, Outbox, bearer, cut, socket_of, tune
from lightning_ft.membership import wire

logger = logging.getLogger("lightning_ft")

_REFUSALS = {
    401: "its token is not this process's (LIGHTNING_FT_TOKEN)",
    426: f"it does not speak protocol version {wire.PROTOCOL_VERSION}: two versions of lightning_ft in one job",
}

_FIRST_PAUSE_S = 0.02
_CLOSING_TIME_S = 1.0


class Link:
    """Keeps a WebSocket to the coordinator open until cancelled.

    Args:
        endpoint: `host:port`.
        path: Which of the coordinator's endpoints.
        token: The job's secret.
        settings: For intervals and timeouts.
        greet: Gives the first frames of each connection.
        on_frame: Called with each text frame; a False result, or an exception, breaks the connection.
        on_change: Called when the connection was made or broke.
        heartbeat: Gives the frame that says that this process is alive; asked for it also while there is no connection.

    Attributes:
        interval_s: Seconds between heartbeats.
        refusal: Why the coordinator refused to talk to this process; None: it has not, or was reached before.
        cause: Why it is not connected, for a person.

    Threads: the event loop's; `is_connected`, `silent_s` and `fileno` may be read from any.
    """

    def __init__(
        self,
        endpoint: str,
        path: str,
        token: str,
        settings: Settings,
        *,
        greet: Callable[[], Iterable[str]],
        on_frame: Callable[[str], bool],
        on_change: Callable[[], None],
        heartbeat: Callable[[], str],
    ) -> None:
        parse_endpoint(endpoint)
        self.endpoint = endpoint
        self._url = f"http://{endpoint}{path}"
        self._headers = {TOKEN_HEADER: bearer(token), VERSION_HEADER: str(wire.PROTOCOL_VERSION)}
        self._settings = settings
        self._greet = greet
        self._on_frame = on_frame
        self._on_change = on_change
        self._heartbeat = heartbeat
        self._websocket: aiohttp.ClientWebSocketResponse | None = None
        self._outbox: Outbox | None = None
        self._lost_at_s = time.monotonic()
        self._was_connected = False
        self.interval_s = settings.heartbeat_interval
        self.refusal: str | None = None
        self.cause = "not tried yet"

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is being heard."""
        return self._outbox is not None

    def silent_s(self) -> float:
        """Seconds since the coordinator was last in contact; 0 while it is."""
        return 0.0 if self.is_connected else time.monotonic() - self._lost_at_s

    def fileno(self) -> int:
        """Descriptor of the connection's socket; -1 without one."""
        websocket = self._websocket
        sock = None if websocket is None else socket_of(websocket)
        return -1 if sock is None else sock.fileno()

    def send(self, frame: str) -> bool:
        """Queue a frame. Returns: False if there is no connection."""
        return self._outbox is not None and self._outbox.put(frame)

    async def flush(self) -> bool:
        """Wait until everything queued was handed to the kernel. Returns: False if there is no connection."""
        return self._outbox is not None and await self._outbox.flush()

    def reconnect(self, reason: str) -> None:
        """Break the connection, and make it anew."""
        logger.info("connecting to the coordinator anew: %s", reason)
        if self._websocket is not None:
            cut(self._websocket)

    async def run(self) -> None:
        """Connect, and again, until cancelled; then say goodbye."""
        self._lost_at_s = time.monotonic()  # it may have been made long before
        beats = asyncio.get_running_loop().create_task(self._beat())
        try:
            await self._connect_forever()
        finally:
            beats.cancel()

    async def _connect_forever(self) -> None:
        pause_s = _FIRST_PAUSE_S
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with asyncio.timeout(self._settings.heartbeat_timeout):
                        websocket = await self._connect(session)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._note_failure(error)
                else:
                    pause_s = _FIRST_PAUSE_S
                    await self._serve(websocket)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  (not all members at once)
                pause_s = min(2 * pause_s, self._settings.heartbeat_interval)

    async def _connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        return await session.ws_connect(
            self._url,
            headers=self._headers,
            max_msg_size=wire.MAX_MESSAGE_BYTES,
            heartbeat=self._settings.heartbeat_timeout,  # a ping after so long a silence; half of it for the answer
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSING_TIME_S),
        )

    def _note_failure(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, aiohttp.WSServerHandshakeError) and error.status in _REFUSALS:
            cause = _REFUSALS[error.status]
            # Once we were connected, another job's coordinator may have taken the port for a while.
            self.refusal = None if self._was_connected else cause
        if cause != self.cause:
            logger.debug("connecting to the coordinator at %s failed: %s", self.endpoint, cause)
        self.cause = cause
        self._on_change()

    async def _serve(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        tune(websocket, self._settings.heartbeat_timeout)
        self._websocket = websocket
        if not self._was_connected:
            self._was_connected = True
            self.refusal = None
        self._outbox = Outbox(websocket, "the coordinator")
        try:
            for frame in self._greet():
                self._outbox.put(frame)
            self._outbox.put(self._heartbeat())
            self._on_change()
            self.cause = await self._receive(websocket)
        except asyncio.CancelledError:
            await self._say_goodbye(websocket)
            raise
        finally:
            self._outbox.close()
            self._outbox = self._websocket = None
            self._lost_at_s = time.monotonic()
            await websocket.close()
            self._on_change()

    async def _receive(self, websocket: aiohttp.ClientWebSocketResponse) -> str:
        while True:
            message = await websocket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                if not self._on_frame(message.data):
                    return "this process broke the connection"
            elif message.type is aiohttp.WSMsgType.CLOSE:
                if message.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    self.refusal = f"it closed the connection: {message.extra}"
                return f"closed by the coordinator: {message.extra or message.data}"
            else:
                return "the connection broke"

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            self.send(self._heartbeat())

    async def _say_goodbye(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async with asyncio.timeout(_CLOSING_TIME_S):
                await self.flush()
        except TimeoutError:
            cut(websocket)
