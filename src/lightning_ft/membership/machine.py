"""The coordinator's core: `step(settings, state, event, now_s) -> (state, effects)`, pure.

One function per event, found in a table. Rules (PROTOCOL.md section 3) and where they are:

    C1, C3, C4, C6   `transitions`, `quorum`
    C4a              `quorum`, `deadlines`
    C2               `_on_exited`, `_on_disconnected`, `_on_probe_refused`, `deadlines`
    C2d              `_on_failed`
    C5               `_live_sender`, `_is_stale`
    C7               `_on_ready`, `quorum`, `transitions.commit`
    C7a              `_on_ready`, `_on_described`
    C8               `deadlines`
    C9               `snapshot`
    C10              `links`, `transitions.conclude`

An event that is illegal or too late changes nothing and yields `Refuse`, followed by what its sender is to be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events
from lightning_ft.membership.deadlines import judge
from lightning_ft.membership.effects import Cause, Effect
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.links import LinkFailure, recent
from lightning_ft.membership.quorum import admissible, no_room, num_spares
from lightning_ft.membership.state import Failure, Joiner, Member, Phase, State, Status
from lightning_ft.membership.transitions import (
    Turn,
    announce_joiners,
    conclude,
    end_quiet,
    gone,
    repeat_view,
    send_away,
    stop,
    suspend,
)

UNREACHABLE_REASON = "unreachable"
"""The reason of a park whose sender has found out that others don't answer."""

_FromMember = events.Hello | events.Parked | events.Leaving | events.Heartbeat | events.Described
_OfProcess = events.Disconnected | events.ProbeRefused | events.Exited | events.Failed


def step(settings: Settings, state: State, event: events.Event, now_s: float) -> tuple[State, tuple[Effect, ...]]:
    """Take one event in.

    Args:
        settings: The job's; the same at every step.
        state: From `state.initial` or the step before.
        event: What happened.
        now_s: Caller's monotonic clock, never less than at the step before.

    Returns:
        The new state, and what is to be done, in this order.
    """
    turn = Turn(settings, state, now_s)
    _HANDLERS[type(event)](turn, event)
    turn.state.check()
    return turn.state, tuple(turn.effects)


def _on_hello(turn: Turn, event: events.Hello) -> None:
    member = _live_sender(turn, event)
    if member is None:
        return
    if event.generation > turn.state.generation:
        _refuse_future(turn, event)
        return
    if member.incarnation is None:
        turn.record(
            "member_joined", event.member, incarnation=event.incarnation, host=event.address.host, pid=event.pid
        )
    progress_s = turn.clock_s if member.progress_s is None else member.progress_s
    said = {"incarnation": event.incarnation, "address": event.address, "pid": event.pid}
    member = turn.put(member, progress_s=progress_s, **said, **_heard(turn))
    _catch_up(turn, member, event.generation)


def _on_parked(turn: Turn, event: events.Parked) -> None:
    member = _live_sender(turn, event)
    if member is None or _is_stale(turn, member, event):
        return
    if member.status is Status.LEAVING:
        _refuse(turn, event, "park from a member that is leaving")
        return
    turn.put(
        member,
        status=Status.PARKED,
        has_state=event.completed is not None,
        completed=event.completed or 0,
        admits=event.admits,
        **_heard(turn),
    )
    if turn.state.phase is Phase.HEALTHY or event.reason == UNREACHABLE_REASON:
        _note_suspects(turn, event)  # else its connections broke because others had severed theirs
    if turn.state.phase is Phase.HEALTHY:
        suspend(turn, event.member, f"{event.member} parked: {event.reason}", is_quiet=event.is_quiet)
    elif not event.is_quiet:
        end_quiet(turn, f"{event.member} parked: {event.reason}")
    conclude(turn)


def _note_suspects(turn: Turn, event: events.Parked) -> None:
    known = recent(turn.state.link_failures, turn.clock_s)
    new = (LinkFailure(turn.clock_s, event.generation, event.member, suspect) for suspect in event.suspects)
    in_view = [failure for failure in new if failure.suspect in turn.state.members and failure.suspect != event.member]
    turn.change(link_failures=(*known, *in_view))


