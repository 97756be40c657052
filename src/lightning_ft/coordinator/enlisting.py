"""Which members an agent may start that asks before it starts any (C7b)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from lightning_ft.config import Settings
from lightning_ft.membership import wire
from lightning_ft.membership.ids import as_ranges, parse_logical_id
from lightning_ft.membership.quorum import no_room
from lightning_ft.membership.state import Phase, State, Status

_LIVE = (Status.RUNNING, Status.PARKED, Status.LEAVING)


def node_of(member: str) -> int:
    """Number of the node that a logical id names."""
    return parse_logical_id(member)[0]


def who_is_there(state: State, agents: Container[int], node: int | None) -> str:
    """Say who stands in the way of an agent for a node; empty if nobody does.

    Args:
        state: Of the job.
        agents: Nodes whose agent is connected.
        node: None: one that the job has not had.
    """
    if node is None:
        return ""
    if node in agents:
        return f"node {node} has an agent. Join as a new node (LIGHTNING_FT_JOIN=1), or end that one first"
    for member in state.members.scan():
        if node_of(member.member) == node and member.incarnation is not None and member.status in _LIVE:
            return f"{member.member} is a member already. Join as a new node (LIGHTNING_FT_JOIN=1), or end it first"
    return ""


def beginning(
    arrived: wire.NodeArrived, state: State, settings: Settings, expected: Sequence[str], enlisted: Mapping[str, int]
) -> wire.JobBegins | str:
    """Answer an agent in whose way nobody stands; or say why it may start no members.

    Args:
        arrived: Its question.
        state: Of the job.
        settings: Of the job.
        expected: The members that the job starts with.
        enlisted: Members that were named in earlier answers, each with the incarnation that was its first.
    """
    if arrived.num_slots == 0:
        return "it asks for no members"
    if state.phase is Phase.STOPPED:
        return f"the job has stopped: {state.reason}"
    node = arrived.node
    if node is None:
        node = 1 + max(node_of(member) for member in [*expected, *enlisted])
    members = [f"{node}/{slot}" for slot in range(arrived.num_slots + settings.spares)]
    if reason := no_room(state, settings, members[: arrived.num_slots]):
        return reason
    last = ((member, _last_incarnation(state, settings, member, enlisted.get(member))) for member in members)
    return wire.JobBegins(node, as_ranges(expected), tuple(last))


def _last_incarnation(state: State, settings: Settings, name: str, enlisted: int | None) -> int:
    """The last that there may have been, though not all have been heard of; 0 for whoever is expected still."""
    member = state.members.get(name)
    if member is not None and member.incarnation is None and member.status is Status.RUNNING:
        return 0
    known = 0 if member is None else member.incarnation or 1  # an expected one that was given up unheard had the first
    return max(known, 0 if enlisted is None else enlisted + settings.max_restarts)
