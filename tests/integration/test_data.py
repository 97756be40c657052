"""Each sample is trained on once in an epoch, whoever dies and comes back meanwhile, in real jobs."""

from __future__ import annotations

import collections
import pathlib
import signal
from collections.abc import Sequence

from tests.integration import jobs

RESPAWN = {"LIGHTNING_FT_RESPAWN": "1"}


def consumed(job: jobs.Job, members: Sequence[str]) -> dict[int, collections.Counter[int]]:
    """Return how often each sample was in a committed step, for each epoch.

    What a member drew for a step counts if the step's contributors, on which all agree, have it among them.
    """
    contributors: dict[int, list[str]] = {}
    drawn: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for member in members:
        for line in job.records(member):
            if line["event"] == "draws":
                drawn[member, line["step"]] = line["epoch"], line["ids"]
            if line["event"] == "committed":
                agreed = contributors.setdefault(line["step"], line["contributors"])
                assert agreed == line["contributors"], f"{member} {line}\n{job.output()}"
    assert sorted(contributors) == list(range(len(contributors)))
    epochs: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for step, present in contributors.items():
        for member in present:
            epoch, ids = drawn[member, step]
            epochs[epoch].update(ids)
    return epochs


def slots(number: int) -> list[str]:
    """Return the members of a node."""
    return [f"0/{slot}" for slot in range(number)]


def check(job: jobs.Job, members: Sequence[str], length: int, num_epochs: int, max_padding: int) -> None:
    """Check that each epoch has consumed each sample once, and some that fill up its end twice."""
    assert job.finish() == 0, job.output()
    check_epochs(consumed(job, members), length, num_epochs, max_padding)


def check_epochs(epochs: dict[int, collections.Counter[int]], length: int, num_epochs: int, max_padding: int) -> None:
    """The same, of what was consumed."""
    assert sorted(epochs) == list(range(num_epochs))
    for epoch, counts in epochs.items():
        assert set(counts) == set(range(length)), f"epoch {epoch} lacks {set(range(length)) - set(counts)}"
        assert sum(counts.values()) - length <= max_padding, f"epoch {epoch} repeats {counts.most_common(9)}"


def test_the_data_of_the_dead_and_of_who_leaves_are_dealt_to_the_others(tmp_path: pathlib.Path) -> None:
    """4 -> 3 -> 2 ranks over 1003 samples, with workers that draw ahead: in each of two epochs each sample once.

    One dies, then rank 0 gets SIGTERM and leaves at a boundary. Then the others get it: they stop at the same one, and
    save; 3 ranks go on from there.
    """
    asked = "commit.done@31>recover.park>commit.done@20:terminate"
    faults = f"0/1=reduction.issued@10; 0/0=commit.done@30:terminate; 0/2={asked}; 0/3={asked}"
    settings = {"LIGHTNING_FT_FAIL_AT": faults, "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1"}
    program = ["sampled_loop.py", "1003", "2", "--workers", "2"]
    with jobs.running(tmp_path / "1", 4, program, settings) as job:
        assert job.finish() == 128 + signal.SIGTERM, job.output()
        events = job.events()
        assert [event["member"] for event in events if event["event"] == "failure_detected"] == ["0/1"], job.output()
        assert next(event["member"] for event in events if event["event"] == "member_left") == "0/0", job.output()
        statuses = {event["member"]: event["status"] for event in events if event["event"] == "member_exited"}
        assert statuses == {"0/0": 0, "0/1": -signal.SIGKILL, "0/2": 143, "0/3": 143}, job.output()
        stops = [job.records(member)[-1] for member in ("0/2", "0/3")]
        assert {(line["event"], line["step"]) for line in stops} == {("stopped", stops[0]["step"])}, job.output()
        epochs = consumed(job, slots(4))
    resume = ["--resume", str(tmp_path / "1/saved.pt")]
    with jobs.running(tmp_path / "2", 3, [*program, *resume]) as job:
        assert job.finish() == 0, job.output()
        for epoch, counts in consumed(job, slots(3)).items():
            epochs[epoch] += counts
    check_epochs(epochs, 1003, 2, max_padding=3)


