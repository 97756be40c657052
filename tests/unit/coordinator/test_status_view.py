"""What the coordinator tells of the job to whoever asks."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from lightning_ft.config import Settings
from lightning_ft.coordinator.channel import bearer
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.coordinator.status_view import STATUS_PATH, job_status
from lightning_ft.event_log import EventLog
from lightning_ft.membership import events, machine, state
from lightning_ft.membership.events import Address

SETTINGS = Settings(heartbeat_timeout=5.0)


def played(*happened: tuple[float, events.Event]) -> state.State:
    """The state of a job of three members after some events."""
    found = state.initial(["0/0", "0/1", "1/0"], 0.0, 60.0)
    for now_s, event in happened:
        found, _ = machine.step(SETTINGS, found, event, now_s)
    return found


def trained() -> state.State:
    """Three members train; one has sent a heartbeat later than the others."""
    hellos = [
        (1.0, events.Hello(name, 1, 0, Address(f"host{name[0]}", 5000 + int(name[2])), 4711))
        for name in ("0/0", "0/1", "1/0")
    ]
    parks = [(1.0, events.Parked(name, 1, 0, 0, "start")) for name in ("0/0", "0/1", "1/0")]
    beat = events.Heartbeat("1/0", 1, 7, None, 0.5, "training batch 7", None, 0.25, 0.0)
    return played(*hellos, *parks, (3.0, beat))


def member(status: dict[str, Any], name: str) -> dict[str, Any]:
    """One row."""
    (found,) = [row for row in status["members"] if row["member"] == name]
    return found


def test_table_has_place_rank_step_and_age() -> None:
    """For each member what it said last, and how long ago that was."""
    status = job_status(trained(), 4.0)
    assert (status["generation"], status["phase"], status["num_members"], status["target"]) == (1, "healthy", 3, 3)
    assert status["ring"] == ["0/0", "0/1", "1/0"]
    assert status["tree"] == [None, 0, 0]
    assert member(status, "1/0") == {
        "member": "1/0",
        "rank": 2,
        "state": "running",
        "cause": None,
        "incarnation": 1,
        "host": "host1",
        "port": 5000,
        "pid": 4711,
        "step": 7,
        "doing": "training batch 7",
        "heartbeat_age_s": 1.0,
        "progress_age_s": 1.5,
        "waits_s": None,
        "busy_s": 0.25,
        "is_connected": True,
        "is_straggler": False,
    }
    assert member(status, "0/1")["heartbeat_age_s"] == 3.0


def test_member_that_is_gone_has_no_rank() -> None:
    """It stays in the table with the cause; the ring is that of the view until there is another."""
    found, _ = machine.step(SETTINGS, trained(), events.Exited("0/0", 1, -9, "killed by SIGKILL"), 4.0)
    status = job_status(found, 4.0)
    assert (member(status, "0/0")["rank"], member(status, "0/0")["cause"]) == (None, "exit")
    assert (status["phase"], status["num_members"]) == ("suspended", 2)
    for name in ("0/1", "1/0"):
        found, _ = machine.step(SETTINGS, found, events.Parked(name, 1, 1, 0, "connection"), 4.0)
    status = job_status(found, 4.0)
    assert status["ring"] == ["0/1", "1/0"]
    assert [row["rank"] for row in status["members"]] == [None, 0, 1]


def test_who_has_not_come_is_awaited() -> None:
    """And who waits to join has a list of its own."""
    found, _ = machine.step(SETTINGS, trained(), events.Exited("0/0", 1, -9, "killed by SIGKILL"), 4.0)
    found, _ = machine.step(SETTINGS, found, events.Ready("0/0", 2, Address("host0", 1), 12), 4.0)
    assert job_status(found, 6.0)["joiners"] == [
        {"member": "0/0", "incarnation": 2, "host": "host0", "port": 1, "pid": 12, "heartbeat_age_s": 2.0}
    ]
    awaited = member(job_status(played(), 1.0), "0/0")
    assert (awaited["state"], awaited["rank"], awaited["host"], awaited["heartbeat_age_s"]) == (
        "awaited",
        0,
        None,
        None,
    )


@pytest.mark.parametrize("token", ["secret", "wrong", None])
def test_only_who_knows_the_token_is_told(token: str | None) -> None:
    """Over a real socket: JSON for the job's token, 401 for any other."""

    async def play() -> tuple[int, str]:
        server = CoordinatorServer(SETTINGS, ["0/0"], "secret", EventLog(None))
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{STATUS_PATH}"
        await server.start(listener)
        headers = {} if token is None else {"Authorization": bearer(token)}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            found = answer.status, await answer.text()
        await server.stop()
        return found

    status, text = asyncio.run(play())
    if token == "secret":
        assert status == 200
        assert json.loads(text)["ring"] == ["0/0"]
    else:
        assert status == 401
        assert "0/0" not in text
