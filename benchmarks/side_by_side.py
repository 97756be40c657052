"""The same model, ranks and machine: Lightning's `ddp`, torchrun with restarts, torchft, lightning_ft; ratios count.

    python benchmarks/side_by_side.py [--ranks 3] [--steps 800] [--rounds 2] [--kinds plain torchrun torchft]

Four jobs of each kind (programs/side_by_side_loop.py): so many rounds in peace, for the step time and the memory; one
in which a rank is killed (SIGKILL), one in which a rank hangs (SIGSTOP), after a hundred steps; both train to their
ends, or until nobody has taken a step for 30 s. How each is set, by its own documentation:

* `ddp`, `ft_ddp`: a Lightning fit, started as a script. `plain`: backend `ft`, by `lightning-ft run`.
* `torchrun`: `--standalone --max-restarts 3`, a checkpoint every 25 steps, and
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which restarted workers meet the keys of the first ones.
* `torchft` 0.2.0: a lighthouse with `--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000`, a torchrun with
  `--max-restarts 10` for each replica, and the loop of its own example, which also keeps its place in the data after
  every step. It is installed into runs/torchft-venv; if that can't be done, its rows are missing.

All give a silent rank up after 5 s (torchft's default; heartbeat_timeout; the timeout of DDP's group), which
torchrun's workers can't outlive. *Again*: steps that are done a second time. *Lost*, *twice*: samples of the epoch that
no, or more than one, step of the training that counts has used; what a checkpoint takes back does not count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT)]

import report  # noqa: E402
from tests.integration import jobs  # noqa: E402

PROGRAM = str(pathlib.Path(__file__).parent / "programs" / "side_by_side_loop.py")
KINDS = ("ddp", "ft_ddp", "torchrun", "plain", "torchft")
BATCH_SIZE = 8
SILENCE_S = "5"
NUM_STEPS_IN_PEACE, NUM_STEPS_BEFORE = 300, 100
START_S = 200.0
GIVEN_UP_S = 30.0
"""A job in which nobody has taken a step for so long is taken to hang for good."""

TORCHFT = ("torchft==0.2.0", "opentelemetry-exporter-otlp-proto-http>=1.39.0", "opentelemetry-sdk>=1.39.0")


def torchft_python() -> pathlib.Path | None:
    """Return an interpreter that has torchft, beside this one's packages; None if it can't be installed."""
    home = ROOT / "runs" / "torchft-venv"
    python = home / "bin" / "python"
    if not (home / "bin" / "torchft_lighthouse").exists():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", TORCHFT[0]]
        others = [*pip[:6], "--quiet", "--constraint", str(ROOT / "constraints.txt"), *TORCHFT[1:]]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
            packages = home / "lib" / version / "site-packages"
            base = str(pathlib.Path(psutil.__file__).parents[1])
            (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
            subprocess.run(others, check=True)
            subprocess.run(pip, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"torchft is left out: {error}", file=sys.stderr)
            return None
    return python


@dataclasses.dataclass
class Running:
    """A job of one kind.

    Attributes:
        out: Where its processes write.
        processes: That were started here.
    """

    out: pathlib.Path
    processes: list[psutil.Popen]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has written."""
        return jobs.read_lines(self.out / f"{rank}.jsonl")

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """Return the steps that a rank has committed."""
        return [line for line in self.lines(rank) if line["event"] == "step"]

    def has_ended(self) -> bool:
        """Whether all processes have."""
        return all(process.poll() is not None for process in self.processes)


