"""What keeps a fit waiting: that it goes on, and a bar on rank 0 if it takes longer than some seconds."""

from __future__ import annotations

import time
from typing import Self

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_ft.comm.backend import progress
from lightning_ft.lightning_internals import rank_zero_rank

AFTER_S = 3.0
"""Whoever waits for less is shown nothing."""


class WaitingBar:
    """Shows how long something takes, and how much of it is done.

    Args:
        what: Is done, for a person.
        total_bytes: How much there is to do; None: not known.
    """

    def __init__(self, what: str, total_bytes: int | None = None) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._started_s = time.monotonic()
        self._bar: Tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def done(self, num_bytes: int = 0) -> None:
        """Note that so much more is done, or that it goes on: who does it is not taken for hung."""
        progress(self._what)
        self._num_bytes += num_bytes
        if self._total_bytes is not None:  # what is read to find out what to read is in no total
            self._num_bytes = min(self._num_bytes, self._total_bytes)
        if self._bar is None:
            if rank_zero_rank() or time.monotonic() - self._started_s < AFTER_S:
                return
            amount = "{desc}: {elapsed}" if not self._num_bytes else None
            self._bar = Tqdm(
                desc=self._what, total=self._total_bytes, unit="B", unit_scale=True, bar_format=amount, leave=False
            )
        self._bar.update(self._num_bytes - self._bar.n)
        self._bar.refresh()
