"""Who keeps the coordinator's entries, and when it may decide."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ft.coordinator.replicas import Replicas, pack, unpack
from lightning_ft.membership import wire
from lightning_ft.membership.replication import Entry, Ledger, replica_id

HOME, SECOND, THIRD = (replica_id(node, 7) for node in range(3))


class Agent:
    """Stands for a connection: what was sent over it."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def send(self, message: Any) -> bool:
        self.frames.append(message)
        return True


class Stage:
    """Replicas with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.replicas = Replicas(Ledger(3, 0, (HOME,), (HOME,)), HOME, 10.0, lambda: self.now_s)
        self.agents: dict[int, Agent] = {}

    def decide(self, *kept_by: int) -> Entry:
        """Propose a state, and have agents keep it."""
        entry = self.replicas.propose({"core": "x"})
        assert entry is not None
        self.replicas.send(entry)
        for replica in kept_by:
            self.replicas.kept(replica, entry.number)
        return entry

    def attach(self, *replicas: int) -> None:
        for replica in replicas:
            self.agents[replica] = Agent()
            self.replicas.attach(replica, self.agents[replica])  # type: ignore[arg-type]


@pytest.fixture
def stage() -> Stage:
    """All three agents follow and keep the entries."""
    stage = Stage()
    stage.decide()
    stage.attach(HOME, SECOND, THIRD)
    stage.decide(HOME)
    assert stage.decide(HOME, SECOND).replicas == (HOME, SECOND, THIRD)
    return stage


def test_a_state_is_read_as_it_was_written() -> None:
    """In less space, for states are alike in their parts."""
    state = {"core": "member " * 1000, "lines": ["a", "ü"]}
    assert unpack(pack(state)) == state
    assert len(pack(state)) < 200


def test_what_is_decided_is_told_once_a_majority_keeps_it(stage: Stage) -> None:
    """Two of three."""
    entry = stage.decide(HOME)
    assert not stage.replicas.holds(entry.number)
    assert stage.replicas.kept(THIRD, entry.number)
    assert stage.replicas.holds(entry.number)
    assert stage.agents[SECOND].frames[-1] == entry


def test_a_silent_agent_is_left_out_and_taken_back_in(stage: Stage) -> None:
    """So that the rest can lose another one; its next heartbeat brings it back."""
    stage.now_s += 6.0
    for replica in (HOME, SECOND):
        stage.replicas.beat(replica)
    assert stage.replicas.are_outdated
    assert stage.decide(HOME, SECOND).replicas == (HOME, SECOND)
    assert not stage.replicas.are_outdated
    stage.replicas.beat(THIRD)
    assert stage.replicas.are_outdated


def test_agent_that_is_done_is_dismissed_when_nobody_needs_it(stage: Stage) -> None:
    """Not before the others have agreed to do without it."""
    stage.replicas.done(THIRD)
    entry = stage.decide(HOME)
    assert wire.Dismissed() not in stage.agents[THIRD].frames
    stage.replicas.kept(SECOND, entry.number)
    assert stage.agents[THIRD].frames[-1] == wire.Dismissed()


def test_lease_needs_a_majority_that_has_heard_lately(stage: Stage) -> None:
    """What an agent repeats is the coordinator's own clock."""
    assert not stage.replicas.has_lease
    stage.replicas.heard(HOME, 100.0)
    assert not stage.replicas.has_lease
    stage.replicas.heard(SECOND, 99.0)
    assert stage.replicas.has_lease
    stage.now_s = 109.0
    assert not stage.replicas.has_lease


def test_loss_of_the_majority_is_noticed(stage: Stage) -> None:
    """Since the last moment at which there was one."""
    assert stage.replicas.lost_s() == 0.0
    for replica in (SECOND, THIRD):
        stage.replicas.detach(replica, stage.agents[replica])  # type: ignore[arg-type]
    stage.now_s += 4.0
    stage.replicas.beat(HOME)
    assert stage.replicas.lost_s() == 4.0


def test_who_goes_on_from_decisions_is_in_office_with_a_quorum(stage: Stage) -> None:
    """It counts the time until then, and not what comes later."""
    assert (stage.replicas.is_in_office, stage.replicas.waited_s()) == (True, 0.0), "nothing was decided before"
    stage.replicas = Replicas(
        Ledger(3, 7, (HOME, SECOND, THIRD), (HOME, SECOND, THIRD)), HOME, 10.0, lambda: stage.now_s
    )
    stage.attach(HOME)
    stage.now_s += 3.0
    assert (stage.replicas.is_in_office, stage.replicas.waited_s()) == (False, 3.0)
    stage.replicas.beat(HOME)
    stage.attach(THIRD)
    assert (stage.replicas.is_in_office, stage.replicas.waited_s()) == (True, 0.0)


def test_alone_everything_holds_at_once() -> None:
    """In a job of one node nothing is sent to anybody."""
    alone = Replicas(None, HOME, 10.0, lambda: 0.0)
    alone.attach(HOME, Agent())  # type: ignore[arg-type]
    assert (alone.propose({}), alone.term, alone.lost_s()) == (None, 0, 0.0)
    assert alone.holds(1)
    assert alone.has_lease
    assert not alone.are_outdated
    assert not alone.kept(HOME, 1)