def commands(
    kind: str, out: pathlib.Path, num_ranks: int, num_steps: int
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the command lines of a job, and what is in their environments."""
    words = [PROGRAM, str(out), kind, str(num_ranks), str(num_steps)]
    ours = {"LIGHTNING_FT_HEARTBEAT_TIMEOUT": SILENCE_S, "LIGHTNING_FT_EVENT_LOG": str(out / "events.jsonl")}
    if kind in ("ddp", "ft_ddp"):
        yield [sys.executable, *words], ours
    elif kind == "plain":
        yield [sys.executable, "-m", "lightning_ft.cli", "run", "--nproc-per-node", str(num_ranks), *words], ours
    elif kind == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        yield [*torchrun, "--nproc-per-node", str(num_ranks), *words], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        python = torchft_python()
        assert python is not None, "it was looked for before"
        port = free_port()
        settings = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "1"]
        yield [*lighthouse, "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"], settings
        for replica in range(num_ranks):
            torchrun = [str(python), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
            more = {"REPLICA_GROUP_ID": str(replica), "NUM_REPLICA_GROUPS": str(num_ranks)}
            yield [*torchrun, "--max-restarts", "10", "--master-port", str(free_port()), *words], settings | more


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(kind: str, out: pathlib.Path, num_ranks: int, num_steps: int) -> Iterator[Running]:
    """Start a job, and leave nothing of it."""
    out.mkdir(parents=True)
    job = Running(out, [])
    try:
        with (out / "output.txt").open("wb") as output:
            for command, more in commands(kind, out, num_ranks, num_steps):
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **more}
                job.processes.append(psutil.Popen(command, env=environment, stdout=output, stderr=output))
        yield job
    finally:
        for process in job.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait()


def wait_for(job: Running, num_steps: int, num_ranks: int) -> None:
    """Wait until every rank has taken so many steps."""
    deadline_s = time.monotonic() + START_S
    while not all(len(job.steps(rank)) >= num_steps for rank in range(num_ranks)):
        if time.monotonic() > deadline_s or job.has_ended():
            raise RuntimeError(f"the job did not get there:\n{(job.out / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.05)


def in_peace(kind: str, out: pathlib.Path, num_ranks: int, num_steps: int) -> tuple[float, float, float]:
    """Return the median time of a step, and the memory of a rank, settled and at its peak, MB."""
    with running(kind, out, num_ranks, num_steps) as job:
        assert wait_for(job, min(num_steps, NUM_STEPS_IN_PEACE), num_ranks, 300), (out / "output.txt").read_text()[
            -3000:
        ]
        steps = job.steps(0)
    times = [line["time"] for line in steps[20:]]
    memory = [line for line in steps if "memory_kb" in line][-1]
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
    return step_s, memory["memory_kb"] / 1024, memory["peak_kb"] / 1024


@dataclasses.dataclass
class Harm:
    """What became of a job that was harmed; None: it ended.

    Attributes:
        next_s: Until the slowest survivor had committed its next step.
        whole_s: Until a step of all ranks was committed.
        again: Steps done again.
        lost: Samples that no step used.
        twice: Samples that more than one step used.
    """

    next_s: float | None = None
    whole_s: float | None = None
    again: int = 0
    lost: int = 0
    twice: int = 0


def harmed(kind: str, out: pathlib.Path, num_ranks: int, num_steps: int, number: signal.Signals) -> Harm:
    """Harm the last rank after a while, and return what becomes of the job."""
    victim = num_ranks - 1
    with running(kind, out, num_ranks, num_steps) as job:
        assert wait_for(job, min(num_steps // 3, NUM_STEPS_BEFORE), num_ranks, 300), (out / "output.txt").read_text()[
            -3000:
        ]
        pid = job.lines(victim)[-1]["pid"]
        harmed_s = time.time()
        os.kill(pid, number)
        while not job.has_ended() and not _is_done(job, kind) and not _is_stuck(job, num_ranks):
            time.sleep(0.2)
        return judge([job.steps(rank) for rank in range(num_ranks)], harmed_s, pid, num_ranks, num_steps)


def _is_stuck(job: Running, num_ranks: int) -> bool:
    last_s = max((job.out / f"{rank}.jsonl").stat().st_mtime for rank in range(num_ranks))
    return time.time() > last_s + GIVEN_UP_S


def _is_done(job: Running, kind: str) -> bool:
    if kind != "torchft":
        return False
    return all(process.poll() is not None for process in job.processes[1:])  # the lighthouse never ends


def judge(
    steps: Sequence[Sequence[dict[str, Any]]], harmed_s: float, victim: int, num_ranks: int, num_steps: int
) -> Harm:
    """Read from the steps of all ranks what a harm did."""
    survivors = steps[: num_ranks - 1]
    others = [line for rank in survivors for line in rank if line["time"] > harmed_s + 0.02]
    if not others:
        return Harm(lost=num_ranks * num_steps * BATCH_SIZE)
    firsts = [next((line["time"] for line in rank if line["time"] > harmed_s + 0.02), None) for rank in survivors]
    next_s = None if None in firsts else max(first for first in firsts if first is not None) - harmed_s
    back = [line["time"] for line in steps[num_ranks - 1] if line["pid"] != victim and line["size"] == num_ranks]
    counted: dict[tuple[int, int], list[int]] = {}  # the last time that a rank took a step
    again: collections.Counter[int] = collections.Counter()
    for rank, lines in enumerate(steps):
        for line in lines:
            again[rank] += (rank, line["step"]) in counted
            counted[rank, line["step"]] = line["index"]
    used = collections.Counter(index for indices in counted.values() for index in indices)
    return Harm(
        next_s=next_s,
        whole_s=back[0] - harmed_s if back else None,
        again=max(again.values(), default=0),
        lost=num_ranks * num_steps * BATCH_SIZE - len(used),
        twice=sum(count > 1 for count in used.values()),
    )


def seconds(value: float | None) -> str:
    """For a table."""
    return "never" if value is None else f"{value:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    arguments = parser.parse_args()
    kinds = [kind for kind in arguments.kinds if kind != "torchft" or torchft_python() is not None]
    peace: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = pathlib.Path(name)
        for number in range(arguments.rounds):  # in turns, so that all see the same machine
            for kind in kinds:
                out = directory / f"{kind}{number}"
                peace[kind].append(in_peace(kind, out, arguments.ranks, arguments.steps))
        print_peace(peace, arguments.ranks)
        print(f"| {arguments.ranks} ranks, one harmed | next step, s | all ranks again, s | again | lost | twice |")
        print("|---|---|---|---|---|---|")
        for what, number in (("killed", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
            for kind in kinds:
                out = directory / f"{kind}-{what}"
                harm = harmed(kind, out, arguments.ranks, arguments.steps, number)
                print(
                    f"| {kind}: {what} | {seconds(harm.next_s)} | {seconds(harm.whole_s)} | {harm.again} "
                    f"| {harm.lost} | {harm.twice} |",
                    flush=True,
                )


def print_peace(peace: dict[str, list[tuple[float, float, float]]], num_ranks: int) -> None:
    """Print step times and memory as ratios to the loop of the same sort on torch's DDP."""
    print(f"| {num_ranks} ranks in peace | step, ms | ratio to (rounds) | memory, ratio | peak memory, ratio |")
    print("|---|---|---|---|---|")
    for kind, rounds in peace.items():
        base = peace.get("ddp" if kind == "ft_ddp" else "torchrun", rounds) if kind != "ddp" else rounds
        step, memory, peak = (
            [ours[column] / stock[column] for ours, stock in zip(rounds, base, strict=True)] for column in range(3)
        )
        against = "" if base is rounds else f"{statistics.median(step):.2f} ({min(step):.2f} to {max(step):.2f})"
        print(
            f"| {kind} | {statistics.median(row[0] for row in rounds) * 1e3:.1f} | {against} "
            f"| {statistics.median(memory):.2f} | {statistics.median(peak):.2f} |"
        )
        if base is not rounds:
            report.figure(f"side_by_side/{kind}/step ratio", step)
    print("\nTo Lightning's `ddp` for `ft_ddp`, to `torchrun` for the plain loops.\n")


if __name__ == "__main__":
    main()
