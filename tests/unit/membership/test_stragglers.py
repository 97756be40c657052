"""Who is slow, and for how long before that is said."""

from __future__ import annotations

import dataclasses

import pytest
from driver import INTERVAL_S, SILENCE_S, TIMEOUT_S, Job

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events
from lightning_ft.membership.state import Phase, Status

A, B, C, D = "0/0", "0/1", "1/0", "1/1"


def work(job: Job, seconds: float, busy_s: dict[str, float | None]) -> None:
    """Let time pass while members say how long they work for a step; `effects` are those of all this time."""
    seen: list[effects.Effect] = []
    for _ in range(round(seconds / INTERVAL_S)):
        job.now_s += INTERVAL_S
        for member, value in busy_s.items():
            job.feed(events.Heartbeat(member, 1, busy_s=value))
        seen += job.feed(events.Tick())
    job.effects = tuple(seen)


def test_straggler_is_reported_once_after_a_while_and_when_it_recovers() -> None:
    """With its share: what the others wait for it, of each step."""
    job = Job.running(A, B, C)
    work(job, SILENCE_S, {A: 0.1, B: 0.31, C: 0.1})
    assert not job.records("straggler_detected")
    work(job, 3 * SILENCE_S, {A: 0.1, B: 0.4, C: 0.1})
    assert job.records("straggler_detected") == [
        {"member": B, "host": "host0", "busy_s": 0.4, "median_s": 0.1, "share": 0.75}
    ]
    work(job, SILENCE_S, {A: 0.1, B: 0.25, C: 0.1})
    assert not job.of(effects.Record), "not so slow any more, but slow"
    work(job, SILENCE_S, {A: 0.1, B: 0.2, C: 0.1})
    assert job.records("straggler_recovered") == [{"member": B, "busy_s": 0.2, "median_s": 0.1}]
    assert job.state.phase is Phase.HEALTHY


def test_short_slowness_is_no_matter() -> None:
    """It must last."""
    job = Job.running(A, B, C)
    for _ in range(5):
        work(job, SILENCE_S - INTERVAL_S, {A: 0.1, B: 0.5, C: 0.1})
        assert not job.of(effects.Record)
        work(job, INTERVAL_S, {A: 0.1, B: 0.1, C: 0.1})


@pytest.mark.parametrize("busy_s", [{A: 0.1, B: 9.0, C: None, D: None}, {A: 0.0, B: 0.0, C: 0.0, D: 0.0}])
def test_too_little_is_known(busy_s: dict[str, float | None]) -> None:
    """Of two nobody can say which is slow; and nothing is three times nothing."""
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
