"""The transitions that events lead to: suspend, gone, next view, stop (C1, C2, C3, C4, C6).

Each changes a `Turn`, the scratch copy of one `machine.step`; the state that the step was given is never touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_ft.config import Settings
from lightning_ft.membership import effects
from lightning_ft.membership.effects import Cause, Effect
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.links import WINDOW_S, LinkFailure, accused, counts
from lightning_ft.membership.quorum import admissible, quorum
from lightning_ft.membership.state import Joiner, Member, Phase, State, Status, Tally, View

ALL_LEFT = "all members left"
"""Why a job stopped that ended as it should."""


class Turn:
    """One step in the making: the state so far and the effects so far."""

    def __init__(self, settings: Settings, state: State, now_s: float) -> None:
        self.settings = settings
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    @property
    def clock_s(self) -> float:
        """The coordinator's clock."""
        return self.state.clock_s(self.now_s)

    def change(self, **values: Any) -> None:
        """Replace fields of the state."""
        self.state = dataclasses.replace(self.state, **values)

    def put(self, before: Member, **values: Any) -> Member:
        """Replace fields of a member; the view's tally follows."""
        after = dataclasses.replace(before, **values)
        tally = self.state.tally
        if self.state.is_current(before) and self.state.phase is not Phase.STOPPED:
            tally = tally.moved(before, after)
        self.change(members=self.state.members.with_item(before.member, after), tally=tally)
        return after

    def emit(self, effect: Effect) -> None:
        """Append an effect."""
        self.effects.append(effect)

    def record(self, event: str, member: str | None = None, **fields: object) -> None:
        """Append a line to the event log, in the current generation."""
        self.emit(effects.Record(event, self.state.generation, member, tuple(fields.items())))


def quorum_timeout_s(settings: Settings) -> float:
    """How long C4 waits for proofs: an agent that can kill does so well within a member's own silence."""
    return settings.heartbeat_timeout


def _rejoin_timeout_s(turn: Turn) -> float:
    """How long C4 waits for joiners: not at all if nobody is there who might come."""
    gone = [member for member in turn.state.members.scan() if member.status is Status.GONE]
    is_hopeless = not turn.state.joiners and all(member.stays_away for member in gone)
    return turn.settings.rejoin_timeout if turn.settings.respawn and not is_hopeless else 0.0


def suspend(turn: Turn, member: str, reason: str, *, is_quiet: bool = False) -> None:
    """C1: the first park, or the first member that is gone, suspends the view; nobody is told of a quiet park."""
    # Whoever is waited for has `timeout` from when the first began to wait, which may be now. It is in any case given
    # as long as a silent member, to hear of the suspension and to park.
    first_s = min([turn.clock_s, *_waits_since_s(turn)])
    deadline_s = max(turn.clock_s + turn.settings.heartbeat_timeout, first_s + turn.settings.least_timeout)
    quiet_until_s = turn.clock_s + turn.settings.heartbeat_interval
    turn.change(phase=Phase.SUSPENDED, hang_deadline_s=deadline_s, quiet_until_s=quiet_until_s)
    turn.record("view_suspended", member, reason=reason)
    if not is_quiet:
        end_quiet(turn, reason)


def end_quiet(turn: Turn, reason: str) -> None:
    """C1: tell whoever has not parked that the view is suspended, if that was not said yet."""
    if turn.state.quiet_until_s is None:
        return
    turn.change(quiet_until_s=None)
    generation = turn.state.generation
    for other in turn.state.view.members:
        if turn.state.members[other].status is Status.RUNNING:
            turn.emit(effects.Suspend(other, generation, reason))


def _waits_since_s(turn: Turn) -> list[float]:
    """Since when those wait that may go on; whoever is out keeps what it said last, which counts no more."""
    return [
        member.waits_since_s
        for member in turn.state.members.scan()
        if member.waits_since_s is not None and member.status in (Status.RUNNING, Status.PARKED)
    ]


def gone(turn: Turn, member: Member, cause: Cause, detail: str, *, is_proven: bool) -> None:
    """C2: a member of the view is gone. The caller concludes, once for all that are gone in the same step."""
    if member.status is Status.LEAVING:  # C6: its death is its release
        turn.put(member, status=Status.RELEASED, is_connected=False)
        turn.record("member_left", member.member, detail=detail)
        return
    changed = {"status": Status.GONE, "cause": cause, "is_proven": is_proven}
    turn.put(member, **changed, is_connected=False, dropped_s=None, admits=False)
    turn.record(
        "failure_detected",
        member.member,
        cause=cause.value,
        detail=detail,
        host=None if member.address is None else member.address.host,
        doing=member.doing,
        late_s=_late_s(turn, member, cause),
        detect_s=_detect_s(turn, member, cause, is_proven=is_proven),
    )
    if not is_proven and member.incarnation is not None:
        reason = f"given up: {detail}"
        turn.emit(effects.Evict(member.member, member.incarnation, reason))
        turn.emit(effects.Kill(member.member, member.incarnation, reason))
    reason = f"{member.member} is gone: {detail}"
    if turn.state.phase is Phase.HEALTHY:
        suspend(turn, member.member, reason)
    end_quiet(turn, reason)


