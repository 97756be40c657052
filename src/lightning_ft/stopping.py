"""Which ranks of a fit, or of a hand-written loop, stop or leave after a signal, and at which step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_ft.comm.ring import Ring
from lightning_ft.ddp import FaultTolerantDDP, StepCommit


class Fit(Protocol):
    """What is asked about the fit that goes on."""

    @property
    def model(self) -> object:
        """FaultTolerantDDP in a fit."""

    @property
    def is_member(self) -> bool:
        """Whether this process is no joiner that waits still."""


class Stopping:
    """Passes signals on with the steps' commits, so that all ranks act upon them between the same two batches.

    SIGINT, or SLURM's signal before the job's time is over, asks all ranks to stop. SIGTERM asks this one to leave; if
    that leaves too few, or none, all stop. Ranks that are all asked don't hear of it at the same step: one waits for
    another, and for a moment.

    Args:
        fit: Looked at when a signal comes.
        min_world_size: With fewer ranks all stop.
        moment_s: How long a rank that is asked to leave waits for others that may be, seconds.
        depart: Called on a rank that leaves alone, between two batches.
        agree: Called on all ranks at once, when all stop, with the signal that came here; returns what to end with.
    """

    def __init__(
        self,
        fit: Fit,
        min_world_size: int,
        moment_s: float,
        depart: Callable[[], None],
        agree: Callable[[signal.Signals | None], signal.Signals | None] = lambda own: own,
    ) -> None:
        self._fit = fit
        self._min_world_size = max(1, min_world_size)
        self._moment_s = moment_s
        self._depart = depart
        self._agree = agree
        self._all_stop = False
        self._own_signal: signal.Signals | None = None
        self._leaves_after_s = 0.0

    def on_signal(self, number: signal.Signals) -> None:
        """Note a signal; called in its handler.

        Raises:
            KeyboardInterrupt: SIGINT outside of a fit.
            SystemExit: SIGTERM there.
        """
        model = self._fit.model
        if isinstance(model, FaultTolerantDDP) and self._fit.is_member:
            model.is_leave_requested |= number == signal.SIGTERM
            model.is_stop_requested |= number != signal.SIGTERM
            self._own_signal = self._own_signal or number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number == signal.SIGTERM:
            raise SystemExit(128 + number)

    def on_commit(self, commit: StepCommit) -> None:
        """Learn what all ranks were asked."""
        num_staying = len(commit.contributors) - commit.leave_requests
        # Nobody leaves: a step that fewer have finished, who wait for others to come back, is no reason to stop.
        would_be_too_few = commit.leave_requests > 0 and num_staying < self._min_world_size
        self._all_stop |= commit.stop_requests > 0 or would_be_too_few
        if self._num_leave_requests == 1:
            self._leaves_after_s = time.monotonic() + self._moment_s

    def reason(self) -> signal.Signals | None:
        """Return with which signal to end now, between two batches; None to go on."""
        is_alone = not self._all_stop
        if is_alone:
            if self._num_leave_requests <= 1 or time.monotonic() < self._leaves_after_s:
                return None
            self._depart()
        own, self._own_signal, self._all_stop = self._own_signal, None, False
        return (own if is_alone else self._agree(own)) or signal.SIGTERM

    def catch_up(self) -> None:
        """Take a signal that came after the last step of a fit for the next, or for the evaluation that follows."""
        self._all_stop = False
        if self._own_signal is not None:
            self.on_signal(self._own_signal)

    @property
    def _num_leave_requests(self) -> int:
        """In how many commits this rank has asked to leave."""
        model = self._fit.model
        return model.num_leave_requests if isinstance(model, FaultTolerantDDP) else 0


def heed_signals(parts: Iterable[object], ring: Ring) -> Stopping | None:
    """Have SIGTERM heeded in a hand-written loop, if the program has no handler for it.

    Args:
        parts: Of the loop's state. The first FaultTolerantDDP among them tells the others.
        ring: Of this process.

    Returns: What says, at a boundary, that all stop. If this rank alone leaves, asking it ends this process. None:
        there is no FaultTolerantDDP.
    """
    modules = (module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules())
    model = next((module for module in modules if isinstance(module, FaultTolerantDDP)), None)
    if model is None:
        return None

    def depart() -> None:
        ring.depart()
        raise SystemExit(0)

    settings = ring.settings
    stopping = Stopping(_Loop(model, ring), settings.min_world_size, settings.heartbeat_interval, depart)
    model.commit_followers.append(stopping.on_commit)
    _OnSigterm.hand_to(stopping)
    return stopping


class _Loop:
    """What `Stopping` asks about a hand-written loop."""

    def __init__(self, model: FaultTolerantDDP, ring: Ring) -> None:
        self.model = model
        self._ring = ring

    @property
    def is_member(self) -> bool:
        return dist.is_initialized() and self._ring.was_admitted


class _OnSigterm:
    """Handles SIGTERM for the loop that was the last to begin."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self._is_received = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self._is_received = True
        self._stopping.on_signal(signal.Signals(number))

    @classmethod
    def hand_to(cls, stopping: Stopping) -> None:
        """Have it noted for this loop from now on, as one that came after the last step of another loop."""
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, cls):
            handler._stopping = stopping
            if handler._is_received:
                stopping.on_signal(signal.SIGTERM)
        elif handler == signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, cls(stopping))  # else it is the user's
