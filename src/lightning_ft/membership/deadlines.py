"""What the passing of time decides: who is silent, who hangs, what is stuck (C2, C8). Judged at ticks only."""

from __future__ import annotations

from lightning_ft.membership import effects, events
from lightning_ft.membership.effects import Cause
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.quorum import lost_joiners
from lightning_ft.membership.state import Member, Phase, Status
from lightning_ft.membership.stragglers import judge_stragglers
from lightning_ft.membership.transitions import Turn, conclude, end_quiet, gone, suspend


def judge(turn: Turn, _: events.Tick) -> None:
    """Give up members whose time is over, look again at those that may be dead, and conclude."""
    _account_for_starvation(turn)
    if turn.state.phase is Phase.STOPPED:
        return
    if turn.state.quiet_until_s is not None and turn.clock_s >= turn.state.quiet_until_s:
        end_quiet(turn, "others have come to the boundary long ago")
    num_waiting = _num_waiting(turn, turn.settings.least_timeout)
    overdue, doubtful = _look_at_all(turn, is_waited_for=num_waiting > 0)
    for name in in_order(overdue):
        gone(turn, turn.state.members[name], *overdue[name], is_proven=False)
    # Again at each tick: a dying process may close its connection before its port, so the first probe gets through.
    for name in in_order([*doubtful, *overdue]):
        member = turn.state.members[name]
        if member.address is not None and member.incarnation is not None:
            turn.emit(effects.Probe(name, member.incarnation, member.address))
    longest_s = turn.settings.longest_timeout  # a learned one may be shorter than what a large transfer takes
    if turn.state.phase is Phase.HEALTHY and _num_waiting(turn, longest_s) == turn.state.tally.running:
        suspend(turn, turn.state.view.members[0], f"all members have waited for {longest_s:g} s in a collective")
    judge_stragglers(turn)
    _drop_silent_joiners(turn)
    if reason := lost_joiners(turn.state, turn.clock_s, turn.settings):
        suspend(turn, turn.state.view.members[0], reason)
    conclude(turn)


def _look_at_all(turn: Turn, *, is_waited_for: bool) -> tuple[dict[str, tuple[Cause, str]], list[str]]:
    """Return the verdicts on those whose time is over, and those whose connection is broken."""
    overdue: dict[str, tuple[Cause, str]] = {}
    doubtful = []
    for member in turn.state.members.scan():
        if member.status is Status.RELEASED or member.is_proven:
            continue
        verdict = None
        if member.status is not Status.GONE:
            verdict = _silent(turn, member) or _absent(turn, member, is_waited_for=is_waited_for)
        if verdict is not None:
            overdue[member.member] = verdict
        elif not member.is_connected and turn.state.is_current(member):
            doubtful.append(member.member)
    return overdue, doubtful


def _account_for_starvation(turn: Turn) -> None:
    """C8: if the coordinator itself did not run, its clock did not either."""
    interval_s = turn.settings.heartbeat_interval
    late_s = turn.now_s - turn.state.last_tick_s - interval_s
    skipped_s = turn.state.skipped_s + (late_s if late_s > interval_s else 0.0)
    turn.change(last_tick_s=turn.now_s, skipped_s=skipped_s)


def _num_waiting(turn: Turn, timeout_s: float) -> int:
    """How many members have waited for so long. In a suspended view all have, once there was time to hear of it."""
    if turn.state.phase is Phase.SUSPENDED:
        return turn.state.tally.running if turn.clock_s >= (turn.state.hang_deadline_s or 0.0) else 0
    return sum(
        member.status is Status.RUNNING
        and member.waits_since_s is not None
        and not _is_mute(turn, member)
        and _last_word_s(member) - member.waits_since_s >= timeout_s
        for member in turn.state.members.scan()
    )


def _is_mute(turn: Turn, member: Member) -> bool:
    """Whether what a member last said is too old to be believed, though its process may be seen to compute."""
    heard_s = member.last_heard_s
    return heard_s is not None and turn.clock_s - heard_s >= turn.settings.heartbeat_timeout


def _last_word_s(member: Member) -> float:
    """When a member last said what it does; since then it may do something else."""
    return 0.0 if member.last_heard_s is None else member.last_heard_s


def _silent(turn: Turn, member: Member) -> tuple[Cause, str] | None:
    limit_s = turn.settings.heartbeat_timeout
    if not _is_mute(turn, member):
        return None
    is_vouched_for = member.vouched_s is not None and turn.clock_s - member.vouched_s < limit_s
    if is_vouched_for and (member.is_connected or member.is_unseen):
        return None  # its interpreter's lock is held by something that works, so that it can't connect anew either
    silent = f"nothing was heard of it for {limit_s:g} s"
    if member.is_connected:
        return Cause.HEARTBEAT, silent
    return Cause.CONNECTION, f"its connection dropped and {silent}"


def _absent(turn: Turn, member: Member, *, is_waited_for: bool) -> tuple[Cause, str] | None:
    """Whether a member that is alive keeps the others waiting, and shows no sign that it will come."""
    if not is_waited_for or member.status is not Status.RUNNING:
        return None
    if member.progress_s is None:
        return Cause.CONNECTION, "it did not connect in time"
    is_mute = _is_mute(turn, member)
    idle_s = (turn.clock_s if is_mute else _last_word_s(member)) - member.progress_s
    patience_s = turn.settings.longest_timeout if member.patience_s is None else member.patience_s
    # In a healthy view, whoever waits is held up by others; a suspended one has freed it.
    is_held_up = turn.state.phase is Phase.HEALTHY and member.waits_since_s is not None and not is_mute
    if idle_s < patience_s or is_held_up:
        return None
    doing = f" ({member.doing})" if member.doing else ""
    doing += ", nor answered, though its process computes" if is_mute else ""
    return Cause.HANG, f"the others wait for it, and it has shown no progress for {idle_s:.3g} s{doing}"


def _drop_silent_joiners(turn: Turn) -> None:
    joiners = turn.state.joiners
    limit_s = turn.clock_s - turn.settings.heartbeat_timeout
    for name in in_order(joiner.member for joiner in joiners.scan() if joiner.last_heard_s <= limit_s):
        turn.emit(effects.Evict(name, joiners[name].incarnation, "nothing was heard of it while it waited to join"))
        joiners = joiners.without(name)
    turn.change(joiners=joiners)
