"""How processes end, and what that makes of the job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import threading
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended. `status` is its exit code, or minus the signal's number."""

    member: str
    incarnation: int
    status: int

    @property
    def detail(self) -> str:
        """In words for a person."""
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            return f"killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"killed by signal {-self.status}"


def job_status(exits: Sequence[Exit], released: frozenset[tuple[str, int]]) -> int:
    """Exit status of a job.

    Args:
        exits: How its processes ended, in order of time.
        released: The (member, incarnation) pairs that the coordinator let go after their last collective.

    Returns: 0 if a released member succeeded and none failed; else the last failure's status, 128 + n for signal n.
    """
    finished = [ended.status for ended in exits if (ended.member, ended.incarnation) in released]
    if finished and not any(finished):
        return 0
    failed = [ended.status for ended in exits if ended.status != 0]
    if not failed:
        return 0
    return failed[-1] if failed[-1] > 0 else 128 - failed[-1]


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
