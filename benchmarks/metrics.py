"""How long a scrape takes of a job with 1,000 members, and what folding heartbeats and events costs the coordinator.

    python benchmarks/metrics.py [--members 1000] [--scrapes 50]

The core is fed in this process with a view of so many members, and with the event log of as many recoveries; the
endpoint is scraped over HTTP by this process. CPU time is of both ends of the connection together. Exit status 1 if the
limit is missed, in CPU time: other programs don't count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator

import aiohttp

from lightning_ft.config import Settings
from lightning_ft.coordinator.metrics import JobMetrics, Pace
from lightning_ft.coordinator.metrics_endpoint import MetricsEndpoint
from lightning_ft.coordinator.metrics_families import JobCollector, Moment
from lightning_ft.membership import events, machine, state
from lightning_ft.membership.events import Address

LIMIT_S = 0.020
NUM_SLOTS = 8
CAUSES = ("exit", "connection", "heartbeat", "hang", "slow")


def trained(names: list[str]) -> state.State:
    """Return a job of all these in its first view."""
    settings, found = Settings(), state.initial(names, 0.0, 600.0)
    hellos = [events.Hello(name, 1, 0, Address("host", 5000)) for name in names]
    parks = [events.Parked(name, 1, 0, 0, "start") for name in names]
    for event in [*hellos, *parks]:
        found, _ = machine.step(settings, found, event, 1.0)
    return found


def log(names: list[str]) -> Iterator[str]:
    """Yield the events of as many recoveries, of all causes, and of a checkpoint for each."""
    yield _line(0.0, "job_started", 0, members=names, settings={})
    yield _line(1.0, "view_committed", 1, members=names, reason="")
    for number, name in enumerate(names):
        time_s, cause = 10.0 * number + 10, CAUSES[number % len(CAUSES)]
        rest = [*names[:number], *names[number + 1 :]]
        facts = {"latency_s": 0.5, "park_s": 0.25, "rebuild_s": 0.125, "settle_s": 0.0625, "rounds": 1, "step": number}
        yield _line(time_s, "failure_detected", number, name, cause=cause, detail="", doing="", late_s=1.0)
        yield _line(time_s, "view_suspended", number, name, reason="")
        yield _line(time_s + 0.25, "view_committed", number + 1, members=rest, reason="")
        yield _line(time_s + 0.5, "recovered", number + 1, rest[0], **facts, redone="reduce", contributors=rest)
        saved = {"kind": "delta", "bytes": 1, "duration_s": 0.5, "blocked_s": 0.1, "step": number}
        yield _line(time_s + 5, "checkpoint_saved", number + 1, rest[0], **saved)


def _line(time_s: float, event: str, generation: int, member: str | None = None, **fields: object) -> str:
    return json.dumps({"time": time_s, "event": event, "generation": generation, "member": member, **fields})


async def measure(num_members: int, num_scrapes: int) -> bool:
    """Print a table, and return whether the limit was kept."""
    names = [f"{number // NUM_SLOTS}/{number % NUM_SLOTS}" for number in range(num_members)]
    metrics, pace, found = JobMetrics(), Pace(), trained(names)
    lines = list(log(names))
    begin_s = time.process_time()
    for line in lines:
        metrics.add(line)
    event_s = (time.process_time() - begin_s) / len(lines)
    begin_s = time.process_time()
    for step in range(20):
        for name in names:
            pace.hear(name, step, float(step))
    heartbeat_s = (time.process_time() - begin_s) / (20 * len(names))
    moment = Moment(found, metrics, pace, term=1, num_lost=0, now_s=2.0, time_s=10.0 * num_members + 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    endpoint = MetricsEndpoint("127.0.0.1", port, JobCollector(lambda: moment).text)
    await endpoint.start()
    walls_s, cpus_s, size = [], [], 0
    async with aiohttp.ClientSession() as session:
        await _listening(session, port)
        for _ in range(num_scrapes):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                size = len(await response.read())
            walls_s.append(time.perf_counter() - wall_s)
            cpus_s.append(time.process_time() - cpu_s)
    await endpoint.stop()
    print(f"| {num_members} members, {num_scrapes} scrapes of {size / 1024:.0f} KiB | median | maximum | limit |")
    print("|---|---|---|---|")
    print(f"| CPU time of a scrape, ms | {1e3 * statistics.median(cpus_s):.1f} | {1e3 * max(cpus_s):.1f} | "
          f"{1e3 * LIMIT_S:g} |")  # fmt: skip
    print(f"| time of a scrape, ms | {1e3 * statistics.median(walls_s):.1f} | {1e3 * max(walls_s):.1f} | |")
    print(f"| CPU time to fold a heartbeat, us | {1e6 * heartbeat_s:.2f} | | |")
    print(f"| CPU time to fold an event, us | {1e6 * event_s:.1f} | | |")
    return statistics.median(cpus_s) < LIMIT_S


async def _listening(session: aiohttp.ClientSession, port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                    await response.read()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)
            else:
                return


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=50)
    arguments = parser.parse_args()
    return 0 if asyncio.run(measure(arguments.members, arguments.scrapes)) else 1


if __name__ == "__main__":
    sys.exit(main())