def _on_leaving(turn: Turn, event: events.Leaving) -> None:
    joiner = turn.state.joiners.get(event.member)
    if joiner is not None and joiner.incarnation == event.incarnation:
        turn.change(joiners=turn.state.joiners.without(event.member))
        turn.emit(effects.Release(event.member, event.incarnation, "it was in no view"))
        return
    member = _live_sender(turn, event)
    if member is None or _is_stale(turn, member, event):
        return
    if member.status is Status.PARKED:
        _refuse(turn, event, "leave from a member that is parked, so in a collective")
        return
    turn.put(member, status=Status.LEAVING, completed=event.completed, **_heard(turn))
    notice = turn.state.leave_notice
    # The others need only the lowest number that a leaver won't enter; leavers differ by one (I3), so there are two
    # rounds of notices at most, not one for each leaver.
    if turn.state.phase is Phase.HEALTHY and (notice is None or event.completed < notice[1]):
        turn.change(leave_notice=(event.member, event.completed))
        for other in turn.state.view.members:
            if turn.state.members[other].status is Status.RUNNING:
                turn.emit(effects.NotifyLeaving(other, event.member, event.completed))
    end_quiet(turn, f"{event.member} leaves")
    conclude(turn)


def _on_heartbeat(turn: Turn, event: events.Heartbeat) -> None:
    joiner = turn.state.joiners.get(event.member)
    if joiner is not None and joiner.incarnation == event.incarnation:
        heard = dataclasses.replace(joiner, last_heard_s=turn.clock_s)
        turn.change(joiners=turn.state.joiners.with_item(event.member, heard))
        return
    member = _live_sender(turn, event)
    if member is not None:
        now_s = turn.clock_s
        waits_since_s = None if event.waits_s is None else now_s - event.waits_s
        progress_s = now_s - event.idle_s
        turn.put(
            member,
            waits_since_s=waits_since_s,
            progress_s=progress_s,
            doing=event.doing,
            patience_s=event.patience_s,
            busy_s=event.busy_s,
            step=event.step or 0,
            has_state=member.has_state or event.step is not None,
            **_heard(turn),
        )
        turn.emit(effects.Acknowledge(event.member, event.sent_s))


def _on_vouched(turn: Turn, event: events.Vouched) -> None:
    for name, incarnation in event.processes:
        member = turn.state.members.get(name)
        if member is not None and member.incarnation == incarnation:
            turn.put(member, vouched_s=turn.clock_s)


def _on_ready(turn: Turn, event: events.Ready) -> None:
    if turn.state.phase is Phase.STOPPED:
        send_away(turn, event.member, event.incarnation)
        return
    member = turn.state.members.get(event.member)
    waiting = turn.state.joiners.get(event.member)
    is_back = waiting is not None and waiting.incarnation == event.incarnation
    known = max((known.incarnation or 0 for known in (member, waiting) if known is not None), default=0)
    if event.incarnation < known:
        _evict(turn, event, f"incarnation {known} of it is known")
    elif member is not None and member.incarnation == event.incarnation:
        live = _live_sender(turn, event)
        if live is not None:  # it was admitted and missed it
            live = turn.put(live, address=event.address, **_heard(turn))
            _catch_up(turn, live, 0)
    elif member is not None and member.incarnation is None and event.incarnation == 1:
        _refuse(turn, event, "ready from a member of the first view, which must say hello")
    elif _is_other(turn.state, event):
        _decline_other(turn, event)
    elif not is_back and (reason := no_room(turn.state, turn.settings, (event.member,))):
        _decline(turn, effects.Decline(event.member, event.incarnation, reason))
    else:
        joiner = Joiner(event.member, event.incarnation, event.address, turn.clock_s, event.pid, event.fingerprint)
        if not is_back and num_spares(turn.state, turn.settings, (event.member,)) > 0:
            turn.record(
                "spare_ready", event.member, incarnation=event.incarnation, host=event.address.host, pid=event.pid
            )
        is_told = admissible(turn.state, turn.clock_s, turn.settings)
        turn.change(joiners=turn.state.joiners.with_item(event.member, joiner))
        if not is_told:
            announce_joiners(turn)
        conclude(turn)


