"""Where Prometheus scrapes a job: `GET /metrics` on a port of its own, without a token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

logger = logging.getLogger("lightning_ft")

PATH = "/metrics"

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PAUSE_S = 5.0


class MetricsEndpoint:
    """Answers scrapes. A port that can't be had is no reason for a job to stop: it is tried again and again.

    Args:
        host: Address to listen on.
        port: The port.
        text: Returns the exposition.

    Threads: the event loop's.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        self._host = host
        self._port = port
        self._text = text
        self._runner: web.AppRunner | None = None
        self._starter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, now or as soon as the port can be had."""
        application = web.Application()
        application.add_routes([web.get(PATH, self._serve)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._starter = asyncio.get_running_loop().create_task(self._listen(self._runner))

    async def stop(self) -> None:
        """Answer no more."""
        if self._starter is not None:
            self._starter.cancel()
            await asyncio.gather(self._starter, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        is_told = False
        while True:
            try:
                await web.TCPSite(runner, self._host, self._port, reuse_address=True).start()
            except OSError as error:
                if not is_told:
                    logger.warning(
                        "Metrics can't be served on %s:%d: %s. Trying again; choose another port with metrics_port.",
                        self._host, self._port, error.strerror,
                    )  # fmt: skip
                is_told = True
                await asyncio.sleep(_PAUSE_S)
            else:
                logger.info("metrics are at http://%s:%d%s", self._host, self._port, PATH)
                return

    async def _serve(self, _: web.Request) -> web.Response:
        return web.Response(body=self._text(), headers={"Content-Type": _CONTENT_TYPE})
