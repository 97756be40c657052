"""Who may join a job: as many as there are places, as spares too, and only what trains the same (C7a)."""

from __future__ import annotations

import pytest
from driver import SILENCE_S, Job

from lightning_ft.membership import effects
from lightning_ft.membership.events import Address
from lightning_ft.membership.quorum import no_room

A, B, C, D = "0/0", "0/1", "1/0", "1/1"


def admit(job: Job, *members: str) -> None:
    """Have the members pass a boundary."""
    for member in members:
        job.park(member, 5, reason="join", admits=True, incarnation=job.state.members[member].incarnation or 1)


def declined(job: Job) -> list[str]:
    return [effect.member for effect in job.of(effects.Decline)]


def test_a_full_job_declines() -> None:
    """It may have as many members as it began with; who comes beyond that is told so, and no member is."""
    job = Job.running(A, B, max_world_size=None)
    before = job.state
    job.ready("9/0")
    assert [type(effect) for effect in job.effects] == [effects.Record, effects.Decline]
    assert declined(job) == ["9/0"]
    assert "at most 2 members (max_world_size), free: 0, waiting: 0" in job.of(effects.Decline)[0].reason
    (record,) = job.records("join_declined")
    assert (record["member"], record["incarnation"]) == ("9/0", 1)
    assert job.state == before


def test_a_place_that_is_free_is_taken_once() -> None:
    """By whoever comes first, a newcomer too; whom it belonged to finds it taken."""
    job = Job.running(A, B, max_world_size=None)
    job.exited(B)
    job.park(A)
    job.ready("9/0")
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(A, "ready: 9/0", (Address("host9", 2),))]
    job.ready(B, 2)
    assert declined(job) == [B], "9/0 waits for the only place"
    job.ready("9/0")
    assert declined(job) == [], "its connection broke, and it is back"
    admit(job, A)
    assert job.state.view.members == (A, "9/0")
    job.ready(B, 3)
    assert declined(job) == [B]


def test_a_job_may_grow() -> None:
    """Up to `max_world_size`; as large it is then missed."""
    job = Job.running(A, B, max_world_size=3, max_failures=1, respawn=False)
    job.ready(C)
    job.ready(D)
    assert declined(job) == [D]
    admit(job, A, B)
    assert (job.state.view.members, job.state.target) == ((A, B, C), 3)
    job.exited(C)
    job.exited(B)
    job.park(A)
    assert [stop.reason for stop in job.of(effects.Stop)] == ["2 of 3 members are missing, max_failures is 1"]


def test_leavers_make_room() -> None:
    """A job that part of has left may be as large again as it was."""
    job = Job.running(A, B, max_world_size=None)
    job.leave(B)
    job.ready(C)
    assert declined(job) == []
    job.park(A)
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(A, "ready: 1/0", (Address("host1", 2),))]


def test_a_spare_is_no_member() -> None:
    """It waits and nobody is told; its death is nothing; whoever comes back finds it in its place, and is the spare."""
    job = Job.running(A, B, max_world_size=None, spares=1)
    view = job.state.view
    job.ready("0/2")
    assert [type(effect) for effect in job.effects] == [effects.Record]
    assert [record["member"] for record in job.records("spare_ready")] == ["0/2"]
    assert job.ready("0/2") == (), "its connection broke, and it is back"
    assert list(job.state.joiners) == ["0/2"]
    job.ready("0/3")
    assert declined(job) == ["0/3"]
    job.exited("0/2")
    assert (job.effects, list(job.state.joiners), job.state.view) == ((), [], view)
    job.ready("0/2", 2)
    job.exited(B)
    job.park(A)
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(A, "ready: 0/2", (Address("host0", 2),))]
    job.ready(B, 2)
    assert (declined(job), sorted(job.state.joiners)) == ([], [B, "0/2"])
    admit(job, A)
    assert (job.state.view.members, list(job.state.joiners)) == ((A, B), ["0/2"])
    job.exited(B, 2)
    job.park(A)
    admit(job, A)
    assert job.state.view.members == (A, "0/2")


def test_a_spare_does_not_wait_for_the_process_that_it_replaces() -> None:
    """A member that is given up but may run still is no reason not to admit another."""
    job = Job.running(A, B, C, max_world_size=None, spares=1)
    job.ready("0/2")
    job.drop(B)
    job.tick(SILENCE_S, alive=(A, C, "0/2"))
    job.park(A)
    job.park(C)
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(A, "ready: 0/2", (Address("host0", 2),))]


def test_each_node_may_have_spares() -> None:
    """Those of one take nothing from another's."""
    job = Job.running(A, B, C, D, max_world_size=None, spares=1)
    for spare in ("0/2", "1/2"):
        job.ready(spare)
        assert declined(job) == []
    job.exited(D)
    for member in (A, B, C):
        job.park(member)
    job.ready(D, 2)
    admit(job, A, B, C)
    assert job.state.view.members == (A, B, C, D), "its own node has too few, and it is the first of it"
    assert sorted(job.state.joiners) == ["0/2", "1/2"]


@pytest.mark.parametrize("is_told_first", [True, False], ids=["told first", "told later"])
def test_who_trains_something_else_is_declined(is_told_first: bool) -> None:
    """Whether it comes before or after that is known, it gets the job's description; nobody else hears of it."""
    job = Job.running(A, B)
    seen: list[effects.Effect] = []
    if is_told_first:
        seen += job.describe(A, "cafe")
    seen += job.ready("9/0", fingerprint="beef")
    seen += job.ready("9/1", fingerprint="cafe")
    seen += job.ready("9/2")
    if not is_told_first:
        seen += job.describe(A, "cafe")
    (decline,) = [effect for effect in seen if isinstance(effect, effects.Decline)]
    assert decline == effects.Decline("9/0", 1, "it does not train what the job trains", "description of cafe")
    assert {effect.member for effect in seen if not isinstance(effect, effects.AnnounceJoin)} == {"9/0"}
    assert sorted(job.state.joiners) == ["9/1", "9/2"]


def test_what_the_job_trains_may_change() -> None:
    """With the next fit; whoever waited for the one before is declined. What the dead say counts no more."""
    job = Job.running(A, B)
    job.describe(A, "cafe")
    job.ready("9/0", fingerprint="cafe")
    job.describe(A, "beef")
    assert declined(job) == ["9/0"]
    job.exited(A)
    job.describe(A, "cafe")
    assert job.state.fingerprint == "beef"


def test_room_for_a_node() -> None:
    """Its own members of before are no obstacle to those that come in their place."""
    job = Job.running(A, B, C, D, max_world_size=None)
    assert no_room(job.state, job.settings, (C, D)) == ""
    assert "free: 2, " in no_room(job.state, job.settings, (C, D, "1/2"))
    assert "free: 0, " in no_room(job.state, job.settings, ("2/0",))
    job.exited(D)
    job.ready("2/0")
    assert "waiting: 1" in no_room(job.state, job.settings, ("3/0",))