def _on_described(turn: Turn, event: events.Described) -> None:
    if _live_sender(turn, event) is None:
        return
    turn.change(fingerprint=event.fingerprint, description=event.description)
    joiners = turn.state.joiners
    for name in in_order(joiner.member for joiner in joiners.scan() if _is_other(turn.state, joiner)):
        _decline_other(turn, joiners[name])


def _is_other(state: State, process: events.Ready | Joiner) -> bool:
    """Whether a process that wants to join is known to train something else than the job."""
    return "" not in (state.fingerprint, process.fingerprint) and process.fingerprint != state.fingerprint


def _decline_other(turn: Turn, process: events.Ready | Joiner) -> None:
    reason = "it does not train what the job trains"
    _decline(turn, effects.Decline(process.member, process.incarnation, reason, turn.state.description))


def _decline(turn: Turn, decline: effects.Decline) -> None:
    if decline.member in turn.state.joiners:
        turn.change(joiners=turn.state.joiners.without(decline.member))
    turn.record("join_declined", decline.member, incarnation=decline.incarnation, reason=decline.reason)
    turn.emit(decline)


def _on_disconnected(turn: Turn, event: events.Disconnected) -> None:
    member = _subject(turn, event)
    if member is None or member.status is Status.RELEASED or member.is_proven or member.address is None:
        return
    if turn.state.phase is Phase.STOPPED:
        return
    if member.status is not Status.GONE:
        turn.put(member, is_connected=False, dropped_s=turn.clock_s)
    turn.emit(effects.Probe(event.member, event.incarnation, member.address))


def _on_probe_refused(turn: Turn, event: events.ProbeRefused) -> None:
    member = _subject(turn, event)
    if member is None:
        return
    if member.is_connected:
        _refuse(turn, event, "the probe is older than the member's present connection")
        return
    _dead(turn, member, Cause.CONNECTION, "its connection dropped and its port is closed")


def _on_exited(turn: Turn, event: events.Exited) -> None:
    known = turn.state.members.get(event.member)
    if event.is_last and known is not None and event.incarnation >= (known.incarnation or 0):
        turn.put(known, stays_away=True)
    member = _subject(turn, event)
    if member is not None:
        if member.incarnation is None:
            member = turn.put(member, incarnation=event.incarnation)
        _dead(turn, member, Cause.EXIT, event.detail)
    elif event.is_last:
        conclude(turn)


def _on_failed(turn: Turn, event: events.Failed) -> None:
    known = turn.state.failures.get(event.member)
    if turn.state.phase is Phase.STOPPED or (known is not None and known.incarnation >= event.incarnation):
        return  # too late, or said again
    count = 1
    if known is not None and (known.incarnation + 1, known.signature) == (event.incarnation, event.signature):
        count += known.count
    failure = Failure(event.incarnation, event.signature, count)
    turn.change(failures=turn.state.failures.with_item(event.member, failure))
    member = _subject(turn, event)
    if event.signature and turn.settings.respawn and count >= max(2, turn.settings.max_restarts):
        reason = f"{event.member} {event.detail} for the {_ordinal(count)} time in a row, from the same line"
        if turn.state.phase is Phase.HEALTHY:
            suspend(turn, event.member, reason)
        stop(turn, reason, is_final=True)
    elif member is not None:
        _dead(turn, member, Cause.EXIT, event.detail)


def _live_sender(turn: Turn, event: _FromMember | events.Ready) -> Member | None:
    """The record of a message's sender, if it is a live member; else None, and the sender is told what it is."""
    member = turn.state.members.get(event.member)
    joiner = turn.state.joiners.get(event.member)
    if joiner is not None and joiner.incarnation == event.incarnation:
        _refuse(turn, event, f"{_name(event)} from a process that is in no view yet")
        return None
    if member is None or member.incarnation not in (None, event.incarnation):
        _evict(turn, event, "it is in no view; a new process says ready")
        return None
    if member.status is Status.GONE:
        _evict(turn, event, f"it was given up (cause {member.cause}) and the others go on without it")
        return None
    if member.status is Status.RELEASED:
        _refuse(turn, event, f"{_name(event)} from a member that is released")
        turn.emit(effects.Release(event.member, event.incarnation, "it is released already"))
        return None
    if turn.state.phase is Phase.STOPPED:
        _refuse(turn, event, f"the job has stopped: {turn.state.reason}")
        turn.emit(effects.Stop(event.member, turn.state.reason, turn.state.is_final))
        return None
    if member.incarnation is None and not isinstance(event, events.Hello):
        _refuse(turn, event, f"{_name(event)} before hello")
        return None
    return member


