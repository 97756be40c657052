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

_UNWANTED = "this process broke the connection"
_FIRST_PAUSE_S = 0.02
_CLOSING_TIME_S = 1.0


class Link:
    """Keeps a WebSocket to the coordinator open until cancelled.

    Args:
        endpoint: `host:port`; `add_endpoints` names others.
        path: Which of the coordinator's endpoints.
        token: The job's secret.
        settings: For intervals and timeouts.
        greet: Gives the first frames of each connection.
        on_frame: Called with each text frame; a False result, or an exception, breaks the connection.
        on_change: Called when the connection was made or broke.
        heartbeat: Gives the frame that says that this process is alive; asked for it also while there is no connection.

    Attributes:
        endpoint: The one that it talks to, or tries.
        endpoints: All where a coordinator may be.
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
        self.endpoints = [endpoint]
        self._path = path
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

    def add_endpoints(self, endpoints: Iterable[str]) -> None:
        """Try these too, when the connection is lost."""
        for endpoint in endpoints:
            parse_endpoint(endpoint)
            if endpoint not in self.endpoints:
                self.endpoints.append(endpoint)

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
                    async with asyncio.timeout(self._patience_s):
                        websocket = await self._connect(session)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._note_failure(error)
                    self._try_next()
                else:
                    is_followed = await self._serve(websocket)
                    pause_s = _FIRST_PAUSE_S if is_followed else pause_s
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  (not all members at once)
                pause_s = min(2 * pause_s, self._settings.heartbeat_interval)

    @property
    def succession_s(self) -> float:
        """After so long without a coordinator none will come any more."""
        return self._settings.heartbeat_timeout * (1 if len(self.endpoints) == 1 else 4)

    @property
    def _patience_s(self) -> float:
        """A host that is gone must not be waited for for long where others may answer."""
        return self._settings.heartbeat_timeout / (1 if len(self.endpoints) == 1 else 4)

    def _try_next(self) -> None:
        position = self.endpoints.index(self.endpoint) + 1
        self.endpoint = self.endpoints[position % len(self.endpoints)]

    async def _connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        return await session.ws_connect(
            f"http://{self.endpoint}{self._path}",
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

    async def _serve(self, websocket: aiohttp.ClientWebSocketResponse) -> bool:
        """Returns: False if this process broke it."""
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
            if self.cause == _UNWANTED:
                self._try_next()
            return self.cause != _UNWANTED  # noqa: TRY300 - what could fail is above
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
                    return _UNWANTED
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
