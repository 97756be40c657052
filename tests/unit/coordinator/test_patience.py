"""What `timeout="auto"` learns."""

from __future__ import annotations

from lightning_ft.coordinator.patience import FACTOR, MIN_SEEN, Patience


def test_what_is_new_is_given_the_longest() -> None:
    """An activity that was not seen often enough may be a long one."""
    patience = Patience(60.0, 1800.0)
    assert patience.limit_s("a validation") == 1800.0
    for _ in range(MIN_SEEN - 1):
        patience.learn("training_step", 12.0)
    assert patience.limit_s("training_step") == 1800.0
    patience.learn("training_step", 7.0)
    assert patience.limit_s("training_step") == FACTOR * 12.0


def test_limits_hold() -> None:
    """Nothing is given less than the least, nor more than the longest."""
    patience = Patience(60.0, 1800.0)
    for took_s, expected_s in ((0.01, 60.0), (30.0, 300.0), (200.0, 1800.0)):
        for _ in range(MIN_SEEN):
            patience.learn("training_step", took_s)
        assert patience.limit_s("training_step") == expected_s
    assert patience.limit_s(None) == 60.0


def test_numbers_make_no_other_kind() -> None:
    """Each batch has its own name; they are one kind."""
    patience = Patience(60.0, 1800.0)
    for number in range(MIN_SEEN):
        patience.learn(f"batch {number} of epoch {number // 3}", 0.1)
    assert patience.limit_s("batch 77 of epoch 99") == 60.0
    assert patience.limit_s("batch 77 of the test") == 1800.0


def test_memory_is_bounded() -> None:
    """A program that gives each activity another name is remembered up to a point."""
    patience = Patience(60.0, 1800.0)
    for number in range(5000):
        patience.learn(f"{'x' * number}", 0.1)
    assert len(patience._seen) < 1000
