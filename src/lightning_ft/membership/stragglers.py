"""Members that hold every step up: alive and well, but much slower than the others."""

from __future__ import annotations

import statistics

from lightning_ft.membership.effects import Cause
from lightning_ft.membership.state import Member, Phase, Status
from lightning_ft.membership.transitions import Turn, gone

SLOW = 3.0
"""A straggler takes at least so many times the median of all for a step."""

RECOVERED = 2.0
"""It is one until it takes at most so many times."""

_MIN_MEMBERS = 3
"""The median of two says nothing about which of them is slow."""


def judge_stragglers(turn: Turn) -> None:
    """Report who has been slow for `heartbeat_timeout`, and who is no longer; give the slow up if that is wished."""
    if turn.state.phase is not Phase.HEALTHY:
        return
    members = [member for member in turn.state.members.scan() if member.status is Status.RUNNING]
    known = [member.busy_s for member in members if member.busy_s is not None]
    if len(known) < max(_MIN_MEMBERS, len(members) / 2):
        return
    median_s = statistics.median(known)
    for member in members:
        if member.busy_s is not None:
            _judge_one(turn, member, member.busy_s, median_s)


def _judge_one(turn: Turn, member: Member, busy_s: float, median_s: float) -> None:
    name, share = member.member, round(1 - median_s / busy_s, 3) if busy_s else 0.0
    busy_s, median_s = round(busy_s, 6), round(median_s, 6)
    limit = RECOVERED if member.is_straggler else SLOW
    if busy_s <= limit * median_s:
        if member.is_straggler:
            turn.record("straggler_recovered", name, busy_s=busy_s, median_s=median_s)
        if member.slow_since_s is not None:
            turn.put(member, slow_since_s=None, is_straggler=False)
        return
    if member.slow_since_s is None:
        turn.put(member, slow_since_s=turn.clock_s)
    elif not member.is_straggler and turn.clock_s - member.slow_since_s >= turn.settings.heartbeat_timeout:
        member = turn.put(member, is_straggler=True)
        host = None if member.address is None else member.address.host
        turn.record("straggler_detected", name, host=host, busy_s=busy_s, median_s=median_s, share=share)
        if turn.settings.evict_stragglers:
            detail = f"it works {busy_s:.3g} s for a step, the median is {median_s:.3g} s"
            gone(turn, member, Cause.SLOW, detail, is_proven=False)
