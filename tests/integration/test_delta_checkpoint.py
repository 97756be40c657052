"""Differential checkpoints of jobs of several ranks: saved while ranks die, and gone on from."""

from __future__ import annotations

import pathlib
import shutil
import signal
from typing import Any

import fsspec
import pytest

from lightning_ft.checkpoint import load, verify
from lightning_ft.checkpoint.manifests import published_keys, read_manifest
from lightning_ft.checkpoint.store import open_store
from tests.conformance.servers import s3_server
from tests.integration import jobs
from tests.integration.programs.delta_fit import NUM_SAMPLES, weights_hash

MEMBERS = ("0/0", "0/1", "0/2")


def _fit(
    out: pathlib.Path,
    steps: int,
    *flags: str,
    num_members: int = 3,
    fails: str = "",
    num_records: tuple[int, ...] = (0, 0, 0),
) -> list[list[dict[str, Any]]]:
    """Run a fit to its end. Returns: What each member wrote, after the records that were there."""
    program = ["delta_fit.py", str(steps), "--devices", str(num_members), *flags]
    with jobs.running_fit(out, num_members, program, {"LIGHTNING_FT_FAIL_AT": fails}) as job:
        assert job.finish() == 0, job.output()
        return [job.records(member)[start:] for member, start in zip(MEMBERS, num_records, strict=True)]


def test_a_fit_goes_on_bitwise_from_what_was_rounded(tmp_path: pathlib.Path) -> None:
    """Two ranks that round alike: all steps after the last save are equal."""
    flags = "--wait", "--mode", "snap", "--every", "10"
    whole = _fit(tmp_path, 23, *flags, num_members=2)[:2]
    _check_newest(tmp_path, whole, "snap", 20)
    again = _fit(tmp_path, 23, *flags, num_members=2, num_records=(23, 23, 0))[:2]
    assert again == [records[20:] for records in whole]


def test_a_fit_goes_on_bitwise_from_what_was_replayed(tmp_path: pathlib.Path) -> None:
    """Two ranks, each with its share of the gradients; in process too, below what was saved if that is lost.

    It goes back to a log in the storage, and, since the next one's manifest is gone, to the base before it in memory:
    what it saves then is of another generation.
    """
    flags = "--wait", "--mode", "gradlog", "--every", "5"
    program = ["delta_fit.py", "29", "--devices", "2", *flags, "--gives-up", "0/1@12,0/0@23!"]
    with jobs.running_fit(tmp_path, 2, program, {}) as job:
        assert job.finish() == 0, job.output()
        records = [job.records(member) for member in MEMBERS[:2]]
    steps = [*range(13), *range(10, 24), *range(15, 29)]
    for lines in records:
        assert [line["step"] for line in lines] == steps
        first = {line["step"]: line for line in reversed(lines)}
        assert all(line == first[line["step"]] for line in lines)
    told = [line for line in job.events() if line["event"] == "checkpoint_restored"]
    found = [(line["step"], line["source"], line["steps_lost"]) for line in told]
    assert found == [(10, "storage", 2), (15, "memory", 8)]
    assert not [line for line in job.events() if line["event"] == "checkpoint_failed"]
    _check_newest(tmp_path, records, "gradlog", 25)
    counts = (len(records[0]), len(records[1]), 0)
    again = _fit(tmp_path, 29, *flags, num_members=2, num_records=counts)[:2]
    assert again == [lines[-4:] for lines in records]


def _check_newest(out: pathlib.Path, whole: list[list[dict[str, Any]]], mode: str, step: int) -> None:
    """The newest checkpoint depends on another, and is what both ranks have trained on from."""
    store = open_store(str(out / "run"))
    newest = read_manifest(store, published_keys(store)[0])[0]
    assert (newest.key.step, newest.mode, newest.depth, newest.num_ranks) == (step, mode, 1, 2)
    expected = [next(line for line in records if line["step"] == step)["hash"] for records in whole]
    assert [weights_hash(load(store)["state_dict"])] * 2 == expected


