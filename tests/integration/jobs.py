"""Start a real job, break it, and check from its records alone that every promise held."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.integration.networks import Host

PROGRAMS = pathlib.Path(__file__).parent / "programs"
ROOT = pathlib.Path(__file__).parents[2]

_AGENT = """
import sys
from lightning_ft.config import Settings
from lightning_ft.launch.agent import run_agent
from lightning_ft.coordinator.gathering import Beginning
from lightning_ft.launch.nodes import find_nodes
number, joins = sys.argv[1].removeprefix("+"), sys.argv[1].startswith("+")
num_nodes, num_slots = map(int, sys.argv[2:4])
command = sys.argv[4:]
if joins:
    node = int(number) if number else None
    begins, settings = find_nodes(
        Settings.resolve(), nodes=(1, 1), node=node, num_slots=num_slots, endpoint=None, joins=True
    )
else:
    members = [f"{n}/{slot}" for n in range(num_nodes) for slot in range(num_slots)]
    begins, settings = Beginning(int(number), tuple(members)), Settings.resolve()
sys.exit(run_agent(
    command_for=lambda slot: command, env_for=lambda slot: {}, node=begins.node, num_slots=num_slots,
    settings=settings, host_coordinator=begins.node == 0 and not joins, expected_members=begins.expected,
    incarnations=begins.incarnations,
))
"""


@dataclasses.dataclass
class Job:
    """A running or ended job.

    Attributes:
        out: Where its members write their records.
        process: The agent.
        output_name: Of the file with all that was printed.
    """

    out: pathlib.Path
    process: subprocess.Popen[bytes]
    output_name: str = "output.txt"

    def records(self, member: str) -> list[dict[str, Any]]:
        """Return what a member has written so far (only whole lines)."""
        return read_lines(self.out / f"{member.replace('/', '-')}.jsonl")

    def events(self) -> list[dict[str, Any]]:
        """Return the event log."""
        return read_lines(self.out / "events.jsonl")

    def pid(self, member: str) -> int:
        """Return the process id that a member's newest process wrote down."""
        return int([line["pid"] for line in self.records(member) if line["event"] == "start"][-1])

    def kill(self, member: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member; one that has ended is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(member), number)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for a condition on the records; fails with the job's output if it doesn't come."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s or (self.process.poll() is not None and not condition()):
                raise AssertionError(f"the job did not get there:\n{self.output()}")
            time.sleep(0.005)

    def finish(self, timeout_s: float = 90.0) -> int:
        """Return the agent's status; a job that hangs is ended and fails."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs:\n{self.output()}") from None

    def output(self) -> str:
        """Return what the job printed and its event log, for a person who looks for a failure."""
        text = (self.out / self.output_name).read_text(errors="replace")[-8000:]
        return f"{text}\n--- events\n" + "\n".join(json.dumps(event) for event in self.events()[-60:])


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read JSON lines; a last line that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def running(
    out: pathlib.Path, num_members: int, program: Sequence[str], environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Job]:
    """Start members that run a program in `programs/`, under an agent that does nothing else."""
    agent = [sys.executable, "-c", _AGENT, "0", "1", str(num_members)]
    return _running(out, [*agent, *rank_command(out, program)], environment)


def joining(
    out: pathlib.Path,
    node: int | None,
    num_members: int,
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    output_name: str = "joining.txt",
    host: Host | None = None,
) -> contextlib.AbstractContextManager[Job]:
    """Start another agent of a job that runs (see `at_port`); `node` None: one that the job has not had."""
    agent = [sys.executable, "-c", _AGENT, "+" if node is None else f"+{node}", "1", str(num_members)]
    command = [*agent, *rank_command(out, program)]
    return _running(out, command if host is None else host.command(command), environment, output_name)


def at_port() -> dict[str, str]:
    """Settings of a job that others can find."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {"LIGHTNING_FT_COORDINATOR": f"127.0.0.1:{port}", "LIGHTNING_FT_TOKEN": "shared-secret"}


@contextlib.contextmanager
def running_on(
    out: pathlib.Path, hosts: Sequence[Host], num_slots: int, program: Sequence[str], environment: Mapping[str, str]
) -> Iterator[list[Job]]:
    """Start a job of several nodes, one on each host; a job for each, with its own output and one event log."""
    with contextlib.ExitStack() as agents:
        jobs = []
        for node, host in enumerate(hosts):
            agent = [
                sys.executable,
                "-c",
                _AGENT,
                str(node),
                str(len(hosts)),
                str(num_slots),
                *rank_command(out, program),
            ]
            settings = {
                "LIGHTNING_FT_COORDINATOR": f"{hosts[0].address}:29400",
                "LIGHTNING_FT_TOKEN": "shared-secret",
                **environment,
            }
            jobs.append(agents.enter_context(_running(out, host.command(agent), settings, f"output{node}.txt")))
        yield jobs


