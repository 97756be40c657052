"""The coordinator as a process of its own, so that it can die without an agent, and an agent's work can't delay it.

Its agent holds the listening socket and gives it a descriptor: while no coordinator runs, whoever connects waits in the
socket's queue instead of being refused, and no other program can take the port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ft.config import ENV_PREFIX, Settings
from lightning_ft.coordinator.channel import NOT_IN_OFFICE
from lightning_ft.coordinator.listening import listen
from lightning_ft.coordinator.memory import NUM_FILES, Memory, open_files
from lightning_ft.coordinator.replicas import unpack
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.coordinator.succession import Succession
from lightning_ft.event_log import EventLog, say_on_console
from lightning_ft.membership.ids import from_ranges


def main(arguments: Sequence[str]) -> int:
    """Serve until the job is over, or the agent declares it so by a word on standard input, or is dead.

    Settings, `LIGHTNING_FT_TOKEN` and `LIGHTNING_FT_EXPECTED` come from the environment. Signals that are meant for the
    job's processes (a scheduler's SIGTERM to all) are not for this one.

    Args:
        arguments: `--listener FD --memory FD FD FD`; in a job of several nodes also `--replica ID --term N`, and
            `--successor` if it is to take a lost coordinator's place.

    Returns: 0 when the job is over, `NOT_IN_OFFICE` if another coordinator has taken its place, or it can't take one's.
    """
    parser = argparse.ArgumentParser(prog="lightning-ft coordinator")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--memory", type=int, nargs=NUM_FILES, required=True, help="descriptors of its memory")
    parser.add_argument("--replica", type=int, default=0, help="id of the replica of this node's agent")
    parser.add_argument("--term", type=int, default=0, help="its term; 0: it can have no successor")
    parser.add_argument("--successor", action="store_true", help="a coordinator was lost")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    say_on_console()
    return asyncio.run(_serve(options))


def serve(settings: Settings, endpoint: tuple[str, int], expected: Sequence[str], token: str, state: Path) -> int:
    """Serve as a service of its own, which no agent starts, until the job is over.

    Args:
        settings: The job's.
        endpoint: Host and port to listen on.
        expected: Logical ids of the members that the job starts with.
        token: The job's secret.
        state: Directory for the decisions; whoever is started again with it goes on from them.

    Returns: 0 when the job is over, whatever its status; 143 if this process was asked to end before.

    Raises:
        OSError: The port can't be had, or the directory not written.
    """
    memory = Memory(open_files(state))

    async def run() -> int:
        event_log = EventLog(settings.event_log)
        server = CoordinatorServer(settings, expected, token, event_log, memory=memory, replica=None)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.ended.set)  # to be started again, perhaps elsewhere
        await server.start(listener)
        await server.ended.wait()
        await server.stop()
        await asyncio.to_thread(event_log.close)
        return 128 + signal.SIGTERM if server.status is None else 0

    listener = listen(*endpoint)
    return asyncio.run(run())


async def _serve(options: argparse.Namespace) -> int:
    listener, memory = socket.socket(fileno=options.listener), Memory(options.memory)
    settings = Settings.resolve()
    token = os.environ[f"{ENV_PREFIX}TOKEN"]
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    if options.successor and memory.load() is None:  # else it is in office already, and was started again
        succession = Succession(options.term, token, settings)
        loop.add_reader(stdin, succession.cancel)
        entry = await succession.run(listener, 2 * settings.heartbeat_timeout)
        loop.remove_reader(stdin)
        if entry is None:
            return NOT_IN_OFFICE
        meta = [options.term, entry.number, entry.before, entry.replicas]
        memory.save({**unpack(entry.text), "replication": meta})
    event_log = EventLog(settings.event_log)
    expected = from_ranges(os.environ[f"{ENV_PREFIX}EXPECTED"])
    server = CoordinatorServer(
        settings, expected, token, event_log, memory=memory, replica=options.replica, term=options.term
    )

    def hear_agent() -> None:
        if os.read(stdin, 1):
            server.end()
        else:  # it is dead: nobody knows how the job ends
            server.ended.set()

    loop.add_reader(stdin, hear_agent)
    await server.start(listener)
    await server.ended.wait()
    loop.remove_reader(stdin)
    await server.stop()
    await asyncio.to_thread(event_log.close)
    return NOT_IN_OFFICE if server.is_deposed else 0
