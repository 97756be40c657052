"""What a fit does when its ranks have changed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules

from lightning_ft.config import KEEP, SCALE_LR
from lightning_ft.resize import Resize, hold_at_the_end

FOUR, THREE = ("0/0", "0/1", "0/2", "0/3"), ("0/0", "0/2", "0/3")


class Part:
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_membership_change(self, *arguments: Any) -> None:
        """Note it."""
        self.calls.append(arguments)


def trainer_with(optimizer: Optimizer | None = None, scheduler: Any = None, **parts: Any) -> Any:
    """As much of a Trainer as is looked at."""
    configs = [] if scheduler is None else [types.SimpleNamespace(scheduler=scheduler)]
    known = {"callbacks": [], "lightning_module": object(), "datamodule": None, **parts}
    optimizers = [] if optimizer is None else [optimizer]
    return types.SimpleNamespace(optimizers=optimizers, lr_scheduler_configs=configs, **known)


def test_each_change_is_told_once_to_all_parts() -> None:
    """A callback is given what callbacks are given, a module only the views; the first batch is no change."""
    callback, module, data = Part(), Part(), Part()
    trainer = trainer_with(callbacks=[object(), callback], lightning_module=module, datamodule=data)
    resize = Resize(trainer, KEEP)
    for members in (FOUR, FOUR, THREE, THREE, FOUR):
        resize.tell(members)
    assert callback.calls == [(trainer, module, FOUR, THREE), (trainer, module, THREE, FOUR)]
    assert module.calls == data.calls == [(FOUR, THREE), (THREE, FOUR)]


def test_rates_are_kept_unless_asked_for() -> None:
    """A user's rates are the user's."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    resize = Resize(trainer_with(optimizer), KEEP)
    resize.tell(FOUR)
    resize.tell(THREE)
    assert optimizer.param_groups[0]["lr"] == 0.4


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda _: None,
    "step": lambda it: schedules.StepLR(it, 3, 0.5),
    "exponential": lambda it: schedules.ExponentialLR(it, 0.9),
    "cosine": lambda it: schedules.CosineAnnealingLR(it, 20),
    "lambda": lambda it: schedules.LambdaLR(it, lambda step: 1 / (1 + step)),
    "one cycle": lambda it: schedules.OneCycleLR(it, 0.8, total_steps=20),
    "warm up": lambda it: schedules.SequentialLR(
        it, [schedules.LinearLR(it, 0.1, total_iters=5), schedules.CosineAnnealingLR(it, 15)], [5]
    ),
    "restarts": lambda it: schedules.CosineAnnealingWarmRestarts(it, 6),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("change_at", [0, 2, 7])
def test_rates_follow_the_number_of_ranks(name: str, change_at: int) -> None:
    """From the change on they are, at each step, so many times what they would have been; back again as before."""
    rates = []
    for is_changed in (False, True):
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)
        scheduler = SCHEDULES[name](optimizer)
        resize = Resize(trainer_with(optimizer, scheduler), SCALE_LR)
        resize.tell(FOUR)
        seen = []
        for step in range(18):
            if is_changed and step == change_at:
                resize.tell(THREE)
            if is_changed and step == 12:
                resize.tell(FOUR)
            seen.append(optimizer.param_groups[0]["lr"] / (0.75 if is_changed and change_at <= step < 12 else 1.0))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        rates.append(seen)
    assert rates[1] == pytest.approx(rates[0])


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    """A compiled or captured step reads it."""
    rate = torch.tensor(0.4)
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    resize = Resize(trainer_with(optimizer), SCALE_LR)
    resize.tell(FOUR)
    resize.tell(THREE)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_schedule_that_is_over_keeps_its_rate(is_held: bool) -> None:
    """With fewer ranks an epoch has more steps; torch would raise. Its state is as before."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)
    scheduler = schedules.OneCycleLR(optimizer, 0.8, total_steps=5)
    names = set(scheduler.state_dict())
    if is_held:
        Resize(trainer_with(optimizer, scheduler), KEEP).tell(FOUR)
        resize = Resize(trainer_with(optimizer, scheduler), KEEP)
        resize.tell(FOUR)
        resize.tell(THREE)
    rates = []
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    optimizer.step()
    if not is_held:
        with pytest.raises(ValueError, match="Tried to step 6 times"):
            scheduler.step()
        return
    scheduler.step()
    assert scheduler.get_last_lr() == rates[-1] != rates[-2]
    assert set(scheduler.state_dict()) == names


def test_only_torchs_own_class_is_held() -> None:
    """A user's subclass may count otherwise."""

    class Own(schedules.OneCycleLR):
        pass

    own = Own(SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9), 0.8, total_steps=5)
    hold_at_the_end(own)
    assert type(own) is Own
