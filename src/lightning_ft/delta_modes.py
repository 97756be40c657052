"""What the modes of `DeltaCheckpoint` need of a fit: to see its gradients, or to round what it trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from lightning_ft.checkpoint.gradlog import MAX_PENDING, GradientLog, check_optimizer
from lightning_ft.checkpoint.records import GRADLOG, SNAP
from lightning_ft.checkpoint.share import Logged
from lightning_ft.checkpoint.snap import MIN_STEPS, Snap
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Plan, Writer
from lightning_ft.lightning_internals import around_optimizer_step

_log = logging.getLogger("lightning_ft")


class Mode:
    """What is stored is what is there: nothing is needed."""

    default_steps = 0
    """So many optimizer steps lie between two saves if nobody says; 0: an epoch does."""

    def check_interval(self, num_steps: int) -> None:
        """Make sure that so many optimizer steps may lie between two saves; 0: an epoch, or some time.

        Raises:
            ValueError: They may not.
        """

    def begin(self, trainer: Trainer) -> None:
        """A fit begins.

        Raises:
            ValueError: The mode can't be had with it; the message says why.
        """

    def end(self) -> None:
        """It ends, or fails."""

    def forget(self) -> None:
        """The ranks have changed: they do not all know of the last save any more."""

    def state(self) -> int | None:
        """Return what all ranks, and a fit that goes on, must know to decide alike."""
        return None

    def load(self, state: int | None) -> None:
        """Take it over, before a fit begins or in its middle."""

    def must_wait(self, trainer: Trainer) -> bool:
        """Whether a save must not be left out; the same on all ranks, which all call it."""
        return False

    def needs_base(self, trainer: Trainer, state: Mapping[Any, Any], writer: Writer) -> bool:
        """Whether the next checkpoint must not depend on others. All ranks call it."""
        return False

    def prepared(self, trainer: Trainer, plan: Plan, state: Mapping[Any, Any]) -> Mapping[Any, Any] | Logged:
        """Return what is stored. All ranks call it, before the state is copied."""
        return state


class _SnapMode(Mode):
    """Rounds what is trained at each save."""

    def __init__(self) -> None:
        self._snap = Snap(int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self._rounded_at = 0
        self._loaded: int | None = None
        self._is_forgotten = False

    @override
    def check_interval(self, num_steps: int) -> None:
        if 0 < num_steps < MIN_STEPS:
            raise ValueError(
                f"every_n_train_steps must be at least {MIN_STEPS} for mode={SNAP!r}, which rounds what is trained, "
                f"got {num_steps}"
            )

    @override
    def begin(self, trainer: Trainer) -> None:
        _check_strategy(trainer, SNAP)
        self._know(trainer)
        # A state is put together before it is rounded, so a checkpoint says when that was done the time before.
        loaded, self._loaded = self._loaded, None
        is_rounded = loaded is None or trainer.global_step - loaded >= MIN_STEPS
        self._rounded_at = trainer.global_step if loaded is None or is_rounded else loaded

    @override
    def end(self) -> None:
        self._loaded = None
        self.forget()

    @override
    def forget(self) -> None:
        self._snap.forget()
        self._is_forgotten = True

    def _know(self, trainer: Trainer) -> None:
        self._snap.begin(trainer.optimizers)
        self._is_forgotten = False

    @override
    def state(self) -> int | None:
        return self._rounded_at

    @override
    def load(self, state: int | None) -> None:
        if state is not None:
            self._rounded_at = self._loaded = state

    @override
    def needs_base(self, trainer: Trainer, state: Mapping[Any, Any], writer: Writer) -> bool:
        # One that came in the place of another does not know the parameters of the last save: then nobody does.
        own = torch.tensor(float(self._is_forgotten), device=trainer.strategy.root_device)
        told: Tensor = trainer.strategy.reduce(own, reduce_op="max")
        if told:
            self.forget()
        return False

    @override
    def prepared(self, trainer: Trainer, plan: Plan, state: Mapping[Any, Any]) -> Mapping[Any, Any] | Logged:
        if trainer.global_step - self._rounded_at >= MIN_STEPS:
            self._snap.snap(trainer.optimizers, trainer.global_step)
            self._rounded_at = trainer.global_step
            self._is_forgotten = False
        else:  # a fit that goes on from here knows no others
            self._know(trainer)
        return state


class _GradlogMode(Mode):
    """Logs the gradients of all optimizer steps."""

    default_steps = 1

    def __init__(self) -> None:
        self._log: GradientLog | None = None
        self._flat: FlatState | None = None
        self._last_step = -1
        self._interval = 1
        self._undo: Callable[[], None] = lambda: None
        self._told: set[str] = set()

    @override
    def check_interval(self, num_steps: int) -> None:
        if not 0 < num_steps <= MAX_PENDING:
            raise ValueError(
                f"every_n_train_steps must be from 1 to {MAX_PENDING} for mode={GRADLOG!r}, which keeps the gradients "
                f"of each step, got {num_steps or 'another interval'}"
            )
        self._interval = num_steps

    @override
    def begin(self, trainer: Trainer) -> None:
        _check_strategy(trainer, GRADLOG)
        if not trainer.lightning_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ValueError(
                f"mode={GRADLOG!r} needs automatic optimization with one optimizer, got {len(trainer.optimizers)}"
                f"{'' if trainer.lightning_module.automatic_optimization else ' and manual optimization'}"
            )
        check_optimizer(trainer.optimizers[0])
        self._undo()
        self._undo = around_optimizer_step(trainer, self._stepping, self._clipped, self._stepped)

    @override
    def end(self) -> None:
        self._undo()
        self._undo = lambda: None
        self.forget()

    @override
    def forget(self) -> None:
        self._log = None

    @override
    def must_wait(self, trainer: Trainer) -> bool:
        # How much a rank can hold depends on its share, and one may have found that its log does not count.
        is_full = self._log is not None and self._log.num_pending >= max(self._interval, self._log.max_held)
        own = torch.tensor(float(is_full), device=trainer.strategy.root_device)
        told: Tensor = trainer.strategy.reduce(own, reduce_op="max")
        return bool(told)

    @override
    def needs_base(self, trainer: Trainer, state: Mapping[Any, Any], writer: Writer) -> bool:
        is_first = self._log is None
        if self._log is None:
            self._log = GradientLog(trainer.optimizers[0], trainer.global_rank, trainer.world_size)
            self._last_step = -1
        self._flat = FlatState(state)
        reason = self._log.check(self._flat, trainer.global_step - self._last_step)
        # Only rank 0 knows whether the last save became a checkpoint.
        is_apart = trainer.is_global_zero and writer.last_step != self._last_step
        own = torch.tensor(float(reason is not None or is_apart), device=trainer.strategy.root_device)
        told: Tensor = trainer.strategy.reduce(own, reduce_op="max")
        if reason is not None and not is_first and not is_apart and reason not in self._told:
            self._told.add(reason)
            _log.warning("DeltaCheckpoint: a checkpoint without a log of gradients is made, since %s", reason)
        return bool(told)

    @override
    def prepared(self, trainer: Trainer, plan: Plan, state: Mapping[Any, Any]) -> Mapping[Any, Any] | Logged:
        flat, self._flat = self._flat, None
        assert self._log is not None, "needs_base comes first"
        assert flat is not None
        self._last_step = trainer.global_step
        if plan.parent is None:
            self._log.rebase(flat)
            return state
        return self._log.logged(flat)

    def _stepping(self) -> None:
        if self._log is not None:
            self._log.stepping()

    def _clipped(self, total_norm: Tensor, max_norm: float) -> bool:
        return self._log is None or self._log.clipped(total_norm, max_norm)

    def _stepped(self) -> None:
        if self._log is not None:
            self._log.stepped()


def mode_of(name: str) -> Mode:
    """Return the mode of this name."""
    return {SNAP: _SnapMode, GRADLOG: _GradlogMode}.get(name, Mode)()


def _check_strategy(trainer: Trainer, mode: str) -> None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        name = type(trainer.strategy).__name__
        raise ValueError(  # noqa: TRY004 - it is a choice of the user's
            f"mode={mode!r} needs a strategy whose ranks all have the whole state, got {name}"
        )
