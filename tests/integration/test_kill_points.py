"""SIGKILL at every named point of a step and of a recovery, in a plain PyTorch loop."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from tests.integration import jobs, reference

MEMBERS = tuple(f"0/{slot}" for slot in range(5))

FIRST_STEP = ["gather_bytes.enter", "broadcast.issued", "bucket.ready", "commit.enter"]
STEP = [
    "bucket.ready",
    "bucket.started",
    "reduction.wait",
    "reduction.enter",
    "reduction.issued",
    "reduction.done",
    "commit.enter",
    "commit.issued",
    "commit.done",
    "all_reduce.enter",
    "all_reduce.issued",
    "all_reduce.done",
    "broadcast.enter",
    "broadcast.issued",
    "broadcast.done",
]
RECOVERY = [
    "recover.sever",
    "recover.park",
    "recover.build",
    "recover.exchange",
    "recover.handover",
    "recover.confirm",
]


def _check(job: jobs.Job, num_steps: int, survivors: set[str], **program: object) -> None:
    assert job.finish() == 0, job.output()
    contributors = jobs.committed(job, MEMBERS)
    assert sorted(contributors) == list(range(num_steps))
    assert jobs.contributors_by_events(job.events(), num_steps) == contributors, job.output()
    ended = {member for member in MEMBERS if job.records(member)[-1]["event"] == "end"}
    assert ended == survivors, job.output()
    lost = {event["member"] for event in job.events() if event["event"] == "failure_detected"}
    assert lost == set(MEMBERS) - survivors, job.output()
    expected = reference.final_weights(contributors, **program)  # type: ignore[arg-type]
    for member in survivors:
        weights = torch.load(job.out / f"{member.replace('/', '-')}.pt")
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def _schedules() -> list[list[tuple[str, str, int]]]:
    """Spread all points over jobs: four kills in each, far apart, every point with another victim in another job."""
    points = STEP * 3
    schedules = []
    for start in range(0, len(points), 4):
        victims = [MEMBERS[(start // 4 + offset) % 5] for offset in range(4)]
        chosen = points[start : start + 4]
        schedules.append(
            [
                (victim, point, 12 + 25 * index)
                for index, (victim, point) in enumerate(zip(victims, chosen, strict=False))
            ]
        )
    return schedules


@pytest.mark.parametrize("schedule", _schedules(), ids=lambda schedule: "+".join(point for _, point, _ in schedule))
def test_kill_at_a_point_of_the_step(tmp_path: pathlib.Path, schedule: list[tuple[str, str, int]]) -> None:
    """Whoever dies wherever in a step, the survivors finish that step and train as if alone with the contributors."""
    faults = "; ".join(f"{member}={point}@{count}" for member, point, count in schedule)
    program = ["plain_loop.py", "130", "--model", "batchnorm", "--sync-every", "1"]
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        _check(job, 130, set(MEMBERS) - {member for member, _, _ in schedule}, model="batchnorm")


@pytest.mark.parametrize(
    "victims", [("0/0", "0/1", "0/4", "0/3"), ("0/3", "0/2", "0/0", "0/1"), ("0/4", "0/0", "0/2", "0/1")], ids="+".join
)
@pytest.mark.parametrize("points", [RECOVERY[:2], RECOVERY[2:4], RECOVERY[4:]], ids="+".join)
def test_kill_in_the_recovery_from_another(tmp_path: pathlib.Path, points: list[str], victims: tuple[str, ...]) -> None:
    """A second member that dies at any point of the recovery from a first costs one more round, nothing else."""
    first, second, third, fourth = victims
    faults = [
        f"{first}=reduction.issued@20",
        f"{second}=reduction.enter@15>{points[0]}",
        f"{third}=commit.issued@50",
        f"{fourth}=reduction.enter@45>{points[1]}",
    ]
    with jobs.running(tmp_path, 5, ["plain_loop.py", "70"], {"LIGHTNING_FT_FAIL_AT": "; ".join(faults)}) as job:
        _check(job, 70, set(MEMBERS) - set(victims), model="mlp")


@pytest.mark.parametrize("point", FIRST_STEP)
def test_kill_in_the_first_step(tmp_path: pathlib.Path, point: str) -> None:
    """Rank 0 may die before the first step is done."""
    with jobs.running(tmp_path, 5, ["plain_loop.py", "20"], {"LIGHTNING_FT_FAIL_AT": f"0/0={point}"}) as job:
        _check(job, 20, set(MEMBERS) - {"0/0"}, model="mlp")


def test_two_at_once_and_all_but_one(tmp_path: pathlib.Path) -> None:
    """Members that die at the same point of the same step are one failure; one member alone goes on."""
    faults = "0/1=reduction.enter@20; 0/3=reduction.enter@20; 0/0=commit.issued@40; 0/2=commit.issued@40"
    with jobs.running(tmp_path, 5, ["plain_loop.py", "60"], {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        _check(job, 60, {"0/4"}, model="mlp")


@pytest.mark.parametrize(
    "options",
    [
        {"model": "unused", "optimizer": "adamw"},
        {"model": "static", "optimizer": "sgd"},
        {"model": "mlp", "accumulate": 3, "optimizer": "adamw"},
    ],
    ids=str,
)
def test_kill_with_other_kinds_of_model(tmp_path: pathlib.Path, options: dict[str, object]) -> None:
    """Unused parameters, a static graph and accumulation keep their meaning when members die."""
    program = ["plain_loop.py", "100", *(text for key, value in options.items() for text in (f"--{key}", str(value)))]
    faults = "0/2=bucket.started@20; 0/0=reduction.done@30; 0/4=commit.enter@60"
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        _check(job, 100, {"0/1", "0/3"}, **options)


def test_kill_with_gradients_that_are_views_of_the_buckets(tmp_path: pathlib.Path) -> None:
    """Nothing else holds the local gradients then."""
    faults = "0/2=bucket.started@20; 0/0=reduction.done@30; 0/4=commit.enter@60"
    program = ["plain_loop.py", "100", "--bucket-view"]
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        _check(job, 100, {"0/1", "0/3"}, model="mlp")


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_kill_with_a_communication_hook(tmp_path: pathlib.Path, hook: str) -> None:
    """A hook is run again from the state it had; the survivors stay bitwise equal."""
    faults = "0/2=reduction.issued@20; 0/0=reduction.done@40; 0/4=commit.enter@60"
    program = ["plain_loop.py", "80", "--hook", hook]
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        assert job.finish() == 0, job.output()
        assert sorted(jobs.committed(job, MEMBERS)) == list(range(80))
        assert json.dumps(job.records("0/1")[-1]["event"]) == '"end"'
