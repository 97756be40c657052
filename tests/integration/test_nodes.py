"""Several nodes: how they find each other, and what becomes of the job when one goes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import sys

import pytest

from tests.integration import jobs
from tests.integration.test_agent import DEADLINE_S, MEMBER, PATIENT, Stage, cli, stage

__all__ = ["stage"]

TOKEN = "shared-secret"

LEAVE = """
    while not Path(os.environ["NOTES"], "over").exists():
        time.sleep(0.01)
    client.leave(0)
    note("left", " ".join(client.view.members))
    client.close()
"""


def free_endpoint() -> str:
    """Return an address on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_nodes_without_numbers_find_each_other(stage: Stage) -> None:
    """As under torchrun: whoever is first at the endpoint is node 0; the last call is waited for."""
    options = [*PATIENT, "--nnodes", "2:4", "--rdzv_endpoint", free_endpoint(), "--rdzv_id", "a", "--rdzv-backend=c10d"]
    options += ["--rdzv_conf", "last_call_timeout=2,join_timeout=60"]
    script = stage.script(MEMBER, LEAVE)
    nodes = [stage.run(script, *options, num_slots=slots, LIGHTNING_FT_TOKEN=TOKEN) for slots in (1, 1, 1)]
    stage.wait_for_notes("view1", "0/0")
    stranger = stage.run(script, *options, num_slots=1, LIGHTNING_FT_TOKEN=TOKEN)
    assert stranger.wait(DEADLINE_S) == 1
    assert "the job has begun already, without this node" in stage.outputs[-1].read_text()
    (stage.notes / "over").touch()
    assert [node.wait(DEADLINE_S) for node in nodes] == [0, 0, 0]
    members = "0/0 1/0 2/0"
    assert [stage.noted(member, "left") for member in members.split()] == [members] * 3


def test_too_few_nodes_come(stage: Stage) -> None:
    """The job does not begin, and says how many came."""
    options = ["--nnodes", "3:4", "--rdzv-endpoint", free_endpoint(), "--rdzv-conf", "join_timeout=1"]
    script = stage.script(MEMBER)
    nodes = [stage.run(script, *options, LIGHTNING_FT_TOKEN=TOKEN) for _ in range(2)]
    assert [node.wait(DEADLINE_S) for node in nodes] == [1, 1]
    assert all("of 3 nodes came within 1 s" in output.read_text() for output in stage.outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2", "--rdzv-endpoint", "localhost"], "needs the environment variable LIGHTNING_FT_TOKEN"),
        (["--nnodes", "3:2"], "expected MIN <= MAX, got '3:2'"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:port"], "expected host:port"),
    ],
)
def test_wrong_nodes_are_explained(arguments: list[str], message: str) -> None:
    """Status 2, before anything is started."""
    result = cli("run", *arguments, "x.py")
    assert result.returncode == 2
    assert message in result.stderr


def test_one_node_is_asked_to_leave(tmp_path: pathlib.Path) -> None:
    """A script on two nodes with Lightning's own variables; SIGTERM to an agent has its ranks leave the others."""
    address, _, port = free_endpoint().partition(":")
    program = ["lightning_fit.py", "--devices", "1", "--num-nodes", "2", "--epochs", "6"]
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "LIGHTNING_FT_TOKEN": TOKEN,
        "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1",
    }
    with contextlib.ExitStack() as agents:
        nodes = [
            agents.enter_context(
                jobs._running(
                    tmp_path,
                    [sys.executable, str(jobs.PROGRAMS / program[0]), str(tmp_path), *program[1:]],
                    {**variables, "NODE_RANK": str(node)},
                    f"output{node}.txt",
                )
            )
            for node in range(2)
        ]
        job = nodes[0]
        job.wait_until(lambda: len(job.records("1/0")) > 20)
        os.kill(nodes[1].process.pid, signal.SIGTERM)
        assert nodes[1].finish() == 0, nodes[1].output()
        assert job.finish() == 0, job.output()
        events = job.events()
        assert [event["member"] for event in events if event["event"] == "member_left"] == ["1/0"]
        assert not {"failure_detected", "failed"} & {event["event"] for event in events}, job.output()
        assert job.records("0/0")[-1]["event"] == "end", job.output()
