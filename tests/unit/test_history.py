"""What a job's event log says of it."""

from __future__ import annotations

import json

import pytest

from lightning_ft.history.fold import add, histories
from lightning_ft.history.state import Checkpoint, History, MemberState, Outcome

STORY = """
0 job_started members=0/0,0/1,1/0 g0
4 member_joined 0/1 incarnation=1 host=one pid=11
4 member_joined 0/0 incarnation=1 host=one pid=10
5 member_joined 1/0 incarnation=1 host=two pid=10
10 view_committed members=0/0,0/1,1/0 g1 reason=start
14 training_started 0/1 g1
50 failure_detected 0/0 cause=heartbeat detail=silent late_s=6.0 detect_s=5.0 host=one g1
50 view_suspended 0/0 reason=gone g1
51 view_committed members=0/1,1/0 g2 reason=parked
52 recovered 0/1 latency_s=3.0 park_s=2.0 rebuild_s=0.25 settle_s=0.25 rounds=1 step=40 redone=reduce g2
53 member_exited 0/0 status=-9 detail=killed g2
70 view_suspended 1/0 reason=1/0_parked:_join g2
70 member_joined 0/0 incarnation=2 host=one pid=12 g3
70 view_committed members=0/1,1/0,0/0 g3 reason=joined
60 checkpoint_saved 0/1 step=50 kind=base bytes=100 duration_s=2.0 blocked_s=0.5 g2
65 checkpoint_failed 0/1 step=55 cause=ENOSPC count=1 g2
71 members_admitted 0/1 latency_s=1.0 park_s=0.5 rebuild_s=0.0 settle_s=0.5 rounds=1 step=58 joined=0/0 g3
110 job_stopped reason=all g3
112 member_exited 0/1 status=0 detail=exited g3
113 job_finished status=0 g3
"""
"""Seconds, event, member, fields: 0/0 dies unheard after 45 s, and is back after 70."""


def lines(story: str = STORY) -> list[str]:
    """Write a story as a log."""
    found = []
    for time_s, event, *words in (line.split() for line in story.strip().splitlines()):
        fields: dict[str, object] = {"time": float(time_s), "event": event, "generation": 0, "member": None}
        for word in words:
            name, separator, text = word.partition("=")
            if not separator:
                fields |= {"generation": int(word[1:])} if word.startswith("g") else {"member": word}
            elif name in ("members", "joined"):
                fields[name] = text.split(",")
            else:
                fields[name] = text.replace("_", " ") if name == "reason" else _value(text)
        found.append(json.dumps(fields))
    return found


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.fixture
def history() -> History:
    """The story's."""
    (found,) = histories(lines())
    return found


def test_a_loss_is_an_incident_with_its_phases(history: History) -> None:
    """It began when the lost member was last heard of, and ended when rank 0 said so; the phases add up to that."""
    loss, admission = history.incidents
    assert (loss.began_s, loss.ended_s, loss.outcome, loss.cause) == (45, 52, Outcome.RECOVERED, "heartbeat")
    assert loss.phases == {"detect": 4, "park": 2, "rebuild": 0.25, "settle": 0.25, "catch_up": 0.5}
    assert [(lost.member, lost.host, lost.detail) for lost in loss.losses] == [("0/0", "one", "silent")]
    assert (loss.step, loss.redone, loss.rounds, loss.restored_s) == (40, "reduce", 1, 70)
    assert (admission.began_s, admission.ended_s, admission.outcome) == (70, 71, Outcome.ADMITTED)
    assert (admission.cause, admission.joined, admission.restored_s) == ("join", ("0/0",), 70)


def test_members_are_followed_over_their_processes(history: History) -> None:
    """A rank is a position in the newest view; who came back has a restart; the last step is the last that is known."""
    assert {name: (member.rank, member.restarts, member.pid) for name, member in history.members.items()} == {
        "0/0": (2, 1, 12),
        "0/1": (0, 0, 11),
        "1/0": (1, 0, 10),
    }
    assert history.members["0/1"].state is MemberState.ENDED
    assert {member.last_step for member in history.members.values()} == {58}


def test_goodput_counts_the_time_in_which_the_job_made_progress(history: History) -> None:
    """Of 96 seconds since the first step 8 were lost; a third of the members was missing for 20 of them."""
    assert history.goodput(500) == pytest.approx(1 - 8 / 96)
    assert history.capacity(500) == pytest.approx(1 - 20 / 3 / 96)
    assert history.goodput(47) == pytest.approx(31 / 33)
    assert history.goodput(13) is None
    assert history.standstills(500) == [(45, 52), (70, 71)]


def test_add_returns_the_incident_that_a_line_ends() -> None:
    """Whoever counts incidents hears of each once, when it is over."""
    history = History()
    ended = [incident for line in lines() if (incident := add(history, line)) is not None]
    assert ended == history.incidents


def test_a_recovery_that_is_said_again_is_one() -> None:
    """A member repeats it where the coordinator may have died with it; the history stays as it was."""
    once, twice = History(), History()
    for line in lines():
        add(once, line)
        add(twice, line)
        if "latency_s" in line:
            assert add(twice, json.dumps(json.loads(line) | {"time": json.loads(line)["time"] + 5})) is None
    assert twice.incidents == once.incidents
    assert twice.members == once.members


def test_an_incident_goes_on_until_training_does() -> None:
    """A job that waits says since when and for what."""
    history = History()
    for line in lines()[:8]:
        add(history, line)
    assert history.incident is history.incidents[0]
    assert history.incident.duration_s(60) == 15
    assert history.members["0/0"].state is MemberState.LOST
    assert history.goodput(60) == pytest.approx(31 / 46)


def test_without_its_first_step_a_job_trains_since_its_first_view() -> None:
    """Rank 0 may die before it says so, and a log may begin later."""
    (history,) = histories(line for line in lines() if "training_started" not in line)
    assert history.trains_since_s == 10
    assert history.goodput(500) == pytest.approx(0.92)


def test_a_stop_that_only_a_part_of_the_job_said_is_none() -> None:
    """A coordinator that was cut off says that the job stopped; a view after it shows that it did not."""
    text = STORY.replace("51 view", "50.5 job_stopped reason=cut g1\n51 view").partition("110 ")[0]
    (history,) = histories(lines(text))
    assert history.stopped_s is None
    assert [incident.outcome for incident in history.incidents] == [Outcome.RECOVERED, Outcome.ADMITTED]
    assert history.incidents[0].ended_s == 52


def test_checkpoints_are_listed_and_failures_counted(history: History) -> None:
    """What a save cost, and how many came to nothing."""
    assert history.checkpoints == [Checkpoint(60, 50, "base", 100, 2.0, 0.5)]
    assert (history.num_checkpoints_failed, history.num_checkpoints_skipped) == (1, 0)
