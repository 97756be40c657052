"""Whether the parked members may go on, and with whom (C3, C4)."""

from __future__ import annotations

from lightning_ft.config import Settings
from lightning_ft.membership.ids import in_order, parse_logical_id
from lightning_ft.membership.state import State, Status


def quorum(state: State, now_s: float, settings: Settings) -> tuple[tuple[str, ...] | None, str]:
    """Form the next view's members, or say why there is none yet.

    Args:
        state: In phase suspended.
        now_s: Coordinator's clock, `State.clock_s`; a joiner that is silent by now is not admitted.
        settings: `min_world_size`, `max_failures` and `heartbeat_timeout` count.

    Returns:
        The members in rank order and why they may go on; or None and what is missing, for a person.
    """
    tally = state.tally
    if tally.running:
        return None, f"{tally.running} of {len(state.view.members)} members have not parked yet"
    if not tally.parked:
        return None, "no member is parked"
    if reason := _minority(state):
        return None, reason
    joiners = _admissible(state, now_s, settings) if tally.admitting == tally.parked else ()
    size = tally.parked + len(joiners)
    if size < settings.min_world_size:
        return None, f"{size} members could go on, min_world_size is {settings.min_world_size}"
    if settings.max_failures is not None and state.target - size > settings.max_failures:
        return None, f"{state.target - size} of {state.target} members are missing, max_failures is {settings.max_failures}"
    parked = tuple(member for member in state.view.members if state.members[member].status is Status.PARKED)
    reason = f"{len(parked)} of {len(state.view.members)} members parked"
    return parked + joiners, f"{reason}, {len(joiners)} joined" if joiners else reason


def _minority(state: State) -> str:
    """Why the parked may not outvote the others; empty if they may.

    Whoever might still go on elsewhere has a vote: not the proven dead, and not the leavers, who promised it.
    """
    tally = state.tally
    voters = len(state.view.members) - tally.proven - tally.leaving
    unproven = tally.gone - tally.proven
    if 2 * tally.parked > voters:
        return ""
    if 2 * tally.parked < voters:
        return f"{tally.parked} parked members are no majority: {unproven} of the gone may still run"
    lowest = min((member for member in state.view.members if _votes(state, member)), key=parse_logical_id)
    if state.members[lowest].status is Status.PARKED:
        return ""
    return f"{tally.parked} parked members are only half: {unproven} of the gone, among them {lowest}, may still run"


def _votes(state: State, member: str) -> bool:
    record = state.members[member]
    return not record.is_proven and record.status is not Status.LEAVING


def _admissible(state: State, now_s: float, settings: Settings) -> tuple[str, ...]:
    """Joiners that are not silent and don't meet an earlier incarnation of themselves in the view."""
    admissible = []
    for joiner in state.joiners.scan():
        earlier = state.members.get(joiner.member)
        is_free = earlier is None or earlier.status in (Status.GONE, Status.RELEASED)
        if is_free and now_s - joiner.last_heard_s < settings.heartbeat_timeout:
            admissible.append(joiner.member)
    return in_order(admissible)