def _late_s(turn: Turn, member: Member, cause: Cause) -> float | None:
    """How long ago a member should have given a sign of life, or of progress; None if it has ended."""
    since_s = member.progress_s if cause is Cause.HANG else member.last_heard_s
    return None if since_s is None or cause is Cause.EXIT else round(turn.clock_s - since_s, 3)


def _detect_s(turn: Turn, member: Member, cause: Cause, *, is_proven: bool) -> float | None:
    """How long ago a member failed, at most; None if nothing was ever heard of it."""
    if cause in (Cause.EXIT, Cause.SLOW):  # its agent or itself says it at once; a slow one has not failed before
        return 0.0
    if is_proven and member.dropped_s is not None:  # a kernel ends a process and its connections together (A3)
        return round(turn.clock_s - member.dropped_s, 3)
    return _late_s(turn, member, cause)


def conclude(turn: Turn) -> None:
    """C3, C4, C6: if nobody is waited for any more, form the next view, keep waiting, release everybody, or stop."""
    tally = turn.state.tally
    if turn.state.phase is Phase.STOPPED or tally.running:
        return
    if not tally.parked:
        stop(turn, ALL_LEFT if tally.leaving or tally.released else "no member is left that could go on")
        return
    _forgive_links(turn)
    while (verdict := accused(_live_link_failures(turn), turn.settings.max_link_failures)) is not None:
        guilty, other, count = verdict
        detail = f"its link to {other} failed {count} times in {WINDOW_S:g} s"
        gone(turn, turn.state.members[guilty], Cause.CONNECTION, detail, is_proven=False)
    members, reason, needs_joiners = quorum(turn.state, turn.clock_s, turn.settings)
    if members is not None:
        commit(turn, members, reason, needs_joiners=needs_joiners)
        return
    if reason != turn.state.reason:
        turn.record("quorum_missing", reason=reason)
        turn.change(reason=reason)
    since_s = turn.state.no_quorum_since_s
    if since_s is None:
        since_s = turn.clock_s
        turn.change(no_quorum_since_s=since_s)
    if needs_joiners:
        deadline_s = since_s + _rejoin_timeout_s(turn)
    else:
        is_hopeless = turn.state.tally.proven == turn.state.tally.gone
        deadline_s = since_s + (0.0 if is_hopeless else quorum_timeout_s(turn.settings))
    if turn.clock_s >= deadline_s:
        stop(turn, reason)


def _forgive_links(turn: Turn) -> None:
    """In a view that lost a member nothing else is known: whoever noticed it first has cut its links to all others.

    So has whoever has come to a boundary before the others.
    """
    if turn.state.tally.gone or turn.state.tally.admitting:
        generation = turn.state.generation
        known = turn.state.link_failures
        turn.change(link_failures=tuple(failure for failure in known if failure.generation != generation))


def _live_link_failures(turn: Turn) -> list[LinkFailure]:
    """Those between members that are parked."""
    members = turn.state.members
    return [
        failure
        for failure in turn.state.link_failures
        if all(members[end].status is Status.PARKED for end in failure.ends)
    ]


def _report_links(turn: Turn) -> None:
    failures = _live_link_failures(turn)
    totals = counts(failures)
    for ends in sorted({failure.ends for failure in failures if failure.generation == turn.state.generation}):
        hosts = [None if (address := turn.state.members[end].address) is None else address.host for end in ends]
        turn.record("link_failed", ends[0], peer=ends[1], hosts=hosts, count=totals[ends])


