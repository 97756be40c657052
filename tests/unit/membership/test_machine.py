"""The coordinator's core, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from driver import INTERVAL_S, SILENCE_S, TIMEOUT_S, Job

from lightning_ft.membership import effects, events, snapshot, wire
from lightning_ft.membership.effects import Cause
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import Phase, Status

A, B, C, D = "0/0", "0/1", "1/0", "1/1"


def status(job: Job, member: str) -> Status:
    return job.state.members[member].status


# --- C1, C3: the first view, and the next -----------------------------------------------------------------------------


def test_first_view_holds_whoever_parked() -> None:
    """Generation 1 is a difference to the expected members, and comes with the first member's address."""
    job = Job(A, B)
    assert job.hello(A) == (effects.Record("member_joined", 0, A, (("incarnation", 1), ("host", "host0"), ("pid", 0))),)
    job.park(A, reason="start")
    job.hello(B)
    job.park(B, reason="start")
    assert job.of(effects.CommitView) == [
        effects.CommitView(member, 1, 0, (), (), 2, Address("host0", 1)) for member in (A, B)
    ]
    assert job.records("view_committed") == [{"member": None, "members": (A, B), "reason": "2 of 2 members parked"}]


def test_first_park_suspends_the_others_once() -> None:
    """Those that are parked already are not told."""
    job = Job.running(A, B, C)
    job.park(B, 3)
    assert [effect.member for effect in job.of(effects.Suspend)] == [A, C]
    assert job.records("view_suspended") == [{"member": B, "reason": "0/1 parked: connection"}]
    assert job.park(A, 3) == ()


def test_death_makes_the_next_view() -> None:
    """Survivors keep their order and get the difference."""
    job = Job.running(A, B, C)
    job.exited(A)
    (failure,) = job.records("failure_detected")
    assert failure == {
        "member": A,
        "cause": "exit",
        "detail": "killed by SIGKILL",
        "host": "host0",
        "doing": "",
        "late_s": None,
        "detect_s": 0.0,
    }
    assert not job.of(effects.Kill)
    job.park(C, 3)
    job.park(B, 3)
    assert job.of(effects.CommitView) == [
        effects.CommitView(member, 2, 1, (A,), (), 2, Address("host0", 1)) for member in (B, C)
    ]
    assert job.state.phase is Phase.HEALTHY


def _bytes_to_members(turns: Iterable[effects.Effect]) -> int:
    return sum(len(wire.encode(effect)) for effect in turns if isinstance(effect, wire.TO_MEMBER))


def test_bytes_of_a_view_change_grow_as_the_members() -> None:
    """Nobody is sent a list of everybody, neither for the first view nor after a death."""
    per_member = {}
    for num in (10, 1000):
        names = [f"{index // 8}/{index % 8}" for index in range(num)]
        job = Job(*names)
        for name in names:
            job.hello(name)
        first = [effect for name in names for effect in job.park(name, reason="start")]
        death = [*job.exited(names[1]), *(effect for name in names if name != names[1] for effect in job.park(name, 5))]
        assert job.state.view.generation == 2
        assert sum(isinstance(effect, effects.CommitView) for effect in (*first, *death)) == 2 * num - 1
        per_member[num] = (_bytes_to_members(first) / num, _bytes_to_members(death) / num)
    for small, large in zip(per_member[10], per_member[1000], strict=True):
        assert large < 1.2 * small, per_member


def test_a_repeated_park_changes_what_it_says() -> None:
    """After a reconnection it is said again."""
    job = Job.running(A, B)
    job.park(A, 3)
    job.hello(A, generation=1)
    assert job.effects == ()
    job.park(A, 4, admits=True)
    assert job.state.members[A].completed == 4
    assert job.state.tally.admitting == 1


# --- C2: who is gone --------------------------------------------------------------------------------------------------


def test_refused_probe_proves_and_exit_report_is_no_second_failure() -> None:
    """A killed process: connection, port and agent report in this order."""
    job = Job.running(A, B)
    assert job.drop(B) == (effects.Probe(B, 1, Address("host0", 1)),)
    job.refused(B)
    assert job.records("failure_detected")[0]["cause"] == "connection"
    assert job.state.members[B].is_proven
    assert job.exited(B) == ()
    assert job.refused(B) == ()
    assert job.drop(B) == ()


def test_exit_report_may_come_first() -> None:
    """The same, in the other order."""
    job = Job.running(A, B)
    job.exited(B)
    assert job.records("failure_detected")[0]["cause"] == "exit"
    assert job.drop(B) == job.refused(B) == ()


