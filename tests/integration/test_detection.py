"""Members that hang, stop or work for long, and a coordinator that dies or stops, in real jobs."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from typing import Any

import psutil
import pytest
import torch

from tests.integration import jobs
from tests.integration.test_kill_points import MEMBERS, NUM_SWEEPS, check_job
from tests.integration.test_lightning import check_run, log_rows

QUICK = {
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.2",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "2",
    "LIGHTNING_FT_TIMEOUT": "4",
}


def told(job: jobs.Job, event: str) -> list[dict[str, Any]]:
    return [line for line in job.events() if line["event"] == event]


def sums(job: jobs.Job, member: str) -> list[float]:
    return [line["value"] for line in job.records(member) if line["event"] == "sum"]


def test_members_that_hang_are_named_with_their_stacks(tmp_path: pathlib.Path) -> None:
    """In a loop, at a lock, in C with the interpreter's lock, stopped: each is found and killed, and nobody else."""
    program = ["hangs.py", "60", "0/1=loop@10", "0/3=lock@20", "0/0=gil@30", "0/4=stop@40"]
    with jobs.running(tmp_path, 5, program, QUICK) as job:
        assert job.finish() == 0, job.output()
        failures = {failure["member"]: failure for failure in told(job, "failure_detected")}
        assert {member: failure["cause"] for member, failure in failures.items()} == {
            "0/1": "hang",
            "0/3": "hang",
            "0/0": "hang",
            "0/4": "heartbeat",
        }
        assert failures["0/1"]["doing"] == "about to loop"
        assert failures["0/3"]["doing"] == "about to lock"
        assert "nor answered, though its process computes" in failures["0/0"]["detail"]
        assert all(failure["host"] == "127.0.0.1" and failure["late_s"] >= 2 for failure in failures.values())
        stacks = {line["member"]: line["stacks"] for line in told(job, "member_stacks")}
        assert "in hang_in_a_loop" in stacks["0/1"]
        assert "in hang_at_a_lock" in stacks["0/3"]
        assert "in hang_with_the_gil" in stacks["0/0"]
        assert "0/4" not in stacks, "a stopped process answers nothing"
        assert sums(job, "0/2") == [5.0] * 10 + [4.0] * 10 + [3.0] * 10 + [2.0] * 10 + [1.0] * 20
        assert not any(pathlib.Path(f"/proc/{job.pid(member)}").exists() for member in failures)
        assert "in hang_at_a_lock" in job.output(), "a person sees it on the console too"


def test_work_that_is_said_is_no_hang(tmp_path: pathlib.Path) -> None:
    """The others wait for longer than `timeout`, a learned one, for one that shows progress, and for no other."""
    learning = {
        "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.2",
        "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "0.8",
        "LIGHTNING_FT_TIMEOUT": "auto",
    }
    with jobs.running(tmp_path, 3, ["hangs.py", "40", "0/1=busy@20", "0/2=quiet@30"], learning) as job:
        assert job.finish() == 0, job.output()
        (failure,) = told(job, "failure_detected")
        assert (failure["member"], failure["cause"]) == ("0/2", "hang")
        assert sums(job, "0/0") == sums(job, "0/1") == [3.0] * 30 + [2.0] * 10


def test_a_straggler_is_reported_and_given_up_if_that_is_wished(tmp_path: pathlib.Path) -> None:
    """With what it costs the others."""
    settings = {**QUICK, "LIGHTNING_FT_EVICT_STRAGGLERS": "1"}
    with jobs.running(tmp_path, 4, ["plain_loop.py", "120", "--slow", "0/2"], settings) as job:
        check_job(job, 120, {"0/0", "0/1", "0/3"}, MEMBERS[:4], model="mlp")
        (straggler,) = told(job, "straggler_detected")
        assert straggler["member"] == "0/2"
        assert straggler["host"] == "127.0.0.1"
        assert straggler["busy_s"] >= 0.05 > straggler["median_s"]
        assert straggler["share"] == pytest.approx(1 - straggler["median_s"] / straggler["busy_s"], abs=1e-3)
        (failure,) = told(job, "failure_detected")
        assert failure["cause"] == "slow"


