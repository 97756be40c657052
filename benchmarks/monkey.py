"""The chaos monkey of soak.py: what it does to a real job, when, and whom it starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import sys
import time

import psutil

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration import jobs, networks  # noqa: E402

NUM_HOSTS, NUM_SLOTS = 4, 2
PATIENCE_S = 25.0
"""How long an agent may take to end that will: longer than four heartbeat timeouts."""

MARK = "SOAK_OF_LIGHTNING_FT"
SETTINGS = {
    "LIGHTNING_FT_RESPAWN": "1",
    "LIGHTNING_FT_MAX_RESTARTS": "1000",
    "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.5",
    "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "4",
    "LIGHTNING_FT_TIMEOUT": "30",
    "LIGHTNING_FT_MAX_WORLD_SIZE": str(NUM_HOSTS * NUM_SLOTS),
}
PERIOD_S = 5.0
SHORT_S, LONG_S = 1.0, 12.0
"""Less and more than the heartbeat timeout."""

WEIGHTS = {
    "kill": 6,
    "kill two": 2,
    "stop": 2,
    "short stop": 2,
    "coordinator": 2,
    "short card": 1,
    "card": 1,
    "agent": 1,
    "preempt": 1,
}
"""How often what is done."""

OF_NODES = ("card", "short card", "agent", "preempt")
"""To a whole node, one at a time, and never to node 0: its agent has the coordinator."""


@dataclasses.dataclass(frozen=True)
class Act:
    """One thing that the monkey does.

    Attributes:
        at_s: Since it began.
        kind: Of `WEIGHTS`.
        members: Whom it is done to.
        node: Or which node.
    """

    at_s: float
    kind: str
    members: tuple[str, ...] = ()
    node: int = 0


def plan(seed: int, duration_s: float, num_hosts: int) -> list[Act]:
    """Return the schedule of a seed: it depends on nothing that happens."""
    chance = random.Random(seed)
    slots = NUM_SLOTS if num_hosts > 1 else NUM_HOSTS * NUM_SLOTS
    members = [f"{node}/{slot}" for node in range(num_hosts) for slot in range(slots)]
    weights = {kind: weight for kind, weight in WEIGHTS.items() if num_hosts > 1 or kind not in OF_NODES}
    acts, at_s = [], 0.0
    while (at_s := at_s + PERIOD_S * chance.uniform(0.5, 1.5)) < duration_s:
        (kind,) = chance.choices(list(weights), list(weights.values()))
        victims = tuple(chance.sample(members, 2 if kind == "kill two" else 1))
        node = chance.randrange(1, num_hosts) if num_hosts > 1 else 0
        acts.append(Act(at_s, kind, victims, node))
    return acts


class Monkey:
    """Does what is planned to a running job, and starts again what has to be.

    Args:
        out: Of the job.
        hosts: None: all is on this one.
        program: Of each rank.
        stack: Ends all agents.
    """

    def __init__(
        self, out: pathlib.Path, hosts: list[networks.Host] | None, program: list[str], stack: contextlib.ExitStack
    ) -> None:
        self.out, self.hosts, self.program, self.stack = out, hosts, program, stack
        self.log = (out / "monkey.jsonl").open("a")
        self.watched = (out / "watched.jsonl").open("a")
        self.away: dict[int, float] = {}
        self.num_starts = 0
        if hosts is None:
            self.settings = SETTINGS | {MARK: str(out)}
            job = stack.enter_context(jobs.running(out, NUM_HOSTS * NUM_SLOTS, program, self.settings))
            self.agents = {0: job}
        else:
            endpoint = {"LIGHTNING_FT_COORDINATOR": f"{hosts[0].address}:29400", "LIGHTNING_FT_TOKEN": "soak"}
            self.settings = SETTINGS | {MARK: str(out)} | endpoint
            started = stack.enter_context(jobs.running_on(out, hosts, NUM_SLOTS, program, self.settings))
            self.agents = dict(enumerate(started))

    @property
    def job(self) -> jobs.Job:
        """Node 0's."""
        return self.agents[0]

    def say(self, **line: object) -> None:
        """Write down what was done."""
        self.log.write(json.dumps({"time": time.time(), **line}) + "\n")
        self.log.flush()

    def do(self, act: Act) -> None:
        """Do one thing, if there is anybody to do it to."""
        if act.kind in OF_NODES and self.away:
            self.say(skipped=act.kind, why=f"nodes {sorted(self.away)} are away")
            return
        self.say(**dataclasses.asdict(act))
        if act.kind in OF_NODES:
            self._harm_node(act.kind, act.node)
        elif act.kind == "coordinator":
            for process in self.coordinators():  # with all that would take its place
                process.kill()
        elif act.kind == "short stop":
            self.signal(act.members[0], signal.SIGSTOP)
            time.sleep(SHORT_S)  # no condition: the time itself is the fault
            self.signal(act.members[0], signal.SIGCONT)
        else:
            for member in act.members:
                self.signal(member, signal.SIGSTOP if act.kind == "stop" else signal.SIGKILL)

    def _harm_node(self, kind: str, node: int) -> None:
        if kind == "short card":
            self.host(node).card_down()
            time.sleep(SHORT_S)
            self.host(node).card_up()
            return
        if kind == "card":
            self.host(node).card_down()
        elif kind == "agent":
            self.agents[node].process.kill()
        else:
            self.agents[node].process.terminate()
        self.away[node] = time.monotonic() + (LONG_S if kind == "card" else 0.0)

    def host(self, node: int) -> networks.Host:
        """Return the host of a node."""
        assert self.hosts is not None
        return self.hosts[node]

    def signal(self, member: str, number: signal.Signals) -> None:
        """Signal a member, if it lives."""
        with contextlib.suppress(ProcessLookupError, IndexError):
            pid = self.job.pid(member)
            if is_marked(pid, self.out):
                os.kill(pid, number)

    def coordinators(self) -> list[psutil.Process]:
        """Return the coordinators of the job."""
        return [process for process in marked(self.out) if "lightning_ft.coordinator.standalone" in command(process)]

    def tend(self) -> None:
        """Start again the agents that have ended, once their cards are up."""
        for node, since_s in list(self.away.items()):
            if time.monotonic() < since_s:
                continue
            if self.hosts is not None:
                self.host(node).card_up()
            if self.agents[node].process.poll() is None:  # it has not noticed yet, or goes on by itself
                if time.monotonic() > since_s + PATIENCE_S:
                    del self.away[node]
                continue
            if any(f"{node}/" in environment(process).get("LIGHTNING_FT_MEMBER", "") for process in marked(self.out)):
                continue
            self.num_starts += 1
            name = f"again{self.num_starts}.txt"
            joining = jobs.joining(
                self.out, node, NUM_SLOTS, self.program, self.settings, output_name=name, host=self.host(node)
            )
            self.agents[node] = self.stack.enter_context(joining)
            self.say(started=node, output=name)
            del self.away[node]

    def watch(self) -> None:
        """Note what agents and coordinators use."""
        for process in marked(self.out):
            what = command(process)
            is_coordinator = "lightning_ft.coordinator.standalone" in what
            if not is_coordinator and "run_agent" not in what:
                continue
            with contextlib.suppress(psutil.Error):
                line = {
                    "name": "coordinator" if is_coordinator else "agent",
                    "pid": process.pid,
                    "memory_kb": process.memory_info().rss // 1024,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                self.watched.write(json.dumps(line) + "\n")
        self.watched.flush()

    def is_whole(self) -> bool:
        """Whether all members are in the job."""
        views = [event for event in self.job.events() if event["event"] == "view_committed"]
        return bool(views) and len(views[-1]["members"]) == NUM_HOSTS * NUM_SLOTS


def command(process: psutil.Process) -> str:
    """Return a process's command line; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def environment(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return dict(process.environ())
    return {}


def marked(out: pathlib.Path) -> list[psutil.Process]:
    """Return all processes of a job."""
    return [process for process in psutil.process_iter() if environment(process).get(MARK) == str(out)]


def is_marked(pid: int, out: pathlib.Path) -> bool:
    """Whether a process is one of a job."""
    with contextlib.suppress(psutil.Error):
        return environment(psutil.Process(pid)).get(MARK) == str(out)
    return False
