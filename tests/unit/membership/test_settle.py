"""Who hands a result over to whom."""

from __future__ import annotations

import pytest

from lightning_ft.errors import ProtocolViolationError, QuorumLostError
from lightning_ft.membership.settle import SettlePlan, Standing, plan


def at(completed: int | None, *, void: bool = False, generation: int = 1) -> Standing:
    return Standing(completed=completed, kept_is_void=void, kept_generation=generation)


def test_nobody_behind_needs_no_donor() -> None:
    """All have M already."""
    assert plan([at(4), at(4)]) == SettlePlan(4, None, (), (), handover_is_void=False)


def test_lowest_rank_at_target_is_the_donor() -> None:
    """Those at M - 1 adopt."""
    assert plan([at(3, generation=7), at(4), at(3), at(4)]) == SettlePlan(4, 1, (0, 2), (), handover_is_void=False)


def test_void_is_handed_over() -> None:
    """A void result is a result."""
    assert plan([at(4, void=True), at(3)]).handover_is_void


def test_joiners_are_given_the_target() -> None:
    """A joiner has no number; it is no laggard."""
    assert plan([at(4), at(None, generation=0)]) == SettlePlan(4, None, (), (1,), handover_is_void=False)


def test_two_numbers_apart_is_a_violation() -> None:
    """I3."""
    with pytest.raises(ProtocolViolationError, match="expected every member at number 5 or 4, got rank 1 at 3"):
        plan([at(5), at(3)])


@pytest.mark.parametrize("other", [at(4, void=True), at(4, generation=2)])
def test_different_results_are_a_violation(other: Standing) -> None:
    """I5."""
    with pytest.raises(ProtocolViolationError, match="expected one result of number 4"):
        plan([at(4), other])


def test_only_joiners_have_no_job() -> None:
    """Nobody holds the state."""
    with pytest.raises(QuorumLostError, match="nobody has the state"):
        plan([at(None)])