def test_a_drop_is_probed_again_at_each_tick() -> None:
    """The first probe may reach a port that is about to close."""
    job = Job.running(A, B)
    job.drop(B)
    job.tick(INTERVAL_S, alive=(A,))
    assert job.of(effects.Probe) == [effects.Probe(B, 1, Address("host0", 1))]


def test_an_old_probe_says_nothing_about_a_member_that_is_back() -> None:
    """It reconnected while the probe was under way."""
    job = Job.running(A, B)
    job.drop(B)
    job.hello(B, generation=1)
    assert len(job.refused(B)) == 1
    assert "older than" in job.of(effects.Refuse)[0].reason
    assert status(job, B) is Status.RUNNING


def test_silence_is_a_failure_without_proof() -> None:
    """Evicted, and its agent kills it; the exit report is the proof."""
    job = Job.running(A, B)
    job.tick(SILENCE_S, alive=(A,))
    assert job.records("failure_detected")[0]["cause"] == "heartbeat"
    assert [(effect.member, effect.incarnation) for effect in job.of(effects.Evict) + job.of(effects.Kill)] == [
        (B, 1)
    ] * 2
    assert not job.state.members[B].is_proven
    assert job.exited(B) == ()
    assert job.state.members[B].is_proven


def test_heartbeats_of_members_alone_are_answered() -> None:
    """An answer means that the sender is in the job; it repeats the sender's own time."""
    job = Job.running(A, B)
    job.feed(events.Heartbeat(B, 1, sent_s=7.5))
    assert job.of(effects.Acknowledge) == [effects.Acknowledge(B, 7.5)]
    job.tick(SILENCE_S, alive=(A,))
    job.feed(events.Heartbeat(B, 1, sent_s=8.5))
    assert not job.of(effects.Acknowledge)
    assert job.of(effects.Evict)


def test_drop_and_silence_is_a_connection_failure() -> None:
    """The host does not answer the probe: perhaps a cable."""
    job = Job.running(A, B)
    job.drop(B)
    job.tick(SILENCE_S, alive=(A,))
    assert job.records("failure_detected")[0]["cause"] == "connection"
    assert job.drop(B) == (effects.Probe(B, 1, Address("host0", 1)),)  # a proof is still welcome
    job.refused(B)
    assert job.state.members[B].is_proven


def test_one_proof_may_end_the_wait() -> None:
    """B alone is half without the lowest; the proof of A's death makes it all."""
    job = Job.running(A, B)
    job.park(B)
    job.tick(SILENCE_S, alive=(B,))
    assert job.records("quorum_missing")
    assert job.state.generation == 1
    job.exited(A)
    assert job.state.view.members == (B,)


def test_member_that_others_wait_for_in_vain_is_hung() -> None:
    """It is alive, in no collective, and has shown no progress for `timeout`; who waits for it is not blamed."""
    job = Job.running(A, B, C)
    job.stands(A, waits=True)
    job.stands(C, waits=True)
    job.stands(B, idle=True, doing="training_step")
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B, C))
    assert job.state.phase is Phase.HEALTHY
    job.tick(INTERVAL_S, alive=(A, B, C))
    assert job.records("failure_detected") == [
        {
            "member": B,
            "cause": "hang",
            "detail": "the others wait for it, and it has shown no progress for 20 s (training_step)",
            "host": "host0",
            "doing": "training_step",
            "late_s": 20.0,
            "detect_s": 20.0,
        }
    ]
    assert [kill.member for kill in job.of(effects.Kill)] == [B]


@pytest.mark.parametrize("is_heard_again", [False, True])
def test_a_death_is_dated_back_to_the_drop_of_the_connection(is_heard_again: bool) -> None:
    """Not to the last heartbeat, nor to a drop after which the member came back: so long nobody knew of it."""
    job = Job.running(A, B, C)
    if is_heard_again:
        job.drop(B)
        job.tick(0.25, alive=(A, C))
        job.hello(B, 1)
    job.tick(0.5, alive=(A, C))
    job.drop(B)
    job.tick(0.25, alive=(A, C))
    job.refused(B)
    (failure,) = job.records("failure_detected")
    assert (failure["cause"], failure["detect_s"], failure["late_s"]) == ("connection", 0.25, 0.75)


def test_progress_is_no_hang() -> None:
    """However long the others wait: a validation may take hours."""
    job = Job.running(A, B)
    job.stands(A, waits=True)
    job.tick(5 * TIMEOUT_S, alive=(A, B))
    assert job.state.phase is Phase.HEALTHY


