"""How the cost of fault tolerance grows: with ranks, parameters, failures at once, and members of the core.

    python benchmarks/growth_of_cost.py [--ranks 2 4 8 16 32] [--millions 1 10 50 200] [--failures 1 2 4 8]
                                        [--members 10 100 1000 10000] [--steps 24]

Of each table the last row is the exponent: the slope of the logarithms, by least squares. Steps and memory are compared
with torch's own DDP, with the same model and ranks, one job after the other; with more ranks than cores all that ranks
do adds up, so that the ratios count and not the milliseconds. *Recovery* is from SIGKILL to the slowest survivor's next
step, the rest of the broken one included; *latency* what rank 0 says it took to agree, rebuild and settle.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import psutil

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT)]

import report  # noqa: E402
from tests.integration import jobs  # noqa: E402

from lightning_ft.config import Settings  # noqa: E402
from lightning_ft.membership import effects, events, machine, state, wire  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402

PROGRAM = str(pathlib.Path(__file__).parent / "programs" / "growth_loop.py")
DEADLINE_S = 150.0
NUM_WARM = 5
MOST_STOCK_RANKS = 8
"""So many ranks start twice; with more the start takes longer than all else."""

RANKS_OF_PARAMETERS, RANKS_OF_FAILURES, MILLIONS_OF_RANKS = 2, 10, 1.0


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(size), where there is a cost."""
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True) if cost > 0]
    if len(points) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


