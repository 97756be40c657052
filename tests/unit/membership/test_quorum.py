"""Each branch of the decision, with its reason."""

from __future__ import annotations

import dataclasses

import pytest
from driver import Job

from lightning_ft.config import Settings
from lightning_ft.membership.effects import Cause
from lightning_ft.membership.events import Address
from lightning_ft.membership.quorum import Verdict, quorum
from lightning_ft.membership.state import Joiner, Phase, State, Status, Tally, View, initial
from lightning_ft.membership.table import Table

MEMBERS = {
    "P": {"status": Status.PARKED, "completed": 5},
    "A": {"status": Status.PARKED, "completed": 5, "admits": True},
    "b": {"status": Status.PARKED, "completed": 4},
    "N": {"status": Status.PARKED, "has_state": False},
    "R": {"status": Status.RUNNING},
    "L": {"status": Status.LEAVING, "completed": 5},
    "X": {"status": Status.RELEASED},
    "D": {"status": Status.GONE, "cause": Cause.EXIT, "is_proven": True},
    "U": {"status": Status.GONE, "cause": Cause.HEARTBEAT},
    "V": {"status": Status.GONE, "cause": Cause.HEARTBEAT, "has_state": False},
}


def state_of(letters: str, joiners: tuple[Joiner, ...] = ()) -> State:
    """A suspended view with one member 0/i for each letter."""
    state = initial([f"0/{i}" for i in range(len(letters))], 0.0, 100.0)
    records = [
        dataclasses.replace(state.members[f"0/{i}"], incarnation=1, **MEMBERS[letter])
        for i, letter in enumerate(letters)
    ]
    count = {status: sum(record.status is status for record in records) for status in Status}
    return dataclasses.replace(
        state,
        members=Table((record.member, record) for record in records),
        joiners=Table((joiner.member, joiner) for joiner in joiners),
        tally=Tally(
            running=count[Status.RUNNING],
            parked=count[Status.PARKED],
            leaving=count[Status.LEAVING],
            gone=count[Status.GONE],
            released=count[Status.RELEASED],
            admitting=sum(record.admits for record in records),
            proven=sum(record.is_proven for record in records),
            holding=sum(record.status is Status.PARKED and record.has_state for record in records),
            opposing=sum(
                record.status is Status.GONE and record.has_state and not record.is_proven for record in records
            ),
        ),
    )


def decide(letters: str, joiners: tuple[Joiner, ...] = (), **settings: int) -> tuple[str, str]:
    """The members' slots as a string, and the reason."""
    verdict = verdict_of(letters, joiners, **settings)
    return "none" if verdict.members is None else " ".join(verdict.members), verdict.reason


