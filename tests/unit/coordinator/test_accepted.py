"""Whoever asks the coordinator for a connection and is gone before it answers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from lightning_ft.coordinator.accepted import accept
from lightning_ft.coordinator.channel import TOKEN_HEADER, VERSION_HEADER, bearer
from lightning_ft.membership import wire

REQUEST = "\r\n".join(
    [
        "GET / HTTP/1.1",
        "Host: coordinator",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        f"{TOKEN_HEADER}: {bearer('secret')}",
        f"{VERSION_HEADER}: {wire.PROTOCOL_VERSION}",
        "\r\n",
    ]
)


def test_gone_before_the_answer_shows_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A process that lost patience on a busy machine asks again: nothing is wrong, and nobody is told of an error."""

    async def ask_and_go() -> Exception:
        answered: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        is_asked = asyncio.Event()

        async def serve(request: web.Request) -> web.StreamResponse:
            is_asked.set()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0)
            try:
                await accept(request, "secret", 10.0)
            except Exception as error:
                answered.set_result(error)
                raise
            raise AssertionError("a connection that is closed was accepted")

        application = web.Application()
        application.router.add_get("/", serve)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        _, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(REQUEST.encode())
        await is_asked.wait()
        writer.transport.abort()
        error = await answered
        await runner.cleanup()
        return error

    assert isinstance(asyncio.run(ask_and_go()), web.HTTPBadRequest)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
