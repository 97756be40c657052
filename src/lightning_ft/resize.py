"""What a fit does when its ranks have changed: hooks of the user's, learning rates, schedules that end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import OneCycleLR
from typing_extensions import override

from lightning_ft.config import SCALE_LR

HOOK = "on_membership_change"
"""Called on callbacks with (trainer, pl_module, old_view, new_view), on modules and datamodules with the last two."""

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What optimizers and torch's schedulers keep of rates in the groups of parameters."""


class Resize:
    """Tells the parts of a fit that its ranks have changed; on all ranks before the same batch.

    Args:
        trainer: Of the fit.
        on_resize: `scale_lr`: learning rates in proportion to the number of ranks, as the global batch is. Any other:
            they stay.

    Attributes:
        told: The members that the fit knows of, in rank order; None before its first batch.
    """

    def __init__(self, trainer: Trainer, on_resize: str) -> None:
        self._trainer = trainer
        self._on_resize = on_resize
        self.told: tuple[str, ...] | None = None

    def tell(self, members: tuple[str, ...]) -> None:
        """Say who is in it before a batch."""
        told, self.told = self.told, members
        if told is None or told == members:
            return
        for scheduler in self._schedulers():
            hold_at_the_end(scheduler)
        if self._on_resize == SCALE_LR:
            self._scale_rates(len(members) / len(told))
        trainer: Any = self._trainer  # Lightning sets what follows from outside
        for callback in trainer.callbacks:
            if hasattr(callback, HOOK):
                getattr(callback, HOOK)(trainer, trainer.lightning_module, told, members)
        for part in (trainer.lightning_module, trainer.datamodule):
            if hasattr(part, HOOK):
                getattr(part, HOOK)(told, members)

    def _schedulers(self) -> Iterator[Any]:
        for config in self._trainer.lr_scheduler_configs:
            yield from _with_parts(config.scheduler)

    def _scale_rates(self, factor: float) -> None:
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                for name in _RATES:
                    if isinstance(group.get(name), torch.Tensor):
                        group[name].mul_(factor)  # a compiled step reads this tensor
                    elif name in group:
                        group[name] *= factor
        for scheduler in self._schedulers():
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def hold_at_the_end(scheduler: Any) -> None:
    """Have a one-cycle schedule that is over keep its last rate.

    With fewer ranks an epoch has more steps than were planned. torch raises at the first of them.
    """
    if type(scheduler) is OneCycleLR:
        scheduler.__class__ = _HoldingOneCycleLR


class _HoldingOneCycleLR(OneCycleLR):
    @override
    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch > self.total_steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it is made of (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)
