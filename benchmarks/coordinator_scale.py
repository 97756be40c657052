"""How long a change of the view takes with 1,000 members on real sockets, and what it costs the coordinator.

    python benchmarks/coordinator_scale.py [--members 1000] [--deaths 5]

The members are in this process, each a connection that speaks the wire protocol, with heartbeats; the coordinator is a
process of its own on the same machine. One member dies (its port is closed, then its connection), all others are told,
park, and are given the next view; from the death to the last one's view. Exit status 1 if the limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator, Sequence

import aiohttp
import psutil

PACKAGE = pathlib.Path(__file__).parents[1] / "src" / "lightning_ft"
package = types.ModuleType("lightning_ft")  # without what its __init__ imports: torch, which takes seconds
package.__path__ = [str(PACKAGE)]
sys.modules["lightning_ft"] = package

from lightning_ft.config import Settings  # noqa: E402
from lightning_ft.coordinator.channel import MEMBER_PATH, TOKEN_HEADER, VERSION_HEADER, bearer, cut  # noqa: E402
from lightning_ft.coordinator.memory import make_files  # noqa: E402
from lightning_ft.membership import effects, events, wire  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402
from lightning_ft.membership.ids import as_ranges  # noqa: E402

TOKEN = "no-secret"  # noqa: S105 - both ends are here
NUM_SLOTS = 8
NUM_CONNECTING = 50
PATIENCE_S = 60.0
INTERVAL_S = Settings().heartbeat_interval

CHANGE_LIMIT_S = 1.0
"""From a death to the last member's next view."""

COORDINATOR = """
import sys, types
package = types.ModuleType("lightning_ft")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_ft"] = package
from lightning_ft.coordinator.standalone import main
sys.exit(main(sys.argv[2:]))
"""


def names(num: int) -> list[str]:
    """Return logical ids, eight to a node."""
    return [f"{number // NUM_SLOTS}/{number % NUM_SLOTS}" for number in range(num)]


@contextlib.contextmanager
def coordinator(members: Sequence[str], directory: pathlib.Path) -> Iterator[tuple[psutil.Process, int]]:
    """Start one as an agent does; its process and its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, (directory / "output.txt").open("wb") as out:
        descriptors = (listener.fileno(), *make_files())
        number, *memory = map(str, descriptors)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("LIGHTNING_FT_")}
        environment |= {
            "LIGHTNING_FT_TOKEN": TOKEN,
            "LIGHTNING_FT_EXPECTED": as_ranges(members),
            "LIGHTNING_FT_EVENT_LOG": str(directory / "events.jsonl"),
        }
        process = psutil.Popen(
            [sys.executable, "-c", COORDINATOR, str(PACKAGE), "--listener", number, "--memory", *memory],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            pass_fds=descriptors,
        )
        try:
            yield process, listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()
            for descriptor in descriptors[1:]:
                os.close(descriptor)


class Member:
    """A member that parks when it is told to, and does nothing else.

    Attributes:
        generation: Of the last view that it was given.
        heard: Bytes that the coordinator sent to it, by type of message; `said` those that it sent.
    """

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.store = fleet.store
        self.websocket: aiohttp.ClientWebSocketResponse | None = None
        self.generation = 0
        self.is_dead = False
        self.heard: collections.Counter[str] = collections.Counter()
        self.said: collections.Counter[str] = collections.Counter()

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Connect, and follow the coordinator until the end of the connection."""
        headers = {TOKEN_HEADER: bearer(TOKEN), VERSION_HEADER: str(wire.PROTOCOL_VERSION)}
        async with self.fleet.connecting:
            self.websocket = await session.ws_connect(url, headers=headers, max_msg_size=wire.MAX_MESSAGE_BYTES)
        address = Address("127.0.0.1", self.store.getsockname()[1])
        await self.say(events.Hello(self.name, 1, 0, address, os.getpid()))
        await self.say(events.Parked(self.name, 1, 0, 0, "start"))
        async for frame in self.websocket:
            message = wire.decode(frame.data, expect=wire.TO_MEMBER, peer=wire.Peer(self.name, 1))
            self.heard[type(message).__name__] += _on_the_wire(frame.data, 0)
            if isinstance(message, effects.Suspend):
                await self.say(events.Parked(self.name, 1, self.generation, message.generation, "suspended"))
            elif isinstance(message, effects.CommitView):
                self.generation = message.generation
                self.fleet.given()

    async def say(self, message: wire.Message) -> None:
        """Send a message."""
        assert self.websocket is not None
        text = wire.encode(message)
        self.said[type(message).__name__] += _on_the_wire(text, 4)
        await self.websocket.send_str(text)

    def die(self) -> None:
        """End as a process does, seen from outside."""
        assert self.websocket is not None
        self.is_dead = True
        self.store.close()
        cut(self.websocket)


def _on_the_wire(text: str, num_mask_bytes: int) -> int:
    """Bytes of a text frame."""
    return len(text) + num_mask_bytes + (2 if len(text) < 126 else 4 if len(text) < 65536 else 10)


@dataclasses.dataclass
class Change:
    """What one death cost: time until the last view; bytes that a member got and sent; the coordinator's CPU time."""

    latency_s: float
    heard: float
    said: float
    cpu_s: float


