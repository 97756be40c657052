"""Who is in the job and how they are: what the coordinator answers to whoever asks with the job's token.

It reads the core's state and changes nothing. `lightning-ft status` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from lightning_ft.coordinator.accepted import check_token
from lightning_ft.membership.arrangement import tree
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.state import Joiner, Member, State, Status

STATUS_PATH = "/v1/status"

VERSION = 1
"""Of the answer. Fields may be added without a new one; readers ignore what they don't know."""

_IN_THE_RING = (Status.RUNNING, Status.PARKED, Status.LEAVING)


def job_status(state: State, now_s: float) -> dict[str, Any]:
    """Return what `GET /v1/status` answers, as JSON has it. PROTOCOL.md, The status of a job, has the fields.

    Args:
        state: Of the core.
        now_s: The caller's monotonic clock.
    """
    clock_s = state.clock_s(now_s)
    ranks = {member: rank for rank, member in enumerate(state.view.members)}
    known = {member.member: member for member in state.members.scan()}
    waiting = {joiner.member: joiner for joiner in state.joiners.scan()}
    return {
        "version": VERSION,
        "generation": state.generation,
        "phase": state.phase.value,
        "reason": state.reason,
        "num_members": sum(state.is_current(member) and member.status in _IN_THE_RING for member in known.values()),
        "target": state.target,
        "ring": list(state.view.members),
        "tree": list(tree(state.view.members)),
        "members": [
            _told_member(known[name], ranks.get(name) if state.is_current(known[name]) else None, clock_s)
            for name in in_order(known)
        ],
        "joiners": [_told_joiner(waiting[name], clock_s) for name in in_order(waiting)],
    }


def _told_member(member: Member, rank: int | None, clock_s: float) -> dict[str, Any]:
    return {
        "member": member.member,
        "rank": rank if member.status in _IN_THE_RING else None,
        "state": "awaited" if member.incarnation is None else member.status.value,
        "cause": None if member.cause is None else member.cause.value,
        "incarnation": member.incarnation,
        "host": None if member.address is None else member.address.host,
        "port": None if member.address is None else member.address.store_port,
        "pid": member.pid or None,
        "step": member.step,
        "doing": member.doing,
        "heartbeat_age_s": _age(member.last_heard_s, clock_s),
        "progress_age_s": _age(member.progress_s, clock_s),
        "waits_s": _age(member.waits_since_s, clock_s),
        "busy_s": member.busy_s,
        "is_connected": member.is_connected,
        "is_straggler": member.is_straggler,
    }


def _told_joiner(joiner: Joiner, clock_s: float) -> dict[str, Any]:
    return {
        "member": joiner.member,
        "incarnation": joiner.incarnation,
        "host": joiner.address.host,
        "port": joiner.address.store_port,
        "pid": joiner.pid or None,
        "heartbeat_age_s": _age(joiner.last_heard_s, clock_s),
    }


def _age(since_s: float | None, clock_s: float) -> float | None:
    return None if since_s is None else round(max(0.0, clock_s - since_s), 3)


class StatusView:
    """Answers `GET /v1/status`.

    Args:
        token: The job's secret.
        state: Returns the core's state.
        clock: Monotonic seconds.

    Threads: the event loop's.
    """

    def __init__(self, token: str, state: Callable[[], State], clock: Callable[[], float]) -> None:
        self._token = token
        self._state = state
        self._clock = clock

    def told(self) -> dict[str, Any]:
        """Return what it answers."""
        return job_status(self._state(), self._clock())

    async def serve(self, request: web.Request) -> web.Response:
        """Answer one request.

        Raises:
            web.HTTPException: The token is not the job's (401).
        """
        check_token(request, self._token)
        return web.json_response(self.told(), headers={"Cache-Control": "no-store"})
