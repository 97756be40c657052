"""Step time and memory of `ft_ddp` against Lightning's own `ddp`: the same model and ranks, in alternating slices.

    python benchmarks/step_time.py [--slices 40] [--sizes small large]

Both jobs are started; then one of them is stopped (SIGSTOP to all its processes) while the other runs, in turns of a
second or a few. So both see the same machine, however it changes. Only steps that lie wholly in a slice of their own
count. The ratio is taken for each pair of neighbouring slices; the table shows the median and the quartiles of these.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import psutil
import report

PROGRAM = pathlib.Path(__file__).parent / "programs" / "step.py"
SIZES = {"small": (3, 512, 4, 24), "large": (3, 1600, 10, 24)}  # devices, width, depth, batch
SLICE_S = {"small": 1.0, "large": 4.0}
STRATEGIES = ("ddp", "ft_ddp")


class Job:
    """A training that can be stopped and continued as a whole."""

    def __init__(self, strategy: str, size: str, directory: pathlib.Path) -> None:
        self.path = directory / strategy
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_DIR": str(directory)}
        environment |= {"LIGHTNING_FT_HEARTBEAT_TIMEOUT": "60"}  # a stop is no failure here
        command = [sys.executable, str(PROGRAM), strategy, *map(str, SIZES[size])]
        self.process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the job."""
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait_until_warm(self) -> dict[str, float]:
        """Wait until it has measured its memory, and return that."""
        while not self.path.with_suffix(".json").exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.path.name} ended with status {self.process.returncode}")
            time.sleep(0.05)
        result: dict[str, float] = json.loads(self.path.with_suffix(".json").read_text())
        return result

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have used."""
        return sum(sum(process.cpu_times()[:2]) for process in [self.process, *self.process.children(recursive=True)])

    def laps(self) -> list[tuple[float, float]]:
        """Return begin and end of each step so far."""
        data = self.path.with_suffix(".laps").read_bytes()
        times = [time_s for (time_s,) in struct.iter_unpack("<d", data[: len(data) // 8 * 8])]
        return list(itertools.pairwise(times))


def measure(size: str, num_slices: int, directory: pathlib.Path) -> str:
    """Return a row of the table."""
    jobs, memory = {}, {}
    try:
        for strategy in STRATEGIES:
            jobs[strategy] = Job(strategy, size, directory)
            memory[strategy] = jobs[strategy].wait_until_warm()
            jobs[strategy].signal(signal.SIGSTOP)
        slices: dict[str, list[tuple[float, float]]] = {strategy: [] for strategy in STRATEGIES}
        used_s: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
        for number in range(2 * num_slices):
            strategy = STRATEGIES[(number + number // 2) % 2]  # ddp ft ft ddp ddp ft ...: neither is always first
            before_s = jobs[strategy].cpu_s()
            jobs[strategy].signal(signal.SIGCONT)
            begin_s = time.monotonic()
            time.sleep(SLICE_S[size])
            slices[strategy].append((begin_s, time.monotonic()))
            jobs[strategy].signal(signal.SIGSTOP)
            used_s[strategy].append(jobs[strategy].cpu_s() - before_s)
    finally:
        for job in jobs.values():
            job.signal(signal.SIGKILL)
    medians, cpu = {}, {}
    for strategy in STRATEGIES:
        laps = [
            [end - begin for begin, end in jobs[strategy].laps() if first <= begin and end <= last]
            for first, last in slices[strategy]
        ]
        medians[strategy] = [statistics.median(lap) for lap in laps]
        # Of the step that a turn ends in, some is in it: it counts by the time that is left.
        lengths = [last - first for first, last in slices[strategy]]
        cpu[strategy] = [
            used * statistics.mean(lap) / length
            for used, lap, length in zip(used_s[strategy], laps, lengths, strict=True)
        ]
    return (
        f"| {memory['ddp']['parameters'] / 1e6:.1f} M parameters, {SIZES[size][0]} ranks, {num_slices} pairs "
        f"| {statistics.median(medians['ddp']) * 1e3:.1f} ms "
        f"| {_ratio(f'{size}/step ratio', medians)} | {_ratio(f'{size}/processor ratio', cpu)} "
        f"| {memory['ft_ddp']['settled_mb'] / memory['ddp']['settled_mb']:.3f} "
        f"| {memory['ft_ddp']['peak_mb'] / memory['ddp']['peak_mb']:.3f} |"
    )


def _ratio(name: str, values: dict[str, list[float]]) -> str:
    ratios = [ours / stock for stock, ours in zip(values["ddp"], values["ft_ddp"], strict=True)]
    report.figure(f"step_time/{name}", ratios)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=40, help="of each job")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    print(
        "| model | step of ddp | step time, ratio (quartiles) | CPU time of a step, ratio (quartiles) "
        "| memory after the third step, ratio | peak memory, ratio |"
    )
    print("|---|---|---|---|---|---|")
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as directory:
            print(measure(size, arguments.slices, pathlib.Path(directory)), flush=True)


if __name__ == "__main__":
    main()
