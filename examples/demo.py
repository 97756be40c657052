"""Train on handwritten digits with 4 ranks, kill two of them, rank 0 among them, and show what happened.

    python examples/demo.py [--seed N]

Starts `digits.py` as a job of its own, sends SIGKILL to two ranks at random steps, and tells from the job's event log
what happened. Ends with 0 only if the job ended well, outlived both kills and reached 95 % on the test set.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

NUM_RANKS = 4
MAX_EPOCHS = 25
KILL_STEPS = (10, 240)
"""Between the first logged step and well before the end: 17 to 23 steps make an epoch, so there are at least 425."""
KILL_DELAY_S = 0.2
"""Up to so much later than the step, so that the signal may land anywhere in one."""
REQUIRED_ACCURACY = 95.0
DEADLINE_S = 300.0
POLL_S = 0.01

Event = dict[str, Any]


class DemoError(Exception):
    """The demo did not show what it should."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What is killed, when: a member's logical id, and the training step after which it dies."""

    member: str
    step: int
    delay_s: float


@dataclasses.dataclass
class Job:
    """The running job and what it writes into its folder."""

    folder: Path
    process: subprocess.Popen[bytes]

    def events(self) -> list[Event]:
        """Return the event log so far; a line that is being written is left out."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def output(self) -> str:
        """Return what the job printed."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def step(self) -> int:
        """Return the last training step in the metrics of rank 0, whoever that is; -1: none yet."""
        last = -1
        for path in self.folder.glob("**/metrics.csv"):
            with path.open(newline="") as file, contextlib.suppress(csv.Error):
                steps = [row["step"] for row in csv.DictReader(file) if row.get("step") and row.get("train_loss")]
                last = max([last, *(int(step) for step in steps if step.isdigit())])
        return last

    def pid(self, member: str) -> int:
        """Return the process id of a member, a child of the agent that the job's first process is."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("LIGHTNING_FT_MEMBER") == member:
                    return child.pid
        raise DemoError(f"there is no process of {member}: did it end before it could be killed?")

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Poll until a condition holds; the job's end or the deadline are failures."""
        while not condition():
            if self.process.poll() is not None and not condition():
                raise DemoError(f"the job ended with status {self.process.returncode} before {what}")
            if time.monotonic() > deadline_s:
                raise DemoError(f"waited in vain for {what}")
            time.sleep(POLL_S)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Job]:
    """Start the job; nothing of it is left at the end."""
    command = [sys.executable, str(Path(__file__).with_name("digits.py"))]
    command += ["--devices", str(NUM_RANKS), "--max-epochs", str(MAX_EPOCHS), "--log-dir", str(folder / "logs")]
    environment = {**os.environ, "LIGHTNING_FT_EVENT_LOG": str(folder / "events.jsonl"), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield Job(folder, process)
        finally:
            if process.poll() is None:
                process.kill()  # the ranks see their agent die, and end
            process.wait()


def plan(seed: int) -> list[Kill]:
    """Draw who dies when: rank 0 and one other, in any order."""
    draw = random.Random(seed)
    victims = ["0/0", f"0/{draw.randrange(1, NUM_RANKS)}"]
    draw.shuffle(victims)
    steps = sorted(draw.randrange(*KILL_STEPS) for _ in victims)
    return [Kill(member, step, draw.uniform(0, KILL_DELAY_S)) for member, step in zip(victims, steps, strict=True)]


def run(folder: Path, kills: list[Kill]) -> tuple[Job, list[Event]]:
    """Run the job to its end and kill on the way.

    Returns: The ended job, and the kills as events of the demo's own.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    done: list[Event] = []
    with running(folder) as job:
        for kill in kills:
            job.wait_until(lambda step=kill.step: job.step() >= step, f"step {kill.step}", deadline_s)
            time.sleep(kill.delay_s)
            pid = job.pid(kill.member)
            done.append({"time": time.time(), "event": "demo_kill", "member": kill.member, "pid": pid})
            os.kill(pid, signal.SIGKILL)
            print(f"SIGKILL to member {kill.member}, process {pid}, after step {kill.step}", flush=True)
        try:
            job.process.wait(max(1.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise DemoError(f"the job did not end within {DEADLINE_S:g} s") from None
    return job, done


def _view(event: Event) -> str:
    members = event["members"]
    return f"generation {event['generation']}: {len(members)} members, {', '.join(members)}; rank 0 is {members[0]}"


def _recovered(event: Event) -> str:
    done_again, contributors = event["redone"], ", ".join(event["contributors"])
    return (
        f"training goes on at step {event['step']}, {event['latency_s'] * 1000:.0f} ms after it broke "
        f"(done again: {done_again}; contributors: {contributors})"
    )


def _admitted(event: Event) -> str:
    return f"{', '.join(event['joined'])} is back at step {event['step']}; it took {event['latency_s'] * 1000:.0f} ms"


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "demo_kill": lambda event: f"SIGKILL is sent to member {event['member']} (process {event['pid']})",
    "job_started": lambda event: f"the job starts with the members {', '.join(event['members'])}",
    "member_joined": lambda event: f"member {event['member']} is there",
    "failure_detected": lambda event: f"member {event['member']} is lost: {event['detail']} (by its {event['cause']})",
    "view_suspended": lambda event: f"training is suspended: {event['reason']}",
    "view_committed": _view,
    "recovered": _recovered,
    "members_admitted": _admitted,
    "evaluation_redealt": lambda event: f"the others have evaluated the {event['num_samples']} samples of the dead",
    "evaluation_incomplete": lambda event: f"the {event['stage']} covers {event['coverage']:.0%} of its data",
    "job_stopped": lambda event: f"there will be no other view: {event['reason']}",
    "job_finished": lambda event: f"the job ends with status {event['status']}",
}


def narrate(event: Event) -> str:
    """Say an event in words."""
    sentence = _SENTENCES.get(event["event"])
    return event["event"].replace("_", " ") if sentence is None else sentence(event)


def print_timeline(events: list[Event]) -> None:
    """Print all events with their seconds since the start."""
    print("\nWhat happened (seconds since the start):")
    for event in sorted(events, key=lambda event: event["time"]):
        print(f"  {event['time'] - events[0]['time']:8.3f}  {narrate(event)}")
    print()


def check(job: Job, kills: list[Kill]) -> float:
    """Return the test accuracy in percent.

    Raises:
        DemoError: A promise was not kept.
    """
    events = job.events()
    if job.process.returncode != 0:
        raise DemoError(f"the job ended with status {job.process.returncode}, expected 0")
    for kill in kills:
        positions = [i for i, e in enumerate(events) if e["event"] == "failure_detected" and e["member"] == kill.member]
        if not positions:
            raise DemoError(f"the event log does not say that {kill.member} was lost")
        if not any(event["event"] == "recovered" for event in events[positions[0] :]):
            raise DemoError(f"the event log does not say that training went on after {kill.member} was lost")
    lost = {event["member"] for event in events if event["event"] == "failure_detected"}
    if lost != {kill.member for kill in kills}:
        raise DemoError(f"lost were {sorted(lost)}, expected the two that were killed")
    found = re.findall(r"^test accuracy: ([\d.]+)%", job.output(), re.MULTILINE)
    if len(found) != 1:
        raise DemoError(f"expected one line with the test accuracy in the output, got {len(found)}")
    return float(found[0])


def main() -> int:
    """Run the demo.

    Returns: Exit status.
    """
    parser = argparse.ArgumentParser(description="Train while two ranks are killed.")
    parser.add_argument("--seed", type=int, help="draws who is killed when; default: another one each time")
    seed = parser.parse_args().seed
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    kills = plan(seed)
    print(f"Training on handwritten digits with {NUM_RANKS} ranks; two will be killed (--seed {seed}).", flush=True)
    with tempfile.TemporaryDirectory(prefix="lightning_ft-demo-") as name:
        folder = Path(name)
        done: list[Event] = []
        try:
            job, done = run(folder, kills)
            print_timeline([*job.events(), *done])
            accuracy = check(job, kills)
        except DemoError as error:
            output, log = folder / "output.txt", folder / "events.jsonl"
            for path in (output, log):
                if path.exists():
                    print(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}", file=sys.stderr)
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print(f"Final test accuracy: {accuracy:.2f} % (required: {REQUIRED_ACCURACY:g} %)")
    if accuracy < REQUIRED_ACCURACY:
        print("FAILED: the model is not good enough", file=sys.stderr)
        return 1
    print("The job outlived both kills.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
