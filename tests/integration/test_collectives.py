"""Every collective of torch.distributed, in real jobs whose members die at every named point of them."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Set as AbstractSet

import pytest

from tests.integration import collective_records, jobs

NAMES = ["all_reduce", "all_gather", "broadcast"]
RARE_NAMES = ["gather_bytes", "broadcast_bytes"]
PER_ROUND = {"all_reduce": 12, "all_gather": 9, "broadcast": 10, "gather_bytes": 1, "broadcast_bytes": 1}
"""About how often a member enters each in one round of the schedule."""


def causes(job: jobs.Job) -> dict[str, str]:
    """Return why the coordinator gave up each lost member."""
    return {event["member"]: event["cause"] for event in job.events() if event["event"] == "failure_detected"}


def judge(
    job: jobs.Job, num_members: int, *, lost: AbstractSet[int], left: AbstractSet[int] = frozenset()
) -> dict[int, tuple[int, ...]]:
    """Check that one story explains all that the members wrote, and return who was in at which call of WORLD.

    Args:
        job: Of programs/collectives.py.
        num_members: It began with.
        lost: Members that died.
        left: Members that left by sys.exit(1).
    """
    assert job.finish() == 0, job.output()
    records = {slot: job.records(f"0/{slot}") for slot in range(num_members)}
    ended = {slot for slot, lines in records.items() if lines[-1]["event"] == "end"}
    gone = set(records) - ended
    assert gone == lost | left, f"ended: {ended}\n{job.output()}"
    assert set(causes(job)) == {f"0/{slot}" for slot in lost}, job.output()
    lengths = {
        slot: sum(line["event"] == "call" and line["group"] == "world" for line in records[slot]) for slot in ended
    }
    assert len(set(lengths.values())) == 1, lengths
    world = collective_records.explain(
        collective_records.read_chain("world", tuple(records), records, gone),
    )
    assert set(ended) <= set(world[max(world)])
    groups = {}
    for slot in ended:
        for line in records[slot]:
            if line["event"] == "group":
                members = tuple(world[line["at"]][rank] for rank in line["ranks"])
                assert groups.setdefault(line["key"], members) == members, f"{slot} {line}"
    for key, members in groups.items():
        if ended & set(members):  # nothing is promised to a group that nobody is left of
            chain = collective_records.read_chain(key, members, records, gone)
            collective_records.explain(chain, key, world)
    for lines in records.values():
        for line in lines:
            if line["event"] == "ring" and "result" in line:
                assert line["result"] in {2.0**slot for slot in records}, line
    return world


def test_healthy_results_are_those_of_stock_gloo(tmp_path: pathlib.Path) -> None:
    """Without failures, each call gives on each member what stock Gloo gives."""
    program = ["collectives.py", "3", "--seed", "1", "--no-bytes"]
    with jobs.running(tmp_path / "ft", 3, program) as job:
        world = judge(job, 3, lost=set())
        assert set(world.values()) == {(0, 1, 2)}
    stock = tmp_path / "stock"
    stock.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = jobs.rank_command(stock, [*program, "--backend", "gloo"])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "3"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    members = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank), "LIGHTNING_FT_MEMBER": f"0/{rank}"})
        for rank in range(3)
    ]
    try:
        assert [member.wait(90) for member in members] == [0, 0, 0]
    finally:
        for member in members:
            member.kill()
            member.wait()
    drop = ("time", "text")
    for rank in range(3):
        expected = [line for line in jobs.read_lines(stock / f"0-{rank}.jsonl") if line["event"] in ("call", "ring")]
        found = [line for line in job.records(f"0/{rank}") if line["event"] in ("call", "ring")]
        for line in (*expected, *found):
            for key in drop:
                line.pop(key, None)
        assert found == expected


def _schedules() -> list[list[tuple[int, str]]]:
    """Spread all points over jobs of five: four kills in each, far apart."""
    points = [f"{name}.{place}" for place in ("enter", "issued", "done") for name in (*NAMES, *RARE_NAMES)]
    schedules = []
    for index in range(0, len(points), 4):
        victims = [(index // 4 + step) % 5 for step in (0, 2, 4, 1)]
        chosen = points[index : index + 4]
        schedules.append([(victim, point) for victim, point in zip(victims, chosen, strict=False)])
    return schedules


@pytest.mark.parametrize(
    ("schedule", "topology"),
    list(zip(_schedules(), itertools.cycle(["ring", "tree"]), strict=False)),
    ids=lambda part: part if isinstance(part, str) else "+".join(point for _, point in part),
)
def test_kill_at_a_point_of_a_collective(
    tmp_path: pathlib.Path, schedule: list[tuple[int, str]], topology: str
) -> None:
    """Whoever dies wherever in a collective, the survivors all have its result or all raise, and go on."""
    faults = []
    for index, (victim, point) in enumerate(schedule):
        per_round = PER_ROUND[point.split(".")[0]]
        faults.append(f"0/{victim}={point}@{2 + int((1.3 * index + 0.5) * per_round)}")
    environment = {"LIGHTNING_FT_FAIL_AT": ";".join(faults), "LIGHTNING_FT_TOPOLOGY": topology}
    with jobs.running(tmp_path, 5, ["collectives.py", "8", "--seed", "2"], environment) as job:
        judge(job, 5, lost={victim for victim, _ in schedule})


@pytest.mark.parametrize(("point", "other_point"), [("sever", "confirm"), ("park", "handover"), ("exchange", "build")])
def test_kill_in_the_recovery_from_another(tmp_path: pathlib.Path, point: str, other_point: str) -> None:
    """A second member that dies at any point of the recovery from a first costs one more round, nothing else."""
    first, second, third, fourth = [(len(point) + step) % 5 for step in (0, 3, 1, 2)]
    faults = f"0/{first}=all_gather.issued@15; 0/{second}=recover.{point}@2; "
    faults += f"0/{third}=broadcast.done@40; 0/{fourth}=recover.{other_point}@3"  # the start counts too
    program = ["collectives.py", "6", "--seed", str(len(point)), "--no-groups"]
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        judge(job, 5, lost={first, second, third, fourth})


def test_kill_while_sub_groups_are_made_again(tmp_path: pathlib.Path) -> None:
    """Members that die while they settle any of many sub-groups are survived, also by those who make them later."""
    faults = "0/0=recover.exchange@4; 0/3=recover.confirm@7; 0/1=recover.build@3>recover.exchange@2"
    with jobs.running(tmp_path, 5, ["collectives.py", "10", "--seed", "7"], {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        judge(job, 5, lost={0, 1, 3})


def test_kill_while_the_first_view_is_made(tmp_path: pathlib.Path) -> None:
    """Members may die before anybody has called anything."""
    faults = "0/0=recover.build; 0/2=recover.exchange; 0/4=recover.confirm"
    program = ["collectives.py", "2", "--seed", "4"]
    with jobs.running(tmp_path, 5, program, {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        world = judge(job, 5, lost={0, 2, 4})
        assert world[1] == (1, 3)


def test_leave_in_the_middle_of_a_collective(tmp_path: pathlib.Path) -> None:
    """Members that leave where they have begun a call hold nobody up: the others do it without them."""
    faults = "0/1=all_reduce.issued@20:exit; 0/3=broadcast.enter@30:exit; 0/4=recover.exchange@3:exit"
    with jobs.running(tmp_path, 5, ["collectives.py", "5", "--seed", "5"], {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        judge(job, 5, lost=set(), left={1, 3, 4})


def test_two_at_once_and_all_but_one(tmp_path: pathlib.Path) -> None:
    """Two that die in the same call are one failure or two; the last member alone goes on."""
    faults = "0/1=all_reduce.enter@20; 0/3=all_reduce.enter@20; 0/0=broadcast.issued@40; 0/2=broadcast.done@40"
    with jobs.running(tmp_path, 5, ["collectives.py", "7", "--seed", "3"], {"LIGHTNING_FT_FAIL_AT": faults}) as job:
        world = judge(job, 5, lost={0, 1, 2, 3})
        assert world[max(world)] == (4,)


@pytest.mark.parametrize("seed", [int(text) for text in os.environ.get("LIGHTNING_FT_TEST_SEEDS", "11").split()])
def test_random_kills(tmp_path: pathlib.Path, seed: int) -> None:
    """Members that are killed at random moments are survived, one at a time or together."""
    print(f"seed {seed}: LIGHTNING_FT_TEST_SEEDS={seed} repeats it")
    draw = random.Random(seed)
    victims = draw.sample(range(5), draw.randint(2, 4))
    moments = sorted(draw.randint(5, 300) for _ in victims)
    if draw.random() < 0.5:
        moments[1] = moments[0]
    survivor = next(slot for slot in range(5) if slot not in victims)
    environment = {"LIGHTNING_FT_TOPOLOGY": draw.choice(["ring", "tree"])}
    with jobs.running(tmp_path, 5, ["collectives.py", "9", "--seed", str(seed), "--hold"], environment) as job:
        for victim, moment in zip(victims, moments, strict=True):
            job.wait_until(lambda moment=moment: len(job.records(f"0/{survivor}")) >= moment)
            job.kill(f"0/{victim}", signal.SIGKILL)
        (tmp_path / "go").touch()
        judge(job, 5, lost=set(victims))


def sums(job: jobs.Job, member: str) -> list[tuple[float, int]]:
    """Return the sums that a member got, with the world size after each."""
    return [(line["value"], line["size"]) for line in job.records(member) if line["event"] == "sum"]


def check_sums(job: jobs.Job, members: list[str], expected: list[tuple[float, int]]) -> None:
    """Check which sums members got, and in which order they changed; one may be sooner or later."""
    first = sums(job, members[0])
    assert all(sums(job, member) == first for member in members), job.output()
    assert list(dict.fromkeys(first)) == expected, job.output()
    assert all(job.records(member)[-1]["event"] == "end" for member in members), job.output()


def test_a_leaver_and_a_member_that_raises(tmp_path: pathlib.Path) -> None:
    """One that ends early is no failure, one that raises shows its traceback; the others go on and the job succeeds."""
    with jobs.running(tmp_path, 4, ["endings.py", "leave_or_raise"]) as job:
        assert job.finish() == 0, job.output()
        check_sums(job, ["0/0", "0/2"], [(15.0, 4), (7.0, 3), (5.0, 2)])
        assert len(sums(job, "0/3")) == 20
        assert len(sums(job, "0/1")) == 40
        assert "ValueError: member 1 has had enough" in job.output()
        assert set(causes(job)) == {"0/1"}


def test_impossible_calls_raise_on_all_members_and_the_group_goes_on(tmp_path: pathlib.Path) -> None:
    """What torch can't do raises RuntimeError on all members at that call, and nothing else is lost.

    Slots that don't fit are an error of whoever has made them. A sub-group that is destroyed leaves nothing open and
    its name free, in a job that nobody leaves. One whose members all raise then ends with a failure, and shows their
    tracebacks.
    """
    expected = {"slot number": "ValueError", "slot shape": "ValueError", "gather dtype": None}
    with jobs.running(tmp_path, 2, ["endings.py", "impossible", "groups", "all_raise"]) as job:
        assert job.finish() != 0
        for member in ("0/0", "0/1"):
            attempts = [line for line in job.records(member) if line["event"] == "attempt"]
            assert len(attempts) == 10, job.output()
            assert all(line["sum"] == 2.0 for line in attempts)
            for line in attempts:
                of_one = {"slot shape of one": "ValueError" if member == "0/1" else None}
                assert line["error"] == (expected | of_one).get(line["name"], "RuntimeError"), line
            assert "Invalid scalar type" in attempts[0]["text"]
            first, last = [line["count"] for line in job.records(member) if line["event"] == "descriptors"]
            assert last <= first + 6, job.output()
            assert sums(job, member) == [(3.0, 2)] * 40, job.output()
            assert f"ValueError: member {member[-1]} has had enough" in job.output()


def test_different_sizes_end_with_an_error(tmp_path: pathlib.Path) -> None:
    """Tensors of different sizes in one call end in an error within the timeout, not in rebuilding for ever."""
    environment = {"LIGHTNING_FT_TIMEOUT": "4", "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "2"}
    with jobs.running(tmp_path, 3, ["endings.py", "shapes"], environment) as job:
        job.finish()  # its status is Gloo's: with some sizes it ends the process
        output = job.output()
        assert "doesn't match expected size" in output or "can't be done" in output or "different sizes" in output
        assert sum(event["event"] == "view_committed" for event in job.events()) < 20


def test_forked_children_hold_nobody_up(tmp_path: pathlib.Path) -> None:
    """Children that a killed member has forked hold none of its connections, and one that ends leaves nothing."""
    with jobs.running(tmp_path, 3, ["endings.py", "forks"]) as job:
        assert job.finish() == 0, job.output()
        check_sums(job, ["0/0", "0/2"], [(7.0, 3), (5.0, 2)])
        assert len(sums(job, "0/1")) == 26
        assert next(line for line in job.records("0/1") if line["event"] == "forked")["status"] == 0
        for index in range(2):
            assert json.loads((tmp_path / f"child-{index}.json").read_text())["tcp"] == []
        assert set(causes(job)) == {"0/1"}


def test_no_orphan_outlives_the_agent(tmp_path: pathlib.Path) -> None:
    """When the agent is killed, its members end in the middle of their collectives."""
    with jobs.running(tmp_path, 2, ["endings.py", "orphan"]) as job:
        job.wait_until(lambda: all(len(job.records(member)) > 5 for member in ("0/0", "0/1")))
        pids = [job.pid(member) for member in ("0/0", "0/1")]
        job.process.kill()
        job.process.wait()
        deadline_s = time.monotonic() + 60
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline_s, job.output()
            time.sleep(0.01)
