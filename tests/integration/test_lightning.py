"""The strategy in real Lightning runs: bitwise like ddp without failures, and whole with them."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.integration import jobs

CASES = ("adamw", "batchnorm", "accumulate", "manual")  # ddp ignores a communication hook on CPU


def _members(num: int) -> tuple[str, ...]:
    return tuple(f"0/{slot}" for slot in range(num))


INDEX_SUM = sum(range(120))
"""Of all samples of a validation or test."""


def check_run(job: jobs.Job, num: int, survivors: set[str], case: str = "adamw") -> dict[str, list[dict[str, Any]]]:
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
        assert steps == _steps(case, batches[member]), f"{member}: {steps}\n{job.output()}"
        calls = [line for line in job.records(member) if line["event"] == "training_step" and line["case"] == case]
        assert len(calls) == len(steps), "training_step runs once per batch"
        for line in job.records(member):
            if line["event"] == "validated" and line["step"]:
                assert line["metrics"]["val_index"] == INDEX_SUM, f"{line}: each sample is in a metric once"
                assert line["metrics"]["val_seen"] == INDEX_SUM, f"{line}: in a list as in a sum"
        for line in batches[member]:
            assert hashes.setdefault(line["step"], line["hash"]) == line["hash"], f"{member} differs at {line}"
    assert len({len(batches[member]) for member in survivors}) == 1
    return batches


def _steps(case: str, batches: list[dict[str, Any]]) -> list[int]:
    """Return what `global_step` must be after each batch: it counts what the optimizers did."""
    per_batch = [2 if case == "manual" else 1] * len(batches)
    if case == "accumulate":  # every third, and the last of an epoch
        following = [line["epoch"] for line in batches[1:]] + [None]
        per_batch = [
            int((line["batch"] + 1) % 3 == 0 or line["epoch"] != epoch)
            for line, epoch in zip(batches, following, strict=True)
        ]
    return list(itertools.accumulate(per_batch))


def log_rows(job: jobs.Job, case: str = "adamw") -> list[dict[str, str]]:
    (path,) = (job.out / "logs" / case).glob("version_*/metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_without_failure_it_is_bitwise_ddp(tmp_path: pathlib.Path) -> None:
    """Same seed, same number of ranks: the same final weights, bit for bit, as Lightning's own ddp on Gloo.

    With LIGHTNING_FT_ENABLE=0 it is that: no agent, no event log, the same result.
    """
    cases = [text for case in CASES for text in ("--case", case)]
    with contextlib.ExitStack() as both:  # side by side: each leaves a core idle while it starts
        started = []
        for strategy in ("ddp", "ft_ddp"):
            program = ["lightning_fit.py", "--strategy", strategy, "--devices", "3", *cases]
            started.append(both.enter_context(jobs.running_script(tmp_path / strategy, program)))
        for job in started:
            assert job.finish(120) == 0, job.output()
    with jobs.running_script(tmp_path / "off", program[: -len(cases)], {"LIGHTNING_FT_ENABLE": "0"}) as job:
        assert job.finish() == 0, job.output()
        assert job.events() == []
    compared = [(case, "ft_ddp") for case in CASES] + [("adamw", "off")]
    for case, strategy in compared:
        expected, got = (torch.load(tmp_path / name / f"{case}.pt") for name in ("ddp", strategy))
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), (case, strategy, name)


POINTS = {
    "batch.start": 40,
    "optimizer.enter": 40,
    "optimizer.done": 40,
    "reduction.done": 40,
    "commit.done": 40,
    "all_reduce.issued": 16,
    "all_reduce.done": 16,
    "broadcast_bytes.issued": 5,
    "broadcast_bytes.done": 5,
    "gather_bytes.issued": 6,
    "gather_bytes.done": 6,
    "evaluation.start": 5,
    "evaluation.batch": 14,
    "checkpoint.save": 3,
    "checkpoint.saved": 3,
}
"""Where a member dies in a fit with sanity check, three epochs and a test; and how often that is reached at least."""

RECOVERY = ["recover.sever", "recover.build", "recover.exchange", "recover.handover", "recover.confirm"]


def _faults(seed: int) -> list[list[str]]:
    """Deal the points to jobs of four, each once and in random order; in each job three members die."""
    chance = random.Random(seed)
    points = list(POINTS)
    chance.shuffle(points)
    chance.shuffle(recoveries := list(RECOVERY))
    jobs_faults = []
    while points:
        chosen, points = points[:3], points[3:]
        victims = chance.sample(_members(4), 3)
        faults = [
            f"{victim}={point}@{chance.randint(1, POINTS[point])}"
            for victim, point in zip(victims, chosen, strict=False)
        ]
        if recoveries and len(chosen) == 3:  # the last one dies in the recovery from another
            faults[2] = f"{victims[2]}=batch.start@1>{recoveries.pop()}"
            points.append(chosen[2])
        jobs_faults.append(faults)
    return jobs_faults


NUM_SWEEPS = int(os.environ.get("NUM_SWEEPS", "1"))
SWEEPS = [faults for seed in range(NUM_SWEEPS) for faults in _faults(seed)]


@pytest.mark.parametrize("points", SWEEPS, ids="+".join)
def test_kill_at_points_of_a_fit(tmp_path: pathlib.Path, points: list[str]) -> None:
    """Whoever dies wherever in a fit, the survivors see each step once and end with whole logs and checkpoints."""
    survivors = set(_members(4)) - {point.split("=")[0] for point in points}
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "3", "--test"]
    with jobs.running_fit(tmp_path, 4, program, {"LIGHTNING_FT_FAIL_AT": "; ".join(points)}) as job:
        batches = check_run(job, 4, survivors)
        lost = {event["member"] for event in job.events() if event["event"] == "failure_detected"}
        assert lost == set(_members(4)) - survivors, job.output()
        check_data(job, _members(4), 3)
        rows = log_rows(job)
        logged = [int(row["step"]) for row in rows if row["loss"]]
        assert logged == sorted(set(logged)), "no line twice"
        assert logged == list(range(len(batches[min(survivors)]))), "no line lost"
        assert len([row for row in rows if row["val_loss"]]) == 3, "each validation is logged once"
        saved = [line for member in survivors for line in job.records(member) if line["event"] == "saved"]
        assert len(saved) == 1, "one rank 0 at the end"
        assert saved[0]["keys"] > 0
        assert pathlib.Path(saved[0]["best"]).with_name("last.ckpt").exists()
        for event in ("validated", "tested"):
            seen = {
                member: [
                    line.get("metrics", line.get("results")) for line in job.records(member) if line["event"] == event
                ]
                for member in survivors
            }
            assert len({str(metrics) for metrics in seen.values()}) == 1, "all survivors have the same metrics"


def check_data(job: jobs.Job, members: Sequence[str], num_epochs: int, max_padding: int = 6) -> None:
    """Check that each epoch of a fit has trained on each sample once, by what the event log says of contributors."""
    lines = [line for member in members for line in job.records(member)]
    epoch_of = {line["step"] - 1: line["epoch"] for line in lines if line["event"] == "batch"}
    drawn = {
        (member, line["step"]): line["index"]
        for member in members
        for line in job.records(member)
        if line["event"] == "training_step"
    }
    contributors = jobs.contributors_by_events(job.events(), len(epoch_of))
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(num_epochs)}
    for step, epoch in epoch_of.items():
        for member in contributors[step]:
            seen[epoch] += drawn[member, step]
    for epoch, indices in seen.items():
        assert set(indices) == set(range(480)), f"epoch {epoch} lacks {set(range(480)) - set(indices)}\n{job.output()}"
        assert len(indices) <= 480 + max_padding, f"epoch {epoch} has {len(indices)} samples\n{job.output()}"


def test_two_at_once_and_all_but_one(tmp_path: pathlib.Path) -> None:
    """Two that die in the same step are one failure; one rank alone ends the fit."""
    faults = "0/0=commit.issued@10; 0/2=commit.issued@10; 0/1=evaluation.batch@7"
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "2"]
    with jobs.running_fit(tmp_path, 4, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        check_run(job, 4, {"0/3"})
        output = (job.out / "output.txt").read_text()
        assert "[0/0 g1] is lost: " in output
        assert "[0/3 g3] training goes on in step " in output


def test_kill_with_other_kinds_of_fit(tmp_path: pathlib.Path) -> None:
    """Several optimizers, accumulation, running statistics and a hook keep their meaning when a rank dies."""
    cases = ("manual", "accumulate", "batchnorm", "hook")
    faults = "0/2=commit.enter@12; 0/0=reduction.issued@30; 0/4=bucket.started@50; 0/1=reduction.done@100"
    program = ["lightning_fit.py", "--devices", "5", *(text for case in cases for text in ("--case", case))]
    with jobs.running_fit(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        ended_in = {}
        for case in cases:
            for member, batches in check_run(job, 5, {"0/3"}, case).items():
                if batches:
                    ended_in[member] = case
        assert ended_in == {"0/2": "manual", "0/0": "accumulate", "0/4": "batchnorm", "0/1": "hook", "0/3": "hook"}


def test_too_few_are_left(tmp_path: pathlib.Path) -> None:
    """The job goes on after as many failures as are allowed; the next one reaches fit as an error that says why."""
    faults = "0/0=reduction.wait@5; 0/1=reduction.wait@15"
    environment = {"LIGHTNING_FT_FAIL_AT": faults, "LIGHTNING_FT_MAX_FAILURES": "1"}
    with jobs.running_fit(tmp_path, 4, ["lightning_fit.py", "--devices", "4"], environment) as job:
        assert job.finish() == 1, job.output()
        output = (job.out / "output.txt").read_text()
        reason = "2 of 4 members are missing, max_failures is 1"
        assert output.count("Traceback (most recent call last)") == 1, "one of the ranks that are left says why"
        assert re.search(rf"\n\[rank[23]\]: lightning_ft\.errors\.QuorumLostError: the .* the job: {reason}", output)
        assert f"the job was stopped: {reason}; failed processes of this node: 4" in output
        assert "in training_step" in output or "in optimizer_step" in output
        for member in ("0/2", "0/3"):
            steps = [line["step"] for line in job.records(member) if line["event"] == "batch"]
            assert steps[-1] == 14, job.output()


def test_evaluation_without_a_fit(tmp_path: pathlib.Path) -> None:
    """A test has results of all of its data, and a prediction outlives a death; what comes after is dealt anew."""
    program = ["lightning_fit.py", "--devices", "4", "--skip-fit", "--test", "--predict"]
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=evaluation.batch@2; 0/0=evaluation.batch@5"}
    with jobs.running_fit(tmp_path, 4, program, faults) as job:
        assert job.finish() == 0, job.output()
        results = [[line for line in job.records(member) if line["event"] == "tested"] for member in ("0/2", "0/3")]
        assert results[0][0]["results"] == results[1][0]["results"]
        assert results[0][0]["results"][0]["test_index"] == INDEX_SUM
        told = [event for event in job.events() if event["event"].startswith("evaluation_")]
        assert [(event["event"], event["stage"], event["missing"]) for event in told[:1]] == [
            ("evaluation_redealt", "test", ["0/1"])
        ], job.output()
        # Of a prediction it is told only if others still predict: nobody waits for anybody at its end.
        assert [(event["stage"], event["missing"]) for event in told[1:]] in ([], [("predict", ["0/0"])])
        predicted = {member: _predicted(job, member) for member in ("0/2", "0/3")}
        assert {len(indices) for indices in predicted.values()} == {40}, "the share of one of three"
        assert not set(predicted["0/2"]) & set(predicted["0/3"])


def _predicted(job: jobs.Job, member: str) -> list[int]:
    return [index for line in job.records(member) if line["event"] == "predicted" for index in line["index"]]


def test_what_the_dead_had_evaluated_is_evaluated_by_the_others(tmp_path: pathlib.Path) -> None:
    """All of the share of a member that dies in a validation, and of one that dies while it does a part of that."""
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "1"]
    # Two batches of the sanity check come first; then each has three, and one of what the first one leaves.
    faults = {"LIGHTNING_FT_FAIL_AT": "0/0=evaluation.batch@5; 0/2=evaluation.batch@6"}
    with jobs.running_fit(tmp_path, 4, program, faults) as job:
        check_run(job, 4, {"0/1", "0/3"})
        (event,) = [event for event in job.events() if event["event"].startswith("evaluation_")]
        assert (event["event"], event["stage"], event["missing"]) == (
            "evaluation_redealt",
            "validation",
            ["0/0", "0/2"],
        )
        assert event["num_samples"] == 30 + 40, "the share of the second has grown by that of the first"
        validated = [line for line in job.records("0/1") if line["event"] == "validated"]
        assert validated[-1]["metrics"]["val_index"] == INDEX_SUM


def test_deaths_inside_the_sync_of_a_metric_leave_no_trace(tmp_path: pathlib.Path) -> None:
    """Whoever dies between two metrics, or while these are put together anew: the others do its share, and begin again.

    Each sample is once in a list state, a sum state and a logged sum: all of them are of the same ranks. The monitor of
    each rank that is left has seen both recoveries, and rank 0's as the event log has them.
    """
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "1", "--monitor"]
    # Two of the sanity check, the accuracy, what was seen: there the first one dies; then both are put together anew.
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=gather_bytes.enter@4; 0/2=gather_bytes.enter@6"}
    with jobs.running_fit(tmp_path, 4, program, faults) as job:
        check_run(job, 4, {"0/0", "0/3"})
        (event,) = [event for event in job.events() if event["event"].startswith("evaluation_")]
        assert (event["event"], event["missing"]) == ("evaluation_redealt", ["0/1", "0/2"]), job.output()
        validated = [[line for line in job.records(name) if line["event"] == "validated"] for name in ("0/0", "0/3")]
        assert [line["metrics"] for line in validated[0]] == [line["metrics"] for line in validated[1]]
        assert validated[0][-1]["metrics"]["val_seen"] == INDEX_SUM
        (told,), (other,) = [
            [line for line in job.records(name) if line["event"] == "monitored"] for name in ("0/0", "0/3")
        ]
        latencies_s = [event["latency_s"] for event in job.events() if event["event"] == "recovered"]
        assert (told["recoveries"], other["recoveries"], len(latencies_s)) == (2, 2, 2), job.output()
        assert told["recovery_latency"] == pytest.approx(sum(latencies_s) / 2)
        assert 0 < told["goodput"] < 1
        (path,) = (job.out / "logs/adamw").glob("version_*/metrics.csv")
        assert {"ft/goodput", "ft/world_size", "loss"} <= set(path.read_text().splitlines()[0].split(","))


def test_rank_zero_and_its_successor_die(tmp_path: pathlib.Path) -> None:
    """The promoted ranks log into the same TensorBoard directory; no point is lost or doubled.

    The first dies in a step: its forked workers, which live on for seconds, hold no socket of the ring, so that it is
    noticed at once. The second dies while the last checkpoint is saved: its share of the validation is in the results.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = ["lightning_fit.py", "--devices", "4", "--workers", "1", "--logger", "tensorboard"]
    faults = {"LIGHTNING_FT_FAIL_AT": "0/0=reduction.issued@9; 0/1=checkpoint.saved@2"}
    with jobs.running_fit(tmp_path, 4, program, faults) as job:
        batches = check_run(job, 4, {"0/2", "0/3"})
        assert not [event for event in job.events() if event["event"].startswith("evaluation_")], job.output()
        (directory,) = (job.out / "logs" / "adamw").glob("version_*")
        accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        accumulator.Reload()
        assert [point.step for point in accumulator.Scalars("loss")] == list(range(len(batches["0/2"])))
        assert len(accumulator.Scalars("val_loss")) == 2, "each validation once"
