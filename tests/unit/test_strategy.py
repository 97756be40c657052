"""The strategy's arguments."""

from __future__ import annotations

import datetime
import signal

import pytest
import torch

from lightning_ft import FaultTolerantDDPStrategy
from lightning_ft.ddp import StepCommit


@pytest.mark.parametrize("name", ["min_world_sizee", "enable", "bucket_cap"])
def test_an_unknown_argument_is_named(name: str) -> None:
    """A misspelt setting is told before anything is started, not by DDP in each rank."""
    with pytest.raises(ValueError, match=f"'{name}' is no setting of FaultTolerantDDPStrategy"):
        FaultTolerantDDPStrategy(**{name: 1})


def test_arguments_of_ddp_are_taken() -> None:
    """What DistributedDataParallel knows is passed on; what DDPStrategy knows too, as LightningCLI gives all of it."""
    given = {"bucket_cap_mb": 1, "static_graph": True}
    assert FaultTolerantDDPStrategy(**given, model_averaging_period=3, start_method="popen")._ddp_kwargs == {
        "bucket_cap_mb": 1,
        "static_graph": True,
    }


def test_timeout_may_be_a_timedelta() -> None:
    """As for DDPStrategy."""
    assert FaultTolerantDDPStrategy(timeout=datetime.timedelta(minutes=1)).settings.timeout == 60.0


def test_a_signal_between_two_runs_counts_in_the_next() -> None:
    """It came after a fit's last step, so that nobody learned of it; an evaluation ends with it at once."""
    strategy = FaultTolerantDDPStrategy()
    strategy.model = torch.nn.Linear(1, 1)
    strategy._catch_up_on_signal()
    strategy._own_stop_signal = signal.SIGTERM
    with pytest.raises(SystemExit) as ended:
        strategy._catch_up_on_signal()
    assert ended.value.code == 143
    strategy._own_stop_signal = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        strategy._catch_up_on_signal()


@pytest.mark.parametrize(
    ("stops", "leaves", "least", "is_stopping"),
    [(0, 0, 3, False), (1, 0, 1, True), (0, 1, 1, False), (0, 2, 1, False), (0, 2, 2, True), (0, 3, 1, True)],
)
def test_all_stop_if_one_asks_them_to_or_too_few_would_stay(
    stops: int, leaves: int, least: int, is_stopping: bool
) -> None:
    """Of three; those that a scheduler wants to leave, leave."""
    strategy = FaultTolerantDDPStrategy(min_world_size=least)
    strategy._on_commit(StepCommit(7, ("0/0", "0/1", "0/2"), stops, leaves))
    assert (strategy._stop_reason() is not None) == is_stopping


def test_a_stop_is_taken_once() -> None:
    """The next fit of the same trainer trains."""
    strategy = FaultTolerantDDPStrategy()
    assert strategy._stop_reason() is None
    strategy._is_stopping = True
    assert strategy._stop_reason() == signal.SIGTERM
    assert strategy._stop_reason() is None
    strategy._is_stopping, strategy._own_stop_signal = True, signal.SIGINT
    assert strategy._stop_reason() == signal.SIGINT
    assert strategy._own_stop_signal is None
