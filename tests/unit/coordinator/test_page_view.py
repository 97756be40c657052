"""The status page on the coordinator's port: who may look, what is answered, what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pathlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from logs import busy

from lightning_ft.config import Settings
from lightning_ft.coordinator.page_view import FACTS_PATH, HistoryReader, address_of
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog
from lightning_ft.page.key import key_of

TOKEN = "the-tökèn"


@contextlib.asynccontextmanager
async def serving(event_log: EventLog) -> AsyncIterator[str]:
    """A coordinator that waits for its members, and its address."""
    server = CoordinatorServer(Settings(), ("0/0", "0/1"), TOKEN, event_log)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await server.stop()


def ask(check: Callable[[aiohttp.ClientSession, str], Awaitable[None]], event_log: EventLog | None = None) -> None:
    """Run a client, which keeps cookies as a browser does, against a coordinator."""

    async def run() -> None:
        jar = aiohttp.CookieJar(unsafe=True)  # of an address instead of a name
        async with serving(event_log or EventLog()) as address, aiohttp.ClientSession(cookie_jar=jar) as session:
            await check(session, address)

    asyncio.run(run())


@pytest.mark.parametrize("given", [TOKEN, key_of(TOKEN)])
def test_the_token_in_the_address_becomes_a_cookie(given: str, caplog: pytest.LogCaptureFixture) -> None:
    """It does not stay in the address bar; the browser keeps a key that is good for the page alone; no log has it."""

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        async with session.get(address, params={"token": given}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Lax" in cookie
            assert TOKEN not in cookie
        async with session.get(address) as answer:
            assert answer.status == 200
            text = await answer.text()
            assert 'data-poll="/v1/page"' in text
            assert TOKEN not in text
            assert key_of(TOKEN) not in text
        async with session.get(address + FACTS_PATH) as answer:
            told = await answer.json()
            assert (told["is_live"], told["verdict"]["title"]) == (True, "Starting")
            assert told["log"]["num_events"] == 1  # the log has no file yet

    with caplog.at_level(logging.DEBUG):
        ask(check)
    assert not [record for record in caplog.records if TOKEN in record.getMessage()]
    assert not [record for record in caplog.records if key_of(TOKEN) in record.getMessage()]


def test_the_token_can_be_entered_or_sent_by_a_script() -> None:
    """The entrance's form takes it, and so does the header of the other requests."""

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        header = {"Authorization": f"Bearer {TOKEN}"}
        async with session.get(address + FACTS_PATH, headers={"Authorization": "Bearer x"}) as answer:
            assert answer.status == 401
        async with session.get(address + FACTS_PATH, headers=header) as answer:
            assert answer.status == 200
        async with session.post(address, data={"token": TOKEN}) as answer:
            assert answer.status == 200
            assert "data-poll" in await answer.text()

    ask(check)


@pytest.mark.parametrize("wrong", ["", "x", TOKEN[:-1], key_of("another"), "\ud800", "é" * 100_000])
def test_without_the_token_nothing_is_told(wrong: str) -> None:
    """Neither in the address, in a cookie, in the form nor in the header; the entrance has no word of the job."""

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        port = address.rpartition(":")[2]
        quoted = wrong.encode(errors="surrogatepass")[:2000]
        requests = [
            session.get(address),
            session.get(address + FACTS_PATH),
            session.get(address, params={"token": quoted.decode(errors="replace")}),
            session.post(address, data=b"token=" + wrong.encode(errors="surrogatepass")),
            session.get(address, cookies={f"lightning_ft_{port}": "x" + key_of(TOKEN)}),
        ]
        for request in requests:
            async with request as answer:
                assert answer.status == 401
                text = await answer.text()
                assert "0/0" not in text
                assert TOKEN not in text
                assert "Set-Cookie" not in answer.headers

    ask(check)


def test_answers_forbid_what_a_page_of_a_job_never_needs() -> None:
    """Sources elsewhere, frames, caches, guesses about types: for the entrance, the page and the facts."""

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        async with session.get(address) as entrance, session.get(address, params={"token": TOKEN}) as page:
            async with session.get(address + FACTS_PATH) as facts:
                for answer in (entrance, page, facts):
                    assert answer.headers["Cache-Control"] == "no-store"
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert answer.headers["X-Frame-Options"] == "DENY"
                    assert answer.headers["Referrer-Policy"] == "no-referrer"
            for answer in (entrance, page):
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; ")
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
        async with session.put(address) as answer:
            assert answer.status == 405

    ask(check)


def test_nothing_is_read_until_somebody_looks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that nobody looks at pays nothing; whoever may not look makes it pay nothing either."""
    reads: list[None] = []
    monkeypatch.setattr(HistoryReader, "read", lambda _self: reads.append(None))
    event_log = EventLog(tmp_path / "events.jsonl")

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        event_log.write("node_heard", generation=0, node=1)
        async with session.get(address):
            assert reads == []

    ask(check, event_log)
    event_log.close()


def test_history_is_read_as_the_file_grows(tmp_path: pathlib.Path) -> None:
    """Each whole line once; a torn one when it is whole; another run, or another file, begins anew."""
    path = tmp_path / "events.jsonl"
    event_log = EventLog()
    reader, lines = HistoryReader(event_log), [f"{line}\n" for line in busy(4).lines]
    assert reader.read()[0].num_events == 0
    event_log.open(path)
    assert reader.read()[0].num_events == 0  # it is not there yet
    text = "".join(lines)
    middle = len("".join(lines[:6])) + 9
    with path.open("w") as file:
        file.write(text[:middle])
        file.flush()
        assert reader.read()[0].num_events == 6
        file.write(text[middle:])
    history, earlier = reader.read()
    assert (history.num_events, history.num_damaged, earlier) == (len(lines), 0, 0)
    with path.open("a") as file:
        file.write("".join(lines[:2]))
    history, earlier = reader.read()
    assert (history.num_events, earlier) == (2, 1)
    path.write_text(lines[0])
    assert reader.read()[0].num_events == 1
    path.write_text(lines[0] + "x" * 3_000_000 + "\n" + lines[1])
    assert reader.read()[0].num_events == 2  # a line without an end is read in pieces
    event_log.close()


def test_address_is_where_others_find_it() -> None:
    """The name that members use, with the port that it has; no secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener, Settings()) == f"http://127.0.0.1:{port}/"
        assert address_of(listener, Settings(coordinator="node0:29400")) == f"http://node0:{port}/"
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert address_of(listener, Settings()) == f"http://[::1]:{listener.getsockname()[1]}/"


def test_facts_of_the_server_are_json_without_markup() -> None:
    """What a member says reaches the browser as data."""
    event_log = EventLog()

    async def check(session: aiohttp.ClientSession, address: str) -> None:
        event_log.write("failed", generation=0, member="0/0", exception="<b>&", signature="")
        async with session.get(address, params={"token": TOKEN}) as answer:
            assert "<b>" not in (await answer.text()).partition('id="facts">')[2].partition("<script>")[0]
        async with session.get(address + FACTS_PATH) as answer:
            assert answer.content_type == "application/json"
            assert "<b>&" in json.loads(await answer.text())["sentences"][0][4]

    ask(check, event_log)
