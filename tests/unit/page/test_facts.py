"""What is shown of a job."""

from __future__ import annotations

from typing import Any

import pytest
from logs import Log, busy

from lightning_ft.config import Settings
from lightning_ft.coordinator.status_view import job_status
from lightning_ft.history.fold import histories
from lightning_ft.history.state import MAX_SENTENCES, History
from lightning_ft.membership import events, machine, state
from lightning_ft.membership.events import Address
from lightning_ft.page.facts import MAX_INCIDENTS, duration, facts, in_words


def shown(log: Log) -> dict[str, Any]:
    """The facts of a log at its end."""
    (history,) = histories(log.lines)
    return facts(history, log.now_s)


def verdict(log: Log) -> tuple[str, str, str]:
    """What somebody reads who has five seconds."""
    said = shown(log)["verdict"]
    return said["level"], said["title"], said["text"]


def test_verdict_follows_the_job() -> None:
    """Whether it trains, who is missing and why, whether it stands still, and how it ended."""
    log = Log(4, per_host=2)
    assert verdict(log) == ("good", "Training", "All members are there.")
    log.lose("1/1")
    assert verdict(log) == ("bad", "Training stands still", "1/1 is lost (killed by SIGKILL).")
    log.write("quorum_missing", reason="2 of 4 members are too few")
    assert verdict(log)[2].endswith("It can't go on yet: 2 of 4 members are too few.")
    log.recover()
    assert verdict(log) == ("warn", "Training with 3 of 4 members", "Missing: 1/1 (killed by SIGKILL).")
    log.write("view_suspended", "0/0", reason="0/0 parked: join")
    assert verdict(log)[:2] == ("warn", "Taking members in")
    log.admit("1/1")
    assert verdict(log)[0] == "good"
    log.write("straggler_detected", "0/1", host="a", busy_s=3.0, median_s=1.0, share=0.7)
    assert verdict(log) == ("warn", "Training, with trouble", "0/1 holds the others up.")
    log.write("node_silent", node=1, late_s=12.0)
    assert verdict(log)[2] == "0/1 holds the others up. Nothing is heard of the agent of node 1."
    log.write("gradient_mismatch", "0/0", step=3, members=["0/1"], gradient_divergence=0.5)
    assert verdict(log)[2].endswith("What 0/1 held was not what the others held.")
    log.write("gradients_compared", "0/0", step=9, gradient_divergence=0.0)
    assert "held" not in verdict(log)[2]
    log.write("job_stopped", reason="all members left")
    assert verdict(log) == ("over", "Stopped", "All members left.")
    log.write("job_finished", status=0)
    assert verdict(log)[:2] == ("over", "Finished")
    log.write("job_finished", status=137)
    assert verdict(log)[:2] == ("bad", "Failed with status 137")


def test_a_job_that_begins_says_for_whom_it_waits() -> None:
    """Nothing has failed before the first view."""
    log = Log(3)
    log.lines = log.lines[:3]
    assert verdict(log) == ("wait", "Starting", "Waiting for 0/2.")
    assert facts(History(), 0.0)["verdict"]["level"] == "wait"


def test_the_coordinator_knows_more_than_the_log() -> None:
    """States, steps and the age of heartbeats are its own; restarts, process and the reason of a loss are the log's."""
    log = Log(3, per_host=1, host="host-{}")
    log.lose("2/0")
    log.recover()
    settings, members = Settings(), tuple(log.members)
    now_s, core = 100.0, state.initial(members, 100.0, 600.0)

    def step(event: events.Event) -> None:
        nonlocal core
        core, _ = machine.step(settings, core, event, now_s)

    for node, name in enumerate(members):
        step(events.Hello(name, 1, 0, Address(f"10.0.0.{node}", 5000)))
        step(events.Parked(name, 1, 0, 0, "start"))
    step(events.Heartbeat("0/0", 1, step=77, doing="training_step"))
    step(events.Exited("2/0", 1, -9, "killed by SIGKILL"))
    step(events.Parked("0/0", 1, 1, 5, "suspended"))
    step(events.Parked("1/0", 1, 1, 5, "suspended"))
    step(events.Ready("2/0", 2, Address("10.0.0.2", 5001)))
    (history,) = histories(log.lines)
    found = facts(history, log.now_s, job_status(core, now_s + 7))
    rows = {row["member"]: row for row in found["members"]}
    assert (rows["0/0"]["state"], rows["0/0"]["step"], rows["0/0"]["doing"]) == ("running", 77, "training_step")
    assert (rows["0/0"]["host"], rows["0/0"]["age_s"], rows["0/0"]["is_late"]) == ("10.0.0.0", 7.0, True)
    assert (rows["2/0"]["state"], rows["2/0"]["rank"], rows["2/0"]["is_back"]) == ("lost", None, True)
    assert found["ring"] == ["0/0", "1/0"]
    assert (found["num_members"], found["target"], found["is_live"]) == (2, 3, True)
    assert found["verdict"]["text"] == "Missing: 2/0 (killed by SIGKILL; back, waits to join)."


def test_facts_have_a_limit_however_long_the_job() -> None:
    """The latest incidents and events are shown, all are counted; a long text is cut."""
    log = Log(2)
    for _ in range(MAX_INCIDENTS):
        log.lose("0/1", detail="x" * 5000)
        log.recover()
        log.admit("0/1")
        log.wait(1)
    found = shown(log)
    assert len(found["incidents"]) == MAX_INCIDENTS
    assert (found["num_incidents"], found["num_failures"]) == (2 * MAX_INCIDENTS, MAX_INCIDENTS)
    assert len(found["sentences"]) <= MAX_SENTENCES
    assert len(found["incidents"][-1]["reason"]) <= 600
    lost_s = found["lost_before_s"] + sum(last_s - first_s for first_s, last_s in found["standstills"])
    assert lost_s == pytest.approx(1.25 * MAX_INCIDENTS)
    assert found["goodput"] == pytest.approx(1 - lost_s / (found["end_s"] - found["trains_since_s"]))


def test_text_says_the_same() -> None:
    """For a terminal."""
    text = in_words(shown(busy(4)))
    assert text.startswith(
        "Training with 3 of 4 members. Missing: 0/3 (killed by SIGKILL).\n3 of 4 members, generation 4"
    )
    assert "2 failures, 1.0 s on average" in text
    assert "process ended 0/1: 1.0 s (detect 0 ms, park 500 ms, rebuild 250 ms, settle 125 ms, catch up 125 ms)" in text
    assert "joined 0/1: 250 ms" in text
    (history,) = histories(["no line of a log", *busy(1).lines])
    assert "left out: damaged lines 1, unknown events 0" in in_words(facts(history, history.last_s or 0.0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0084, "8 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (86399, "1 d 0 h"),
        (200_000, "2 d 8 h"),
    ],
)
def test_duration_is_said_in_two_units(seconds: float, text: str) -> None:
    """Rounded once, so that no unit overflows."""
    assert duration(seconds) == text
