"""Ranks of a Lightning fit that died come back, and go on in the middle of the epoch as if they had never been away."""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch

from tests.integration import jobs
from tests.integration.test_lightning import check_data, log_rows

MEMBERS = ("0/0", "0/1", "0/2", "0/3")
RESPAWN = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_ON_RESIZE": "scale_lr"}


def check_fit(
    job: jobs.Job, num_epochs: int, num_lost: int, members: tuple[str, ...] = MEMBERS, num_at_start: int = 4
) -> None:
    """Check a fit of lightning_fit.py with these ranks, that all were there at its end; the first began it.

    All ranks had the same weights after each batch that they saw, and saw each batch once; whoever came back went on at
    the very next one. The metrics of each validation are the same on all ranks. The log has one line for each step, and
    the checkpoints are those of a fit in which nobody died. All were told of each change before the same batch, and
    their learning rate is in proportion to the number of ranks.
    """
    assert job.finish(150) == 0, job.output()
    lost = [event for event in job.events() if event["event"] == "failure_detected"]
    assert len(lost) == num_lost, job.output()
    assert len([event for event in job.events() if event["event"] == "members_admitted"]) >= 1, job.output()
    hashes: dict[int, tuple[str, int, int]] = {}
    metrics: dict[int, dict[str, float]] = {}
    changes: dict[int, tuple[list[str], list[str], int]] = {}
    for member in members:
        lines = job.records(member)
        assert lines[-1]["event"] == "end", f"{member}\n{job.output()}"
        starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            steps = [line["step"] for line in lines[start:end] if line["event"] == "batch"]
            assert steps == list(range(steps[0], steps[0] + len(steps))), f"{member}: {steps}\n{job.output()}"
        num_ranks = num_at_start
        for line in lines:
            if line["event"] == "batch":
                found = (line["hash"], line["epoch"], line["batch"])
                assert hashes.setdefault(line["step"], found) == found, f"{member} {line}\n{job.output()}"
                assert line["rate"] == pytest.approx(0.05 * num_ranks / num_at_start), (
                    f"{member} {line}\n{job.output()}"
                )
            if line["event"] == "change":
                num_ranks = len(line["new"])
                told = (line["old"], line["new"], line["size"])
                assert changes.setdefault(line["step"], told) == told, f"{member} {line}\n{job.output()}"
            if line["event"] == "validated" and line["step"]:
                assert metrics.setdefault(line["step"], line["metrics"]) == line["metrics"], f"{member} {line}"
    views = [[*members[:num_at_start]], *(new for _, (_, new, _) in sorted(changes.items()))]
    assert [old for _, (old, _, _) in sorted(changes.items())] == views[:-1], changes
    assert sorted(views[-1]) == [*members], changes
    assert all(size == len(new) for _, new, size in changes.values()), changes
    assert sorted(hashes) == list(range(1, len(hashes) + 1))
    assert {epoch for _, epoch, _ in hashes.values()} == set(range(num_epochs))
    check_data(job, members, num_epochs)
    assert [int(row["step"]) for row in log_rows(job, "batchnorm") if row["loss"]] == list(range(len(hashes)))
    ends = {epoch: step for step, (_, epoch, _) in hashes.items()}  # the last step of each
    (directory,) = job.out.glob("logs/batchnorm/version_*/checkpoints")
    last = torch.load(directory / "last.ckpt", weights_only=False)
    assert last["global_step"] == ends[last["epoch"]], "Lightning saves the last when it saves one of the best"
    best = {path.name for path in directory.glob("epoch*.ckpt")}
    assert len(best) == 2
    assert best <= {f"epoch={epoch}-step={step}.ckpt" for epoch, step in ends.items()}


def test_the_dead_come_back(tmp_path: pathlib.Path) -> None:
    """Two of four, rank 0 among them: with weights, optimizer, counters, callbacks and data of the others.

    They get the weights and what the optimizer keeps before they are admitted, while the others train on.
    """
    faults = "0/1=commit.done@10; 0/0=reduction.issued@25"
    program = ["lightning_fit.py", "--devices", "4", "--epochs", "16", "--hold", "--case", "batchnorm"]
    settings = {**RESPAWN, "LIGHTNING_FT_FAIL_AT": faults}
    with jobs.running_fit(tmp_path, 4, [*program, "--ahead", "6144"], settings) as job:
        check_fit(job, 16, num_lost=2)
        missing = [event["missing_bytes"] for event in job.events() if event["event"] == "caught_up"]
        assert missing[0] == 0, job.output()


@pytest.mark.parametrize("num", [1, 2])
def test_a_new_machine_joins(tmp_path: pathlib.Path, num: int) -> None:
    """The same script, started elsewhere while the fit runs, doubles its ranks; learning rates and data follow.

    Its Trainer becomes the agent; or `lightning-ft run` is it.
    """
    program = ["lightning_fit.py", "--devices", str(num), "--epochs", "8", "--wanted", str(2 * num)]
    program += ["--case", "batchnorm"]
    settings = {**RESPAWN, **jobs.at_port(), "LIGHTNING_FT_MAX_WORLD_SIZE": str(2 * num)}
    members = tuple(f"{node}/{slot}" for node in range(2) for slot in range(num))
    joins = settings | {"LIGHTNING_FT_JOIN": "1"}
    if num == 1:
        start = functools.partial(jobs.running_script, tmp_path, program)
    else:
        start = functools.partial(jobs.running_fit, tmp_path, num, program)
    with start(settings) as job:
        job.wait_until(lambda: any(line["event"] == "batch" for line in job.records("0/0")))
        with start(joins, output_name="joining.txt") as more:
            job.wait_until(lambda: all(job.records(member) for member in members))
            (tmp_path / "go").touch()
            check_fit(job, 8, num_lost=0, members=members, num_at_start=num)
            assert more.finish() == 0, more.output()
