"""Hosts whose network fails: no process dies, no connection is reset, there is only silence."""

from __future__ import annotations

import pathlib

from tests.integration import jobs, networks, reference
from tests.integration.test_kill_points import check_weights

SETTINGS = {
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.3",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "2",
    "LIGHTNING_FT_TIMEOUT": "8",
}


def steps_of(job: jobs.Job, member: str) -> int:
    return sum(line["event"] == "step" for line in job.records(member))


def test_card_is_broken(tmp_path: pathlib.Path) -> None:
    """The host is given up after its silence; the others finish the step; it writes nothing more and ends."""
    victim = 2
    members = tuple(f"{node}/0" for node in range(4))
    with networks.hosts(4) as hosts, jobs.running_on(tmp_path, hosts, 1, ["plain_loop.py", "400"], SETTINGS) as nodes:
        nodes[0].wait_until(lambda: steps_of(nodes[0], "0/0") >= 20)
        hosts[victim].card_down()
        assert nodes[0].finish() == 0, nodes[0].output()
        survivors = [member for member in members if member != f"{victim}/0"]
        contributors = jobs.committed(nodes[0], members)
        assert sorted(contributors) == list(range(400))
        (failure,) = [event for event in nodes[0].events() if event["event"] == "failure_detected"]
        assert failure["member"] == f"{victim}/0"
        assert failure["cause"] in ("heartbeat", "connection")
        assert failure["host"] == hosts[victim].address
        check_weights(nodes[0], survivors, reference.final_weights(contributors, model="mlp"))
        for node in nodes:
            status = node.finish()
            assert (status == 0) == (node is not nodes[victim]), node.output()
        assert "CoordinatorLostError" in nodes[victim].output()
