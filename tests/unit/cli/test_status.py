"""`lightning-ft status`: what it prints, and what it says if it can't."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import socket
import subprocess
import threading
import urllib.request
import webbrowser
from collections.abc import Iterator

import pytest

from lightning_ft.cli import main, status
from lightning_ft.cli.common import CommandError
from lightning_ft.cli.status import STATUS_PATH, Job, ask, shown
from lightning_ft.config import Settings
from lightning_ft.coordinator import status_view
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog
from lightning_ft.membership import events
from lightning_ft.membership.arrangement import tree
from lightning_ft.membership.events import Address

MEMBERS = ("0/0", "0/1", "1/0")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A coordinator whose three members train; the last one is then killed."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0))

    async def start() -> CoordinatorServer:
        server = CoordinatorServer(Settings(), MEMBERS, "secret", EventLog(None))
        for name in MEMBERS:
            server._decisions.apply(events.Hello(name, 1, 0, Address(f"10.0.0.{name[0]}", 5000), 4711))
        for name in MEMBERS:
            server._decisions.apply(events.Parked(name, 1, 0, 0, "start"))
        server._decisions.apply(events.Exited("1/0", 1, -9, "killed by SIGKILL"))
        await server.start(listener)
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_table_and_ring_are_printed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each member, the dead one with its cause; the ring and the tree with a host where it is entered."""
    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    assert main(["status", "--coordinator", endpoint]) == 0
    head, _, *rows, _, ring, _, title, first, second, third = capsys.readouterr().out.splitlines()
    assert head.startswith("generation 1, suspended")
    assert head.endswith("2 of 3 members are in the job")
    assert rows[0].split() == ["MEMBER", "RANK", "ADDRESS", "PID", "STATE", "STEP", "HEARD", "DOING"]
    assert rows[1].split()[:6] == ["0/0", "0", "10.0.0.0:5000", "4711", "running", "0"]
    assert rows[3].split()[:6] == ["1/0", "-", "10.0.0.1:5000", "4711", "gone", "(exit)"]
    assert ring == "ring: 0/0 (10.0.0.0) -> 0/1 -> 1/0 (10.0.0.1) -> 0/0"
    assert (title, first, second, third) == ("tree:", "0/0 (10.0.0.0)", "|- 0/1", "`- 1/0 (10.0.0.1)")


