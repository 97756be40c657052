"""Each kind of fault, at each moment of a Lightning run, in one rank, in two, and in all but one.

The cells are dealt to jobs of four ranks that are struck again and again. `MATRIX=all` runs every cell, `MATRIX=n` the
few jobs of deal n (0 if nothing is said), `MATRIX='stop@save=0/1 loop@last_step=0/0,0/2'` one job; `NUM_SWEEPS=n` takes
that many deals. A test's name is what to give to `MATRIX`.
docs/fault-matrix.md is the table for a person.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import os
import pathlib
import random
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch

from tests.integration import jobs
from tests.integration.matrix import (
    CELLS,
    DISKS,
    FAULTS,
    MEMBERS,
    NUM_RANKS,
    POINTS,
    RECOVERY,
    Hit,
    Outcome,
    deal,
    plans,
)

SETTINGS = {
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.3",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "3",
    "LIGHTNING_FT_TIMEOUT": "6",
}

PATIENCE_S = 150.0
"""After which a job hangs. All that it may have to wait for is a third of that, its start included."""


def lines(job: jobs.Job, member: str, event: str) -> list[dict[str, Any]]:
    return [line for line in job.records(member) if line["event"] == event]


def told(job: jobs.Job, event: str) -> list[dict[str, Any]]:
    return [line for line in job.events() if line["event"] == event]


def victims(hits: Sequence[Hit], outcome: Outcome) -> list[str]:
    return sorted(member for hit in hits if hit.promise.outcome is outcome for member in hit.members)


def check_steps(job: jobs.Job) -> None:
    """Check that each rank, as far as it came, saw each batch once, with the same weights as all others."""
    hashes: dict[int, str] = {}
    for member in MEMBERS:
        batches = lines(job, member, "batch")
        steps = [line["step"] for line in batches]
        assert steps == list(range(1, len(steps) + 1)), f"{member}: {steps}\n{job.output()}"
        for before, after in itertools.pairwise(batches):
            following = (before["epoch"], before["batch"] + 1), (before["epoch"] + 1, 0)
            assert (after["epoch"], after["batch"]) in following, f"{member}: {before}, {after}\n{job.output()}"
        calls = [line["step"] + 1 for line in lines(job, member, "training_step")]
        assert calls[: len(steps)] == steps, f"{member}: {calls}\n{job.output()}"
        assert len(calls) - len(steps) in (0, 1), f"{member}: training_step runs once per batch\n{job.output()}"
        for line in batches:
            agreed = hashes.setdefault(line["step"], line["hash"])
            assert agreed == line["hash"], f"{member} differs after step {line['step']}\n{job.output()}"


def check_survivors(job: jobs.Job, survivors: Sequence[str], *, is_whole: bool) -> None:
    """Check that these ranks came equally far, that the log has it all, and the checkpoint if they came to the end."""
    batches = {member: lines(job, member, "batch") for member in survivors}
    num_steps = len(batches[survivors[0]])
    assert {len(seen) for seen in batches.values()} == {num_steps}, job.output()
    calls = {len(lines(job, member, "training_step")) for member in survivors}
    assert calls == {num_steps}, "no batch is begun and not ended"
    seen = [[(line["step"], line["loss"]) for line in lines(job, member, "validated")] for member in survivors]
    assert all(validated == seen[0] for validated in seen), f"all have the same metrics: {seen}\n{job.output()}"
    assert logged_steps(job) == list(range(num_steps)), f"each line once\n{job.output()}"
    if is_whole:
        assert [line["epoch"] for line in batches[survivors[0]]][-1] == 1, job.output()
        assert len(seen[0]) == 2, "each epoch was validated"
        (path,) = (job.out / "logs/run").glob("version_*/checkpoints/last.ckpt")
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] == num_steps, job.output()
        assert weights_hash(checkpoint["state_dict"]) == batches[survivors[0]][-1]["hash"], job.output()


def logged_steps(job: jobs.Job) -> list[int]:
    (path,) = (job.out / "logs/run").glob("version_*/metrics.csv")
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


def weights_hash(state: dict[str, torch.Tensor]) -> str:
    """As the program's own."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()[:16]


def check_events(job: jobs.Job, hits: Sequence[Hit]) -> None:
    """Check that the event log names exactly the victims, once each, with a cause that the fault can have."""
    failures = told(job, "failure_detected")
    assert sorted(line["member"] for line in failures) == victims(hits, Outcome.LOST), job.output()
    causes = {line["member"]: line["cause"] for line in failures}
    for hit in hits:
        for member in hit.members:
            if hit.promise.outcome is Outcome.LOST:
                assert causes[member] in hit.promise.causes, f"{hit}: {causes[member]}\n{job.output()}"
    if hits[-1].promise.outcome is not Outcome.STOPPED:
        assert sorted(line["member"] for line in told(job, "member_left")) == victims(hits, Outcome.LEFT), job.output()
    is_restarted = any(hit.fault == "coordinator_killed" for hit in hits)
    assert bool(told(job, "coordinator_restarted")) == is_restarted, job.output()


