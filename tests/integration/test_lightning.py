"""The strategy in real Lightning runs: bitwise like ddp without failures, and whole with them."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import pytest
import torch

from tests.integration import jobs

CASES = ("adamw", "batchnorm", "accumulate", "manual")


def _members(num: int) -> tuple[str, ...]:
    return tuple(f"0/{slot}" for slot in range(num))


def _check_run(job: jobs.Job, num: int, survivors: set[str], case: str = "adamw") -> dict[str, list[dict[str, Any]]]:
    """Check that each survivor saw each batch and step once, all with the same weights; returns all batches."""
    assert job.finish() == 0, job.output()
    batches = {
        member: [line for line in job.records(member) if line["event"] == "batch" and line["case"] == case]
        for member in _members(num)
    }
    ended = {member for member in _members(num) if any(line["event"] == "end" for line in job.records(member))}
    assert ended == survivors, job.output()
    hashes: dict[int, str] = {}
    for member in survivors:
        steps = [line["step"] for line in batches[member]]
        assert steps == list(range(1, len(steps) + 1)), f"{member}: {steps}\n{job.output()}"
        calls = [line for line in job.records(member) if line["event"] == "training_step" and line["case"] == case]
        assert len(calls) == len(steps), "training_step runs once per batch"
        for line in batches[member]:
            assert hashes.setdefault(line["step"], line["hash"]) == line["hash"], f"{member} differs at {line}"
    assert len({len(batches[member]) for member in survivors}) == 1
    return batches


def _rows(job: jobs.Job, case: str = "adamw") -> list[dict[str, str]]:
    (path,) = (job.out / "logs" / case).glob("version_*/metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("devices", [2, 3])
def test_without_failure_it_is_bitwise_ddp(tmp_path: pathlib.Path, devices: int) -> None:
    """Same seed, same number of ranks: the same final weights, bit for bit, as Lightning's own ddp on Gloo."""
    cases = [text for case in CASES for text in ("--case", case)]
    for strategy in ("ddp", "ft_ddp"):
        out = tmp_path / strategy
        program = ["lightning_fit.py", "--strategy", strategy, "--devices", str(devices), *cases]
        with jobs.running_script(out, program) as job:
            assert job.finish(120) == 0, job.output()
    for case in CASES:
        expected, got = (torch.load(tmp_path / strategy / f"{case}.pt") for strategy in ("ddp", "ft_ddp"))
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), (case, name)


@pytest.mark.parametrize(
    "points",
    [
        ("0/1=batch.start@5", "0/0=optimizer.enter@12", "0/2=optimizer.done@18"),
        ("0/0=broadcast_bytes.enter@3", "0/3=reduction.issued@9", "0/1=commit.issued@14"),
        ("0/2=all_reduce.issued@12", "0/0=evaluation.start@2", "0/3=gather_bytes.enter@2"),
        ("0/0=checkpoint.save@1", "0/1=checkpoint.save@3"),
        ("0/0=evaluation.start@4", "0/1=evaluation.start@5"),  # the last validation, the test
    ],
    ids="+".join,
)
def test_kill_at_points_of_a_fit(tmp_path: pathlib.Path, points: tuple[str, ...]) -> None:
    """Whoever dies wherever in a fit, the survivors see each step once and end with whole logs and checkpoints."""
    survivors = set(_members(4)) - {point.split("=")[0] for point in points}
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "3", "--test"]
    with jobs.running_script(tmp_path, program, {"LIGHTNING_FT_FAIL_AT": "; ".join(points)}) as job:
        batches = _check_run(job, 4, survivors)
        lost = {event["member"] for event in job.events() if event["event"] == "failure_detected"}
        assert lost == set(_members(4)) - survivors, job.output()
        rows = _rows(job)
        logged = [int(row["step"]) for row in rows if row["loss"]]
        assert logged == sorted(set(logged)), "no line twice"
        assert logged == list(range(len(batches[min(survivors)]))), "no line lost"
        saved = [line for member in survivors for line in job.records(member) if line["event"] == "saved"]
        assert len(saved) == 1, "one rank 0 at the end"
        assert saved[0]["keys"] > 0
        validated = {
            member: [line["metrics"] for line in job.records(member) if line["event"] == "validated"]
            for member in survivors
        }
        assert len({str(metrics) for metrics in validated.values()}) == 1, "all survivors have the same metrics"


def test_what_the_dead_had_to_evaluate_is_said(tmp_path: pathlib.Path) -> None:
    """A member that dies in a validation leaves a hole, and the event log tells its size."""
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "1"]
    with jobs.running_script(tmp_path, program, {"LIGHTNING_FT_FAIL_AT": "0/2=evaluation.batch@5"}) as job:
        _check_run(job, 4, set(_members(4)) - {"0/2"})
        (event,) = [event for event in job.events() if event["event"] == "evaluation_incomplete"]
        assert event["stage"] == "validation"
        assert event["coverage"] == pytest.approx(0.75)
        assert event["missing"] == ["0/2"]


def test_dataloader_workers_do_not_keep_the_dead_alive(tmp_path: pathlib.Path) -> None:
    """Forked workers hold no socket of the ring: a killed parent is noticed although they live on for seconds."""
    program = ["lightning_fit.py", "--devices", "3", "--workers", "1"]
    with jobs.running_script(tmp_path, program, {"LIGHTNING_FT_FAIL_AT": "0/0=reduction.issued@9"}) as job:
        _check_run(job, 3, {"0/1", "0/2"})


def test_tensorboard_goes_on_after_rank_zero(tmp_path: pathlib.Path) -> None:
    """The promoted rank logs into the same directory; no point is lost or doubled."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = ["lightning_fit.py", "--devices", "3", "--logger", "tensorboard"]
    with jobs.running_script(tmp_path, program, {"LIGHTNING_FT_FAIL_AT": "0/0=reduction.issued@15"}) as job:
        batches = _check_run(job, 3, {"0/1", "0/2"})
        (directory,) = (job.out / "logs" / "adamw").glob("version_*")
        accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        accumulator.Reload()
        assert [point.step for point in accumulator.Scalars("loss")] == list(range(len(batches["0/1"])))
