"""The coordinator's decisions as text, so that one that is started again goes on where the last one was.

Written before a decision is carried out: whatever a member was told, the next coordinator knows. What members repeat by
themselves when they connect (parks, leaves, that they are alive, that they want to join) is not needed and may be old.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lightning_ft.membership.effects import Cause, Kill
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import Failure, Member, Phase, State, Status, Tally, View
from lightning_ft.membership.table import Table

_VERSION = 5


def is_decision(before: State, after: State) -> bool:
    """Whether a step decided something that must not be forgotten."""
    out, was_out = after.tally, before.tally
    return (
        after.view is not before.view
        or after.phase is not before.phase
        or (out.gone, out.proven, out.released) != (was_out.gone, was_out.proven, was_out.released)
        or after.leave_notice != before.leave_notice
        or after.failures is not before.failures
        or after.fingerprint != before.fingerprint
    )


def dump(state: State) -> str:
    """Write a state as JSON."""
    return json.dumps(
        {
            "version": _VERSION,
            "generation": state.view.generation,
            "view": state.view.members,
            "phase": state.phase.value,
            "members": [_dump_member(member) for member in state.members.scan()],
            "target": state.target,
            "num_expected": state.num_expected,
            "fingerprint": state.fingerprint,
            "needs_joiners": state.needs_joiners,
            "reason": state.reason,
            "leave_notice": state.leave_notice,
            "is_final": state.is_final,
            "failures": {member: dataclasses.astuple(failure) for member, failure in state.failures.items()},
        },
        separators=(",", ":"),
    )


def load(text: str, now_s: float, timeout_s: float, start_timeout_s: float) -> State:
    """Read a state that an earlier coordinator wrote.

    Nobody is connected. Whoever was heard of before counts as heard of now, and is given up if it stays silent.

    Args:
        text: From `dump`.
        now_s: Caller's monotonic clock.
        timeout_s: How long members may take to park.
        start_timeout_s: How long they may take before the first view, as for `initial`.

    Raises:
        ValueError: It is no such text, or of another version.
    """
    saved = json.loads(text)
    if saved.get("version") != _VERSION:
        raise ValueError(f"expected a state of version {_VERSION}, got {saved.get('version')!r}")
    members = Table((record["member"], _load_member(record, now_s)) for record in saved["members"])
    view = View(saved["generation"], tuple(saved["view"]))
    phase = Phase(saved["phase"])
    patience_s = timeout_s if view.generation else start_timeout_s
    notice = saved["leave_notice"]
    return State(
        view=view,
        phase=phase,
        members=members,
        joiners=Table(),
        tally=Tally.of(members[member] for member in view.members),
        target=saved["target"],
        num_expected=saved["num_expected"],
        hang_deadline_s=now_s + patience_s if phase is Phase.SUSPENDED else None,
        no_quorum_since_s=None,
        needs_joiners=saved["needs_joiners"],
        reason=saved["reason"],
        leave_notice=None if notice is None else (notice[0], notice[1]),
        last_tick_s=now_s,
        skipped_s=0.0,
        is_final=saved["is_final"],
        fingerprint=saved["fingerprint"],
        failures=Table((member, Failure(*values)) for member, values in saved["failures"].items()),
    )


def pending_kills(state: State) -> list[Kill]:
    """Whom to kill still: an agent may not have heard of it from the last coordinator."""
    return [
        Kill(member.member, member.incarnation, f"given up before (cause {member.cause})")
        for member in state.members.scan()
        if member.status is Status.GONE and not member.is_proven and member.incarnation is not None
    ]


def _dump_member(member: Member) -> dict[str, Any]:
    return {
        "member": member.member,
        "incarnation": member.incarnation,
        "address": None if member.address is None else [member.address.host, member.address.store_port],
        "generation": member.generation,
        "status": member.status.value,
        "has_state": member.has_state,
        "completed": member.completed,
        "admits": member.admits,
        "is_proven": member.is_proven,
        "cause": member.cause,
    }


def _load_member(record: dict[str, Any], now_s: float) -> Member:
    address, cause = record["address"], record["cause"]
    return Member(
        member=record["member"],
        incarnation=record["incarnation"],
        address=None if address is None else Address(*address),
        generation=record["generation"],
        status=Status(record["status"]),
        is_unseen=address is not None,
        last_heard_s=None if address is None else now_s,
        progress_s=None if address is None else now_s,
        has_state=record["has_state"],
        completed=record["completed"],
        admits=record["admits"],
        is_proven=record["is_proven"],
        cause=None if cause is None else Cause(cause),
    )