def test_whoever_is_seen_to_compute_is_not_silent_but_may_hang() -> None:
    """Something holds its interpreter's lock: it is given time, as one that answers and shows no progress."""
    job = Job.running(A, B)
    job.stands(B, waits=True, doing="reduction 4 of world")
    job.heartbeat(B)
    job.stands(A, waits=True)
    for _ in range(int(TIMEOUT_S) - 1):
        job.feed(events.Vouched(((B, 1), ("9/9", 1), (A, 7))))
        job.tick(1.0, alive=(A,))
        assert job.state.phase is Phase.HEALTHY
    job.feed(events.Vouched(((B, 1),)))
    job.tick(1.0, alive=(A,))
    (failure,) = job.records("failure_detected")
    assert (failure["member"], failure["cause"]) == (B, "hang")
    assert str(failure["detail"]).endswith("(reduction 4 of world), nor answered, though its process computes")


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "no longer"])
def test_whoever_is_not_seen_to_compute_any_more_is_silent(is_dropped: bool) -> None:
    """Nor helps it one that has lost its connection: others can't reach it either."""
    job = Job.running(A, B)
    if is_dropped:
        job.drop(B)
    for _ in range(2):
        job.feed(events.Vouched(((B, 1),)))
        job.tick(1.0, alive=(A,))
    for _ in range(int(SILENCE_S) + 1):
        if is_dropped:
            job.feed(events.Vouched(((B, 1),)))
        job.tick(1.0, alive=(A,))
    assert job.state.members[B].cause is (Cause.CONNECTION if is_dropped else Cause.HEARTBEAT)


def test_nobody_waits_for_whoever_is_idle_alone() -> None:
    """A long step of all is no hang."""
    job = Job.running(A, B)
    job.stands(A, idle=True)
    job.stands(B, idle=True)
    job.tick(5 * TIMEOUT_S, alive=(A, B))
    assert job.state.phase is Phase.HEALTHY


def test_a_collective_that_all_wait_in_is_broken_up() -> None:
    """Nobody is to blame: the view is suspended, all park, and it is done again among the same members."""
    job = Job.running(A, B)
    job.stands(A, waits=True)
    job.tick(INTERVAL_S, alive=(A, B))
    job.stands(B, waits=True)
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B))
    assert job.state.phase is Phase.HEALTHY
    job.tick(INTERVAL_S, alive=(A, B))
    assert {effect.member for effect in job.of(effects.Suspend)} == {A, B}
    job.park(A, 3)
    job.park(B, 3)
    assert (job.state.generation, job.state.view.members) == (2, (A, B))


def test_member_that_does_not_park_is_hung() -> None:
    """Alive, without progress, and not parked a while after the suspension."""
    job = Job.running(A, B, C)
    job.stands(B, idle=True)
    job.exited(C)
    job.park(A)
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B))
    assert job.state.generation == 1
    job.tick(INTERVAL_S, alive=(A, B))
    assert [record["cause"] for record in job.records("failure_detected")] == ["hang"]


def test_time_waited_before_the_suspension_counts() -> None:
    """But for a grace of `heartbeat_timeout`, to hear of it and to park."""
    job = Job.running(A, B, C)
    job.stands(A, waits=True)
    job.stands(B, idle=True)
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B, C))
    job.exited(C)
    job.park(A)
    job.tick(SILENCE_S - INTERVAL_S, alive=(A, B))
    assert status(job, B) is Status.RUNNING
    job.tick(INTERVAL_S, alive=(A, B))
    assert status(job, B) is Status.GONE


def test_whoever_nobody_waited_for_has_its_time() -> None:
    """All have computed for long without a collective when one dies: the others are not to blame."""
    job = Job.running(A, B, C)
    job.stands(A, idle=True)
    job.stands(B, idle=True)
    job.tick(TIMEOUT_S, alive=(A, B, C))
    job.exited(C)
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B))
    assert job.state.tally.running == 2
    job.park(A, 3)
    job.park(B, 3)
    assert job.state.view.members == (A, B)


def test_what_the_dead_waited_for_does_not_count() -> None:
    """A member that died long ago, in a collective, must not shorten anybody's time in a later view."""
    job = Job.running(A, B, C, D)
    job.stands(D, waits=True)
    job.tick(INTERVAL_S, alive=(A, B, C, D))
    job.exited(D)
    for member in (A, B, C):
        job.park(member, 3)
    job.stands(A, idle=True)
    job.stands(B, idle=True)
    job.tick(2 * TIMEOUT_S, alive=(A, B, C))
    job.exited(C)
    job.tick(TIMEOUT_S - INTERVAL_S, alive=(A, B))
    assert job.state.tally.running == 2, "nobody has waited for them until now"


