"""A line that shows the progress of a long command."""

from __future__ import annotations

import sys
import time

from lightning_ft.cli.common import in_bytes

_PAUSE_S = 0.1


class Progress:
    """Shows in one line of standard error how much of something was read, if that is a terminal.

    Args:
        what: Is done.
        total_bytes: How much there is to read.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._shown_s = 0.0

    def read(self, num_bytes: int) -> None:
        """Note that so much more was read."""
        self._num_bytes = min(self._num_bytes + num_bytes, self._total_bytes)
        if sys.stderr.isatty() and time.monotonic() - self._shown_s > _PAUSE_S:
            self._shown_s = time.monotonic()
            share = 100 * self._num_bytes // max(1, self._total_bytes)
            sys.stderr.write(f"\r\033[K{self._what}: {share} % of {in_bytes(self._total_bytes)}")
            sys.stderr.flush()

    def end(self) -> None:
        """Wipe the line."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
