"""Whether this process is still a member, as far as it can know: what fences one that was given up and wakes up.

Source: Gray and Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency", 1989.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def _clock() -> float:
    """Monotonic seconds that go on while the host sleeps, where there are such (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease:
    """The coordinator gives up nobody for silence within `duration_s` of a heartbeat that it has answered.

    Args:
        duration_s: `heartbeat_timeout`.
        clock: Monotonic seconds, which go on while this process is stopped.

    Threads: the monitor thread calls `beat` and `renew`, any thread reads; no lock, since each value is whole.
    """

    def __init__(self, duration_s: float, clock: Callable[[], float] = _clock) -> None:
        self._duration_s = duration_s
        self._clock = clock
        self._renewed_s = -math.inf
        self._beat_s = clock()
        self._returned_s = -math.inf

    def beat(self) -> float:
        """Note that a heartbeat is sent. Returns: The time, for `renew`."""
        now_s = self._clock()
        if now_s - self._beat_s > self._duration_s:
            self._returned_s = now_s
        self._beat_s = now_s
        return now_s

    def renew(self, sent_s: float) -> None:
        """Note that the heartbeat sent at `sent_s` was answered."""
        self._renewed_s = max(self._renewed_s, sent_s)

    @property
    def is_valid(self) -> bool:
        """Whether the others can't have gone on without this process for its silence."""
        return self._clock() - self._renewed_s < self._duration_s

    @property
    def is_in_doubt(self) -> bool:
        """Whether this process was away itself (stopped, frozen), for so long that they may have; until it is answered.

        False while only the coordinator is away: then nobody is given up.
        """
        is_away = self._clock() - self._beat_s > self._duration_s
        return is_away or self._renewed_s < self._returned_s
