"""Members that come back get the state while the others train on, whoever dies or stops meanwhile."""

from __future__ import annotations

import pathlib

from tests.integration import jobs

MEMBERS = ("0/0", "0/1", "0/2")


def test_catching_up_holds_nobody_up(tmp_path: pathlib.Path) -> None:
    """A donor dies in the middle of it; then a joiner stops and, later, dies; all are back in the end.

    With nothing missing: all of the state was sent and kept up to date before, so that it is bitwise the others'.
    """
    faults = "0/1=commit.done@10; 0/2=catch_up.send@6; 0/2#2=catch_up.take@12:stop"
    settings = {
        "LIGHTNING_FT_RESPAWN": "1",
        "LIGHTNING_FT_MAX_RESTARTS": "5",
        "LIGHTNING_FT_FAIL_AT": faults,
        "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.5",
        "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "3",
    }
    program = ["plain_loop.py", "20", "--full", "--double", "--optimizer", "adamw", "--ahead", "65536"]
    with jobs.running(tmp_path, 3, program, settings) as job:
        job.wait_until(lambda: "fault placed at catch_up.take: stop" in job.output(), timeout_s=150)
        before = len(job.records("0/0"))
        job.wait_until(lambda: len(job.records("0/0")) > before + 100)
        job.kill("0/2")
        assert job.finish(150) == 0, job.output()
        contributors = jobs.committed(job, MEMBERS)
        assert jobs.contributors_by_events(job.events(), len(contributors)) == contributors, job.output()
        lost = [event["member"] for event in job.events() if event["event"] == "failure_detected"]
        assert lost == ["0/1", "0/2"], f"whoever dies before it is admitted is missed by nobody\n{job.output()}"
        told = [event for event in job.events() if event["event"] == "caught_up"]
        assert [event["member"] for event in told] == ["0/1", "0/2"], job.output()
        assert all(event["missing_bytes"] == 0 < event["total_bytes"] for event in told), job.output()