def test_whoever_is_not_freed_by_a_suspension_is_hung() -> None:
    """A severed collective ends at once; one that waits in it for `timeout` does not listen."""
    job = Job.running(A, B, C)
    job.stands(B, waits=True)
    job.exited(C)
    job.park(A)
    job.tick(TIMEOUT_S, alive=(A, B))
    assert status(job, B) is Status.GONE


def test_expected_member_that_never_comes() -> None:
    """Given up `timeout` after the start; nobody knows its incarnation, so nobody is told."""
    job = Job(A, B)
    job.hello(A)
    job.park(A, reason="start")
    job.tick(TIMEOUT_S, alive=(A,))
    assert job.records("failure_detected") == [
        {
            "member": B,
            "cause": "connection",
            "detail": "it did not connect in time",
            "host": None,
            "doing": "",
            "late_s": None,
            "detect_s": None,
        }
    ]
    assert not job.of(effects.Kill)
    assert job.state.view.members == (A,)
    job.hello(B)
    assert job.of(effects.Evict)


def test_expected_member_that_dies_before_hello() -> None:
    """Its agent knows its incarnation."""
    job = Job(A, B)
    job.hello(A)
    job.park(A, reason="start")
    job.exited(B)
    assert job.state.view.members == (A,)
    assert job.state.members[B].is_proven


# --- C4: no quorum ----------------------------------------------------------------------------------------------------


def test_hopeless_stops_at_once() -> None:
    """All that are missing are dead, and nobody starts them again: nothing would change."""
    job = Job.running(A, B, min_world_size=2, respawn=False)
    job.exited(B)
    job.park(A)
    assert job.of(effects.Stop) == [effects.Stop(A, "members left: 1, min_world_size is 2")]
    assert job.records("job_stopped") == [{"member": None, "reason": "members left: 1, min_world_size is 2"}]
    assert job.state.phase is Phase.STOPPED


def test_waiting_for_proof_is_bounded() -> None:
    """Then the parked and the pending joiners are told to stop."""
    job = Job.running(A, B)
    job.ready("9/0")
    job.park(B)
    job.tick(SILENCE_S, alive=(B, "9/0"))
    job.tick(SILENCE_S - INTERVAL_S, alive=(B, "9/0"))
    assert job.state.phase is Phase.SUSPENDED
    job.tick(INTERVAL_S, alive=(B, "9/0"))
    assert [effect.member for effect in job.of(effects.Stop)] == [B, "9/0"]


def test_the_stopped_stay_stopped() -> None:
    """Whoever speaks is told so; deaths are no failures any more."""
    job = Job.running(A, B, min_world_size=2, rejoin_timeout=0.0)
    job.exited(B)
    job.park(A)
    assert job.of(effects.Stop)
    for say in (job.hello(A, generation=1), job.park(A), job.leave(A), job.ready("9/0")):
        assert [type(effect) for effect in say if not isinstance(effect, effects.Refuse)] == [effects.Stop]
    for happens in (job.drop(A), job.refused(A), job.tick(SILENCE_S), job.exited(A)):
        assert not [effect for effect in happens if isinstance(effect, effects.Record)]
    job.hello(B)
    assert job.of(effects.Evict)


def test_nobody_left_stops() -> None:
    """All died."""
    job = Job.running(A)
    job.exited(A)
    assert job.records("job_stopped")[0]["reason"] == "no member is left that could go on"


# --- C4a: too few -----------------------------------------------------------------------------------------------------


def short(**settings: Any) -> Job:
    """A job in which two are needed, one is left, and that one waits."""
    job = Job.running(A, B, min_world_size=2, rejoin_timeout=60.0, **settings)
    job.exited(B)
    job.park(A)
    assert (job.state.phase, job.of(effects.Stop)) == (Phase.SUSPENDED, [])
    assert [record["reason"] for record in job.records("quorum_missing")] == ["members left: 1, min_world_size is 2"]
    return job