def test_a_resumed_fit_is_bitwise_the_one_that_was_not_interrupted(tmp_path: pathlib.Path) -> None:
    """In the middle of an epoch, with every rank's random numbers; and fewer ranks train on what is left of it.

    So is one that goes back in process.
    """
    whole = _fit(tmp_path / "whole", 25, "--wait", "--every", "9")
    _check_going_back(tmp_path / "back", whole)
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "parts" / "run")
    resumed = _fit(tmp_path / "parts", 38, "--wait", "--every", "9")
    assert [records[:7] for records in resumed] == [records[18:] for records in whole]
    url = str(tmp_path / "parts" / "run")
    state = load(url)
    assert state["global_step"] == 36
    assert all(not verdict.problems for verdict in verify(open_store(url), deep=True))
    fewer = _fit(tmp_path / "parts", 43, num_members=2, num_records=tuple(map(len, resumed)))
    assert fewer[0][0]["step"] == 36
    assert fewer[0][0]["hash"] == weights_hash(state["state_dict"])
    of_epoch = [line for records in resumed for line in records if 30 <= line["step"] < 36]
    of_epoch += [line for records in fewer for line in records if line["step"] <= 41]
    assert sorted(sample for line in of_epoch for sample in line["samples"]) == list(range(NUM_SAMPLES))


def _check_going_back(out: pathlib.Path, whole: list[list[dict[str, Any]]]) -> None:
    """Within an epoch, to the one before, to the end of one, for two at once; and to what a dead rank has written."""
    gives_up = "0/1@6,0/2@11,0/0@22,0/1@22,0/0@23,0/0@23,0/0@23"
    program = ["delta_fit.py", "25", "--wait", "--every", "4", "--gives-up", gives_up]
    with jobs.running_fit(out, 3, program, {"LIGHTNING_FT_FAIL_AT": "0/2=commit.enter@33"}) as job:
        assert job.finish() == 1, job.output()  # going back to the same step three times has not helped
        first, second, third = map(job.records, MEMBERS)
    together = [*range(7), *range(4, 12), *range(8, 23), *range(20, 23)]
    assert [line["step"] for line in third] == together
    for records, expected in zip((first, second, third), whole, strict=True):
        assert all(line == expected[line["step"]] for line in records[: len(together)])
    assert [line["step"] for line in first[len(together) :]] == [23, *range(20, 24), *range(20, 24)]
    assert first[len(together) + 1]["hash"] == whole[0][20]["hash"]
    assert [line["hash"] for line in first] == [line["hash"] for line in second]
    told = [line for line in job.events() if line["event"] == "checkpoint_restored"]
    found = [(line["step"], line["source"], line["steps_lost"]) for line in told]
    assert found == [(4, "memory", 2), (8, "memory", 3), (20, "memory", 2), (20, "storage", 3), (20, "storage", 3)]
    failed = [line["exception"] for line in job.events() if line["event"] == "failed" and line["member"] == "0/0"]
    assert "the loss is not finite" in failed[0]
    assert "has not helped" in failed[0]


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("lossless", "0/1=save.enter@2; 0/0=save.commit@4"),
        ("gradlog", "0/1=save.written@2; 0/0=save.committed@4"),
    ],
)
def test_kill_in_saves(tmp_path: pathlib.Path, mode: str, faults: str) -> None:
    """Who dies while it saves costs the job that save at most; what is committed is the state that all ranks had.

    A save that nobody is left to tell of, since rank 0 died when it was committed, is not told to have failed.
    """
    records = _fit(tmp_path, 40, "--mode", mode, "--every", "5", "--pause", "0.05", fails=faults)
    assert len(records[2]) == 40
    store = open_store(str(tmp_path / "run"))
    verdicts = verify(store, deep=True)
    assert all(not verdict.problems for verdict in verdicts), verdicts
    state = load(store)
    assert state["global_step"] == 40
    told = [event for event in jobs.read_lines(tmp_path / "events.jsonl") if event["event"].startswith("checkpoint_")]
    lost = [(event["step"], event["cause"]) for event in told if event["event"] == "checkpoint_failed"]
    assert {cause for _, cause in lost} <= {"ranks changed"}, told
    saved = [event for event in told if event["event"] == "checkpoint_saved"]
    there = {event["step"] for event in saved} | {verdict.key.step for verdict in verdicts}
    assert not {step for step, _ in lost} & there
    untold = set(range(5, 41, 5)) - {event["step"] for event in told}
    assert len(untold) == (0 if "save.commit@" in faults else 1)
    kept = {str(verdict.key): verdict.key.step for verdict in verdicts}
    assert {event["path"].rpartition("/")[2]: event["step"] for event in saved[-3:]}.items() <= kept.items()
    assert all(0 < event["blocked_s"] <= event["duration_s"] for event in saved)
    assert all(event["kind"] == "base" or event["bytes"] < event["state_bytes"] for event in saved)
    after = _fit(tmp_path, 41, num_members=1, num_records=tuple(map(len, records)))
    assert after[0][0]["hash"] == weights_hash(state["state_dict"])
    assert after[0][0]["step"] == 40
    restored = jobs.read_lines(tmp_path / "events.jsonl")
    (restored,) = [event for event in restored if event["event"] == "checkpoint_restored"]
    assert (restored["step"], restored["source"], restored["steps_lost"]) == (40, "storage", 0)


