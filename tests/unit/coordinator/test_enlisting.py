"""Whom an agent may start that comes to a job, whose members it does not know."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_ft.config import Settings
from lightning_ft.coordinator.enlisting import beginning, who_is_there
from lightning_ft.membership import events, machine, wire
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import State, initial

EXPECTED = ("0/0", "1/0")
SETTINGS = Settings(max_world_size=3, max_restarts=3)


def ask(
    node: int | None, state: State, enlisted: dict[str, int] | None = None, num_slots: int = 1, num_spares: int = 0
) -> wire.JobBegins | str:
    settings = dataclasses.replace(SETTINGS, spares=num_spares)
    return beginning(wire.NodeArrived(num_slots, node), state, settings, EXPECTED, enlisted or {})


@pytest.fixture
def starting() -> State:
    """Nobody was heard of yet."""
    return initial(EXPECTED, 0.0, 100.0)


@pytest.fixture
def running(starting: State) -> State:
    """In its first view."""
    state = starting
    for member in EXPECTED:
        state, _ = machine.step(SETTINGS, state, events.Hello(member, 1, 0, Address("h", 1)), 0.0)
    for member in EXPECTED:
        state, _ = machine.step(SETTINGS, state, events.Parked(member, 1, 0, 0, "start"), 0.0)
    assert state.generation == 1
    return state


def fail(state: State, member: str) -> State:
    return machine.step(SETTINGS, state, events.Exited(member, 1, -9, "killed"), 0.0)[0]


def test_an_expected_node_starts_its_members(starting: State) -> None:
    """With their first incarnations, also if its agent is started again before they were heard of."""
    told = wire.JobBegins(1, "0-1/0", (("1/0", 0),))
    assert ask(1, starting) == told
    assert ask(1, starting, {"1/0": 1}) == told
    assert who_is_there(starting, (), 1) == ""


def test_a_node_without_a_number_gets_a_new_one(running: State) -> None:
    """Above all that the job has had, though nothing was heard of their members."""
    assert ask(None, running) == wire.JobBegins(2, "0-1/0", (("2/0", 0),))
    assert ask(None, running, {"2/0": 1}) == wire.JobBegins(3, "0-1/0", (("3/0", 0),))
    assert ask(None, running, num_spares=1) == wire.JobBegins(2, "0-1/0", (("2/0", 0), ("2/1", 0)))
    assert who_is_there(running, (), None) == ""


def test_incarnations_are_never_used_again(running: State, starting: State) -> None:
    """Nor those of processes that the coordinator never heard of: their agent may have started more."""
    dead = fail(running, "1/0")
    assert ask(1, dead) == wire.JobBegins(1, "0-1/0", (("1/0", 1),))
    assert ask(1, dead, {"1/0": 1}) == wire.JobBegins(1, "0-1/0", (("1/0", 4),))
    assert ask(2, running, {"2/0": 5}) == wire.JobBegins(2, "0-1/0", (("2/0", 8),))
    stillborn = fail(starting, "1/0")
    assert ask(1, stillborn) == wire.JobBegins(1, "0-1/0", (("1/0", 1),))


def test_there_must_be_room(running: State) -> None:
    """Beside the members, and for all that the agent wants to start; the end of the job leaves none."""
    refused = ask(None, running, num_slots=2)
    assert isinstance(refused, str)
    assert refused.startswith("there is no room: the job has at most 3 members (max_world_size), free: 1")
    assert ask(None, running, num_slots=0) == "it asks for no members"
    state = running
    for member in EXPECTED:
        state = fail(state, member)
    assert ask(None, state) == "the job has stopped: no member is left that could go on"


def test_nobody_is_pushed_aside(running: State) -> None:
    """A node that has an agent, or members that live, has no use for another."""
    assert who_is_there(running, (0, 1), 1).startswith("node 1 has an agent. ")
    assert who_is_there(running, (0,), 1).startswith("1/0 is a member already. ")
    assert who_is_there(fail(running, "1/0"), (0,), 1) == ""
