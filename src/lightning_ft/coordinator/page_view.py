"""The status page on the coordinator's port: read-only, for whoever has the job's token, at no cost while nobody looks.

The job's history is read from the event log when somebody asks, and from then on as far as it has grown.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from lightning_ft.config import Settings
from lightning_ft.event_log import EventLog
from lightning_ft.history import fold
from lightning_ft.history.lines import is_start
from lightning_ft.history.state import History
from lightning_ft.page.facts import facts
from lightning_ft.page.key import key_of
from lightning_ft.page.render import as_text, entrance, page, policy

logger = logging.getLogger("lightning_ft")

PAGE_PATH = "/"
FACTS_PATH = "/v1/page"

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_LONGEST_BYTES = 1 << 20
"""Longest line of a log that is read; a longer one is a damaged one."""


class HistoryReader:
    """The history of the job's present run, from its event log.

    Threads: one call at a time.
    """

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._path: Path | None = None
        self._read_bytes = 0
        self._history = History()
        self._earlier_runs = 0

    def read(self) -> tuple[History, int]:
        """Read what is new. Returns: The history, and how many runs the log holds besides it."""
        path = self._event_log.path
        if path is None:  # there is no file (yet): all that there is waits to be written
            history = History()
            for text in self._event_log.unwritten():
                fold.add(history, text)
            return history, 0
        if path != self._path:
            self._path, self._read_bytes, self._history, self._earlier_runs = path, 0, History(), 0
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < self._read_bytes:  # somebody has put another file there
                    self._read_bytes, self._history, self._earlier_runs = 0, History(), 0
                file.seek(self._read_bytes)
                while (line := file.readline(_LONGEST_BYTES)).endswith(b"\n") or len(line) == _LONGEST_BYTES:
                    self._read_bytes += len(line)
                    self._add(line)
        except OSError as error:
            logger.debug("the event log can't be read for the status page: %s", error)
        return self._history, self._earlier_runs

    def _add(self, line: bytes) -> None:
        if is_start(line) and self._history.num_events:
            self._history = History()
            self._earlier_runs += 1
        fold.add(self._history, line)


class PageView:
    """Serves the page and its facts.

    Args:
        token: The job's secret.
        event_log: The job's.
        told: Returns what `GET /v1/status` answers.

    Threads: the event loop's; the event log is read in another one.
    """

    def __init__(self, token: str, event_log: EventLog, told: Callable[[], dict[str, Any]]) -> None:
        self._token = token
        self._key = key_of(token)
        self._reader = HistoryReader(event_log)
        self._told = told
        self._lock = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """The paths that are served."""
        return [
            web.get(PAGE_PATH, self.serve_page),
            web.post(PAGE_PATH, self.enter),
            web.get(FACTS_PATH, self.serve_facts),
        ]

    async def serve_page(self, request: web.Request) -> web.Response:
        """Answer with the page; or, if the token is in the address, with a cookie and the way to the page."""
        given = request.query.get("token")
        if given is not None:
            return self._admit(request, given)
        if not self._may_look(request):
            return _answer(entrance(is_wrong=False), status=401)
        return _answer(page(await self._facts(), poll=FACTS_PATH))

    async def enter(self, request: web.Request) -> web.Response:
        """Take the token from the form of the entrance."""
        form = (await request.read()).decode(errors="replace")
        return self._admit(request, dict(parse_qsl(form)).get("token", ""))

    async def serve_facts(self, request: web.Request) -> web.Response:
        """Answer with what the page shows, as JSON."""
        if not self._may_look(request):
            return web.json_response({"error": "the token is not this job's"}, status=401, headers=_HEADERS)
        return web.Response(text=as_text(await self._facts()), content_type="application/json", headers=_HEADERS)

    async def _facts(self) -> dict[str, Any]:
        async with self._lock:
            history, earlier_runs = await asyncio.to_thread(self._reader.read)
            told = self._told()
            return await asyncio.to_thread(facts, history, time.time(), told, earlier_runs=earlier_runs)

    def _admit(self, request: web.Request, given: str) -> web.Response:
        if not (_equal(given, self._token) | _equal(given, self._key)):
            logger.warning("refused the status page to %s: the token is not this job's", request.remote)
            return _answer(entrance(is_wrong=True), status=401)
        # The token leaves the address bar, and the browser keeps a key that is good for nothing but this page.
        answer = web.Response(status=303, headers={**_HEADERS, "Location": PAGE_PATH})
        answer.set_cookie(_cookie(request), self._key, httponly=True, samesite="Lax")
        return answer

    def _may_look(self, request: web.Request) -> bool:
        return _equal(request.cookies.get(_cookie(request), ""), self._key) | _equal(
            request.headers.get("Authorization", "").removeprefix("Bearer "), self._token
        )


def address_of(listener: socket.socket, settings: Settings) -> str:
    """Return the page's address, which holds no secret."""
    host, port = listener.getsockname()[:2]
    if settings.coordinator is not None:
        host = settings.coordinator.rpartition(":")[0]
    return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{port}{PAGE_PATH}"


def _cookie(request: web.Request) -> str:
    """Name of the cookie: a host's ports share their cookies, and each may be another job."""
    return f"lightning_ft_{request.url.port or 0}"


def _equal(given: str, secret: str) -> bool:
    """Compare without telling by the time it takes how much is right."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode(errors="surrogateescape"))


def _answer(text: str, status: int = 200) -> web.Response:
    headers = {**_HEADERS, "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'"}
    return web.Response(text=text, status=status, content_type="text/html", headers=headers)