class Fleet:
    """All members.

    Attributes:
        store: Liveness port of those that live to the end.
    """

    def __init__(self, members: Iterable[str], store: socket.socket) -> None:
        self.store = store
        self.connecting = asyncio.Semaphore(NUM_CONNECTING)
        self.members = [Member(self, name) for name in members]
        self._tasks: list[asyncio.Task[None]] = []
        self._num_given = 0
        self._last_s = 0.0
        self._all_given = asyncio.Event()

    def given(self) -> None:
        """Note that a member was given its view."""
        self._num_given += 1
        self._last_s = time.monotonic()
        if self._num_given == len(self.members):
            self._all_given.set()

    async def view(self) -> float:
        """Wait until all have the next view. Returns: When the last was given it."""
        async with asyncio.timeout(PATIENCE_S):
            await self._all_given.wait()
        self._num_given = 0
        self._all_given.clear()
        return self._last_s

    def start(self, tasks: asyncio.TaskGroup, session: aiohttp.ClientSession, port: int) -> None:
        """Connect all, and have them say that they are alive."""
        url = f"http://127.0.0.1:{port}{MEMBER_PATH}"
        self._tasks = [tasks.create_task(member.run(session, url)) for member in self.members]
        self._tasks.append(tasks.create_task(self._beat()))

    def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()

    async def _beat(self) -> None:
        """One heartbeat of each in every interval, evenly over it."""
        due_s = time.monotonic()
        while True:
            for member in list(self.members):
                due_s += INTERVAL_S / len(self.members)
                if due_s > time.monotonic():
                    await asyncio.sleep(due_s - time.monotonic() + 0.005)  # a few at once: timers cost more than they
                if member.generation and not member.is_dead:
                    await member.say(events.Heartbeat(member.name, 1, sent_s=time.monotonic()))

    async def lose(self, victim: Member, process: psutil.Process) -> Change:
        """Have a member die, and all others get their next view."""
        self.members.remove(victim)
        heard, said, cpu_s = self._bytes("heard"), self._bytes("said"), _cpu_s(process)
        begin_s = time.monotonic()
        victim.die()
        latency_s = await self.view() - begin_s
        num = len(self.members)
        return Change(
            latency_s,
            (self._bytes("heard") - heard) / num,
            (self._bytes("said") - said) / num,
            _cpu_s(process) - cpu_s,
        )

    def _bytes(self, direction: str) -> int:
        """So far, without heartbeats and their answers."""
        counters: list[collections.Counter[str]] = [getattr(member, direction) for member in self.members]
        return sum(sum(counter.values()) - counter["Heartbeat"] - counter["Acknowledge"] for counter in counters)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(num: int, num_deaths: int, directory: pathlib.Path) -> bool:
    """Print a table of the changes, and return whether the limit was kept."""
    chance = random.Random(0)
    with coordinator(names(num), directory) as (process, port), contextlib.ExitStack() as stores:
        fleet = Fleet(names(num), stores.enter_context(socket.create_server(("127.0.0.1", 0))))
        victims = chance.sample(fleet.members, num_deaths)
        for victim in victims:
            victim.store = stores.enter_context(socket.create_server(("127.0.0.1", 0)))
        async with (
            asyncio.timeout(PATIENCE_S * (num_deaths + 2)),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            await _listening(session, port)
            before, begin_s = process.memory_info().rss, time.monotonic()
            fleet.start(tasks, session, port)
            first_s = await fleet.view() - begin_s
            await asyncio.sleep(3 * INTERVAL_S)
            memory_kib = (process.memory_info().rss - before) / num / 1024
            changes = []
            for victim in victims:
                changes.append(await fleet.lose(victim, process))
                await asyncio.sleep(chance.uniform(1, 2) * INTERVAL_S)
            fleet.stop()
    latencies_s = [change.latency_s for change in changes]
    print(f"| {num} members on sockets, {num_deaths} deaths | median | maximum | limit |")
    print("|---|---|---|---|")
    _print_row("a death to the last member's next view, s", latencies_s, ".3f", f"{CHANGE_LIMIT_S:g}")
    _print_row("of these CPU time of the coordinator, s", [change.cpu_s for change in changes], ".2f")
    _print_row("bytes to each member", [change.heard for change in changes], ".0f")
    _print_row("bytes from each member", [change.said for change in changes], ".0f")
    print(f"| first connection to the first view, s | {first_s:.2f} | | |")
    print(f"| memory of the coordinator for each member, KiB | {memory_kib:.1f} | | |")
    return max(latencies_s) <= CHANGE_LIMIT_S


async def _listening(session: aiohttp.ClientSession, port: int) -> None:
    """Wait until the coordinator has started: it refuses who has no token."""
    async with asyncio.timeout(PATIENCE_S), session.get(f"http://127.0.0.1:{port}{MEMBER_PATH}") as response:
        assert response.status == 401, response.status


def _print_row(name: str, values: Sequence[float], style: str, limit: str = "") -> None:
    print(f"| {name} | {statistics.median(values):{style}} | {max(values):{style}} | {limit} |")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--deaths", type=int, default=5, help="one after the other")
    arguments = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a descriptor at each end
    with tempfile.TemporaryDirectory() as directory:
        is_kept = asyncio.run(measure(arguments.members, arguments.deaths, pathlib.Path(directory)))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