def test_whoever_comes_back_is_dealt_data_in_the_same_epoch(tmp_path: pathlib.Path) -> None:
    """4 -> 3 -> 4 ranks over 1003 samples, and the whole next epoch."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=commit.done@10"}
    program = ["sampled_loop.py", "1003", "2", "--hold", "30"]
    with jobs.running(tmp_path, 4, program, RESPAWN | faults) as job:
        check(job, slots(4), 1003, 2, max_padding=3)
        assert job.records("0/1")[-1] == {"time": job.records("0/1")[-1]["time"], "event": "end", "world_size": 4}
        epochs = {line["epoch"] for line in job.records("0/1") if line["event"] == "draws"}
        assert epochs == {0, 1}, "it was back before the first epoch had ended"


def test_death_and_return_at_every_place_of_an_epoch(tmp_path: pathlib.Path) -> None:
    """A death in the first step of an epoch and in its last, and two at once, lose no sample and repeat none."""
    # 4 ranks, 256 samples, batches of 4: 16 steps in an epoch as long as nobody dies
    faults = {"LIGHTNING_FT_FAIL_AT": "0/3=commit.enter@16; 0/1=commit.enter@17; 0/2=commit.enter@17"}
    with jobs.running(tmp_path, 4, ["sampled_loop.py", "256", "3"], faults) as job:
        check(job, slots(4), 256, 3, max_padding=6)


def test_large_epochs_shrink_and_grow(tmp_path: pathlib.Path) -> None:
    """60,000 items over 8 -> 6 ranks, two that die in the same step, then a whole epoch; 60,001 over 2 -> 3 ranks."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/2=commit.enter@5; 0/7=commit.enter@5"}
    with jobs.running(tmp_path / "8", 8, ["sampled_loop.py", "60000", "2", "--batch", "625"], faults) as job:
        check(job, slots(8), 60_000, 2, max_padding=12)
        lost = [event["member"] for event in job.events() if event["event"] == "failure_detected"]
        assert sorted(lost) == ["0/2", "0/7"], job.output()
    settings = {**RESPAWN, "LIGHTNING_FT_MAX_WORLD_SIZE": "3", **jobs.at_port()}
    program = ["sampled_loop.py", "60001", "1", "--batch", "250", "--hold", "5", "--world-size", "3"]
    with jobs.running(tmp_path / "2", 2, program, settings) as job:
        job.wait_until(lambda: any(line["event"] == "committed" for line in job.records("0/0")))
        with jobs.joining(tmp_path / "2", None, 1, program, settings) as third:
            check(job, ["0/0", "0/1", "1/0"], 60_001, 1, max_padding=2)
            assert third.finish() == 0, third.output()
        assert any(line["event"] == "committed" for line in job.records("1/0")), job.output()


def test_a_fit_goes_on_where_its_checkpoint_was_made(tmp_path: pathlib.Path) -> None:
    """3 ranks, then 2 whose steps keep their samples, a checkpoint, and 3 that go on from it: each sample once.

    The first job's loader has workers; the second one weighs its last step, so that it needs no padding.
    """
    program = ["lightning_fit.py", "--epochs", "1", "--devices", "3"]
    faults = {"LIGHTNING_FT_FAIL_AT": "0/1=reduction.enter@5", "LIGHTNING_FT_ON_RESIZE": "keep_global_batch"}
    with jobs.running_fit(tmp_path / "1", 3, [*program, "--workers", "1", "--save-every", "9"], faults) as job:
        assert job.finish() == 0, job.output()
        contributors = jobs.contributors_by_events(job.events(), 9)
        steps: dict[int, list[int]] = collections.defaultdict(list)
        for member in ("0/0", "0/1", "0/2"):
            for line in job.records(member):
                if line["event"] == "training_step" and line["step"] < 9 and member in contributors[line["step"]]:
                    steps[line["step"]] += line["index"]
    assert [len(steps[step]) for step in range(9)] == [24] * 4 + [16] + [24] * 4
    counts = collections.Counter(index for indices in steps.values() for index in indices)
    saved = str(tmp_path / "1/saved/step=9.ckpt")
    program += ["--resume", saved]
    with jobs.running_fit(tmp_path / "2", 3, program, {"LIGHTNING_FT_UNEVEN": "exact"}) as job:
        assert job.finish() == 0, job.output()
        for member in ("0/0", "0/1", "0/2"):
            lines = [line for line in job.records(member) if line["event"] == "training_step"]
            assert [line["step"] for line in lines] == list(range(9, 9 + len(lines)))
            for line in lines:
                counts.update(line["index"])
        assert "not resumable" not in job.output()
    assert counts == collections.Counter(range(480))
