"""Members that hold every step up: alive and well, but much slower than the others."""

from __future__ import annotations

import statistics

from lightning_ft.membership.effects import Cause
from lightning_ft.membership.quorum import may_lose_one
from lightning_ft.membership.state import Member, Phase, Status
from lightning_ft.membership.transitions import Turn, gone

SLOW = 3.0
"""A straggler takes more than so many times the median of all for a step."""

RECOVERED = 2.0
"""It is one until it takes at most so many times."""

LEAST_S = 0.02
"""And at least so much more: less is a progress bar, or a line in a log."""

NUM_STEPS = 16
"""For so many steps, as many as its own figure is the median of: what it did before does not count."""

_MIN_MEMBERS = 3
"""The median of two says nothing about which of them is slow."""


def judge_stragglers(turn: Turn) -> None:
    """Report who has been slow for `heartbeat_timeout`, and who is no longer; give the slow up if that is wished."""
    members = [member for member in turn.state.members.scan() if member.status is Status.RUNNING]
    known = [member.busy_s for member in members if member.busy_s is not None]
    if turn.state.phase is not Phase.HEALTHY or len(known) < max(_MIN_MEMBERS, len(members) / 2):
        return
    median_s = statistics.median(known)
    for member in members:
        if member.busy_s is not None:
            _judge_one(turn, member, member.busy_s, median_s)


def _judge_one(turn: Turn, member: Member, busy_s: float, median_s: float) -> None:
    factor = RECOVERED if member.is_straggler else SLOW
    if busy_s <= max(factor * median_s, median_s + LEAST_S):
        if member.is_straggler:
            turn.record("straggler_recovered", member.member, busy_s=round(busy_s, 6), median_s=round(median_s, 6))
        if member.slow_since is not None:
            turn.put(member, slow_since=None, is_straggler=False)
    elif member.slow_since is None:
        turn.put(member, slow_since=(turn.clock_s, member.step))
    elif not member.is_straggler and _has_lasted(turn, member, *member.slow_since):
        _report(turn, turn.put(member, is_straggler=True), busy_s, median_s)


def _has_lasted(turn: Turn, member: Member, since_s: float, since_step: int) -> bool:
    """Not the time alone: none of it may count in which no step was done, by whosever fault."""
    return turn.clock_s - since_s >= turn.settings.heartbeat_timeout and member.step - since_step >= NUM_STEPS


def _report(turn: Turn, member: Member, busy_s: float, median_s: float) -> None:
    turn.record(
        "straggler_detected",
        member.member,
        host=None if member.address is None else member.address.host,
        busy_s=round(busy_s, 6),
        median_s=round(median_s, 6),
        share=round(1 - median_s / busy_s, 3),
    )
    if turn.settings.evict_stragglers and may_lose_one(turn.state, turn.settings):
        detail = f"it works {busy_s:.3g} s for a step, the median is {median_s:.3g} s"
        gone(turn, member, Cause.SLOW, detail, is_proven=False)
