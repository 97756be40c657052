"""Machines that were never part of a job join it while it runs, as far as there is room; spares replace the dead."""

from __future__ import annotations

import pathlib

import torch

from lightning_ft.child import CANNOT_JOIN_STATUS
from tests.integration import jobs, reference
from tests.integration.test_kill_points import check_weights

GROWS = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_MAX_WORLD_SIZE": "4"}
PROGRAM = ["plain_loop.py", "20", "--full", "--double", "--world-size", "4"]


def check_whole(job: jobs.Job, members: tuple[str, ...], num_at_end: int) -> None:
    """Check that a job of plain_loop.py kept every promise, and who took part in the last step."""
    assert job.finish() == 0, job.output()
    contributors = jobs.committed(job, members)
    assert sorted(contributors) == list(range(len(contributors)))
    assert jobs.contributors_by_events(job.events(), len(contributors)) == contributors, job.output()
    last = contributors[len(contributors) - 1]
    assert len(last) == num_at_end, last
    check_weights(job, last, reference.final_weights(contributors, model="mlp", dtype=torch.float64))


def has_committed(job: jobs.Job, member: str) -> bool:
    return any(line["event"] == "committed" for line in job.records(member))


def named(job: jobs.Job, event: str) -> list[dict[str, object]]:
    return [line for line in job.events() if line["event"] == event]


def test_who_starts_with_another_model_is_named(tmp_path: pathlib.Path) -> None:
    """All ranks end with the first difference."""
    with jobs.running(tmp_path, 3, ["plain_loop.py", "20", "--wide", "0/2"]) as job:
        assert job.finish() == 1, job.output()
        told = [str(line["exception"]) for line in named(job, "failed")]
        where = "parameter 0: first.weight is [64, 16] float32 there, [65, 16] float32 here"
        assert [f"than rank 0's (there): {where}. " in text for text in told] == [True] * 3, job.output()
        assert all("the model of rank 2 (here) has other parameter names" in text for text in told)


def test_a_new_machine_joins_and_a_wrong_one_does_not(tmp_path: pathlib.Path) -> None:
    """2 ranks become 4, bitwise equal; one with another model, and one with too many, are told why they can't."""
    settings = GROWS | jobs.at_port()
    with jobs.running(tmp_path, 2, PROGRAM, settings) as job:
        job.wait_until(lambda: has_committed(job, "0/0"))
        with jobs.joining(tmp_path, None, 1, [*PROGRAM, "--width", "65"], settings, output_name="other.txt") as other:
            assert other.finish() == CANNOT_JOIN_STATUS, other.output()
            assert (
                "parameter 0 of model: first.weight is [64, 16] float64 there, [65, 16] float64 here" in other.output()
            )
        assert [line["generation"] for line in named(job, "join_declined")] == [1], "nobody was disturbed"
        with jobs.joining(tmp_path, None, 3, PROGRAM, settings, output_name="many.txt") as many:
            assert many.finish() == 1, many.output()
            assert "failed: there is no room: the job has at most 4 members" in many.output(), many.output()
        with jobs.joining(tmp_path, None, 2, PROGRAM, settings) as more:
            check_whole(job, ("0/0", "0/1", "2/0", "2/1"), 4)
            assert more.finish() == 0, more.output()
    assert {line["event"] for line in job.events()} & {"failure_detected"} == set(), job.output()


def test_a_machine_takes_the_place_of_a_dead_one(tmp_path: pathlib.Path) -> None:
    """A node whose agent is killed comes back under its number once it is known to be dead."""
    settings = GROWS | jobs.at_port()
    with jobs.running(tmp_path, 2, PROGRAM, settings) as job:
        job.wait_until(lambda: has_committed(job, "0/0"))
        with jobs.joining(tmp_path, 1, 2, PROGRAM, settings) as first:
            job.wait_until(lambda: all(has_committed(job, f"1/{slot}") for slot in range(2)))
            first.process.kill()
            first.process.wait()
            with jobs.joining(tmp_path, 1, 2, PROGRAM, settings, output_name="again.txt") as again:
                check_whole(job, ("0/0", "0/1", "1/0", "1/1"), 4)
                assert again.finish() == 0, again.output()
    assert [line["incarnation"] for line in named(job, "member_joined")] == [1, 1, 1, 1, 5, 5]


def test_a_spare_takes_the_place_of_the_dead(tmp_path: pathlib.Path) -> None:
    """While the dead one starts again, to be the next spare; that a spare dies is nothing to the job."""
    program = ["plain_loop.py", "30", "--full", "--double", "--world-size", "3", "--hold", "5", "15"]
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@10; 0/2=commit.done@20"}
    settings = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_SPARES": "1"}
    with jobs.running(tmp_path, 3, program, settings | faults) as job:
        job.wait_until(lambda: len(named(job, "spare_ready")) == 1)
        (tmp_path / "go-5").touch()
        job.wait_until(lambda: len(named(job, "spare_ready")) == 2)
        job.kill("0/1")
        job.wait_until(lambda: len(named(job, "spare_ready")) == 3)
        (tmp_path / "go-15").touch()
        check_whole(job, ("0/0", "0/1", "0/2", "0/3"), 3)
        assert [line["joined"] for line in named(job, "members_admitted")] == [["0/3"], ["0/1"]], job.output()
        assert [line["member"] for line in named(job, "failure_detected")] == ["0/1", "0/2"], job.output()
        assert [line["member"] for line in named(job, "spare_ready")] == ["0/3", "0/1", "0/1"], job.output()
