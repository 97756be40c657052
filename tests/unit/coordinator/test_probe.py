"""Probing a liveness port: only a refusal by a live host proves a death."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from lightning_ft.coordinator.probe import Verdict, attempt, wait_until_refused
from lightning_ft.membership.events import Address

DEADLINE_S = 20

T = TypeVar("T")


def listener() -> tuple[socket.socket, Address]:
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, Address("127.0.0.1", sock.getsockname()[1])


async def bounded(coroutine: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(DEADLINE_S):
        return await coroutine


def test_closed_port_is_refused() -> None:
    """The kernel of a live host answers for a process that is gone."""
    sock, address = listener()
    sock.close()
    assert asyncio.run(bounded(attempt(address, DEADLINE_S))) is Verdict.REFUSED


def test_open_port_proves_nothing() -> None:
    """A listening port may belong to a process that is alive."""
    sock, address = listener()
    with sock:
        assert asyncio.run(bounded(attempt(address, 0.05))) in (Verdict.OPEN, Verdict.SILENT)


def test_unknown_host_proves_nothing() -> None:
    """A name that can't be resolved is no proof of death."""
    assert asyncio.run(bounded(attempt(Address("no-such-host.invalid", 1), 5))) is Verdict.SILENT


def test_dying_process_is_noticed_when_it_closes() -> None:
    """An accepted connection is held; its end leads to the next attempt at once, not after the pause."""

    async def story() -> None:
        sock, address = listener()
        sock.setblocking(False)
        probing = asyncio.create_task(wait_until_refused(address, pause_s=10 * DEADLINE_S))
        connection, _ = await asyncio.get_running_loop().sock_accept(sock)
        assert not probing.done()
        sock.close()
        connection.close()
        await probing

    asyncio.run(bounded(story()))