def test_with_stock_ddp(tmp_path: pathlib.Path) -> None:
    """The callback needs nothing of ft_ddp: each rank writes its part, and goes on with the rest of the epoch."""
    program = ["delta_fit.py", "12", "15", "--strategy", "ddp", "--devices", "2", "--every", "6"]
    with jobs.running_script(tmp_path, program) as job:
        assert job.finish() == 0, job.output()
    records = jobs.read_lines(tmp_path / "0.jsonl")
    assert [line["step"] for line in records] == list(range(15))
    others = jobs.read_lines(tmp_path / "1.jsonl")
    assert [line["hash"] for line in others] == [line["hash"] for line in records]
    assert sorted(sample for line in records + others for sample in line["samples"]) == list(range(NUM_SAMPLES))
    assert load(str(tmp_path / "run"))["global_step"] == 12
    assert {path.name for path in (tmp_path / "run").rglob("*.pack")} == {"a0.r0.0.pack", "a0.r1.0.pack"}


def test_on_s3_after_a_kill_in_a_save(tmp_path: pathlib.Path) -> None:
    """One device; from `"last"` and from the URL it goes on, for more than 100 steps bitwise as if nothing had been."""
    flags = ["--strategy", "auto", "--devices", "1"]
    with s3_server(tmp_path / "server.log") as endpoint:
        access = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        settings = {**access, "FSSPEC_S3_ENDPOINT_URL": endpoint, "LIGHTNING_FT_MEMBER": "0/0"}
        fs = fsspec.filesystem("s3", endpoint_url=endpoint, key="someone", secret="secret", skip_instance_cache=True)
        fs.call_s3("create_bucket", Bucket="bucket")
        on_s3 = [*flags, "--url", "s3://bucket/run"]
        faults = {"LIGHTNING_FT_FAIL_AT": "0/0=save.commit@3"}
        with jobs.running_script(
            tmp_path, ["delta_fit.py", "20", *on_s3, "--every", "3", "--wait"], settings | faults
        ) as job:
            assert job.finish() == -signal.SIGKILL, job.output()
            killed = job.records("0/0")
        with jobs.running_script(tmp_path, ["delta_fit.py", "108", "112", *on_s3, "--every", "27"], settings) as job:
            assert job.finish() == 0, job.output()
            resumed = job.records("0/0")[len(killed) :]
    with jobs.running_script(
        tmp_path / "whole", ["delta_fit.py", "112", *flags], {"LIGHTNING_FT_MEMBER": "0/0"}
    ) as job:
        assert job.finish() == 0, job.output()
        whole = job.records("0/0")
    assert killed == whole[:9]
    assert resumed == whole[6:]
