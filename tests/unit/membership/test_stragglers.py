"""Who is slow, and for how long before that is said."""

from __future__ import annotations

import dataclasses

import pytest
from driver import INTERVAL_S, SILENCE_S, TIMEOUT_S, Job

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events
from lightning_ft.membership.state import Phase, Status

A, B, C, D = "0/0", "0/1", "1/0", "1/1"
STEPS = 10
"""In each interval."""


def work(job: Job, seconds: float, busy_s: dict[str, float | None], *, is_moving: bool = True) -> None:
    """Let time pass while members say how long they work for a step; `effects` are those of all this time."""
    seen: list[effects.Effect] = []
    for _ in range(round(seconds / INTERVAL_S)):
        job.now_s += INTERVAL_S
        for member, value in busy_s.items():
            step = job.state.members[member].step + (STEPS if is_moving else 0)
            job.feed(events.Heartbeat(member, 1, step, busy_s=value))
        seen += job.feed(events.Tick())
    job.effects = tuple(seen)


def test_straggler_is_reported_once_after_a_while_and_when_it_recovers() -> None:
    """With its share: what the others wait for it, of each step. D has not said anything yet."""
    job = Job.running(A, B, C, D)
    work(job, SILENCE_S, {A: 0.1, B: 0.31, C: 0.1, D: None})
    assert not job.records("straggler_detected")
    work(job, 3 * SILENCE_S, {A: 0.1, B: 0.4, C: 0.1, D: None})
    assert job.records("straggler_detected") == [
        {"member": B, "host": "host0", "busy_s": 0.4, "median_s": 0.1, "share": 0.75}
    ]
    work(job, SILENCE_S, {A: 0.1, B: 0.25, C: 0.1, D: None})
    assert not job.of(effects.Record), "not so slow any more, but slow"
    work(job, SILENCE_S, {A: 0.1, B: 0.2, C: 0.1, D: None})
    assert job.records("straggler_recovered") == [{"member": B, "busy_s": 0.2, "median_s": 0.1}]
    assert job.state.phase is Phase.HEALTHY


def test_short_slowness_is_no_matter() -> None:
    """It must last."""
    job = Job.running(A, B, C)
    for _ in range(5):
        work(job, SILENCE_S - INTERVAL_S, {A: 0.1, B: 0.5, C: 0.1})
        assert not job.of(effects.Record)
        work(job, INTERVAL_S, {A: 0.1, B: 0.1, C: 0.1})


def test_time_without_steps_does_not_count() -> None:
    """A member that was slow for its last steps, before a validation, may be as fast as the others after it."""
    job = Job.running(A, B, C)
    work(job, INTERVAL_S, {A: 0.1, B: 0.5, C: 0.1})
    work(job, 3 * SILENCE_S, {A: 0.1, B: 0.5, C: 0.1}, is_moving=False)
    work(job, INTERVAL_S, {A: 0.1, B: 0.5, C: 0.1})
    assert not job.of(effects.Record)


def test_slowness_in_another_view_does_not_count() -> None:
    """What held the step up may have been what broke the view."""
    job = Job.running(A, B, C, D)
    work(job, SILENCE_S, {A: 0.1, B: 0.5, C: 0.1, D: 0.1})
    job.exited(D)
    for member in (A, B, C):
        job.park(member, 5)
    work(job, SILENCE_S - INTERVAL_S, {A: 0.1, B: 0.5, C: 0.1})
    assert not job.of(effects.Record)


def test_straggler_is_kept_if_the_job_needs_it() -> None:
    """Slow is better than not at all."""
    for limits in ({"min_world_size": 3}, {"max_failures": 0}):
        job = Job.running(A, B, C)
        job.settings = dataclasses.replace(job.settings, evict_stragglers=True, **limits)
        work(job, 3 * SILENCE_S, {A: 0.1, B: 0.5, C: 0.1})
        assert job.records("straggler_detected")
        assert job.state.phase is Phase.HEALTHY


@pytest.mark.parametrize(
    "busy_s",
    [
        {A: 0.1, B: 9.0, C: None, D: None},
        {A: 0.0, B: 0.0, C: 0.0, D: 0.0},
        {A: 0.002, B: 0.02, C: 0.002, D: 0.002},
    ],
)
def test_too_little_is_known(busy_s: dict[str, float | None]) -> None:
    """Of two nobody can say which is slow; and little is no trouble."""
    job = Job.running(A, B, C, D)
    work(job, 3 * SILENCE_S, busy_s)
    assert not job.of(effects.Record)


def test_straggler_is_given_up_if_that_is_wished() -> None:
    """Killed by its agent, and evicted."""
    job = Job.running(A, B, C)
    job.settings = dataclasses.replace(job.settings, evict_stragglers=True)
    work(job, 2 * SILENCE_S, {A: 0.1, B: 0.4, C: 0.1})
    (failure,) = job.records("failure_detected")
    assert (failure["member"], failure["cause"]) == (B, "slow")
    assert [kill.member for kill in job.of(effects.Kill)] == [B]
    assert job.state.members[B].status is Status.GONE
    assert job.state.phase is Phase.SUSPENDED


def test_learned_patience_replaces_the_timeout() -> None:
    """Whoever said that it may take long is given so long, and who waits looks for somebody early."""
    job = Job.running(A, B)
    job.settings = Settings(heartbeat_interval=INTERVAL_S, heartbeat_timeout=SILENCE_S, timeout="auto")
    least_s, patience_s = job.settings.least_timeout, 3 * job.settings.least_timeout
    seen: list[effects.Effect] = []
    start_s = job.now_s
    while job.state.phase is Phase.HEALTHY:
        job.now_s += INTERVAL_S
        idle_s = job.now_s - start_s
        job.feed(events.Heartbeat(A, 1, waits_s=idle_s, idle_s=idle_s, patience_s=least_s))
        job.feed(events.Heartbeat(B, 1, idle_s=idle_s, patience_s=patience_s))
        seen += job.feed(events.Tick())
    job.effects = tuple(seen)
    (failure,) = job.records("failure_detected")
    assert (failure["member"], failure["cause"]) == (B, "hang")
    assert job.now_s - start_s == pytest.approx(patience_s, abs=INTERVAL_S)
    assert job.settings.longest_timeout > patience_s > TIMEOUT_S


def test_a_large_transfer_is_given_the_longest() -> None:
    """All wait in it; that is no hang before 1800 s, whatever was learned."""
    job = Job.running(A, B)
    job.settings = Settings(heartbeat_interval=INTERVAL_S, heartbeat_timeout=SILENCE_S, timeout="auto")
    start_s = job.now_s
    while job.state.phase is Phase.HEALTHY:
        job.now_s += INTERVAL_S
        waits_s = job.now_s - start_s
        for member in (A, B):
            job.feed(events.Heartbeat(member, 1, 0, waits_s, waits_s, "a broadcast", job.settings.least_timeout))
        job.feed(events.Tick())
    assert job.now_s - start_s >= job.settings.longest_timeout
    assert job.state.tally.gone == 0
