"""One bit is flipped on one rank, and the ranks find it, say where, and end as if it had not been."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.integration import jobs

KINDS = ["plain", "view", "unused", "static", "hook"]
"""As in verified_loop.py: views of the buckets, unused parameters and so on."""

ALWAYS = {
    "LIGHTNING_FT_VERIFY_EVERY_N_STEPS": "1",
    "LIGHTNING_FT_VERIFY_STATE_EVERY_N_STEPS": "1",
    "LIGHTNING_FT_VERIFY_CHUNK_BYTES": "1024",
}


def _mismatches(job: jobs.Job) -> list[dict[str, Any]]:
    return [event for event in job.events() if event["event"] == "gradient_mismatch"]


def _check_runs(job: jobs.Job, members: tuple[str, ...]) -> None:
    for member in members:
        runs = [line for line in job.records(member) if line["event"] == "run"]
        assert [run["kind"] for run in runs] == KINDS, job.output()
        for run in runs:
            assert len(set(run["hashes"])) == 5
            assert run["found"] == run["hashes"], f"{member}, {run}\n{job.output()}"


def test_what_a_rank_has_otherwise_is_healed_from_the_majority(tmp_path: pathlib.Path) -> None:
    """In a bucket, a parameter, an optimizer; NaN is named; who is given up goes; one may die in the middle of it."""
    environment = {**ALWAYS, "LIGHTNING_FT_FAIL_AT": "0/1=last.step>verify_transfer.issued"}
    with jobs.running(tmp_path, 4, ["verified_loop.py"], environment) as job:
        assert job.finish() == 0, job.output()
        _check_runs(job, ("0/0", "0/1", "0/2", "0/3"))
        found = _mismatches(job)
        for index in range(len(KINDS)):
            bucket, parameter, state = found[3 * index : 3 * index + 3]
            assert (bucket["members"], bucket["what"]) == (["0/1"], ["gradients"])
            assert (parameter["members"], parameter["what"]) == (["0/2"], ["parameters"])
            assert (state["members"], state["what"]) == (["0/3"], ["optimizer state"])
            assert parameter["parameters"] == ["last.bias"]
            assert state["parameters"] == ["exp_avg of last.bias"]
            for event in (bucket, parameter, state):
                assert event["outcome"] == "healed", event
                assert 0 < event["gradient_divergence"] < 1, event
                assert len(event["parameters"]) == len(event["chunks"]) == event["num_chunks"] == 1, event
        evicted, last = found[3 * len(KINDS) :]
        assert (evicted["members"], evicted["outcome"]) == (["0/3"], "evicted")
        assert (last["members"], last["outcome"]) == (["0/0"], "healed")
        losses = {event["member"]: event["detail"] for event in job.events() if event["event"] == "failure_detected"}
        assert set(losses) == {"0/1", "0/3"}
        assert "verify_policy is 'evict'" in losses["0/3"]
        (not_finite,) = (event for event in job.events() if event["event"] == "gradient_not_finite")
        assert not_finite["members"] == ["0/2"]
        assert "last.bias" in not_finite["parameters"]
        for member in ("0/0", "0/2"):
            nan, *steps = job.records(member)[-4:]
            assert nan["before"] == nan["after"]
            assert [step["event"] for step in steps] == ["evicted", "without", "end"]
            assert all(step["hash"] == step["expected"] for step in steps), job.output()
        compared = [event for event in job.events() if event["event"] == "gradients_compared"]
        assert {event["gradient_divergence"] for event in compared} == {0.0}


def test_two_ranks_reduce_again_and_fail_if_they_differ_again(tmp_path: pathlib.Path) -> None:
    """Nobody can say which of two is right; the local gradients are still there."""
    with jobs.running(tmp_path, 2, ["verified_loop.py", "--redo"], ALWAYS) as job:
        assert job.finish() == 1, job.output()
        _check_runs(job, ("0/0", "0/1"))
        *redone, failed = _mismatches(job)
        assert [event["outcome"] for event in redone] == ["redone"] * len(KINDS)
        assert all(event["contributors"] == ["0/0", "0/1"] == event["members"] for event in redone)
        assert failed["outcome"] == "failed"
        for member in ("0/0", "0/1"):
            last = job.records(member)[-1]
            assert last["event"] == "failed"
            assert "resume from the last checkpoint" in last["text"]
            assert last["hash"] == [line for line in job.records(member) if line["event"] == "run"][-1]["found"][-1]