def test_json_is_the_coordinators_answer(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment names the job, as in its own processes; `--rdzv-id` is part of the secret."""
    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    monkeypatch.setenv("LIGHTNING_FT_COORDINATOR", endpoint)
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ring"] == list(MEMBERS)
    assert told["version"] == status_view.VERSION
    assert main(["status", "--rdzv-id", "other"]) == 3
    assert "the token is not that of the job" in capsys.readouterr().err


def test_jobs_of_this_machine_are_found_by_their_processes(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only one is meant; of two one has to be chosen; of none that is said. Another's environment tells nothing."""
    monkeypatch.delenv("LIGHTNING_FT_COORDINATOR", raising=False)
    told = {"LIGHTNING_FT_COORDINATOR": endpoint, "LIGHTNING_FT_TOKEN": "secret", "LIGHTNING_FT_MEMBER": "0/0"}
    environments = [{}, {**told, "LIGHTNING_FT_AGENT_PID": "11"}, {**told, "LIGHTNING_FT_AGENT_PID": "11"}]
    environments.append({**told, "LIGHTNING_FT_COORDINATOR": "127.0.0.1:1", "LIGHTNING_FT_AGENT_PID": "22"})
    processes = [subprocess.Popen(["sleep", "600"], env={**os.environ, **own}) for own in environments]  # noqa: S607
    try:
        pids = [process.pid for process in processes]
        monkeypatch.setattr(status, "_processes", lambda: pids[:1])
        assert main(["status"]) == 3
        assert "no job of yours runs on this machine" in capsys.readouterr().err
        monkeypatch.setattr(status, "_processes", lambda: pids[:3])
        assert main(["status"]) == 0
        monkeypatch.setattr(status, "_processes", lambda: pids)
        with pytest.raises(SystemExit):
            main(["status"])
        error = capsys.readouterr().err
        assert f"--pid 11 ({endpoint})" in error
        assert "--pid 22 (127.0.0.1:1)" in error
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_successor_is_asked_where_the_first_coordinator_is_lost(endpoint: str) -> None:
    """A rank's environment names those who may take its place; if none answers, the first is the one that is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lost = f"127.0.0.1:{listener.getsockname()[1]}"
    assert ask(Job(lost, "secret", (lost, endpoint)))["ring"] == list(MEMBERS)
    with pytest.raises(CommandError, match=lost):
        ask(Job(lost, "secret", (lost,)))


def test_path_is_the_coordinators() -> None:
    """The command does not import the module that serves it."""
    assert STATUS_PATH == status_view.STATUS_PATH


def test_job_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 3, and the endpoint is named; status 2 without a secret, or with an endpoint that is none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    assert main(["status", "--coordinator", endpoint]) == 3
    assert f"the coordinator at {endpoint} can't be reached" in capsys.readouterr().err
    for environment, told in (
        ({"LIGHTNING_FT_TOKEN": "x"}, "host:port"),
        ({"LIGHTNING_FT_TOKEN": ""}, "TOKEN must hold"),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            main(["status", "--coordinator", "nowhere"])
        assert caught.value.code == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"version": 99}'])
def test_what_is_no_coordinator_is_told(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another server at that port, or another version of this one."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as it is called
            pass

    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["status", "--coordinator", f"127.0.0.1:{server.server_port}"]) == 3
        thread.join()
    assert "is no coordinator" in capsys.readouterr().err


def test_nobody_has_come_yet() -> None:
    """What is not known is a dash, and whoever waits to join is in the table."""
    row = dict.fromkeys(("rank", "cause", "host", "port", "pid", "heartbeat_age_s"))
    awaited = {**row, "member": "0/0", "rank": 0, "state": "awaited", "step": 0, "doing": ""}
    joiner = {"member": "0/1", "host": "h", "port": 1, "pid": 7, "heartbeat_age_s": 0.25}
    text = shown(
        {
            "generation": 0,
            "phase": "suspended",
            "reason": "nobody",
            "num_members": 0,
            "target": 1,
            "ring": ["0/0"],
            "tree": [None],
            "members": [{**awaited, "is_straggler": False, "is_connected": False}],
            "joiners": [joiner],
        }
    )
    lines = text.splitlines()
    assert lines[0] == "generation 0, suspended: nobody; 0 of 1 members are in the job"
    assert lines[3].split() == ["0/0", "0", "-", "-", "awaited", "0", "-", "-"]
    assert lines[4].split() == ["0/1", "-", "h:1", "7", "waits", "to", "join", "-", "0.2", "s", "ago", "-"]
    assert lines[-4:] == ["ring: 0/0 -> 0/0", "", "tree:", "0/0"]


def test_tree_is_drawn_with_its_branches() -> None:
    """Each member stands below the one that it sends to."""
    members = [f"{node}/{slot}" for node in range(2) for slot in range(4)]
    told = {
        "ring": members,
        "tree": tree(members),
        "members": [{"member": member, "host": f"host{member[0]}"} for member in members],
    }
    assert status._tree(told).splitlines() == [
        "0/0 (host0)",
        "|- 0/1",
        "|- 0/2",
        "|  `- 0/3",
        "`- 1/0 (host1)",
        "   |- 1/1",
        "   `- 1/2",
        "      `- 1/3",
    ]


@pytest.mark.parametrize("has_screen", [False, True])
def test_open_prints_an_address_that_shows_the_page(
    endpoint: str, has_screen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds a key instead of the token, and goes to a browser where there is a screen."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    monkeypatch.setenv("DISPLAY", ":0" if has_screen else "")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["status", "--open", "--coordinator", endpoint]) == 0
    address = capsys.readouterr().out.strip()
    assert address.startswith(f"http://{endpoint}/?token=")
    assert "secret" not in address
    assert opened == [address] * has_screen
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(address) as answer:
        assert answer.url == f"http://{endpoint}/"
        assert b'data-poll="/v1/page"' in answer.read()
