"""What the coordinator knows of the job's past: its event log, also what earlier coordinators have written."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from lightning_ft.coordinator.metrics import JobMetrics
from lightning_ft.event_log import EventLog
from lightning_ft.history.lines import is_start

logger = logging.getLogger("lightning_ft")

_MAX_OVERLAP = 10_000
"""Of so many lines at a file's end it is known that they were read."""


class Chronicle:
    """Folds each line of the event log as it is appended, and what was in the file before.

    Args:
        event_log: Followed from now on.

    Attributes:
        metrics: Of this run of the job; another object once the file was read.

    Threads: the event loop's; the file is read in a thread of its own, which may hang with the disk.
    """

    def __init__(self, event_log: EventLog) -> None:
        self.metrics = JobMetrics()
        self._event_log = event_log
        self._followed: list[str] = []
        self._is_reading = True
        event_log.follow(self._add)

    def begin(self, *, is_resumed: bool) -> None:
        """Read the file, if an earlier coordinator has written to it; call it in the event loop."""
        path = self._event_log.path
        if not is_resumed or path is None:
            self._end_reading()
            return
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(path, loop), name="lightning_ft-chronicle", daemon=True).start()

    def _add(self, line: str) -> None:
        self.metrics.add(line)
        if self._is_reading:
            self._followed.append(line)

    def _read(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._event_log.flush()  # what the last coordinator had not written yet
        take: Callable[[], None] = self._end_reading
        try:
            take = functools.partial(self._take, *fold(path))
        except OSError as error:  # of another host, or the disk is broken: what comes from now on is all there is
            logger.warning("The event log %s can't be read: %s. Metrics count from now on.", path, error.strerror)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            loop.call_soon_threadsafe(take)

    def _take(self, metrics: JobMetrics, known: Collection[str]) -> None:
        for line in self._followed:
            if line not in known:
                metrics.add(line)
        self.metrics = metrics
        self._end_reading()

    def _end_reading(self) -> None:
        self._is_reading = False
        self._followed.clear()


def fold(path: Path) -> tuple[JobMetrics, Collection[str]]:
    """Fold the last run that is in a file.

    Returns: What its lines say, and the last of them.

    Raises:
        OSError: It can't be read.
    """
    metrics, lines = JobMetrics(), collections.deque[str](maxlen=_MAX_OVERLAP)
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if is_start(line):
                metrics = JobMetrics()
            metrics.add(line)
            lines.append(line)
    return metrics, set(lines)