def commit(turn: Turn, members: tuple[str, ...], reason: str, *, needs_joiners: bool) -> None:
    """C3: the next view. Whoever of the old one is not in it is out for good."""
    _report_links(turn)
    old, old_members, joiners = turn.state.view, turn.state.members, turn.state.joiners
    survivors = [member for member in members if _goes_on(turn.state, member)]
    going_on = set(survivors)
    left = tuple(member for member in old.members if member not in going_on)  # a joiner may be a successor of one
    joined = tuple(member for member in members if member not in going_on)
    new = View(old.generation + 1, members)
    leavers = [member for member in left if old_members[member].status is Status.LEAVING]
    num_left = sum(old_members[member].status is Status.RELEASED for member in left) + len(leavers)
    changed = [_survivor(old_members[member], new.generation, turn.clock_s) for member in survivors]
    changed += [_joined(joiners[member], new.generation) for member in joined]
    changed += [dataclasses.replace(old_members[member], status=Status.RELEASED) for member in leavers]
    waiting = joiners
    for member in joined:
        waiting = waiting.without(member)
    turn.change(
        view=new,
        phase=Phase.HEALTHY,
        members=old_members.with_items((record.member, record) for record in changed),
        joiners=waiting,
        tally=Tally(running=len(members)),
        target=max(turn.state.target - num_left, len(members)),
        hang_deadline_s=None,
        quiet_until_s=None,
        no_quorum_since_s=None,
        needs_joiners=needs_joiners,
        reason="",
        leave_notice=None,
    )
    _tell_view(turn, old.generation, left, survivors, joined)
    for member in leavers:
        _release(turn, old_members[member], f"generation {new.generation} goes on without it")
        turn.record("member_left", member, detail="released")
    for member in joined:
        joiner = joiners[member]
        turn.record("member_joined", member, incarnation=joiner.incarnation, host=joiner.address.host, pid=joiner.pid)
    turn.record("view_committed", members=members, reason=reason)
    announce_joiners(turn)


def _goes_on(state: State, member: str) -> bool:
    record = state.members.get(member)
    return record is not None and record.status in (Status.PARKED, Status.LEAVING)


def _survivor(member: Member, generation: int, now_s: float) -> Member:
    return dataclasses.replace(
        member,
        generation=generation,
        status=Status.RUNNING,
        admits=False,
        waits_since_s=None,
        progress_s=now_s,
        slow_since=None,
        is_straggler=False,
    )


def _joined(joiner: Joiner, generation: int) -> Member:
    return Member(
        member=joiner.member,
        incarnation=joiner.incarnation,
        address=joiner.address,
        generation=generation,
        pid=joiner.pid,
        is_connected=True,
        has_state=False,
        last_heard_s=joiner.last_heard_s,
        progress_s=joiner.last_heard_s,
    )


def _tell_view(turn: Turn, base: int, left: tuple[str, ...], survivors: list[str], joined: tuple[str, ...]) -> None:
    """Give survivors the difference to their view, joiners the whole."""
    view = turn.state.view
    meeting = turn.state.members[view.members[0]].address
    assert meeting is not None, "a parked member said hello"
    size = len(view.members)
    for member in survivors:
        is_short = turn.state.needs_joiners
        turn.emit(effects.CommitView(member, view.generation, base, left, joined, size, meeting, is_short))
    for member in joined:
        turn.emit(effects.CommitView(member, view.generation, None, (), view.members, size, meeting))


def repeat_view(turn: Turn, member: Member) -> None:
    """Tell a member all that it may have missed of the current view; what it knows, it ignores."""
    state = turn.state
    meeting = state.members[state.view.members[0]].address
    assert meeting is not None, "a view but the initial one has members that said hello"
    members, is_short = state.view.members, state.needs_joiners
    turn.emit(effects.CommitView(member.member, state.generation, None, (), members, len(members), meeting, is_short))


def announce_joiners(turn: Turn) -> None:
    """C7: tell the first member of a healthy view that somebody waits to join for whom there is room."""
    if waiting := admissible(turn.state, turn.clock_s, turn.settings):
        reason = f"ready: {', '.join(in_order(turn.state.joiners)[:3])}"
        addresses = tuple(turn.state.joiners[joiner].address for joiner in waiting)
        turn.emit(effects.AnnounceJoin(turn.state.view.members[0], reason, addresses))


def stop(turn: Turn, reason: str, *, is_final: bool = False) -> None:
    """C2d, C4, C6: the job is over. The parked are told so, the leavers released, the joiners sent away."""
    end_quiet(turn, reason)
    turn.change(phase=Phase.STOPPED, hang_deadline_s=None, no_quorum_since_s=None, reason=reason, is_final=is_final)
    for member in turn.state.view.members:
        record = turn.state.members[member]
        if record.status is Status.PARKED:
            turn.emit(effects.Stop(member, reason, is_final))
        elif record.status is Status.LEAVING:
            turn.put(record, status=Status.RELEASED)
            _release(turn, record, reason)
    for joiner in sorted(turn.state.joiners.scan(), key=lambda joiner: joiner.member):
        send_away(turn, joiner.member, joiner.incarnation)
    turn.record("job_stopped", reason=reason)


def _release(turn: Turn, leaver: Member, reason: str) -> None:
    assert leaver.incarnation is not None, "whoever leaves was heard of"
    turn.emit(effects.Release(leaver.member, leaver.incarnation, reason))


def send_away(turn: Turn, joiner: str, incarnation: int) -> None:
    """Tell a joiner that the job has stopped; if that was its end, coming too late is no failure."""
    reason = turn.state.reason
    is_done = reason == ALL_LEFT
    turn.emit(
        effects.Release(joiner, incarnation, reason) if is_done else effects.Stop(joiner, reason, turn.state.is_final)
    )