def test_a_short_stop_is_no_failure(tmp_path: pathlib.Path) -> None:
    """A process that goes on before its silence is too long costs nothing but the wait."""
    patient = {**QUICK, "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "20", "LIGHTNING_FT_TIMEOUT": "60"}
    with jobs.running(tmp_path, 3, ["hangs.py", "6000"], patient) as job:
        job.wait_until(lambda: len(sums(job, "0/1")) > 20)
        written = tmp_path / "0-0.jsonl"
        for _ in range(3):
            job.kill("0/1", signal.SIGSTOP)
            job.wait_until(lambda: time.time() - written.stat().st_mtime > 0.5)
            count = len(sums(job, "0/0"))
            assert count < 6000, "the others wait"
            job.kill("0/1", signal.SIGCONT)
            job.wait_until(lambda count=count: len(sums(job, "0/0")) > count)
        assert job.finish() == 0, job.output()
        assert not told(job, "failure_detected")
        assert len(told(job, "view_committed")) == 1


def _coordinator_pid(job: jobs.Job) -> int:
    children = pathlib.Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    for pid in map(int, children):
        if b"lightning_ft.coordinator.standalone" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no coordinator among {children}")


def test_training_does_not_wait_for_the_coordinator(tmp_path: pathlib.Path) -> None:
    """While it is stopped for longer than `heartbeat_timeout`, steps go on; when it goes on, it gives nobody up.

    If it is stopped for good, its agent kills it; the next one goes on, gives nobody up, and the job outlives a death
    after that. If then the agent is killed, nobody knows how the job would have ended: the event log ends without a
    word.
    """
    program = ["plain_loop.py", "100000", "--width", "16"]
    with jobs.running(tmp_path, 3, program, {**QUICK, "LIGHTNING_FT_TIMEOUT": "60"}) as job:
        job.wait_until(lambda: len(job.records("0/0")) > 20)
        stopped = _coordinator_pid(job)
        os.kill(stopped, signal.SIGSTOP)
        first_s = job.records("0/0")[-1]["time"]
        job.wait_until(lambda: job.records("0/0")[-1]["time"] > first_s + 3.0)
        os.kill(stopped, signal.SIGCONT)
        job.wait_until(lambda: job.records("0/0")[-1]["time"] > first_s + 6.0)
        assert not told(job, "failure_detected")
        assert len(told(job, "view_committed")) == 1

        num_restarts = len(told(job, "coordinator_restarted"))
        stopped = _coordinator_pid(job)
        os.kill(stopped, signal.SIGSTOP)
        job.wait_until(lambda: len(told(job, "coordinator_restarted")) > num_restarts)
        assert not told(job, "failure_detected")
        job.kill("0/0")
        job.wait_until(lambda: bool(told(job, "recovered")))
        before = len(job.records("0/1"))
        job.wait_until(lambda: len(job.records("0/1")) > before + 100)
        assert [line["member"] for line in told(job, "failure_detected")] == ["0/0"], job.output()
        assert _coordinator_pid(job) != stopped

        coordinator = psutil.Process(_coordinator_pid(job))
        job.process.kill()
        psutil.wait_procs([coordinator], timeout=30)
        assert not coordinator.is_running() or coordinator.status() == psutil.STATUS_ZOMBIE
        assert not told(job, "job_finished"), job.output()


@pytest.mark.parametrize("seed", range(NUM_SWEEPS))
def test_kill_the_coordinator_between_kills_of_members(tmp_path: pathlib.Path, seed: int) -> None:
    """Wherever it dies in a view change, the members find the next one, and no step is lost."""
    chance = random.Random(seed)
    members = MEMBERS[:5]
    victims = chance.sample(members, 4)
    faults = [f"{victim}=reduction.issued@{10 + 10 * index}" for index, victim in enumerate(victims)]
    point = chance.choice(["decision.made", "decision.saved", "member.told"])
    faults.append(f"coordinator={point}@{chance.randint(3, 6)}")
    with jobs.running(tmp_path, 5, ["plain_loop.py", "60"], {"LIGHTNING_FT_FAIL_AT": "; ".join(faults)}) as job:
        check_job(job, 60, set(members) - set(victims), members, model="mlp")
        assert told(job, "coordinator_restarted"), job.output()


def _is_running(pid: int) -> bool:
    """Whether a process runs, or may run again; not if only its parent has not looked at its end yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_who_was_given_up_and_wakes_writes_nothing(tmp_path: pathlib.Path) -> None:
    """Two ranks 0, one after the other, stop before a line of the log and before a checkpoint; nobody kills them."""
    program = ["lightning_fit.py", "--devices", "4"]
    faults = "0/0=commit.done@10:stop; 0/1=commit.done@12>checkpoint.save:stop"
    with jobs.running_fit(tmp_path, 4, program, {**QUICK, "LIGHTNING_FT_FAIL_AT": faults}) as job:
        for count, victim in enumerate(("0/0", "0/1"), start=1):
            job.wait_until(lambda count=count: job.output().count("fault placed at") == count)
            os.kill(job.process.pid, signal.SIGSTOP)
            job.wait_until(lambda victim=victim: victim in {line["member"] for line in told(job, "failure_detected")})
            job.wait_until(lambda count=count: len(told(job, "recovered")) == count)
            before = job.records(victim)
            job.kill(victim, signal.SIGCONT)
            job.wait_until(lambda victim=victim: not _is_running(job.pid(victim)))
            assert job.records(victim) == before, "not a line more"
            os.kill(job.process.pid, signal.SIGCONT)
        batches = check_run(job, 4, {"0/2", "0/3"})
        saved = [torch.load(path, weights_only=False)["global_step"] for path in tmp_path.rglob("epoch*.ckpt")]
        ends = {line["epoch"]: line["step"] for line in batches["0/2"]}
        assert sorted(saved) == sorted(ends.values()), "a checkpoint for each epoch, none twice"
        logged = [int(row["step"]) for row in log_rows(job) if row["loss"]]
        assert logged == list(range(len(batches["0/2"]))), "each line once"
        assert not any(line["event"] == "saved" for line in job.records("0/1"))
        assert all({line["node"] for line in told(job, name)} == {0} for name in ("node_silent", "node_heard"))
