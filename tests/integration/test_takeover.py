"""The node with the coordinator and rank 0 is lost: another node's agent starts a successor, and no step is lost."""

from __future__ import annotations

import contextlib
import pathlib
import time
from typing import Any

import psutil

from tests.integration import jobs, networks, reference
from tests.integration.test_kill_points import check_weights

SETTINGS = {
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.2",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "2",
    "LIGHTNING_FT_TIMEOUT": "30",
}

NUM_STEPS = 200


def told(job: jobs.Job, event: str) -> list[dict[str, Any]]:
    return [line for line in job.events() if line["event"] == event]


def go_on(job: jobs.Job, member: str) -> None:
    """Wait until ten more steps are done."""
    num_steps = len(job.records(member))
    job.wait_until(lambda: len(job.records(member)) > num_steps + 20)


def kill_node(job: jobs.Job) -> None:
    """Kill all processes of a node at once."""
    agent = psutil.Process(job.process.pid)
    processes = [agent, *agent.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def check(nodes: list[jobs.Job], lost: set[str]) -> None:
    """The survivors ended with the job's status, every step was made once, with the same weights."""
    members = tuple(f"{node}/0" for node in range(len(nodes)))
    survivors = {*members} - lost
    for node, member in zip(nodes, members, strict=True):
        if member in survivors:
            assert node.finish() == 0, node.output()
    job = nodes[-1]
    assert {line["member"] for line in told(job, "failure_detected")} == lost, job.output()
    contributors = jobs.committed(job, members)
    assert sorted(contributors) == list(range(NUM_STEPS))
    check_weights(job, survivors, reference.final_weights(contributors, model="mlp", width=16))


def test_first_node_dies_and_then_its_successor(tmp_path: pathlib.Path) -> None:
    """Of four nodes, the one with the coordinator is killed; then the one that has taken its place."""
    program = ["plain_loop.py", str(NUM_STEPS), "--width", "16", "--hold", "100"]
    with networks.hosts(4) as hosts, jobs.running_on(tmp_path, hosts, 1, program, SETTINGS) as nodes:
        job = nodes[-1]
        job.wait_until(lambda: len(job.records("3/0")) > 20)
        kill_node(nodes[0])
        job.wait_until(lambda: len(told(job, "failure_detected")) == 1)
        go_on(job, "3/0")
        (restarted,) = told(job, "coordinator_restarted")
        silence_s = float(SETTINGS["LIGHTNING_FT_HEARTBEAT_TIMEOUT"])
        job.wait_until(lambda: time.time() > restarted["time"] + silence_s)  # by then the lost node is no replica
        kill_node(nodes[1])
        (tmp_path / "go-100").touch()
        job.wait_until(lambda: len(told(job, "failure_detected")) == 2)
        check(nodes, {"0/0", "1/0"})
        assert len(told(job, "coordinator_restarted")) == 2, job.output()


def test_first_node_is_cut_off(tmp_path: pathlib.Path) -> None:
    """The old coordinator lives with its own member, but can decide nothing: they end; the others go on."""
    program = ["plain_loop.py", str(NUM_STEPS), "--width", "16"]
    with networks.hosts(3) as hosts, jobs.running_on(tmp_path, hosts, 1, program, SETTINGS) as nodes:
        job = nodes[-1]
        job.wait_until(lambda: len(job.records("2/0")) > 20)
        for far in (1, 2):
            hosts[0].lose_packets_to(hosts[far])
            hosts[far].lose_packets_to(hosts[0])
        assert nodes[0].finish() != 0, nodes[0].output()
        assert "QuorumLostError" in nodes[0].output()
        check(nodes, {"0/0"})