def test_too_few_wait_for_others_to_come_back() -> None:
    """When enough are ready, the members finish their step without them, and are told to admit them after it."""
    job = short()
    job.tick(50, alive=(A,))
    job.ready(B, 2)
    assert (job.state.view.members, job.state.phase) == ((A,), Phase.HEALTHY)
    assert [effect.member for effect in job.of(effects.AnnounceJoin)] == [A]
    assert [effect.needs_joiners for effect in job.of(effects.CommitView)] == [True]
    job.park(A, 5, reason="join", admits=True)
    assert job.state.view.members == (A, B)
    assert not job.state.needs_joiners, "they are there"


def test_the_wait_for_others_is_bounded() -> None:
    """Nobody came."""
    job = short()
    job.tick(59, alive=(A,))
    assert job.state.phase is Phase.SUSPENDED
    job.tick(1, alive=(A,))
    assert job.of(effects.Stop) == [effects.Stop(A, "members left: 1, min_world_size is 2")]


def test_nobody_waits_for_those_that_stay_away() -> None:
    """Their agent will not start them again; whether a process dies in the view, or before it could join."""
    job = Job.running(A, B, min_world_size=2)
    job.exited(B, is_last=True)
    job.park(A)
    assert job.of(effects.Stop) == [effects.Stop(A, "members left: 1, min_world_size is 2")]
    job = short()
    job.exited(B, 2)
    assert not job.of(effects.Stop), "there may be a third"
    job.exited(B, 3, is_last=True)
    assert job.of(effects.Stop)


def test_too_few_do_not_go_on_without_those_they_waited_for() -> None:
    """A joiner that dies before the boundary leaves too few: it is suspended, by a restarted coordinator too."""
    job = short()
    job.ready(B, 2)
    restarted = snapshot.load(snapshot.dump(job.state), job.now_s, TIMEOUT_S, TIMEOUT_S)
    assert restarted.needs_joiners
    job.exited(B, 2)
    assert job.state.phase is Phase.HEALTHY
    job.tick(alive=(A,))
    assert job.records("view_suspended")[0]["reason"] == "members left: 1, min_world_size is 2"
    job.park(A, 1)
    assert (job.state.phase, job.of(effects.Stop)) == (Phase.SUSPENDED, [])
    job.ready(B, 3)
    assert job.state.phase is Phase.HEALTHY


# --- C5: stale --------------------------------------------------------------------------------------------------------


def test_park_of_an_earlier_generation_gets_the_missed_view() -> None:
    """It was disconnected when the view was sent."""
    job = Job.running(A, B, C)
    job.exited(C)
    job.park(A)
    job.park(B)
    job.park(B, generation=1)
    assert [type(effect) for effect in job.effects] == [effects.Refuse, effects.CommitView]
    assert job.of(effects.CommitView) == [effects.CommitView(B, 2, None, (), (A, B), 2, Address("host0", 1))]
    assert status(job, B) is Status.RUNNING


def test_the_gone_are_evicted_whatever_they_say() -> None:
    """Final for the incarnation."""
    job = Job.running(A, B, C)
    job.tick(SILENCE_S, alive=(A, B))
    before = job.state
    for say in (job.hello(C, generation=1), job.park(C), job.leave(C), job.heartbeat(C), job.ready(C)):
        assert [type(effect) for effect in say] == [effects.Refuse, effects.Evict]
    assert job.state == before


def test_strangers_are_evicted_or_refused() -> None:
    """Unknown ids, other incarnations, and words before hello."""
    job = Job(A, B)
    assert [type(effect) for effect in job.park(A)] == [effects.Refuse]
    job.hello(A)
    before = job.state
    for say in (job.hello("7/7"), job.park(A, incarnation=2), job.heartbeat("7/7")):
        assert [type(effect) for effect in say] == [effects.Refuse, effects.Evict]
    for happens in (job.drop("7/7"), job.refused(A, incarnation=2), job.exited("7/7"), job.ready(B)):
        assert [type(effect) for effect in happens] == [effects.Refuse]
    assert job.state == before


def test_a_higher_generation_is_refused() -> None:
    """The coordinator was started anew; it can't take the job over."""
    job = Job(A)
    for say in (job.hello(A, generation=5),):
        assert [type(effect) for effect in say] == [effects.Refuse]
    job.hello(A)
    before = job.state
    for say in (job.park(A, generation=5), job.leave(A, generation=5)):
        assert "can't take a running job over" in say[0].reason
    assert job.state == before


def test_reconnecting_member_hears_what_it_missed() -> None:
    """The suspension; or the view, the leaver and the joiner."""
    job = Job.running(A, B, C)
    job.hello(A, generation=0)
    assert [type(effect) for effect in job.effects] == [effects.CommitView]
    job.leave(C, 4)
    job.ready("9/0")
    job.hello(A, generation=1)
    assert [type(effect) for effect in job.effects] == [effects.NotifyLeaving, effects.AnnounceJoin]
    job.park(B)
    job.hello(A, generation=1)
    assert [type(effect) for effect in job.effects] == [effects.Suspend]


