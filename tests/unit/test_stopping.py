"""Which ranks stop or leave after a signal."""

from __future__ import annotations

import signal
import types

import pytest
import torch

from lightning_ft.ddp import StepCommit
from lightning_ft.stopping import Stopping


def _stopping(min_world_size: int = 1) -> Stopping:
    fit = types.SimpleNamespace(model=torch.nn.Linear(1, 1), is_member=True)
    return Stopping(fit, min_world_size, 1.0, lambda: pytest.fail("nobody was asked to leave"))


def test_a_signal_between_two_runs_counts_in_the_next() -> None:
    """It came after a fit's last step, so that nobody learned of it; an evaluation ends with it at once."""
    stopping = _stopping()
    stopping.catch_up()
    stopping._own_signal = signal.SIGTERM
    with pytest.raises(SystemExit) as ended:
        stopping.catch_up()
    assert ended.value.code == 143
    stopping._own_signal = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        stopping.catch_up()


@pytest.mark.parametrize(
    ("stops", "leaves", "least", "is_stopping"),
    [(0, 0, 3, False), (1, 0, 1, True), (0, 1, 1, False), (0, 2, 1, False), (0, 2, 2, True), (0, 3, 1, True)],
)
def test_all_stop_if_one_asks_them_to_or_too_few_would_stay(
    stops: int, leaves: int, least: int, is_stopping: bool
) -> None:
    """Of three; those that a scheduler wants to leave, leave."""
    stopping = _stopping(least)
    stopping.on_commit(StepCommit(7, ("0/0", "0/1", "0/2"), stops, leaves))
    assert (stopping.reason() is not None) == is_stopping


def test_a_stop_is_taken_once() -> None:
    """The next fit of the same trainer trains."""
    stopping = _stopping()
    assert stopping.reason() is None
    stopping._all_stop = True
    assert stopping.reason() == signal.SIGTERM
    assert stopping.reason() is None
    stopping._all_stop, stopping._own_signal = True, signal.SIGINT
    assert stopping.reason() == signal.SIGINT
    assert stopping._own_signal is None
