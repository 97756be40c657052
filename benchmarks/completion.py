"""How many runs complete, and at what goodput: fail-stop, restart from checkpoints, lightning_ft. In virtual time.

    python benchmarks/completion.py [--runs 200] [--no-plot]

**Simulated**: no process dies here. Of lightning_ft the real core, settle plan and cursor decide (virtual_job.py); what
things take was measured with few ranks (RESULTS.md) or is assumed, and is printed. A run is 24 h of work; what counts
is whether it is done within 10 % more. Failures come at random, at the same rate for each rank (exponentially).

With plain all-reduce one failure ends the run. If one failure is expected in a run, the chance that there is none is
1/e = 37 %, so 63 % of such runs fail: that is the rate of the column "1".

Restarts wait as long for a lost machine, and notice silence and hangs as fast as lightning_ft; checkpoints are saved at
Daly's interval sqrt(2 d M) - d (J. T. Daly, Future Generation Computer Systems 22, 2006; the first order is J. W.
Young's, Communications of the ACM 17, 1974), d the time that saving blocks, M the mean time between failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import report
from virtual_job import KINDS, SETTINGS, TIMEOUT_S, Job, Outcome, Times

WORK_S = 24 * 3600.0
SLACK = 1.1
NUM_RANKS = 100
EXPECTED = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Failures in 24 h of 100 ranks."""

SAVE_S = 5.0
RESTART_S = (5.5, 60.0, 600.0)
"""The first is torchrun's with a small model (RESULTS.md, `recovery.py`); the others are assumed for large ones."""

RECOVERIES_S = (0.045, 1.0, 10.0, 60.0, 300.0)
"""From a failure to the next committed step, of which the first is measured."""

Run = Callable[[int], Outcome]


@dataclasses.dataclass(frozen=True)
class Point:
    """What so many runs came to."""

    complete: float
    goodput: float
    num_failures: float
    lost_steps: float
    lost_samples: float
    repeated_samples: float


def collect(run: Run, num_runs: int) -> Point:
    """Run with seeds from 0 on; the goodput is that of the runs that complete."""
    outcomes = [run(seed) for seed in range(num_runs)]
    done = [outcome.goodput for outcome in outcomes if outcome.is_complete]
    return Point(
        len(done) / num_runs,
        statistics.mean(done) if done else math.nan,
        statistics.mean(outcome.num_failures for outcome in outcomes),
        statistics.mean(outcome.lost_steps for outcome in outcomes),
        statistics.mean(outcome.lost_samples for outcome in outcomes),
        statistics.mean(outcome.repeated_samples for outcome in outcomes),
    )


def ours(rate: float, num_ranks: int = NUM_RANKS, times: Times | None = None, work_s: float = WORK_S) -> Run:
    """Return lightning_ft's run; `rate` is the failures per second of a rank."""
    times = times or Times()
    num_steps = round(work_s / times.step_s)
    return lambda seed: Job(seed, num_ranks, num_steps, failures_per_s=rate, times=times, limit_s=SLACK * work_s).run()


def fail_stop(rate: float, num_ranks: int = NUM_RANKS) -> Run:
    """Return a run that ends with the first failure."""

    def run(seed: int) -> Outcome:
        first_s = random.Random(seed).expovariate(rate * num_ranks)
        return Outcome(first_s > WORK_S, min(first_s, WORK_S), WORK_S, int(first_s <= WORK_S))

    return run


def restart(rate: float, restart_s: float, num_ranks: int = NUM_RANKS) -> Run:
    """Return a run that goes back to its last checkpoint at each failure, if need be on another machine."""
    mean_s, times = 1 / (rate * num_ranks), Times()
    interval_s = math.sqrt(2 * SAVE_S * mean_s) - SAVE_S if 2 * mean_s > SAVE_S else mean_s
    kinds, shares = list(KINDS), list(KINDS.values())
    waits_s = {
        "exit": times.exit_detect_s,
        "silent": SETTINGS.heartbeat_timeout + times.replace_s,
        "hang": TIMEOUT_S,
    }

    def run(seed: int) -> Outcome:
        chance = random.Random(seed)
        now_s = saved_s = 0.0
        num_failures = lost_steps = 0
        while saved_s < WORK_S and now_s < 10 * WORK_S:
            next_s = now_s + chance.expovariate(1 / mean_s)
            period_s = interval_s + SAVE_S
            left_s = WORK_S - saved_s
            end_s = now_s + left_s + math.floor(left_s / interval_s) * SAVE_S
            if end_s <= next_s:
                now_s, saved_s = end_s, WORK_S
                break
            num_saves = int((next_s - now_s) / period_s)
            saved_s += num_saves * interval_s
            lost_steps += int(min(interval_s, next_s - now_s - num_saves * period_s) / times.step_s)
            num_failures += 1
            now_s = next_s + waits_s[chance.choices(kinds, shares)[0]]
            while (again_s := chance.expovariate(1 / mean_s)) < restart_s:  # it fails while it starts
                num_failures += 1
                now_s += again_s
            now_s += restart_s
        is_complete = saved_s >= WORK_S and now_s <= SLACK * WORK_S
        return Outcome(is_complete, now_s, WORK_S, num_failures, lost_steps=lost_steps)

    return run


def percent(value: float) -> str:
    """For a table."""
    return "" if math.isnan(value) else f"{value:.1%}".replace("%", " %")


