"""Hosts whose network fails: no process dies, no connection is reset, there is only silence."""

from __future__ import annotations

import itertools
import pathlib
import time
from typing import Any

from tests.integration import jobs, networks, reference
from tests.integration.test_kill_points import check_weights

HEARTBEAT_TIMEOUT_S = 2.0

SETTINGS = {
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.3",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
    "LIGHTNING_FT_TIMEOUT": "6",
    "LIGHTNING_FT_MAX_LINK_FAILURES": "1",
}

NUM_STEPS = 300


def told(job: jobs.Job, event: str) -> list[dict[str, Any]]:
    return [line for line in job.events() if line["event"] == event]


def lost(job: jobs.Job) -> list[str]:
    return [line["member"] for line in told(job, "failure_detected")]


def go_on(job: jobs.Job) -> None:
    """Wait until ten more steps are done."""
    num_steps = len(job.records("0/0"))
    job.wait_until(lambda: len(job.records("0/0")) > num_steps + 20)


def test_networks_fail_in_every_way(tmp_path: pathlib.Path) -> None:
    """A card that is back in time, two hosts that hear all but each other, a network cut in two, a broken card."""
    program = ["plain_loop.py", str(NUM_STEPS), "--width", "16"]
    members = tuple(f"{node}/0" for node in range(6))
    with networks.hosts(6) as hosts, jobs.running_on(tmp_path, hosts, 1, program, SETTINGS) as nodes:
        job = nodes[0]
        job.wait_until(lambda: len(job.records("0/0")) > 20)

        for _ in range(2):
            hosts[5].card_down()
            down_s = time.monotonic()
            job.wait_until(lambda down_s=down_s: time.monotonic() > down_s + HEARTBEAT_TIMEOUT_S / 2)
            hosts[5].card_up()
            go_on(job)
        assert not lost(job), "nobody is punished for a card that is back in time"

        hosts[1].lose_packets_to(hosts[2])
        hosts[2].lose_packets_to(hosts[1])
        job.wait_until(lambda: len(lost(job)) == 1)
        go_on(job)
        (guilty,) = lost(job)
        assert guilty in ("1/0", "2/0")
        (failure,) = told(job, "failure_detected")
        assert failure["cause"] == "connection"
        # Others may be named too: whoever is heard first is believed, and may only have seen another sever its links.
        named = [(line["member"], line["peer"], line["hosts"]) for line in told(job, "link_failed")]
        assert ("1/0", "2/0", [hosts[1].address, hosts[2].address]) in named

        cut_off = [4, 5]
        for near, far in itertools.product(range(4), cut_off):
            hosts[near].lose_packets_to(hosts[far])
            hosts[far].lose_packets_to(hosts[near])
        job.wait_until(lambda: len(lost(job)) == 3)
        go_on(job)

        hosts[3].card_down()
        assert job.finish() == 0, job.output()
        survivors = {"0/0", "1/0", "2/0"} - {guilty}
        assert sorted(lost(job)) == sorted({*members} - survivors)
        contributors = jobs.committed(job, members)
        assert sorted(contributors) == list(range(NUM_STEPS))
        assert jobs.contributors_by_events(job.events(), NUM_STEPS) == contributors
        check_weights(job, survivors, reference.final_weights(contributors, model="mlp", width=16))
        for node, member in zip(nodes, members, strict=True):
            assert (node.finish() == 0) == (member in survivors), node.output()
        for number in (3, *cut_off):
            assert "CoordinatorLostError" in nodes[number].output()
