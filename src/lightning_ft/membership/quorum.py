"""Whether the parked members may go on, and with whom (C3, C4)."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from lightning_ft.config import Settings
from lightning_ft.membership.arrangement import with_joined
from lightning_ft.membership.ids import in_order, parse_logical_id
from lightning_ft.membership.state import Joiner, Phase, State, Status


class Verdict(NamedTuple):
    """Whether there is a next view.

    Attributes:
        members: In rank order; None: not yet.
        reason: Why they may go on, or what is missing, for a person.
        needs_joiners: Too few are left. If there are members, enough wait to join them at their next boundary.
    """

    members: tuple[str, ...] | None
    reason: str
    needs_joiners: bool = False


def quorum(state: State, now_s: float, settings: Settings) -> Verdict:
    """Form the next view's members, or say why there is none yet.

    Args:
        state: In phase suspended.
        now_s: Coordinator's clock, `State.clock_s`; a joiner that is silent by now is not admitted.
        settings: `min_world_size`, `max_failures`, `max_world_size` and `heartbeat_timeout` count.
    """
    tally = state.tally
    if tally.running:
        return Verdict(None, f"{tally.running} of {len(state.view.members)} members have not parked yet")
    if not tally.holding:
        return Verdict(None, "no member that is left holds the state of the job")
    stayers = {Status.PARKED, Status.LEAVING} if _leavers_are_needed(state) else {Status.PARKED}
    if reason := _minority(state, stayers):
        return Verdict(None, reason)
    members = tuple(member for member in state.view.members if state.members[member].status in stayers)
    joiners = _admissible(state, members, now_s, settings)
    if reason := _shortage(state, len(joiners), settings):
        return Verdict(None, reason, needs_joiners=True)
    reason = f"{tally.parked} of {len(state.view.members)} members parked"
    if Status.LEAVING in stayers:
        reason += f", {tally.leaving} that leave hold a result that the others need"
    elif tally.admitting == tally.parked and joiners:
        return Verdict(with_joined(members, joiners), f"{reason}, {len(joiners)} joined")
    return Verdict(members, reason, needs_joiners=bool(_shortage(state, 0, settings)))


def lost_joiners(state: State, now_s: float, settings: Settings) -> str:
    """Why a healthy view that needed joiners may not go on: they are not there any more. Empty if it may."""
    if state.phase is not Phase.HEALTHY or not state.needs_joiners:
        return ""
    members = [member for member in state.view.members if state.members[member].status is Status.RUNNING]
    return _shortage(state, len(_admissible(state, members, now_s, settings)), settings)


def _shortage(state: State, num_joiners: int, settings: Settings) -> str:
    """Why those that are present and that many joiners are too few; empty if they are enough."""
    tally = state.tally
    present = tally.running + tally.parked + tally.leaving + tally.released  # whoever leaves in peace is not missed
    ready = f", ready to join: {num_joiners}" if num_joiners else ""
    if present + num_joiners < settings.min_world_size:
        return f"members left: {present}{ready}, min_world_size is {settings.min_world_size}"
    missing = state.target - present
    if settings.max_failures is not None and missing - num_joiners > settings.max_failures:
        return f"{missing} of {state.target} members are missing{ready}, max_failures is {settings.max_failures}"
    return ""


def may_lose_one(state: State, settings: Settings) -> bool:
    """Whether a healthy view's members may go on with one fewer."""
    present = state.tally.running + state.tally.leaving + state.tally.released - 1
    limit = settings.max_failures
    return present >= settings.min_world_size and (limit is None or state.target - present <= limit)


def _leavers_are_needed(state: State) -> bool:
    """Whether a leaver finished a number that a parked member did not."""
    if not state.tally.leaving:
        return False
    members = [state.members[member] for member in state.view.members]
    last_left = max(member.completed for member in members if member.status is Status.LEAVING)
    return last_left > min(member.completed for member in members if member.holds)