# --- C6: leave --------------------------------------------------------------------------------------------------------


def test_all_leave() -> None:
    """One or two rounds of notices, then all are released."""
    job = Job.running(A, B, C)
    job.leave(A, 5)
    assert job.effects == tuple(effects.NotifyLeaving(member, A, 5) for member in (B, C))
    assert job.leave(B, 5) == ()
    job.leave(C, 5)
    assert [effect.member for effect in job.of(effects.Release)] == [A, B, C]
    assert job.records("job_stopped")[0]["reason"] == "all members left"
    assert job.drop(A) == job.exited(A) == ()
    job.leave(A, 5, generation=1)
    assert job.of(effects.Release)


def test_a_lower_leaver_is_announced_too() -> None:
    """The others must not enter what it won't."""
    job = Job.running(A, B, C)
    job.leave(A, 5)
    job.leave(B, 4)
    assert job.effects == (effects.NotifyLeaving(C, B, 4),)


def test_others_go_on_without_a_leaver() -> None:
    """It is released when the view without it is formed, and it is not missed."""
    job = Job.running(A, B, max_failures=0)
    job.leave(A, 5)
    job.park(B, 5, reason="leave")
    assert job.state.view.members == (B,)
    assert job.of(effects.Release) == [effects.Release(A, 1, "generation 2 goes on without it")]
    assert job.state.target == 1


def test_a_leaver_with_a_needed_result_stays() -> None:
    """It finished a number that a parked member did not: it establishes, then leaves again."""
    job = Job.running(A, B, C)
    job.leave(A, 5)
    job.exited(C)
    job.park(B, 4)
    assert job.state.view.members == (A, B)
    assert status(job, A) is Status.RUNNING
    assert not job.of(effects.Release)


def test_death_of_a_leaver_is_its_release() -> None:
    """It suspends nothing."""
    job = Job.running(A, B, C)
    job.leave(A, 5)
    job.exited(A)
    assert job.records("member_left") == [{"member": A, "detail": "killed by SIGKILL"}]
    assert job.state.phase is Phase.HEALTHY
    job.leave(B, 5)
    job.tick(SILENCE_S, alive=(C,))
    assert job.records("member_left")[0]["member"] == B
    job.leave(C, 5)
    assert job.state.phase is Phase.STOPPED
    assert job.heartbeat(A)[1] == effects.Release(A, 1, "it is released already")


def test_leave_and_park_exclude_each_other() -> None:
    """A leaver is in no collective."""
    job = Job.running(A, B, C)
    job.leave(A, 5)
    assert "leaving" in job.park(A, 5)[0].reason
    job.park(B, 5)
    assert "parked" in job.leave(B, 5)[0].reason
    job.park(C, 5)
    assert job.state.generation == 2
    assert "over" in job.leave(B, 5, generation=1)[0].reason


def test_leave_in_a_suspended_view_is_not_announced() -> None:
    """Nobody enters a number there."""
    job = Job.running(A, B, C)
    job.park(A, 5)
    assert job.leave(B, 5) == ()
    job.leave(C, 5)
    assert job.state.view.members == (A,)


# --- C7: join ---------------------------------------------------------------------------------------------------------


def test_join_at_a_boundary() -> None:
    """Rank 0 is told once; all park with admits; the joiner is appended and gets the whole view."""
    job = Job.running(A, B)
    job.ready("9/0")
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(A, "ready: 9/0", (Address("host9", 2),))]
    assert job.ready("8/0") == ()
    assert job.heartbeat("9/0") == ()
    job.park(A, 5, reason="join", admits=True)
    job.park(B, 5, reason="join", admits=True)
    assert job.state.view.members == (A, B, "8/0", "9/0")
    assert [(view.member, view.base, view.joined) for view in job.of(effects.CommitView)] == [
        (A, 1, ("8/0", "9/0")),
        (B, 1, ("8/0", "9/0")),
        ("8/0", None, (A, B, "8/0", "9/0")),
        ("9/0", None, (A, B, "8/0", "9/0")),
    ]
    assert [record["member"] for record in job.records("member_joined")] == ["8/0", "9/0"]
    assert job.state.target == 4


