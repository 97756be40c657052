"""From SIGKILL to the full job again: 3 ranks, a small model, plain PyTorch on `ft`.

    python benchmarks/rejoin.py [--kills 10]

The dead one is started again, or, in jobs of their own, a spare takes its place. Start-up is what the new process takes
from its creation to its first own line: to import torch. *Rest* is all else from the kill to its first committed step;
of a spare that is all. *Blocked* is for how long the others waited for it.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT)]

import report  # noqa: E402
from tests.integration import jobs  # noqa: E402

MEMBERS = ("0/0", "0/1", "0/2")
SPARE = "0/3"
LIMITS_S = {"rest": 0.5, "blocked": 0.2, "with a spare": 1.0}


def measure(directory: pathlib.Path, seed: int) -> dict[str, float]:
    """Kill one of three members at a random moment, and return the phases until it trains again, seconds."""
    chance = random.Random(seed)
    with jobs.running(directory, 3, ["plain_loop.py", "100000"], {"LIGHTNING_FT_RESPAWN": "1"}) as job:
        job.wait_until(lambda: all(len(job.records(member)) > 20 for member in MEMBERS))
        time.sleep(chance.uniform(0.2, 0.6))  # a moment without meaning to the job
        victim = chance.choice(MEMBERS)
        killed_s = time.time()
        job.kill(victim)
        job.wait_until(lambda: _starts(job, victim) == 2)
        records = job.records(victim)
        start = [line for line in records if line["event"] == "start"][1]
        created_s = psutil.Process(start["pid"]).create_time()
        job.wait_until(lambda: job.records(victim)[-1]["event"] in ("committed", "step"))
        later = job.records(victim)[len(records) :]
        committed_s = next(line["time"] for line in later if line["event"] == "committed")
        (admitted,) = [event for event in job.events() if event["event"] == "members_admitted"]
    startup_s = start["time"] - created_s
    return {
        "total": committed_s - killed_s,
        "start-up": startup_s,
        "rest": committed_s - killed_s - startup_s,
        "blocked": admitted["latency_s"],
    }


def measure_spare(directory: pathlib.Path, seed: int) -> dict[str, float]:
    """Kill one of three members once there is a spare, and return how long it takes until that trains, seconds."""
    chance = random.Random(seed)
    settings = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_SPARES": "1"}
    with jobs.running(directory, 3, ["plain_loop.py", "100000"], settings) as job:
        job.wait_until(lambda: any(event["event"] == "spare_ready" for event in job.events()))
        time.sleep(chance.uniform(0.2, 0.6))  # a moment without meaning to the job
        killed_s = time.time()
        job.kill(chance.choice(MEMBERS))
        job.wait_until(lambda: any(line["event"] == "committed" for line in job.records(SPARE)))
        committed_s = next(line["time"] for line in job.records(SPARE) if line["event"] == "committed")
    return {"with a spare": committed_s - killed_s}


def _starts(job: jobs.Job, member: str) -> int:
    return sum(line["event"] == "start" for line in job.records(member))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        results = [
            measure(directory / str(seed), seed) | measure_spare(directory / f"spare-{seed}", seed)
            for seed in range(arguments.kills)
        ]
    print(f"| {len(results)} kills, 3 ranks | median, s | maximum, s | limit, s |")
    print("|---|---|---|---|")
    for phase in ("total", "start-up", "rest", "blocked", "with a spare"):
        values = [result[phase] for result in results]
        report.figure(f"rejoin/{phase}, s", values)
        print(f"| {phase} | {statistics.median(values):.3f} | {max(values):.3f} | {LIMITS_S.get(phase, '')} |")


if __name__ == "__main__":
    main()
