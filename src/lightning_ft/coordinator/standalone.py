"""The coordinator as a process of its own, so that it can die without an agent, and an agent's work can't delay it.

Its agent holds the listening socket and gives it a descriptor: while no coordinator runs, whoever connects waits in the
socket's queue instead of being refused, and no other program can take the port.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from lightning_ft.config import ENV_PREFIX, Settings
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog, say_on_console
from lightning_ft.membership.ids import from_ranges


def main(arguments: Sequence[str]) -> int:
    """Serve until the job is over, or SIGTERM declares it so.

    Settings, `LIGHTNING_FT_TOKEN` and `LIGHTNING_FT_EXPECTED` come from the environment.

    Args:
        arguments: `--listener FD --state FILE`.

    Returns: 0.
    """
    parser = argparse.ArgumentParser(prog="lightning-ft coordinator")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--state", type=Path, required=True, help="file that keeps its decisions")
    options = parser.parse_args(arguments)
    say_on_console()
    settings = Settings.resolve()
    asyncio.run(
        _serve(settings, socket.socket(fileno=options.listener), options.state, is_restarted=options.state.exists())
    )
    return 0


async def _serve(settings: Settings, listener: socket.socket, state_file: Path, *, is_restarted: bool) -> None:
    expected = from_ranges(os.environ[f"{ENV_PREFIX}EXPECTED"])
    event_log = EventLog(settings.event_log)
    server = CoordinatorServer(settings, expected, os.environ[f"{ENV_PREFIX}TOKEN"], event_log, state_file=state_file)
    if not is_restarted:
        shown = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
        server.record("job_started", members=list(expected), settings=shown)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.end)
    await server.start(listener)
    await server.ended.wait()
    await server.stop()
    await asyncio.to_thread(event_log.close)
