"""Fields of the state and their invariants."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_ft.membership.effects import Cause
from lightning_ft.membership.state import Member, Phase, Status, Tally, View, initial


def test_initial_ranks_expected_members_numerically() -> None:
    """Generation 0 holds all expected members, in order, and waits for them."""
    state = initial(["10/0", "2/1", "2/0"], 7.0, 30.0)
    assert state.view == View(0, ("2/0", "2/1", "10/0"))
    assert state.phase is Phase.SUSPENDED
    assert state.hang_deadline_s == 37.0
    assert state.target == state.tally.running == 3


@pytest.mark.parametrize("members", [[], ["0/0", "0/0"], ["zero"]])
def test_initial_rejects(members: list[str]) -> None:
    """No member, one twice, or one that is none."""
    with pytest.raises(ValueError, match="expected"):
        initial(members, 0.0, 30.0)


def test_member_fields_agree() -> None:
    """Gone has a cause, proven means gone, only the parked admit."""
    with pytest.raises(AssertionError):
        Member("0/0", status=Status.GONE)
    with pytest.raises(AssertionError):
        Member("0/0", is_proven=True)
    with pytest.raises(AssertionError):
        Member("0/0", admits=True)
    with pytest.raises(AssertionError):
        Member("0/0", last_heard_s=1.0)
    Member("0/0", incarnation=1, status=Status.GONE, cause=Cause.EXIT, is_proven=True)


def test_tally_follows_a_member() -> None:
    """Counts move with the status."""
    before = Member("0/0", incarnation=1)
    after = dataclasses.replace(before, status=Status.PARKED, admits=True)
    assert Tally(running=2).moved(before, after) == Tally(running=1, parked=1, admitting=1, holding=1)


def test_state_invariants_are_asserted() -> None:
    """A tally that does not cover the view, and phases without their fields."""
    state = initial(["0/0"], 0.0, 30.0)
    with pytest.raises(AssertionError):
        dataclasses.replace(state, tally=Tally(running=2))
    with pytest.raises(AssertionError):
        dataclasses.replace(state, phase=Phase.HEALTHY)
    with pytest.raises(AssertionError):
        dataclasses.replace(state, phase=Phase.HEALTHY, hang_deadline_s=None, tally=Tally(parked=1)).check()
    with pytest.raises(AssertionError):
        View(1, ("0/0", "0/0"))