def joining(*members: str) -> Job:
    """A job of three with a joiner, whose members A and `members` have parked quietly for it, and C has not yet."""
    job = Job.running(A, B, C, max_restarts=2, respawn=True)
    job.ready("9/0")
    for member in (A, *members):
        job.park(member, 5, reason="join", admits=True, is_quiet=True)
        assert job.state.phase is Phase.SUSPENDED
        assert not job.of(effects.Suspend)
    return job


def test_who_has_not_come_to_a_boundary_yet_is_not_disturbed() -> None:
    """It hears nothing, not if it connects anew either, and comes by itself; then all have the same view."""
    job = joining(B)
    assert not [effect for effect in job.hello(C, 1) if isinstance(effect, effects.Suspend)]
    job.park(C, 5, reason="join", admits=True, is_quiet=True)
    assert job.state.view.members == (A, B, C, "9/0")
    assert not job.of(effects.Suspend)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda job: job.park(B, 4, reason="connection"),
        lambda job: job.park(B, 5, reason="join", admits=True),
        lambda job: job.exited(B),
        lambda job: job.leave(B, 5),
        lambda job: job.tick(2 * INTERVAL_S, alive=(A, B, C)),
        lambda job: [job.feed(events.Failed("9/0", incarnation, *RAISED)) for incarnation in (1, 2)],
    ],
    ids=["broken", "passed", "dead", "leaves", "long ago", "stopped"],
)
def test_a_boundary_that_not_all_come_to_in_peace(disturb: Callable[[Job], object]) -> None:
    """Whoever has not parked is told once that the view is suspended, as without a boundary."""
    job = joining()
    seen: list[effects.Effect] = []
    feed = job.feed
    job.feed = lambda event: seen.extend(feed(event)) or job.effects  # type: ignore[method-assign, func-returns-value]
    disturb(job)
    assert [effect.member for effect in seen if isinstance(effect, effects.Suspend)].count(C) == 1
    assert job.state.quiet_until_s is None


def test_not_admitted_joiners_stay_pending() -> None:
    """One member was in a number; the next view's first is told again."""
    job = Job.running(A, B, C)
    job.ready("9/0")
    job.exited(A)
    job.park(B, 5, admits=True)
    job.park(C, 4)
    assert job.state.view.members == (B, C)
    assert job.of(effects.AnnounceJoin) == [effects.AnnounceJoin(B, "ready: 9/0", (Address("host9", 2),))]


def test_admitted_joiner_that_missed_its_view() -> None:
    """It says ready again."""
    job = Job.running(A)
    job.ready("9/0")
    job.park(A, 5, admits=True)
    job.ready("9/0")
    assert job.of(effects.CommitView) == [effects.CommitView("9/0", 2, None, (), (A, "9/0"), 2, Address("host0", 1))]


def test_a_new_incarnation_joins_after_the_old_is_out() -> None:
    """Not while its predecessor is in the view; an old incarnation never."""
    job = Job.running(A, B)
    job.ready(B, incarnation=2)
    job.park(A, 1, admits=True)
    job.park(B, 1, admits=True)
    assert job.state.view.members == (A, B)
    assert job.state.members[B].incarnation == 1
    job.exited(B)
    job.park(A, 1, admits=True)
    assert job.state.view.members == (A, B)
    assert job.state.members[B].incarnation == 2
    job.ready(B, incarnation=1)
    assert job.of(effects.Evict)


def test_joiners_that_vanish_are_forgotten() -> None:
    """Dropped, dead, silent, or leaving."""
    job = Job.running(A)
    for vanish in (job.drop, job.exited, job.leave):
        job.ready("9/0")
        vanish("9/0")
        assert not job.state.joiners
    job.ready("9/0")
    assert "in no view yet" in job.park("9/0")[0].reason
    job.tick(SILENCE_S, alive=(A,))
    assert job.of(effects.Evict)[0].member == "9/0"
    assert not job.state.joiners


# --- C8: own gaps -----------------------------------------------------------------------------------------------------


def test_starvation_moves_every_deadline() -> None:
    """A late tick is the coordinator's own fault."""
    job = Job.running(A, B)
    job.now_s = 100.0
    job.tick(INTERVAL_S)
    assert status(job, A) is Status.RUNNING
    job.tick(SILENCE_S - 2 * INTERVAL_S)
    assert status(job, A) is Status.RUNNING
    job.tick(2 * INTERVAL_S)
    assert status(job, A) is Status.GONE


# --- size -------------------------------------------------------------------------------------------------------------


