"""Step time and memory of `ft_ddp` against Lightning's own `ddp`: the same model and ranks, in alternating runs.

    python benchmarks/step_time.py [--pairs 5] [--sizes small large]

A ratio is taken within each pair of runs; the table shows the median and the range of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

PROGRAM = pathlib.Path(__file__).parent / "programs" / "step.py"
SIZES = {"small": (3, 512, 4, 24, 300), "large": (3, 1600, 10, 24, 40)}  # devices, width, depth, batch, steps


def run(strategy: str, size: str, directory: str) -> dict[str, float]:
    """Run one job and return what its rank 0 measured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_DIR": directory}
    arguments = [strategy, *map(str, SIZES[size])]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{strategy} {size} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    print(
        "| model | step of ddp | step time, ratio (range) | memory after the third step, ratio | peak memory, ratio |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for size in arguments.sizes:
            pairs = []
            for index in range(arguments.pairs):
                order = ("ddp", "ft_ddp") if index % 2 == 0 else ("ft_ddp", "ddp")
                results = {strategy: run(strategy, size, directory) for strategy in order}
                pairs.append((results["ddp"], results["ft_ddp"]))
            ratios = {key: sorted(ours[key] / stock[key] for stock, ours in pairs) for key in pairs[0][0]}
            time_ratios = ratios["step_s"]
            print(
                f"| {pairs[0][0]['parameters'] / 1e6:.1f} M parameters, {SIZES[size][0]} ranks "
                f"| {statistics.median(stock['step_s'] for stock, _ in pairs) * 1e3:.1f} ms "
                f"| {statistics.median(time_ratios):.3f} ({time_ratios[0]:.3f} to {time_ratios[-1]:.3f}) "
                f"| {statistics.median(ratios['settled_mb']):.3f} | {statistics.median(ratios['peak_mb']):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