def _is_stale(turn: Turn, member: Member, event: events.Parked | events.Leaving) -> bool:
    """C5: whether the message bears another generation; it is refused, and a sender that missed its view gets it."""
    if event.generation == turn.state.generation:
        return False
    if event.generation > turn.state.generation:
        _refuse_future(turn, event)
        return True
    _refuse(turn, event, f"{_name(event)} of generation {event.generation}, which is over")
    turn.put(member, **_heard(turn))
    if isinstance(event, events.Parked):
        _catch_up(turn, member, event.generation)
    return True


def _catch_up(turn: Turn, member: Member, generation: int) -> None:
    """Tell a live member what it may have missed: its view, and what happened to it since."""
    state = turn.state
    if generation < state.generation:
        repeat_view(turn, member)
    if member.status is not Status.RUNNING or state.generation == 0:
        return
    if state.phase is Phase.SUSPENDED and state.quiet_until_s is None:
        turn.emit(effects.Suspend(member.member, state.generation, "the view was suspended before"))
        return
    if state.leave_notice is not None:
        turn.emit(effects.NotifyLeaving(member.member, *state.leave_notice))
    if member.member == state.view.members[0]:
        announce_joiners(turn)


def _subject(turn: Turn, event: _OfProcess) -> Member | None:
    """The member that a process's end or its connection's is about; None if that is of no consequence to a view."""
    joiner = turn.state.joiners.get(event.member)
    if joiner is not None and joiner.incarnation == event.incarnation:
        turn.change(joiners=turn.state.joiners.without(event.member))
        return None
    member = turn.state.members.get(event.member)
    is_first_word = isinstance(event, events.Exited) and member is not None and member.incarnation is None
    if member is None or (member.incarnation != event.incarnation and not is_first_word):
        _refuse(turn, event, f"{_name(event)} of an incarnation that is in no view")
        return None
    return member


def _dead(turn: Turn, member: Member, cause: Cause, detail: str) -> None:
    """A member's process is known not to run any more: gone if it was not, and proven."""
    if member.status is Status.RELEASED or turn.state.phase is Phase.STOPPED:
        return
    if member.status is Status.GONE:
        if not member.is_proven:
            turn.put(member, is_proven=True)
            conclude(turn)
        return
    gone(turn, member, cause, detail, is_proven=True)
    conclude(turn)


def _heard(turn: Turn) -> dict[str, Any]:
    return {"is_connected": True, "dropped_s": None, "is_unseen": False, "last_heard_s": turn.clock_s}


def _ordinal(number: int) -> str:
    is_teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _name(event: object) -> str:
    return type(event).__name__.lower()


def _refuse(
    turn: Turn,
    event: _FromMember | events.Ready | _OfProcess,
    reason: str,
) -> None:
    turn.emit(effects.Refuse(event.member, reason))


def _refuse_future(turn: Turn, event: events.Hello | events.Parked | events.Leaving) -> None:
    _refuse(
        turn,
        event,
        f"{_name(event)} of generation {event.generation}, but this coordinator is at {turn.state.generation}: "
        "it was started anew, and can't take a running job over",
    )


def _evict(turn: Turn, event: _FromMember | events.Ready, reason: str) -> None:
    _refuse(turn, event, f"{_name(event)} of incarnation {event.incarnation}: {reason}")
    turn.emit(effects.Evict(event.member, event.incarnation, reason))


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    events.Hello: _on_hello,
    events.Parked: _on_parked,
    events.Leaving: _on_leaving,
    events.Ready: _on_ready,
    events.Described: _on_described,
    events.Heartbeat: _on_heartbeat,
    events.Vouched: _on_vouched,
    events.Disconnected: _on_disconnected,
    events.ProbeRefused: _on_probe_refused,
    events.Exited: _on_exited,
    events.Failed: _on_failed,
    events.Tick: judge,
}