def test_view_change_of_ten_thousand_members_is_linear() -> None:
    """Parks are counted, not searched: the work of one does not grow with the job."""
    import time

    members = [f"{node}/{slot}" for node in range(1250) for slot in range(8)]
    started_s = time.process_time()
    job = Job.running(*members)
    job.exited(A)
    for member in members[1:]:
        job.park(member, 3)
    assert job.state.generation == 2
    assert time.process_time() - started_s < 20.0  # a quadratic core takes minutes


def test_a_second_process_of_a_member_that_never_came_may_join() -> None:
    """The news that the first one has ended may come later; until it does, the member is not admitted twice."""
    job = Job(A, B)
    job.hello(A)
    job.park(A, reason="start")
    job.ready(B, incarnation=2)
    assert job.state.joiners[B].incarnation == 2
    assert job.state.phase is Phase.SUSPENDED
    job.feed(events.Exited(B, 1, -9, "killed by SIGKILL"))
    assert job.state.view.members == (A,)
    job.park(A, 7, reason="join", admits=True)
    assert job.state.view.members == (A, B)
    assert not job.state.members[B].has_state


def test_whoever_is_ready_too_late_is_released_or_stopped_as_the_job_was() -> None:
    """A job that all have left is no failure of the one that would have joined."""
    left = Job.running(A)
    left.ready(C)
    left.leave(A)
    assert effects.Release(C, 1, "all members left") in left.effects
    assert left.ready(D, incarnation=3) == (effects.Release(D, 3, "all members left"),)
    lost = Job.running(A)
    lost.ready(C)
    lost.feed(events.Exited(A, 1, 1, "exited with status 1"))
    assert effects.Stop(C, "no member is left that could go on") in lost.effects
    assert lost.ready(D) == (effects.Stop(D, "no member is left that could go on"),)


RAISED = ("failed with ValueError: no such file", "builtins.ValueError at train.py:7")


def test_the_same_exception_of_one_member_again_and_again_ends_the_job() -> None:
    """Restarts don't mend a bug: whoever is in training is freed, and told that resuming is of no use."""
    job = Job.running(A, B, respawn=True, max_restarts=3)
    for incarnation in (1, 2):
        job.feed(events.Failed(B, incarnation, *RAISED))
        job.park(A)
        job.ready(B, incarnation=incarnation + 1)
        job.park(A, 7 + incarnation, reason="join", admits=True)
        assert job.state.view.members == (A, B)
    told = job.feed(events.Failed(B, 3, *RAISED))
    reason = "0/1 failed with ValueError: no such file for the 3rd time in a row, from the same line"
    assert effects.Suspend(A, job.state.generation, reason) in told
    assert job.state.phase is Phase.STOPPED
    assert effects.Stop(A, reason, is_final=True) in job.park(A, 9)
    assert job.ready(C) == (effects.Stop(C, reason, is_final=True),)


def test_a_joiner_that_fails_counts_and_a_member_that_is_waited_for_is_told() -> None:
    """It need not have been admitted; whoever is parked already hears of the end at once."""
    job = Job.running(A, B, D, respawn=True, max_restarts=2)
    job.feed(events.Failed(B, 1, *RAISED))
    job.park(A)
    job.ready(B, incarnation=2)
    told = job.feed(events.Failed(B, 2, *RAISED))
    (stop,) = [effect for effect in told if isinstance(effect, effects.Stop)]
    assert (stop.member, stop.is_final) == (A, True)


@pytest.mark.parametrize(
    ("settings", "exceptions"),
    [
        ({"respawn": False}, [RAISED, RAISED, RAISED]),
        ({"respawn": True, "max_restarts": 1}, [RAISED]),
        ({"respawn": True}, [RAISED, RAISED, ("failed with KeyError: 1", "builtins.KeyError at train.py:9")]),
        ({"respawn": True}, [("failed with EvictedError", "")] * 3),
        ({"respawn": True, "max_restarts": 2}, [RAISED, None, RAISED]),
    ],
)
def test_exceptions_that_do_not_end_the_job(settings: dict[str, Any], exceptions: list[tuple[str, str] | None]) -> None:
    """Nobody is started again, or it is the first, another one, our own, or a kill between: each is a mere crash."""
    job = Job.running(A, B, **settings)
    job.park(A)
    for incarnation, raised in enumerate(exceptions, 1):
        if raised is None:
            continue
        job.feed(events.Failed(B, incarnation, *raised))
        job.feed(events.Failed(B, incarnation, *raised))  # said again, after a reconnect
    assert job.state.view.members == (A,)
    assert job.state.phase is Phase.HEALTHY