def table_of_rates(num_runs: int) -> dict[str, list[Point]]:
    """Print completion and goodput against the failure rate."""
    points: dict[str, list[Point]] = {}

    def add(name: str, point: Point) -> None:
        points.setdefault(name, []).append(point)

    for expected in EXPECTED:
        rate = expected / NUM_RANKS / WORK_S
        add("fail-stop", collect(fail_stop(rate), 20 * num_runs))
        for restart_s in RESTART_S:
            add(f"restart in {restart_s:g} s", collect(restart(rate, restart_s), 2 * num_runs))
        add("lightning_ft", collect(ours(rate), max(3, round(num_runs / max(1.0, expected)))))
    print(
        f"| simulated: {NUM_RANKS} ranks, failures expected in 24 h | " + " | ".join(f"{e:g}" for e in EXPECTED) + " |"
    )
    print("|---|" + "---|" * len(EXPECTED))
    print(
        "| 1 - exp(-failures): fail, with fail-stop | " + " | ".join(percent(1 - math.exp(-e)) for e in EXPECTED) + " |"
    )
    for name, row in points.items():
        print(f"| complete: {name} | " + " | ".join(percent(point.complete) for point in row) + " |")
    for name, row in points.items():
        print(f"| goodput of these: {name} | " + " | ".join(percent(point.goodput) for point in row) + " |")
    for name, row in list(points.items())[1:]:
        print(f"| steps done again, a run: {name} | " + " | ".join(f"{point.lost_steps:.0f}" for point in row) + " |")
    last = points["lightning_ft"]
    lost = " | ".join(f"{point.lost_samples:g}, {point.repeated_samples:g}" for point in last)
    print(f"| samples lost, repeated: lightning_ft | {lost} |")
    print()
    return points


def table_of_recoveries(num_runs: int) -> list[Point]:
    """Print goodput against the time that a recovery takes."""
    expected = 30.0
    points = []
    for recovery_s in RECOVERIES_S:
        extra_s = recovery_s - RECOVERIES_S[0]
        times = dataclasses.replace(Times(), view_s=Times().view_s + extra_s)
        points.append(collect(ours(expected / NUM_RANKS / WORK_S, times=times), max(3, num_runs // 50)))
    print(
        f"| simulated: {NUM_RANKS} ranks, {expected:g} failures in 24 h; recovery | "
        + " | ".join(f"{value:g} s" for value in RECOVERIES_S)
        + " |"
    )
    print("|---|" + "---|" * len(points))
    print("| complete | " + " | ".join(percent(point.complete) for point in points) + " |")
    print("| goodput | " + " | ".join(percent(point.goodput) for point in points) + " |")
    print("| steps done again | " + " | ".join(f"{point.lost_steps:g}" for point in points) + " |")
    print("| samples lost | " + " | ".join(f"{point.lost_samples:g}" for point in points) + " |")
    print()
    return points


def table_of_sizes() -> None:
    """Print the same rate for each rank, with more ranks."""
    rate = 1.0 / NUM_RANKS / WORK_S
    print(
        "| simulated: a failure in 100 rank-days | runs | work | failures | complete | goodput | lost steps, samples |"
    )
    print("|---|---|---|---|---|---|---|")
    for num_ranks, hours, num_runs in ((100, 24.0, 20), (1_000, 24.0, 2), (10_000, 1.2, 1)):
        point = collect(ours(rate, num_ranks, work_s=hours * 3600), num_runs)
        print(
            f"| {num_ranks} ranks | {num_runs} | {hours:g} h | {point.num_failures:.1f} | {percent(point.complete)} "
            f"| {percent(point.goodput)} | {point.lost_steps:g}, {point.lost_samples:g} |",
            flush=True,
        )
    print()


def draw(points: dict[str, list[Point]], recoveries: Sequence[Point]) -> None:
    """Write the plot."""
    from matplotlib.figure import Figure

    plot = Figure(figsize=(11, 3.6), layout="constrained")
    complete, goodput, recovery = plot.subplots(1, 3)
    styles = ["k-", "C0--", "C0-.", "C0:", "C1-"]
    for (name, row), style in zip(points.items(), styles, strict=True):
        complete.plot(EXPECTED, [100 * point.complete for point in row], style, label=name)
        goodput.plot(EXPECTED, [100 * point.goodput for point in row], style, label=name)
    complete.plot(EXPECTED, [100 * math.exp(-e) for e in EXPECTED], "kx", label="exp(-failures)")
    recovery.plot(RECOVERIES_S, [100 * point.goodput for point in recoveries], "C1-")
    for axes, title, label in (
        (complete, "runs that complete, %", "failures expected in 24 h"),
        (goodput, "goodput of these, %", "failures expected in 24 h"),
        (recovery, "goodput with 30 failures, %", "a recovery takes, s"),
    ):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_title(f"{title} (simulated)", fontsize=10)
        axes.grid(visible=True, alpha=0.3)
    complete.legend(fontsize=7)
    path = report.save_plot(plot, "completion")
    print(f"![completion and goodput](plots/{path.name})")


def main() -> None:
    """Simulate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="at the rate of one failure in a run")
    parser.add_argument("--no-plot", action="store_true")
    arguments = parser.parse_args()
    points = table_of_rates(arguments.runs)
    recoveries = table_of_recoveries(arguments.runs)
    table_of_sizes()
    print("Times, s: " + ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(Times()).items()) + ".")
    print(
        f"Kinds of failures: {', '.join(f'{name} {share:.0%}' for name, share in KINDS.items())}. "
        f"A save blocks {SAVE_S:g} s.\n"
    )
    if not arguments.no_plot:
        draw(points, recoveries)
    for index, expected in enumerate(EXPECTED):
        report.figure(
            f"completion/lost steps and samples at {expected:g}",
            [sum(_lost(points["lightning_ft"][index]))],
            is_count=True,
        )


def _lost(point: Point) -> tuple[float, float]:
    return point.lost_steps, point.lost_samples


if __name__ == "__main__":
    main()