def verdict_of(letters: str, joiners: tuple[Joiner, ...] = (), **settings: int) -> Verdict:
    return quorum(state_of(letters, joiners), 10.0, Settings(**({"max_world_size": 9} | settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("letters", "settings", "members", "reason"),
    [
        ("PRP", {}, "none", "1 of 3 members have not parked yet"),
        ("DLD", {}, "none", "no member that is left holds the state of the job"),
        ("NND", {}, "none", "no member that is left holds the state of the job"),
        ("NNUP", {}, "none", "1 members are only half: 1 of the gone, among them 0/2, may still run"),
        ("NNPU", {}, "0/0 0/1 0/2", "3 of 4 members parked"),
        ("NVVP", {}, "0/0 0/3", "2 of 4 members parked"),
        ("LNb", {}, "0/0 0/1 0/2", "2 of 3 members parked, 1 that leave hold a result that the others need"),
        ("LNP", {}, "0/1 0/2", "2 of 3 members parked"),
        ("PPP", {}, "0/0 0/1 0/2", "3 of 3 members parked"),
        ("PDD", {}, "0/0", "1 of 3 members parked"),
        ("PPU", {}, "0/0 0/1", "2 of 3 members parked"),
        ("PUU", {}, "none", "1 members are no majority: 2 of the gone may still run"),
        ("PU", {}, "0/0", "1 of 2 members parked"),
        ("UP", {}, "none", "1 members are only half: 1 of the gone, among them 0/0, may still run"),
        ("DUPP", {}, "0/2 0/3", "2 of 4 members parked"),
        ("LUP", {}, "none", "1 members are only half: 1 of the gone, among them 0/1, may still run"),
        ("LLP", {}, "0/2", "1 of 3 members parked"),
        ("LLb", {}, "0/0 0/1 0/2", "1 of 3 members parked, 2 that leave hold a result that the others need"),
        ("LbUU", {}, "0/0 0/1", "1 of 4 members parked, 1 that leave hold a result that the others need"),
        ("UUbL", {}, "none", "2 members are only half: 2 of the gone, among them 0/0, may still run"),
        ("PDD", {"min_world_size": 2}, "none", "members left: 1, min_world_size is 2"),
        ("PLX", {"min_world_size": 3}, "0/0", "1 of 3 members parked"),
        ("PDD", {"max_failures": 1}, "none", "2 of 3 members are missing, max_failures is 1"),
        ("PDX", {"max_failures": 1}, "0/0", "1 of 3 members parked"),
    ],
)
def test_decision(letters: str, settings: dict[str, int], members: str, reason: str) -> None:
    """Who may go on, and why or why not."""
    assert decide(letters, **settings) == (members, reason)


def test_admission() -> None:
    """Only if all admit, and only joiners that are alive and don't meet themselves."""
    fresh, silent = (Joiner(f"9/{i}", 1, Address("h", 1), heard_s) for i, heard_s in enumerate((9.0, 0.0)))
    again, twin = (Joiner(member, 2, Address("h", 1), 9.0) for member in ("0/1", "0/0"))
    joiners = (fresh, silent, again, twin)
    assert decide("AD", joiners) == ("0/0 0/1 9/0", "1 of 2 members parked, 2 joined")
    assert decide("APD", joiners) == ("0/0 0/1", "2 of 3 members parked")
    assert decide("AL", (fresh,)) == ("0/0 9/0", "1 of 2 members parked, 1 joined")


@pytest.mark.parametrize("limits", [{"min_world_size": 3}, {"max_failures": 0}])
def test_too_few_go_on_if_enough_wait_to_join(limits: dict[str, int]) -> None:
    """They need a majority none the less; where joiners can be admitted, nobody is missing then."""
    joiners = tuple(Joiner(f"9/{slot}", 1, Address("h", 1), 9.0) for slot in range(2))
    assert verdict_of("PDD", joiners[:1], **limits)[::2] == (None, True)
    assert "ready to join: 1" in verdict_of("PDD", joiners[:1], **limits).reason
    assert verdict_of("PDD", joiners, **limits) == (("0/0",), "1 of 3 members parked", True)
    assert verdict_of("ADD", joiners, **limits) == (("0/0", "9/0", "9/1"), "1 of 3 members parked, 2 joined", False)
    assert verdict_of("PUU", joiners, **limits)[::2] == (None, False)
    assert verdict_of("PPP", joiners, **limits)[::2] == (("0/0", "0/1", "0/2"), False)


def test_nodes_come_to_have_equally_many() -> None:
    """Of more joiners than there are places for, those of the nodes with the fewest members; in order among equals."""
    joiners = tuple(Joiner(member, 1, Address("h", 1), 9.0) for member in ("0/7", "1/0", "1/1", "1/2", "2/0"))
    assert decide("AA", joiners, max_world_size=3)[0] == "0/0 0/1 1/0"
    assert decide("AA", joiners, max_world_size=4)[0] == "0/0 0/1 1/0 2/0"
    assert decide("AA", joiners, max_world_size=6)[0] == "0/0 0/1 0/7 1/0 1/1 2/0"
    assert decide("AA", joiners, max_world_size=7)[0] == "0/0 0/1 0/7 1/0 1/1 1/2 2/0"
    assert decide("AAA", joiners, max_world_size=2)[0] == "0/0 0/1 0/2"


def test_half_is_decided_by_numeric_order() -> None:
    """0/2 is lower than 0/10, wherever it stands in the view."""
    job = Job.running("0/2", "0/10")
    state = dataclasses.replace(job.state, view=View(1, ("0/10", "0/2")))
    parked = dataclasses.replace(state.members["0/2"], status=Status.PARKED)
    gone = dataclasses.replace(state.members["0/10"], status=Status.GONE, cause=Cause.HEARTBEAT)
    state = dataclasses.replace(
        state,
        phase=Phase.SUSPENDED,
        hang_deadline_s=1.0,
        members=state.members.with_items([("0/2", parked), ("0/10", gone)]),
        tally=Tally(parked=1, gone=1, holding=1, opposing=1),
    )
    assert quorum(state, 0.0, job.settings)[0] == ("0/2",)
