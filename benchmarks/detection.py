"""How soon a silent member is given up, what looking for it costs, and whether a healthy one ever is.

    python benchmarks/detection.py [--cases card stop heartbeats] [--repeats 5] [--idle-s 60]
    python benchmarks/detection.py --soak MINUTES

`card`: four hosts (network namespaces: root and iproute2), the card of one is set down; from that command to the
slowest survivor's next committed step. `stop`: the same for SIGSTOP to one of four members on loopback. `heartbeats`:
CPU time of an idle member's monitor thread. The soak runs alone: eight ranks, some of whose steps hold the
interpreter's lock for a second, beside two busy processes, all on two cores. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration import jobs, networks  # noqa: E402

PROGRAMS = ROOT / "benchmarks" / "programs"
LOOP = ("plain_loop.py", "100000")
HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 3.0
START_TIMEOUT_S = 120.0

SILENCE_LIMIT_S = HEARTBEAT_TIMEOUT_S + 0.5
IDLE_LIMIT = 0.001
"""Of one core."""

NUM_SOAKED = 8
NUM_BUSY = 2
NUM_CORES = 2


def settings(heartbeat_timeout_s: float) -> dict[str, str]:
    """Return the environment of a job."""
    return {
        "LIGHTNING_FT_HEARTBEAT_INTERVAL": str(HEARTBEAT_INTERVAL_S),
        "LIGHTNING_FT_HEARTBEAT_TIMEOUT": str(heartbeat_timeout_s),
    }


def measure_card(directory: pathlib.Path, seed: int) -> dict[str, float]:
    """Set the card of one of four hosts down, not that of node 0, which has the coordinator."""
    chance = random.Random(seed)
    members = [f"{node}/0" for node in range(4)]
    environment = settings(HEARTBEAT_TIMEOUT_S)
    with networks.hosts(4) as hosts, jobs.running_on(directory, hosts, 1, LOOP, environment) as (job, *_):
        wait_until_warm(job, members, chance)
        node = chance.randrange(1, 4)
        begin_s = time.time()
        hosts[node].card_down()
        return wait_until_recovered(job, members, members[node], begin_s)


def measure_stop(directory: pathlib.Path, seed: int) -> dict[str, float]:
    """Stop one of four members."""
    chance = random.Random(seed)
    members = [f"0/{slot}" for slot in range(4)]
    with jobs.running(directory, 4, LOOP, settings(HEARTBEAT_TIMEOUT_S)) as job:
        wait_until_warm(job, members, chance)
        victim = chance.choice(members)
        begin_s = time.time()
        job.kill(victim, signal.SIGSTOP)
        return wait_until_recovered(job, members, victim, begin_s)


def wait_until_warm(job: jobs.Job, members: Sequence[str], chance: random.Random) -> None:
    """Wait until all train, then until a moment without meaning to heartbeats and ticks."""
    job.wait_until(lambda: all(len(job.records(member)) > 20 for member in members), START_TIMEOUT_S)
    time.sleep(chance.uniform(0.2, 0.2 + 3 * HEARTBEAT_INTERVAL_S))


def wait_until_recovered(job: jobs.Job, members: Sequence[str], victim: str, begin_s: float) -> dict[str, float]:
    """Return how long after `begin_s` the victim was given up, and the slowest survivor committed a step."""
    survivors = [member for member in members if member != victim]
    job.wait_until(lambda: bool(events(job, "recovered")))
    time.sleep(0.3)  # reading the records costs time that the survivors may need
    lost = events(job, "failure_detected")
    if [event["member"] for event in lost] != [victim]:
        raise RuntimeError(f"expected that {victim} is given up, and nobody else\n{job.output()}")
    since_s = events(job, "view_committed")[1]["time"]
    job.wait_until(lambda: all(next_commit_s(job, member, since_s) for member in survivors))
    return {
        "detect": lost[0]["time"] - begin_s,
        "total": max(next_commit_s(job, member, since_s) for member in survivors) - begin_s,
    }


def events(job: jobs.Job, name: str) -> list[dict[str, Any]]:
    """Return the events of one name."""
    return [event for event in job.events() if event["event"] == name]


def next_commit_s(job: jobs.Job, member: str, since_s: float) -> float:
    """Return when a member committed its first step after `since_s`; 0: not yet."""
    return next(
        (line["time"] for line in job.records(member) if line["event"] == "committed" and line["time"] > since_s), 0.0
    )


def measure_heartbeats(idle_s: float) -> float:
    """Return the share of one core that the monitor thread of an idle member takes."""
    command = [sys.executable, str(PROGRAMS / "idle_member.py"), str(idle_s)]
    own = {name: text for name, text in os.environ.items() if not name.startswith("LIGHTNING_FT_")}  # the defaults
    result = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    measured = json.loads(result.stdout)
    share: float = measured["cpu_s"] / measured["wall_s"]
    return share


def soak(directory: pathlib.Path, minutes: float) -> bool:
    """Train for so long, print who was given up, and return whether nobody was."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])  # for all that is started from here
    with contextlib.ExitStack() as started:
        for _ in range(NUM_BUSY):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            started.callback(busy.wait)
            started.callback(busy.kill)
        program = [str(PROGRAMS / "gil_heavy.py")]
        job = started.enter_context(jobs.running(directory, NUM_SOAKED, program, settings(10.0)))
        members = [f"0/{slot}" for slot in range(NUM_SOAKED)]
        job.wait_until(lambda: all(len(job.records(member)) > 1 for member in members), 5 * START_TIMEOUT_S)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            if job.process.poll() is not None:
                raise RuntimeError(f"the job ended:\n{job.output()}")
            time.sleep(1)
        lost, views = events(job, "failure_detected"), events(job, "view_committed")
        held = [line for member in members for line in job.records(member) if line["event"] == "held"]
        steps = max(line["step"] for line in held)
    longest_s = max(line["wall_s"] for line in held)
    print(
        f"| {minutes:g} min, {NUM_SOAKED} ranks and {NUM_BUSY} busy processes on {NUM_CORES} cores | figure | limit |"
    )
    print("|---|---|---|")
    print(f"| members given up | {len(lost)} | 0 |")
    print(f"| views | {len(views)} | 1 |")
    print(f"| steps | {steps} | |")
    print(f"| times that the interpreter's lock was held | {len(held)} | |")
    print(f"| longest of these, s | {longest_s:.1f} | |")
    for event in lost:
        print(json.dumps(event))
    return not lost and len(views) == 1


