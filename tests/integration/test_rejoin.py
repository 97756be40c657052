"""Members that died come back, catch up and train on with the others, in a plain PyTorch loop."""

from __future__ import annotations

import pathlib

import psutil
import pytest
import torch

from lightning_ft.child import CANNOT_JOIN_STATUS
from tests.integration import jobs, reference
from tests.integration.test_kill_points import NUM_SWEEPS, check_weights

MEMBERS = ("0/0", "0/1", "0/2", "0/3")
RESPAWN = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_MAX_RESTARTS": "5"}


def check_full_again(job: jobs.Job, num_lost: int, members: tuple[str, ...] = MEMBERS, **program: object) -> None:
    """Check that a job kept every promise, and ended with all its members.

    Args:
        job: Of plain_loop.py with `--full`.
        num_lost: How many processes died on the way.
        members: All of the job.
        **program: What `reference.final_weights` must know.
    """
    assert job.finish() == 0, job.output()
    contributors = jobs.committed(job, members)
    assert sorted(contributors) == list(range(len(contributors)))
    assert jobs.contributors_by_events(job.events(), len(contributors)) == contributors, job.output()
    assert all(job.records(member)[-1]["event"] == "end" for member in members), job.output()
    assert {event["event"] for event in job.events()} & {"failed", "straggler_detected"} == set(), job.output()
    assert sum(event["event"] == "failure_detected" for event in job.events()) == num_lost, job.output()
    assert set(contributors[len(contributors) - 1]) == set(members)
    check_weights(job, members, reference.final_weights(contributors, **program))  # type: ignore[arg-type]


def test_the_dead_and_who_left_come_back(tmp_path: pathlib.Path) -> None:
    """Two that die, rank 0 among them, are started again, get the state, and train on from the very next step.

    So does one that left with a failure of its own: it is not taken for the leaver that it was.
    """
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@10; 0/0=commit.done@20; 0/2=commit.done@30:exit"}
    with jobs.running(
        tmp_path, 4, ["plain_loop.py", "40", "--full", "--double", "--model", "batchnorm"], RESPAWN | faults
    ) as job:
        check_full_again(job, 2, model="batchnorm", dtype=torch.float64)
        starts = {member: sum(line["event"] == "start" for line in job.records(member)) for member in MEMBERS}
        assert starts == {"0/0": 2, "0/1": 2, "0/2": 2, "0/3": 1}, job.output()


def test_too_few_wait_for_the_dead(tmp_path: pathlib.Path) -> None:
    """Whoever is left waits in the middle of its step, finishes it when the other is ready, and goes on with that."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@5; 0/0=reduction.enter@10"}
    limit = {"LIGHTNING_FT_MIN_WORLD_SIZE": "2"}
    with jobs.running(tmp_path, 2, ["plain_loop.py", "16", "--full", "--double"], RESPAWN | faults | limit) as job:
        check_full_again(job, 2, model="mlp", dtype=torch.float64, members=MEMBERS[:2])
        sizes = [len(contributors) for contributors in jobs.committed(job, MEMBERS[:2]).values()]
        assert sizes.count(1) == 2, sizes
        assert sum(event["event"] == "quorum_missing" for event in job.events()) == 2, job.output()


def test_the_same_exception_again_and_again_ends_the_job(tmp_path: pathlib.Path) -> None:
    """One that comes back, and raises what it raised before, shows its traceback; the others then end with it, too."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@10:raise; 0/1#2=commit.done@3:raise"}
    settings = RESPAWN | faults | {"LIGHTNING_FT_MAX_RESTARTS": "2"}
    with jobs.running(tmp_path, 3, ["plain_loop.py", "20", "--full"], settings) as job:
        assert job.finish() == 1, job.output()
        told = [(event["member"], event["exception"]) for event in job.events() if event["event"] == "failed"]
        assert [member for member, _ in told[:2]] == ["0/1", "0/1"], job.output()
        assert all("RuntimeError: fault placed at commit.done" in exception for _, exception in told[:2])
        (stopped,) = [event for event in job.events() if event["event"] == "job_stopped"]
        assert "RuntimeError: fault placed at commit.done for the 2nd time in a row" in stopped["reason"]
        assert "RepeatedFailureError: the coordinator stopped the job: 0/1 failed with" in job.output()


POINTS = ("sever", "park", "build", "exchange", "handover", "transfer", "confirm")
VICTIMS = {"first donor": ("0/0",), "last donor": ("0/2",), "joiner": ("0/1#2",), "joiner and donor": ("0/0", "0/1#2")}


def _deaths(seed: int) -> list[tuple[str, str]]:
    """Return for each victim a point of the admission of 0/1, another one with each seed; fourteen seeds have all."""
    names = ("first donor", "last donor", "joiner and donor" if seed % 2 else "joiner")
    return [(name, POINTS[(seed + 2 * index) % len(POINTS)]) for index, name in enumerate(names)]


def _fault(member: str, point: str) -> str:
    is_joiner = "#" in member
    if point == "transfer":
        return f"{member}=transfer.{'load' if is_joiner else 'send'}"
    if is_joiner:
        return f"{member}=recover.{'exchange' if point == 'park' else point}"  # it does not park first
    return f"{member}=recover.{point}@3"  # the start, the death of 0/1, its return


@pytest.mark.parametrize(("name", "point"), [death for seed in range(NUM_SWEEPS) for death in _deaths(seed + 1)])
def test_kill_in_an_admission(tmp_path: pathlib.Path, name: str, point: str) -> None:
    """Whoever dies at whatever point of an admission, the others go on, and all come back; so if two die at once."""
    faults = {"LIGHTNING_FT_FAIL_AT": "; ".join(["0/1=commit.done@10", *(_fault(who, point) for who in VICTIMS[name])])}
    program = ["plain_loop.py", "20", "--full", "--double", "--optimizer", "adamw"]
    with jobs.running(tmp_path, 3, program, RESPAWN | faults) as job:
        num_lost = 1 + len(VICTIMS[name])
        check_full_again(job, num_lost, MEMBERS[:3], model="mlp", optimizer="adamw", dtype=torch.float64)


def test_whoever_can_not_join_stays_away(tmp_path: pathlib.Path) -> None:
    """It says why, is not started a third time, and the job is none the worse."""
    program = ["plain_loop.py", "200", "--hook", "powersgd", "--slow", "0/0"]
    with jobs.running(tmp_path, 3, program, RESPAWN | {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@10"}) as job:
        assert job.finish() == 0, job.output()
        statuses = [event["status"] for event in job.events() if event["event"] == "member_exited"]
        assert statuses == [-9, CANNOT_JOIN_STATUS, 0, 0], job.output()
        assert "LaunchError: joining the job failed" in job.output()
        assert "[0/1] stays away: it can't join" in job.output()


def test_whoever_comes_too_late_is_ended(tmp_path: pathlib.Path) -> None:
    """The job's end does not wait for a process that starts still."""
    program = ["plain_loop.py", "20", "--hold", "19"]
    with jobs.running(tmp_path, 3, program, RESPAWN | {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@18"}) as job:
        job.wait_until(lambda: any(event["event"] == "member_exited" for event in job.events()))
        children = psutil.Process(job.process.pid).children
        job.wait_until(lambda: len(children()) == 4)  # with the coordinator: it was started again
        (job.out / "go-19").touch()
        assert job.finish() == 0, job.output()
        assert "[0/1] process" in job.output()
        assert "is ended: the job ended before it joined" in job.output()
        statuses = [event["status"] for event in job.events() if event["event"] == "member_exited"]
        assert sorted(statuses) == [-9, -9, 0, 0], job.output()
