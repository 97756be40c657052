"""Soak: a real job under a seeded chaos monkey for minutes, then every promise is checked from its logs alone.

    make soak MINUTES=10 [SEED=n] [TASK=digits|language]
    python benchmarks/soak.py --minutes 1 --seed 7 --keep runs/soak

Eight ranks on four hosts (network namespaces, which need root and iproute2; without these one host, and no cards).
About every five seconds something happens: SIGKILL to a rank or to two at once, SIGSTOP for good or for a second, a
card that is down for a second or for good, the coordinator killed, an agent killed, a node preempted
(SIGTERM to its agent).
A node that is lost or was preempted is started again and joins. The whole schedule comes from the seed, which is
printed. Then all must become whole again, end at the same epoch, and leave nothing behind: no process, nothing in
/dev/shm. soak_check.py says what else. At last the same fit runs in peace, and must be as good within the noise.

Everything stays in the directory of `--keep` (default: runs/soak-SEED). Exit status 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
import random
import shutil
import sys
import time
from collections.abc import Iterator

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import soak_check
from monkey import MARK, NUM_HOSTS, NUM_SLOTS, OF_NODES, ROOT, SETTINGS, Monkey, command, marked, plan
from tests.integration import jobs, networks

PROGRAM = str(pathlib.Path(__file__).parent / "programs" / "soak_fit.py")
SHARED = pathlib.Path("/dev/shm")  # noqa: S108 - it is looked at
WHOLE_S = 180.0
"""How long the job may take to be whole again once it is left in peace."""


def shared_memory() -> set[str]:
    """Return the names in shared memory."""
    return {path.name for path in SHARED.iterdir()}


def has_networks() -> bool:
    """Whether hosts can be made here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextlib.contextmanager
def all_hosts() -> Iterator[list[networks.Host] | None]:
    """Make the hosts, if that can be done."""
    if not has_networks():
        yield None
        return
    with networks.hosts(NUM_HOSTS) as made:
        yield made


def wait(monkey: Monkey, until_s: float) -> None:
    """Let the job run, with an eye on it; `until_s` as time.monotonic()."""
    while time.monotonic() < until_s:
        monkey.tend()
        monkey.watch()
        time.sleep(0.5)


def soak(out: pathlib.Path, seed: int, minutes: float, task: str) -> list[str]:
    """Run the job under the monkey; return what is wrong with its end."""
    before = shared_memory()
    with all_hosts() as hosts, contextlib.ExitStack() as stack:
        num_nodes, num_slots = (NUM_HOSTS, NUM_SLOTS) if hosts else (1, NUM_HOSTS * NUM_SLOTS)
        monkey = Monkey(out, hosts, [PROGRAM, task, str(num_nodes), str(num_slots)], stack)
        monkey.job.wait_until(lambda: len(monkey.job.records("0/0")) > 20, timeout_s=300)
        begin_s = time.monotonic()
        for act in plan(seed, 60 * minutes, num_nodes):
            wait(monkey, begin_s + act.at_s)
            whom = f"node {act.node}" if act.kind in OF_NODES else " ".join(act.members)
            print(f"{act.at_s:7.1f} s  {act.kind:12} {'' if act.kind == 'coordinator' else whom}", flush=True)
            monkey.do(act)
        deadline_s = time.monotonic() + WHOLE_S
        while not monkey.is_whole() and time.monotonic() < deadline_s:
            wait(monkey, time.monotonic() + 1.0)
        wrong = [] if monkey.is_whole() else [f"the job is not whole {WHOLE_S:g} s after the last fault"]
        (out / "stop").touch()
        wrong += end(monkey)
    return wrong + [f"{SHARED} has {name}" for name in shared_memory() - before if name.startswith(("torch", "psm"))]


def end(monkey: Monkey) -> list[str]:
    """Wait for all agents; return what is wrong with how they end, and with what they leave behind."""
    wrong = []
    for node, job in monkey.agents.items():
        try:
            status = job.finish(120)
        except AssertionError as error:
            wrong.append(f"node {node} does not end: {str(error)[:2000]}")
        else:
            if status != 0:
                wrong.append(f"node {node} ended with status {status}: see {job.output_name}")
    deadline_s = time.monotonic() + 10
    while (left := marked(monkey.out)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for process in left:
        wrong.append(f"a process is left: {process.pid} {command(process)[:120]}")
        with contextlib.suppress(psutil.Error):
            process.kill()
    return wrong


def calm(out: pathlib.Path, task: str, num_epochs: int) -> float:
    """Run the same fit in peace, and return its score."""
    program = [PROGRAM, task, "1", str(NUM_HOSTS * NUM_SLOTS), str(num_epochs)]
    with jobs.running(out, NUM_HOSTS * NUM_SLOTS, program, SETTINGS | {MARK: str(out)}) as job:
        assert job.finish(3600) == 0, job.output()
        return float(job.records("0/0")[-1]["score"])


def noise(task: str, score: float) -> float:
    """Return how far two equally good fits may be apart."""
    if task == "digits":  # three standard errors of the difference of two shares of 360
        return max(0.02, 3 * math.sqrt(2 * max(score * (1 - score), 0.01) / 360))
    return 0.15  # bits per character


def main() -> int:
    """Soak, check, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of the schedule; default: a new one")
    parser.add_argument("--task", default="digits", choices=["digits", "language"])
    parser.add_argument("--keep", type=pathlib.Path, help="an empty directory for all logs")
    parser.add_argument("--calm-epochs", type=int, default=40, help="at most so many of the fit in peace; 0: none")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    out = (arguments.keep or ROOT / "runs" / f"soak-{seed}").resolve()
    print(f"seed {seed}, {arguments.minutes:g} minutes, {arguments.task}; logs in {out}", flush=True)
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    wrong = soak(out, seed, arguments.minutes, arguments.task)
    wrong += soak_check.check(out)
    ends = [line for path in out.glob("*-*.jsonl") for line in soak_check.read(path) if line["event"] == "end"]
    steps = [line for path in out.glob("*-*.jsonl") for line in soak_check.read(path) if line["event"] == "step"]
    if ends and arguments.calm_epochs and not wrong:
        num_epochs = max(line["epoch"] for line in steps) + 1
        score = calm(out / "calm", arguments.task, min(num_epochs, arguments.calm_epochs))
        print(f"score {ends[0]['score']:.4f} after {num_epochs} epochs; in peace {score:.4f}")
        if ends[0]["score"] < score - noise(arguments.task, score):
            wrong.append(f"the soaked model is worse: {ends[0]['score']:.4f}, in peace {score:.4f}")
    kinds = [event["event"] for event in jobs.read_lines(out / "events.jsonl")]
    told = ("failure_detected", "recovered", "members_admitted", "member_left", "coordinator_restarted")
    print("; ".join(f"{kinds.count(kind)} times {kind}" for kind in told))
    print(f"{max((line['step'] for line in steps), default=-1) + 1} steps")
    print("\n".join(wrong) or "all promises were kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
