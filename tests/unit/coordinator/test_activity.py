"""What a process says of itself with its heartbeats."""

from __future__ import annotations

import pytest

from lightning_ft.coordinator.activity import Activity
from lightning_ft.coordinator.patience import MIN_SEEN, Patience


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float) -> None:
        self.now_s += seconds


def test_waits_and_idleness() -> None:
    """Since when it waits, and since when it has shown nothing."""
    clock = Clock()
    activity = Activity(clock=clock)
    clock.after(2)
    assert activity.told() == (None, 2.0, "starting", None, None)
    activity.progress("loading")
    clock.after(1)
    activity.wait("reduction 3")
    clock.after(4)
    activity.wait("commit 4")  # the same wait goes on
    clock.after(1)
    assert activity.told()[:3] == (5.0, 1.0, "commit 4")
    activity.start_anew()
    assert activity.told()[0] == 0.0
    activity.go_on()
    assert activity.told()[:3] == (None, 0.0, "after commit 4")


def test_own_work_of_a_step() -> None:
    """Without what it waited for others, across all kinds of waits; known after a few steps, and robust."""
    clock = Clock()
    activity = Activity(clock=clock)
    for step in range(10):
        assert (activity.told()[4] is None) == (step < 5)
        clock.after(0.2)
        activity.wait("reduction")
        clock.after(1.0)
        activity.start_anew()
        clock.after(2.0)
        activity.go_on()
        clock.after(0.1 if step != 7 else 60.0)  # a validation
        activity.wait("commit")
        clock.after(0.5)
        activity.step()
        clock.after(0.5)  # the rest of the wait is nobody's work
        activity.go_on()
    assert activity.told()[4] == pytest.approx(0.3)


def test_patience_of_what_it_does() -> None:
    """A wait is given the least; the time waited is not taken for the activity's."""
    clock = Clock()
    activity = Activity(Patience(60.0, 1800.0), clock=clock)
    for number in range(MIN_SEEN + 1):
        activity.progress(f"training_step {number}")
        clock.after(9.0)
        activity.wait("reduction")
        clock.after(100.0)
        assert activity.told()[3] == 60.0
        activity.go_on()
    activity.progress("training_step 99")
    assert activity.told()[3] == 90.0
    activity.progress("a validation")
    assert activity.told()[3] == 1800.0
    activity.wait("reduction")
    activity.go_on()
    assert activity.told()[3] == 1800.0, "what comes now may be anything, however often that was short"