@contextlib.contextmanager
def running(out: pathlib.Path, kind: str, num_ranks: int, millions: float) -> Iterator[Callable[[int], list[dict]]]:  # type: ignore[type-arg]
    """Start a job; yields what returns the lines of a rank."""
    out.mkdir(parents=True)
    words = [PROGRAM, str(out), kind, f"{millions:g}"]

    def lines(rank: int) -> list[dict]:  # type: ignore[type-arg]
        return jobs.read_lines(out / f"{rank}.jsonl")

    if kind == "ft":
        with jobs.running(out, num_ranks, words[:1] + words[2:], {"LIGHTNING_FT_HEARTBEAT_TIMEOUT": "60"}):
            yield lines
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with (out / "output.txt").open("wb") as output:
        process = psutil.Popen([*command, *words], env=environment, stdout=output, stderr=output)
    try:
        yield lines
    finally:
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def wait(condition: Callable[[], bool], out: pathlib.Path) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the job did not get there:\n{(out / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.02)


def steady(
    out: pathlib.Path, kind: str, num_ranks: int, millions: float, num_steps: int, *, num_killed: int
) -> dict[str, float]:
    """Run a job, kill some of its ranks if it is ours, and return what was measured."""
    with running(out, kind, num_ranks, millions) as lines:
        wait(lambda: len(lines(num_ranks - 1)) > num_steps + 1 and len(lines(0)) > num_steps + 1, out)
        first = lines(0)
        times = [line["time"] for line in first if line["event"] == "step"][NUM_WARM:]
        memory = [line["memory_mb"] for line in first if "memory_mb" in line]
        found = {
            "step_s": statistics.median(later - earlier for earlier, later in itertools.pairwise(times)),
            "memory_mb": memory[-1],
        }
        if kind == "ft" and num_killed:
            killed_s = time.time()
            for rank in range(num_ranks - num_killed, num_ranks):
                os.kill(lines(rank)[0]["pid"], signal.SIGKILL)
            survivors = range(num_ranks - num_killed)
            wait(lambda: has_recovered(out), out)
            said = next(event for event in jobs.read_lines(out / "events.jsonl") if event["event"] == "recovered")
            found["latency_s"] = said["latency_s"]
            wait(lambda: all(lines(rank)[-1]["time"] > said["time"] for rank in survivors), out)
            after = [next(line["time"] for line in lines(rank) if line["time"] > said["time"]) for rank in survivors]
            found["recovery_s"] = max(after) - killed_s
    return found


def has_recovered(out: pathlib.Path) -> bool:
    """Whether rank 0 has said so."""
    return any(event["event"] == "recovered" for event in jobs.read_lines(out / "events.jsonl"))


def print_table(header: str, rows: dict[float, list[float]], texts: Sequence[str], why: str) -> None:
    """Print a table and the exponents of its columns."""
    print(f"| {header} |")
    print("|---|" + "---|" * len(texts))
    for size, values in rows.items():
        cells = [format_as(text, value) for text, value in zip(texts, values, strict=True)]
        print(f"| {size:g} | " + " | ".join(cells) + " |")
    if len(rows) > 1:
        columns = [[values[column] for values in rows.values()] for column in range(len(texts))]
        slopes = [format_as("{:.2f}", exponent(list(rows), column)) for column in columns]
        print("| exponent | " + " | ".join(slopes) + " |")
    print(f"\n{why}\n", flush=True)


def format_as(text: str, value: float) -> str:
    """Return a value as a cell."""
    return "" if math.isnan(value) else text.format(value)


def of_ranks(directory: pathlib.Path, all_ranks: Sequence[int], num_steps: int) -> None:
    """Print how cost grows with ranks."""
    rows: dict[float, list[float]] = {}
    for num in all_ranks:
        ours = steady(directory / f"ft{num}", "ft", num, MILLIONS_OF_RANKS, num_steps, num_killed=1)
        ratios = [math.nan, math.nan]
        if num <= MOST_STOCK_RANKS:
            stock = steady(directory / f"ddp{num}", "gloo", num, MILLIONS_OF_RANKS, num_steps, num_killed=0)
            ratios = [ours["step_s"] / stock["step_s"], ours["memory_mb"] / stock["memory_mb"]]
        rows[num] = [ours["step_s"] * 1e3, *ratios, ours["latency_s"] * 1e3, ours["recovery_s"] * 1e3]
    print_table(
        "ranks, 1 M parameters, one killed | step, ms | to DDP | memory to DDP | latency, ms | recovery, ms",
        rows,
        ("{:.1f}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}"),
        "Ranks share the cores: the step grows as their work does. A new ring connects each rank to each other one, so "
        "its making grows faster than ranks; what the coordinator does grows as ranks.",
    )


def of_parameters(directory: pathlib.Path, millions: Sequence[float], num_steps: int) -> None:
    """Print how cost grows with parameters."""
    rows: dict[float, list[float]] = {}
    for num in millions:
        steps = max(NUM_WARM + 4, min(num_steps, round(20 * num_steps / num)))
        stock = steady(directory / f"ddp-m{num:g}", "gloo", RANKS_OF_PARAMETERS, num, steps, num_killed=0)
        ours = steady(directory / f"ft-m{num:g}", "ft", RANKS_OF_PARAMETERS, num, steps, num_killed=1)
        ratios = [ours["step_s"] / stock["step_s"], ours["memory_mb"] / stock["memory_mb"]]
        rows[num] = [ours["step_s"] * 1e3, *ratios, ours["latency_s"] * 1e3, ours["recovery_s"] * 1e3]
        report.figure(f"growth_of_cost/{num:g} M/memory ratio", [ratios[1]])
    print_table(
        f"million parameters, {RANKS_OF_PARAMETERS} ranks, one killed "
        "| step, ms | to DDP | memory to DDP | latency, ms | recovery, ms",
        rows,
        ("{:.1f}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}"),
        "A step, and the rest of one that is finished after a recovery, grow as the parameters that are reduced; to "
        "agree on who is left does not depend on them. The copy that DDP keeps of the gradients is ours too.",
    )


def of_failures(directory: pathlib.Path, failures: Sequence[int], num_steps: int) -> None:
    """Print how cost grows with failures at once."""
    rows: dict[float, list[float]] = {}
    for num in failures:
        ours = steady(directory / f"ft-f{num}", "ft", RANKS_OF_FAILURES, MILLIONS_OF_RANKS, num_steps, num_killed=num)
        rows[num] = [ours["latency_s"] * 1e3, ours["recovery_s"] * 1e3]
    print_table(
        f"killed at once, of {RANKS_OF_FAILURES} ranks | latency, ms | recovery, ms",
        rows,
        ("{:.0f}", "{:.0f}"),
        "Those who die together cost one round, or two if one of them is noticed after the next view was made; the "
        "ring of those who are left is smaller.",
    )


def of_members(members: Sequence[int]) -> None:
    """Print how the core's cost grows with members."""
    rows: dict[float, list[float]] = {}
    for num in members:
        rows[num] = one_change(num)
        report.figure(f"growth_of_cost/{num} members/bytes", [rows[num][1]], is_count=True)
    print_table(
        "members of the core, one death | CPU time of the change, ms | bytes to and from all | memory, KiB",
        rows,
        ("{:.2f}", "{:.0f}", "{:.0f}"),
        "Views are told as differences: each member is sent, and says, as much as in a small job, so all grows as "
        "members do and not as their square.",
    )


def one_change(num: int) -> list[float]:
    """Play a death and the next view; return CPU time, bytes and memory."""
    settings = Settings(heartbeat_timeout=3600.0, timeout=7200.0)
    names = [f"{number // 8}/{number % 8}" for number in range(num)]
    tracemalloc.start()
    core = state.initial(names, 0.0, 7200.0)

    def feed(happened: Iterator[events.Event]) -> list[effects.Effect]:
        nonlocal core
        todo: list[effects.Effect] = []
        for event in happened:
            core, new = machine.step(settings, core, event, 0.0)
            todo += new
        return todo

    feed(iter([events.Hello(name, 1, 0, Address("10.0.0.1", 29500), 1) for name in names]))
    feed(iter([events.Parked(name, 1, 0, 0, "start") for name in names]))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    begin_s = time.process_time()
    todo = feed(iter([events.Exited(names[num // 2], 1, -9, "killed by SIGKILL")]))
    parks = [events.Parked(name, 1, 1, 7, "suspended") for name in names if name != names[num // 2]]
    todo += feed(iter(parks))
    spent_s = time.process_time() - begin_s
    assert core.generation == 2, "all have their next view"
    told = sum(len(wire.encode(effect)) for effect in todo if isinstance(effect, wire.TO_MEMBER))
    return [spent_s * 1e3, told + sum(len(wire.encode(park)) for park in parks), memory / 1024]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--millions", type=float, nargs="*", default=[1, 10, 50, 200])
    parser.add_argument("--failures", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--members", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    of_members(arguments.members)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = pathlib.Path(name)
        for measure, sizes in (
            (of_ranks, arguments.ranks),
            (of_parameters, arguments.millions),
            (of_failures, arguments.failures),
        ):
            if sizes:
                measure(directory, sizes, arguments.steps)


if __name__ == "__main__":
    main()