def has_networks() -> bool:
    """Whether hosts can be made here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def measure(cases: Sequence[str], repeats: int, idle_s: float) -> bool:
    """Print a table, and return whether all limits were kept."""
    is_kept = True
    print(f"| {repeats} times each, heartbeat_timeout {HEARTBEAT_TIMEOUT_S:g} s | median | maximum | limit |")
    print("|---|---|---|---|")
    silent = {
        "card": ("card down to the next step, s", measure_card),
        "stop": ("SIGSTOP to the next step, s", measure_stop),
    }
    for case in cases:
        if case == "heartbeats":
            share = measure_heartbeats(idle_s)
            is_kept &= share <= IDLE_LIMIT
            print(f"| CPU of an idle member's monitor thread, % of a core | {share:.3%} | | {IDLE_LIMIT:.1%} |")
        elif case == "card" and not has_networks():
            print("| card down: not measured, it needs root and iproute2 | | | |")
        else:
            name, measure_one = silent[case]
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # members may still be ending
                results = [measure_one(pathlib.Path(directory) / str(seed), seed) for seed in range(repeats)]
            is_kept &= max(result["total"] for result in results) <= SILENCE_LIMIT_S
            print_times(name, [result["total"] for result in results], f"{SILENCE_LIMIT_S:g}")
            print_times("of these until it is given up", [result["detect"] for result in results], "")
    return is_kept


def print_times(name: str, times_s: Sequence[float], limit: str) -> None:
    """Print a row."""
    print(f"| {name} | {statistics.median(times_s):.2f} | {max(times_s):.2f} | {limit} |", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", default=["card", "stop", "heartbeats"], choices=["card", "stop", "heartbeats"]
    )
    parser.add_argument("--repeats", type=int, default=5, help="jobs for each of card and stop")
    parser.add_argument("--idle-s", type=float, default=60.0, help="how long the idle member is watched")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="only look for members that are given up wrongly")
    arguments = parser.parse_args()
    if arguments.soak is None:
        return 0 if measure(arguments.cases, arguments.repeats, arguments.idle_s) else 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        return 0 if soak(pathlib.Path(directory), arguments.soak) else 1


if __name__ == "__main__":
    sys.exit(main())
