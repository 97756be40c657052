"""What this process is doing, as its heartbeats tell the coordinator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from lightning_ft.coordinator.patience import AFTER, Patience

_MAX_TEXT = 200

_NUM_STEPS = 16
_MIN_STEPS = 4


class Activity:
    """The last sign of progress, since when this process waits for others, and how long it works for a step itself.

    Args:
        patience: How long each activity may take, learned here; None: the job's `timeout` says it.
        clock: Monotonic seconds.

    Threads: the training thread says it, the monitor thread reads it; no lock, since each value is whole.
    """

    def __init__(self, patience: Patience | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._progress_s = clock()
        self._waits_since_s: float | None = None
        self._doing = "starting"
        self._waited_s = 0.0
        self._step_s: float | None = None
        self._busy_s: tuple[float, ...] = ()

    def progress(self, doing: str) -> None:
        """Say what is done from now on; costs about a microsecond."""
        now_s = self._clock()
        if self._patience is not None and self._waits_since_s is None:
            self._patience.learn(self._doing, now_s - self._progress_s)
        self._doing = doing
        self._progress_s = now_s

    def wait(self, what: str) -> None:
        """Say that this process now waits for others in a collective."""
        self.progress(what)
        if self._waits_since_s is None:
            self._waits_since_s = self._progress_s

    def go_on(self) -> None:
        """Say that the wait is over."""
        self._count_wait()
        self._waits_since_s = None
        self._doing = f"{AFTER}{self._doing}"

    def start_anew(self) -> None:
        """Say that what was waited for so far does not count any more: there is another view."""
        self._count_wait()
        if self._waits_since_s is not None:
            self._waits_since_s = self._progress_s

    def step(self) -> None:
        """Say that a gradient step is final."""
        now_s = self._clock()
        waited_s = self._waited_s + (0.0 if self._waits_since_s is None else now_s - self._waits_since_s)
        if self._step_s is not None:
            busy_s = max(0.0, now_s - self._step_s - waited_s)  # which rounding can make negative
            self._busy_s = (*self._busy_s[-_NUM_STEPS + 1 :], busy_s)
        self._step_s = now_s
        # So that the rest of the present wait, and no more of it, is counted into the next step when it is over.
        self._waited_s = 0.0 if self._waits_since_s is None else self._waits_since_s - now_s

    def told(self) -> tuple[float | None, float, str, float | None, float | None]:
        """Return the fields of a heartbeat from `waits_s` on."""
        waits_since_s, progress_s, doing, busy_s = self._waits_since_s, self._progress_s, self._doing, self._busy_s
        now_s, patience = self._clock(), self._patience  # the clock last: no duration is negative
        return (
            None if waits_since_s is None else now_s - waits_since_s,
            now_s - progress_s,
            _plain(doing),
            None if patience is None else patience.limit_s(None if waits_since_s is not None else doing),
            statistics.median(busy_s) if len(busy_s) >= _MIN_STEPS else None,
        )

    def _count_wait(self) -> None:
        self._progress_s = self._clock()
        if self._waits_since_s is not None:
            self._waited_s += self._progress_s - self._waits_since_s


def _plain(doing: object) -> str:
    """What a message can hold, whatever a caller said."""
    return str(doing)[:_MAX_TEXT].encode(errors="backslashreplace").decode()
