"""What this process is doing, as its heartbeats tell the coordinator."""

from __future__ import annotations

import time

_MAX_TEXT = 200


class Activity:
    """The last sign of progress, and since when this process waits for others.

    Threads: the training thread says it, the monitor thread reads it; no lock, since each value is whole.
    """

    def __init__(self) -> None:
        self._progress_s = time.monotonic()
        self._waits_since_s: float | None = None
        self._doing = "starting"

    def progress(self, doing: str) -> None:
        """Say what is done from now on; costs about a microsecond."""
        self._doing = doing
        self._progress_s = time.monotonic()

    def wait(self, what: str) -> None:
        """Say that this process now waits for others in a collective."""
        self.progress(what)
        if self._waits_since_s is None:
            self._waits_since_s = self._progress_s

    def go_on(self) -> None:
        """Say that the wait is over."""
        self._waits_since_s = None
        self._progress_s = time.monotonic()

    def start_anew(self) -> None:
        """Say that what was waited for so far does not count any more: there is another view."""
        self._progress_s = time.monotonic()
        if self._waits_since_s is not None:
            self._waits_since_s = self._progress_s

    def told(self) -> tuple[float | None, float, str]:
        """Return how long it has waited (None: it does not), for how long it shows no progress, and what it does."""
        now_s, waits_since_s = time.monotonic(), self._waits_since_s
        return None if waits_since_s is None else now_s - waits_since_s, now_s - self._progress_s, _plain(self._doing)


def _plain(doing: object) -> str:
    """What a message can hold, whatever a caller said."""
    return str(doing)[:_MAX_TEXT].encode(errors="backslashreplace").decode()
