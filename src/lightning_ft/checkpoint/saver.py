"""Saves in the background, while training goes on."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_ft.checkpoint.records import Manifest
from lightning_ft.checkpoint.share import Logged
from lightning_ft.checkpoint.snapshots import Share, Snapshots
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Plan, Writer
from lightning_ft.errors import CheckpointError
from lightning_ft.faultpoints import reach

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 2.0
"""How long rank 0 waits before it looks again whether the others have finished; longer each time."""

PATIENCE_S = 3600.0
"""So long rank 0 waits for the other ranks' shares, if nobody tells it that one will not come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was committed, as rank 0 saw it.

    Attributes:
        manifest: Of the checkpoint.
        duration_s: From when it was due until it was committed.
        blocked_s: How long of that training stood still.
    """

    manifest: Manifest
    duration_s: float
    blocked_s: float


class Saver:
    """Writes one rank's share of a checkpoint at a time, and on rank 0 commits it when all shares are there.

    No collective is used in the background: rank 0 sees in the storage what the others have written.

    Args:
        writer: Of this rank.
        on_saved: Called in the background, on rank 0, when a checkpoint is committed.

    Attributes:
        last: The last checkpoint that this rank has committed.
        share: This rank's share of the state that was saved last; None: there is none, or only a log of gradients.

    Threads: all methods are for one thread; what they start runs in another, until `wait` says that it has ended.
    """

    def __init__(self, writer: Writer, on_saved: Callable[[Saved], None] = lambda _: None) -> None:
        self.writer = writer
        self._on_saved = on_saved
        self.last: Manifest | None = None
        self.share: Share | None = None
        self._snapshots = Snapshots(writer.rank, writer.num_ranks)
        self._thread: threading.Thread | None = None
        self._is_written = threading.Event()
        self._is_abandoned = threading.Event()
        self._error: Exception | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's share is not written yet."""
        return self.is_busy and not self._is_written.is_set()

    @property
    def is_committing(self) -> bool:
        """Whether this is rank 0 and waits for the others, or commits."""
        return self.is_busy and self._is_written.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether anything runs in the background."""
        return self._thread is not None and self._thread.is_alive()

    def take_error(self) -> Exception | None:
        """Return why the last save failed, once."""
        if self.is_busy:
            return None
        error, self._error = self._error, None
        return error

    def start(self, plan: Plan, state: Mapping[Any, Any] | Logged, due_s: float) -> None:
        """Copy this rank's share of the state, and write it in the background; errors are for `take_error`.

        Args:
            plan: Rank 0's.
            state: May change once this has returned; or what `GradientLog.logged` made of it.
            due_s: When training stopped for it, by the monotonic clock.
        """
        assert not self.is_busy, "one at a time"
        self._is_written.clear()
        self._is_abandoned.clear()
        self._error = None
        self.share = None
        flat: FlatState | Logged
        if isinstance(state, Logged):
            flat = state
        else:
            try:
                self.share = self._snapshots.take(state)
            except ValueError as error:  # as any other: the other ranks have to learn of it
                self._error = error
                return
            flat = self.share.flat
        self._thread = threading.Thread(
            target=self._run,
            args=(plan, flat, due_s, time.monotonic() - due_s),
            name="lightning_ft checkpoint",
            daemon=True,
        )
        self._thread.start()

    def abandon(self) -> None:
        """Have rank 0 wait no longer for ranks that have not written their share: somebody won't."""
        self._is_abandoned.set()

    def wait_written(self, timeout_s: float | None = None) -> bool:
        """Wait until this rank's share is written, or has failed. Returns: Whether that is so."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_writing:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return False
            self._is_written.wait(0.1)
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs in the background. Returns: Whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_busy

    # -- in the background --------------------------------------------------------------------------------------------

    def _run(self, plan: Plan, flat: FlatState | Logged, due_s: float, blocked_s: float) -> None:
        try:
            reach("save.enter")
            self.writer.write(plan, flat)
            self._is_written.set()
            reach("save.written")
            if self.writer.rank == 0:
                self.last = self._commit(plan)
                reach("save.committed")
                self._on_saved(Saved(self.last, time.monotonic() - due_s, blocked_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, `take_error` hands it over
            self._error = error

    def _commit(self, plan: Plan) -> Manifest:
        pause_s, deadline_s = _FIRST_LOOK_S, time.monotonic() + PATIENCE_S
        while missing := self.writer.missing_ranks(plan):
            if self._is_abandoned.is_set() or time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"saving checkpoint {plan.key} failed: ranks {missing} have not written their share. The next "
                    "interval tries again."
                )
            self._is_abandoned.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        reach("save.commit")
        return self.writer.conclude(plan)
