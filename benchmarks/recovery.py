"""From SIGKILL to the survivors' next committed step: 4 ranks, a small model, plain PyTorch on `ft`.

    python benchmarks/recovery.py [--kills 50]

Beside it the same loop under torchrun, which restarts all ranks from a checkpoint of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT)]

import report  # noqa: E402
from tests.integration import jobs  # noqa: E402

MEMBERS = tuple(f"0/{slot}" for slot in range(4))


def measure_ours(directory: pathlib.Path, seed: int) -> dict[str, float]:
    """Kill one of four members at a random moment, and return the phases of the recovery, seconds."""
    chance = random.Random(seed)
    alive = list(MEMBERS)
    with jobs.running(directory, 4, ["plain_loop.py", "100000"]) as job:
        job.wait_until(lambda: all(len(job.records(member)) > 20 for member in MEMBERS))
        time.sleep(chance.uniform(0.2, 0.6))  # a moment without meaning to the job
        victim = alive.pop(chance.randrange(len(alive)))
        killed_s = time.time()
        job.kill(victim)
        job.wait_until(lambda: bool(_events(job, "recovered")))
        (suspended,), (recovered,) = _events(job, "view_suspended"), _events(job, "recovered")
        since_s = _events(job, "view_committed")[1]["time"]
        job.wait_until(lambda: all(_next_commit(job, member, since_s) for member in alive))
        return {
            "total": max(_next_commit(job, member, since_s) for member in alive) - killed_s,
            "detect": suspended["time"] - killed_s,
            "park": recovered["park_s"],
            "rebuild": recovered["rebuild_s"],
            "settle": recovered["settle_s"],
        }


def _events(job: jobs.Job, name: str) -> list[dict[str, Any]]:
    return [event for event in job.events() if event["event"] == name]


def _next_commit(job: jobs.Job, member: str, since_s: float) -> float:
    """Return the time at which a member committed its first step after `since_s`; 0: not yet."""
    return next(
        (line["time"] for line in job.records(member) if line["event"] == "committed" and line["time"] > since_s), 0.0
    )


def measure_torchrun(directory: pathlib.Path) -> float:
    """Kill one of four torchrun workers; return the seconds until the next step of the restarted job."""
    directory.mkdir(parents=True, exist_ok=True)
    program = ROOT / "benchmarks" / "programs" / "torchrun_loop.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "--max-restarts",
        "3",
    ]
    # Without the second its restarted workers meet the keys of the first ones in the agent's store, and never resume.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (directory / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(program), str(directory)], env=environment, stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + 120
        while len(lines := jobs.read_lines(directory / "1.jsonl")) < 30:
            if time.monotonic() > deadline_s:
                raise RuntimeError((directory / "output.txt").read_text())
            time.sleep(0.05)
        pid = jobs.read_lines(directory / "0.jsonl")[0]["pid"]
        killed_s = time.time()
        os.kill(lines[0]["pid"], signal.SIGKILL)
        while not (later := [line["time"] for line in jobs.read_lines(directory / "0.jsonl") if line["pid"] != pid]):
            if time.monotonic() > deadline_s:
                raise RuntimeError((directory / "output.txt").read_text())
            time.sleep(0.05)
        first_s: float = later[0]
        return first_s - killed_s
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        _print_table([measure_ours(directory / str(seed), seed) for seed in range(arguments.kills)])
        restart_s = measure_torchrun(directory / "torchrun")
    print(f"\ntorchrun, restart of all ranks from a checkpoint of the last step: {restart_s:.2f} s, one kill")


def _print_table(results: list[dict[str, float]]) -> None:
    print(f"| {len(results)} kills, 4 ranks | median, ms | 99th percentile, ms | maximum, ms |")
    print("|---|---|---|---|")
    for phase in ("total", "detect", "park", "rebuild", "settle"):
        values = sorted(result[phase] * 1e3 for result in results)
        report.figure(f"recovery/{phase}, ms", values)
        p99 = statistics.quantiles(values, n=100, method="inclusive")[98]
        print(f"| {phase} | {statistics.median(values):.1f} | {p99:.1f} | {values[-1]:.1f} |")
    print(json.dumps({"totals_ms": [round(result["total"] * 1e3, 1) for result in results]}))


if __name__ == "__main__":
    main()
