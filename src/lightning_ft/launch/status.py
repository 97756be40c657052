"""How processes end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from pathlib import Path


def in_words(status: int) -> str:
    """Say an exit code, or minus a signal's number, to a person."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), so that it answers no signal (Linux; elsewhere False)."""
    return _stat(pid)[0] in "Tt"


class Processor:
    """Whether a process uses the processor (Linux; elsewhere it never does).

    Args:
        pid: Of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = 0

    def was_used(self) -> bool:
        """Whether it has computed since the last call, or waits to be given the processor; not if it is stopped."""
        state, used = _stat(self._pid)
        before, self._used = self._used, used
        return state not in "TtZX" and (used > before or state == "R")


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state letter, and the clock ticks that it has computed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", 0
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


async def end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process in a thread of its own, and return its status.

    asyncio's own processes lose the status of one that ends just when a signal is sent to it (seen in 2 of 300, Python
    3.11: both reap it). `Popen` takes care that only one does.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def deliver(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def wait() -> None:
        status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, status)

    threading.Thread(target=wait, name=f"lightning_ft-wait-{process.pid}", daemon=True).start()
    return await ended