def running_fit(
    out: pathlib.Path,
    num_members: int,
    program: Sequence[str],
    environment: Mapping[str, str] | None = None,
    output_name: str = "output.txt",
) -> contextlib.AbstractContextManager[Job]:
    """Start a program in `programs/` by `lightning-ft run`, whose agent costs a tenth of one that imports Lightning."""
    agent = [sys.executable, "-m", "lightning_ft.cli", "run", "--nproc-per-node", str(num_members)]
    return _running(out, [*agent, *rank_command(out, program)[1:]], environment, output_name)


def running_script(
    out: pathlib.Path,
    program: Sequence[str],
    environment: Mapping[str, str] | None = None,
    output_name: str = "output.txt",
) -> contextlib.AbstractContextManager[Job]:
    """Start a program in `programs/` as a user would: its Trainer becomes the agent."""
    return _running(out, [sys.executable, str(PROGRAMS / program[0]), str(out), *program[1:]], environment, output_name)


def rank_command(out: pathlib.Path, program: Sequence[str]) -> list[str]:
    """Return what starts one rank of a program in `programs/`."""
    return [sys.executable, str(PROGRAMS / "start.py"), str(PROGRAMS / program[0]), str(out), *program[1:]]


@contextlib.contextmanager
def _running(
    out: pathlib.Path,
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    output_name: str = "output.txt",
) -> Iterator[Job]:
    """Whatever happens, nothing of the job is left at the end."""
    out.mkdir(parents=True, exist_ok=True)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "LIGHTNING_FT_EVENT_LOG": str(out / "events.jsonl"),
        "LIGHTNING_FT_RESPAWN": "0",  # most tests look at what becomes of those that are left
        **(environment or {}),
    }
    with (out / output_name).open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    job = Job(out, process, output_name)
    try:
        yield job
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)  # its children notice and end
            process.wait()


def committed(job: Job, members: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Check that the members agree on every step, and return who contributed to each.

    Each step was committed once by each member that lived then, with the same contributors; all began it with bitwise
    the same buffers, and ended it with bitwise the same weights. Whoever came back began at the very next step, with
    the weights that the others had.
    """
    contributors: dict[int, tuple[str, ...]] = {}
    hashes: dict[int, str] = {}
    for member in members:
        lines = job.records(member)
        starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            steps = [line["step"] for line in lines[start:end] if line["event"] == "committed"]
            first = next((line["step"] for line in lines[start:end] if line["event"] == "in"), 0)
            assert steps == list(range(first, first + len(steps))), f"{member} committed {steps}\n{job.output()}"
            assert start == 0 or not steps or first > 0, f"{member} did not join\n{job.output()}"
        for line in lines:
            if line["event"] == "committed":
                assert line["index"] == line["step"], line
                agreed = contributors.setdefault(line["step"], tuple(line["contributors"]))
                assert agreed == tuple(line["contributors"]), f"{member} {line} but {agreed}\n{job.output()}"
            if line["event"] == "step":
                agreed_hash = hashes.setdefault(line["step"], line["hash"])
                assert agreed_hash == line["hash"], f"{member} differs after step {line['step']}\n{job.output()}"
    for member in members:
        for line in job.records(member):
            if line["event"] == "in" and line["step"]:
                assert hashes[line["step"] - 1].startswith(line["hash"]), f"{member} joined with others\n{job.output()}"
    return contributors


def contributors_by_events(events: Sequence[Mapping[str, Any]], num_steps: int) -> dict[int, tuple[str, ...]]:
    """Return who contributed to each step, according to the event log alone."""
    members = tuple(next(event["members"] for event in events if event["event"] == "view_committed"))
    told: dict[int, tuple[str, ...]] = {}
    since: list[tuple[int, tuple[str, ...]]] = [(0, members)]
    for event in events:
        if event["event"] == "view_committed":
            members = tuple(event["members"])
        if event["event"] == "recovered":
            told[event["step"]] = tuple(event["contributors"])
            since.append((event["step"], members))
        if event["event"] == "members_admitted":
            since.append((event["step"], members))
    result = {}
    for step in range(num_steps):
        result[step] = told.get(step, [who for first, who in since if first <= step][-1])
    return result