def _minority(state: State, stayers: set[Status]) -> str:
    """Why the stayers may not outvote the others; empty if they may.

    Against them vote the gone that may still run; not the proven dead, nor the leavers, who promised to go on nowhere.
    Whoever has joined and does not hold the state of the job yet has no vote either: without the others it is nothing.
    """
    tally = state.tally
    votes = tally.holding + (tally.leaving if Status.LEAVING in stayers else 0)
    against = tally.opposing
    if votes > against:
        return ""
    if votes < against:
        return f"{votes} members are no majority: {against} of the gone may still run"
    lowest = min((member for member in state.view.members if _votes(state, member, stayers)), key=parse_logical_id)
    if state.members[lowest].status in stayers:
        return ""
    return f"{votes} members are only half: {against} of the gone, among them {lowest}, may still run"


def _votes(state: State, member: str, stayers: set[Status]) -> bool:
    record = state.members[member]
    return record.opposes or (record.status in stayers and record.has_state)


def admissible(state: State, now_s: float, settings: Settings) -> tuple[str, ...]:
    """Return who waits that the members of a healthy view could admit; arguments as for `quorum`."""
    if state.phase is not Phase.HEALTHY or not state.joiners:
        return ()
    members = [member for member in state.view.members if state.members[member].status is Status.RUNNING]
    return _admissible(state, members, now_s, settings)


def num_spares(state: State, settings: Settings, newcomers: Sequence[str]) -> int:
    """For how many that wait on the newcomers' node, themselves included, there is no place.

    Places that are free are for whoever waits already, but for the spares of other nodes.

    Args:
        state: Not stopped.
        settings: `max_world_size` and `spares` count.
        newcomers: Logical ids, one or more, all of one node, of processes that ask to join or will.
    """
    waiting = collections.Counter(_node(joiner) for joiner in state.joiners if joiner not in newcomers)
    node = _node(newcomers[0])
    num_taken = sum(max(0, number - settings.spares) for other, number in waiting.items() if other != node)
    return waiting[node] + len(newcomers) - max(0, _num_free(state, settings, newcomers) - num_taken)


def no_room(state: State, settings: Settings, newcomers: Sequence[str]) -> str:
    """Say why no more processes may wait to join: the job is full, and has its spares. Empty if they may.

    Arguments as for `num_spares`.
    """
    if num_spares(state, settings, newcomers) <= settings.spares:
        return ""
    num_waiting = sum(joiner not in newcomers for joiner in state.joiners)
    return (
        f"there is no room: the job has at most {_num_places(state, settings)} members (max_world_size), "
        f"free: {max(0, _num_free(state, settings, newcomers))}, waiting: {num_waiting}"
    )


def _num_free(state: State, settings: Settings, newcomers: Sequence[str]) -> int:
    """How many places no member of the view has, but perhaps an earlier process of a newcomer."""
    present = (Status.RUNNING, Status.PARKED)
    others = [member for member in state.view.members if member not in newcomers]
    return _num_places(state, settings) - sum(state.members[member].status in present for member in others)


def _num_places(state: State, settings: Settings) -> int:
    return state.num_expected if settings.max_world_size is None else settings.max_world_size


def _node(member: str) -> int:
    return parse_logical_id(member)[0]


def _admissible(state: State, members: Sequence[str], now_s: float, settings: Settings) -> tuple[str, ...]:
    """As many joiners as there is room for beside the members that stay, so that all nodes have equally many.

    Not those that are silent or meet an earlier incarnation of themselves in the view.
    """
    waiting = in_order(
        joiner.member for joiner in state.joiners.scan() if _is_admissible(state, joiner, now_s, settings)
    )
    num_places = max(0, _num_places(state, settings) - len(members))
    if len(waiting) <= num_places:
        return waiting
    num_on = collections.Counter(_node(member) for member in members)
    number_on_node = {}
    for joiner in waiting:
        num_on[_node(joiner)] += 1
        number_on_node[joiner] = num_on[_node(joiner)]
    return in_order(sorted(waiting, key=number_on_node.__getitem__)[:num_places])


def _is_admissible(state: State, joiner: Joiner, now_s: float, settings: Settings) -> bool:
    earlier = state.members.get(joiner.member)
    is_free = earlier is None or earlier.status in (Status.GONE, Status.RELEASED)
    return is_free and now_s - joiner.last_heard_s < settings.heartbeat_timeout
