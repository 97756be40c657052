"""The coordinator's decisions as text."""

from __future__ import annotations

import dataclasses
import json

import pytest
from driver import SILENCE_S, TIMEOUT_S, Job

from lightning_ft.membership import effects, events, snapshot
from lightning_ft.membership.state import Phase, State, Status

A, B, C, D = "0/0", "0/1", "1/0", "1/1"


def restarted(state: State, now_s: float = 1000.0) -> State:
    return snapshot.load(snapshot.dump(state), now_s, TIMEOUT_S, 10 * TIMEOUT_S)


def eventful() -> Job:
    """One was killed, one is given up and perhaps alive, one leaves, and the view is suspended."""
    job = Job.running(A, B, C, D, "2/0")
    job.exited(B)
    job.drop(C)
    job.tick(SILENCE_S, alive=(A, D, "2/0"))
    job.leave("2/0", 7)
    return job


def test_what_was_decided_is_kept() -> None:
    """View, who is out and why, who left; of the rest, that nobody is connected yet."""
    job = eventful()
    state = restarted(job.state)
    assert (state.view, state.phase, state.tally) == (job.state.view, Phase.SUSPENDED, job.state.tally)
    assert (state.target, state.reason, state.leave_notice) == (5, "", None)
    for name, member in job.state.members.items():
        expected = dataclasses.replace(
            member, is_connected=False, is_unseen=True, last_heard_s=1000.0, progress_s=1000.0, waits_since_s=None
        )
        assert state.members[name] == expected
    assert state.hang_deadline_s == 1000.0 + TIMEOUT_S
    state.check()


@pytest.mark.parametrize("is_back", [True, False], ids=["back", "cut off"])
def test_whoever_computes_may_take_its_time_to_connect_again(is_back: bool) -> None:
    """Something holds its interpreter's lock; but if it was there and its connection dropped, it can't be reached."""
    job = Job.running(A, B)
    job.state = restarted(job.state, job.now_s)
    if is_back:
        job.heartbeat(B)
        job.drop(B)
    for _ in range(int(SILENCE_S) + 2):
        job.feed(events.Vouched(((B, 1),)))
        job.tick(1.0, alive=(A,))
    assert job.state.members[B].status is (Status.GONE if is_back else Status.RUNNING)
    job.feed(events.Vouched(()))
    job.tick(SILENCE_S, alive=(A,))
    assert job.state.members[B].status is Status.GONE


def test_exceptions_are_kept() -> None:
    """A coordinator that is started again counts on, and knows that there is no use in resuming the job."""
    job = Job.running(A, B, respawn=True, max_restarts=2)
    before = job.state
    job.feed(events.Failed(B, 1, "failed with ValueError", "ValueError at train.py:7"))
    assert snapshot.is_decision(before, job.state)
    assert dict(restarted(job.state).failures) == dict(job.state.failures) != {}
    assert not restarted(job.state).is_final
    job.feed(events.Failed(B, 2, "failed with ValueError", "ValueError at train.py:7"))
    assert restarted(job.state).is_final


def test_what_the_job_trains_is_kept() -> None:
    """The digest, by which joiners are judged; the description is said again by the first member."""
    job = Job.running(A, B)
    before = job.state
    job.describe(A, "cafe")
    assert snapshot.is_decision(before, job.state)
    job.state = restarted(job.state, job.now_s)
    assert (job.state.fingerprint, job.state.description, job.state.num_expected) == ("cafe", "", 2)
    job.ready("9/0", fingerprint="beef")
    (decline,) = job.of(effects.Decline)
    assert (decline.member, decline.description) == ("9/0", "")


def test_generation_zero_waits_as_long_as_at_first() -> None:
    """Members that have not said hello may still be importing."""
    job = Job(A, B)
    job.hello(A)
    state = restarted(job.state)
    assert state.hang_deadline_s == 1000.0 + 10 * TIMEOUT_S
    assert state.members[A].last_heard_s == 1000.0
    assert state.members[B].last_heard_s is None


def test_leave_notice_and_health_are_kept() -> None:
    """A healthy view has no deadline."""
    job = Job.running(A, B)
    job.leave(B, 4)
    state = restarted(job.state)
    assert state.phase is Phase.HEALTHY
    assert state.hang_deadline_s is None
    assert state.leave_notice == (B, 4)
    assert state.members[B].status is Status.LEAVING


def test_kills_that_may_be_unheard_are_repeated() -> None:
    """Of whoever is given up but not known to be dead."""
    (kill,) = snapshot.pending_kills(restarted(eventful().state))
    assert (kill.member, kill.incarnation) == (C, 1)


def test_a_job_goes_on_after_each_restart() -> None:
    """Parks are said again, silence is counted anew, and the next view has the next generation."""
    job = Job.running(A, B, C)
    job.exited(B)
    job.park(A, 3)
    job.now_s = 1000.0
    job.state = restarted(job.state)
    job.hello(A, generation=1)
    job.park(A, 3)
    job.tick(SILENCE_S / 2, alive=(A,))
    assert job.state.tally.running == 1, "C has its time to come back"
    job.hello(C, generation=1)
    assert job.of(effects.Suspend) == [effects.Suspend(C, 1, "the view was suspended before")]
    job.park(C, 3)
    assert [(view.member, view.generation, view.left) for view in job.of(effects.CommitView)] == [
        (A, 2, (B,)),
        (C, 2, (B,)),
    ]


def test_whoever_does_not_come_back_is_given_up() -> None:
    """A restart hides no failure."""
    job = Job.running(A, B)
    job.now_s = 1000.0
    job.state = restarted(job.state)
    job.hello(A, generation=1)
    job.tick(SILENCE_S, alive=(A,))
    assert job.state.members[B].status is Status.GONE


@pytest.mark.parametrize("text", ["{}", '{"version": 99}'])
def test_another_version_is_refused(text: str) -> None:
    """Before anything is believed."""
    with pytest.raises(ValueError, match="expected a state of version 5, got"):
        snapshot.load(text, 0.0, 1.0, 1.0)


def test_decisions_are_told_from_news() -> None:
    """Parks and heartbeats are repeated by their senders; views, losses and leaves are not."""
    job = Job.running(A, B, C)
    is_decision = []
    for act in (
        lambda: job.heartbeat(A),
        lambda: job.leave(C, 4),
        lambda: job.exited(B),
        lambda: job.park(A, 4),
    ):
        before = job.state
        act()
        is_decision.append(snapshot.is_decision(before, job.state))
    assert is_decision == [False, True, True, True]
    assert json.loads(snapshot.dump(job.state))["generation"] == 2
