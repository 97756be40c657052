"""Which ranks stop or leave after a signal."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Iterator

import pytest
import torch

from lightning_ft.ddp import StepCommit
from lightning_ft.stopping import Stopping, _OnSigterm


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
    [
        (0, 0, 3, False),
        (0, 0, 4, False),
        (1, 0, 1, True),
        (0, 1, 1, False),
        (0, 2, 1, False),
        (0, 2, 2, True),
        (0, 3, 1, True),
    ],
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


@pytest.fixture
def no_handler() -> Iterator[None]:
    """SIGTERM is the kernel's, as in a program that has just begun."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Noting(Stopping):
    def __init__(self) -> None:
        self.noted: list[int] = []

    def on_signal(self, number: signal.Signals) -> None:
        self.noted.append(number)


@pytest.mark.usefixtures("no_handler")
def test_the_loop_that_runs_is_told_of_sigterm() -> None:
    """Not the one before it; but what that was told, perhaps after its last step, is no news of the past."""
    first, second, third = Noting(), Noting(), Noting()
    _OnSigterm.hand_to(first)
    _OnSigterm.hand_to(second)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (first.noted, second.noted) == ([], [signal.SIGTERM])
    _OnSigterm.hand_to(third)
    assert third.noted == [signal.SIGTERM]


@pytest.mark.usefixtures("no_handler")
def test_a_handler_of_the_users_stays() -> None:
    """It may ask the model itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _OnSigterm.hand_to(Noting())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
