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

from lightning_ft.config import ENV_PREFIX, Settings
from lightning_ft.coordinator.memory import NUM_FILES, Memory
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog, say_on_console
from lightning_ft.membership.ids import from_ranges


def main(arguments: Sequence[str]) -> int:
    """Serve until the job is over, or the agent declares it so by a word on standard input, or is dead.

    Settings, `LIGHTNING_FT_TOKEN` and `LIGHTNING_FT_EXPECTED` come from the environment. Signals that are meant for the
    job's processes (a scheduler's SIGTERM to all) are not for this one.

    Args:
        arguments: `--listener FD --memory FD FD FD`.

    Returns: 0.
    """
    parser = argparse.ArgumentParser(prog="lightning-ft coordinator")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--memory", type=int, nargs=NUM_FILES, required=True, help="descriptors of its memory")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    say_on_console()
    asyncio.run(_serve(socket.socket(fileno=options.listener), Memory(options.memory)))
    return 0


async def _serve(listener: socket.socket, memory: Memory) -> None:
    settings = Settings.resolve()
    event_log = EventLog(settings.event_log)
    expected = from_ranges(os.environ[f"{ENV_PREFIX}EXPECTED"])
    server = CoordinatorServer(settings, expected, os.environ[f"{ENV_PREFIX}TOKEN"], event_log, memory=memory)

    def hear_agent() -> None:
        if os.read(sys.stdin.fileno(), 1):
            server.end()
        else:  # it is dead: nobody knows how the job ends
            server.ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), hear_agent)
    await server.start(listener)
    await server.ended.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    await server.stop()
    await asyncio.to_thread(event_log.close)