def check_strikes(job: jobs.Job, hits: Sequence[Hit]) -> None:
    """Check that each fault has happened: else nothing was tried."""
    for hit in hits:
        for member in () if hit.fault.startswith("worker_") else hit.members:
            struck = {(line["fault"], line["moment"]) for line in lines(job, member, "fault")}
            assert (hit.fault, hit.moment) in struck, f"{hit} did not happen in {member}\n{job.output()}"


def processes_of(job: jobs.Job) -> list[psutil.Process]:
    """All processes that were started for a job, however deep."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(job.out) in "".join(process.environ().values()):
                found.append(process)
    return found


def check_job(job: jobs.Job, hits: Sequence[Hit]) -> None:
    """Check all that must hold after these faults, the last of which may be the job's end."""
    last = hits[-1].promise.outcome
    status = job.finish(PATIENCE_S)
    expected = max((hit.promise.status for hit in hits), key=abs)
    check_steps(job)
    if last is Outcome.BEREFT:
        assert status == expected, job.output()
        _, alive = psutil.wait_procs(processes_of(job), timeout=PATIENCE_S)
        assert not alive, f"{alive}\n{job.output()}"
        assert not any(lines(job, member, "end") for member in MEMBERS), "nobody goes on without the agent"
        check_strikes(job, hits)
        return
    assert not processes_of(job), f"{processes_of(job)}\n{job.output()}"
    check_strikes(job, hits)
    ended = [member for member in MEMBERS if lines(job, member, "end")]
    if last is Outcome.CONTRADICTED:
        check_contradiction(job, hits, status, ended)
        return
    if last is Outcome.FAILED:
        assert status == expected, job.output()
        assert not ended, job.output()
        assert "No space left on device" in job.output()
        return
    gone = {*victims(hits, Outcome.LOST), *victims(hits, Outcome.LEFT)}
    survivors = [member for member in MEMBERS if member not in gone]
    if last is not Outcome.STOPPED:
        assert ended == survivors, job.output()
    check_survivors(job, survivors, is_whole=last is not Outcome.STOPPED)
    if hits[-1].fault == "events_full":
        assert "The event log can't be written" in job.output()
    else:
        check_events(job, hits)
    assert status == expected, job.output()


def check_contradiction(job: jobs.Job, hits: Sequence[Hit], status: int, ended: Sequence[str]) -> None:
    """Check that ranks that contradict each other end, and that those who go on have lost nothing."""
    lost = {line["member"] for line in told(job, "failure_detected")}
    assert lost > set(victims(hits, Outcome.LOST)), f"somebody pays for it\n{job.output()}"
    assert (status == 0) == bool(ended), job.output()
    if ended:
        assert set(ended) == set(MEMBERS) - lost - set(victims(hits, Outcome.LEFT)), job.output()
        check_survivors(job, ended, is_whole=True)


@contextlib.contextmanager
def small_disk(path: pathlib.Path) -> Iterator[None]:
    """Mount a file system of one megabyte; where that can't be done, the test is skipped, but fails in CI."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("a small disk needs root and mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True, capture_output=True)  # noqa: S607 - wherever it is


@pytest.mark.parametrize("plan", plans())
def test_the_matrix(tmp_path: pathlib.Path, plan: str) -> None:
    """Whatever strikes, when and whomever: what the table promises holds, and the others' training is whole."""
    hits = [Hit.parse(text) for text in plan.split()]
    with contextlib.ExitStack() as stack:
        settings = dict(SETTINGS)
        for name in {DISKS[hit.fault] for hit in hits if hit.fault in DISKS}:
            stack.enter_context(small_disk(tmp_path / name))
            if name == "events":
                settings["LIGHTNING_FT_EVENT_LOG"] = str(tmp_path / name / "events.jsonl")
        program = ["matrix_fit.py", str(NUM_RANKS), *plan.split()]
        job = stack.enter_context(jobs.running_fit(tmp_path, NUM_RANKS, program, settings))
        check_job(job, hits)


def test_each_cell_is_dealt_once() -> None:
    """No cell is left out of all jobs, or in two."""
    struck = [Hit.parse(text) for plan in deal(CELLS, random.Random(1)) for text in plan.split()]
    struck = [hit for hit in struck if hit.moment != "second_epoch"]
    assert len(struck) == len(CELLS)
    assert {hit.fault for hit in struck} == set(FAULTS)
    moments = {(hit.fault, RECOVERY if hit.moment in POINTS else hit.moment) for hit in struck}
    assert moments == {(cell.fault, cell.moment) for cell in CELLS}
