"""How each line of a job's event log changes its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_ft.event_log import describe
from lightning_ft.history.lines import DamagedError, Line, is_start, read
from lightning_ft.history.state import Checkpoint, History, Incident, Loss, Member, MemberState, Outcome, Sentence, View


def add(history: History, line: str | bytes) -> Incident | None:
    """Take one line in; it changes everything that it says, or only a counter.

    Returns: The incident that it ended, if it did.
    """
    fields = read(line)
    if fields is None:
        history.num_damaged += 1
        return None
    history._ended = None
    handler = HANDLERS.get(fields.event)
    try:
        sentence = Sentence(fields.time_s, fields.member, fields.generation, *describe(fields.event, fields.own()))
        if handler is not None:
            handler(history, fields)
    except (DamagedError, RecursionError):
        history.num_damaged += 1
        return None
    history.sentences.append(sentence)
    if handler is None and fields.event not in ONLY_TOLD:
        history.num_unknown += 1
    else:
        history.num_events += 1
    history.started_s = fields.time_s if history.started_s is None else history.started_s
    history.last_s = fields.time_s if history.last_s is None else max(history.last_s, fields.time_s)
    return history._ended


def histories(lines: Iterable[str | bytes]) -> list[History]:
    """Fold a file's lines: one history for each run, since a job that is started again appends to its event log.

    Returns: In order, at least one.
    """
    found = [History()]
    for line in lines:
        if is_start(line) and found[-1].num_events:
            found.append(History())
        add(found[-1], line)
    return found


# What each event changes. A handler reads all that it needs before it changes anything.


def _on_job_started(history: History, line: Line) -> None:
    members, settings = line.names("members"), line.values.get("settings")
    if isinstance(settings, dict):
        history.settings = settings
    history.target = len(members)
    for member in members:
        history.members.setdefault(member, Member(member, MemberState.EXPECTED, line.time_s))


def _on_member_joined(history: History, line: Line) -> None:
    _note_process(history, line, MemberState.ACTIVE)


def _on_spare_ready(history: History, line: Line) -> None:
    _note_process(history, line, MemberState.SPARE)


def _note_process(history: History, line: Line, state: MemberState) -> None:
    incarnation, host, pid = line.count("incarnation") or 0, line.text("host"), line.count("pid")
    member = _member(history, line.subject, line.time_s)
    member.restarts += 0 < member.incarnation < incarnation
    member.incarnation = max(member.incarnation, incarnation)
    member.host, member.pid, member.is_straggler = host or None, pid or None, False
    _become(member, state, line.time_s, "")


def _on_failure_detected(history: History, line: Line) -> None:
    detect_s, late_s, host = line.number("detect_s"), line.number("late_s") or 0.0, line.text("host") or None
    if detect_s is None:  # an older version's log, or nothing was ever heard of it
        detect_s = late_s if line.text("cause") in _SILENT else 0.0
    loss = Loss(line.subject, line.time_s, host, line.text("cause"), line.text("detail"), line.text("doing"))
    member = _member(history, line.subject, line.time_s)
    member.is_straggler = False
    if member.rank is not None:
        history._lost_in_view.add(member.member)
        size = len(history.view) - len(history._lost_in_view)
        history.sizes.append((line.time_s, size, history.sizes[-1][2]))
    _become(member, MemberState.LOST, line.time_s, loss.detail)
    if history.stopped_s is not None or not history.views:  # nothing trained that could stand still
        return
    incident = history.incident
    if incident is None:
        incident = _open(history, line, began_s=line.time_s - detect_s)
    if not incident.losses:
        incident.cause = loss.cause
    incident.losses.append(loss)


def _on_view_suspended(history: History, line: Line) -> None:
    reason = line.text("reason")
    if history.stopped_s is not None or not history.views:
        return
    incident = history.incident or _open(history, line, began_s=line.time_s)
    incident.reason = incident.reason or reason
    if incident.cause == "unknown" and reason.endswith((": join", ": leave")):
        incident.cause = reason.rpartition(": ")[2]


def _on_link_failed(history: History, _line: Line) -> None:
    incident = history.incident
    if incident is not None and not incident.losses:
        incident.cause = "link"


def _on_view_committed(history: History, line: Line) -> None:
    members, reason = line.names("members"), line.text("reason")
    history.target = max(history.target, len(members), 1)
    view = View(line.time_s, line.generation, members, reason)
    history.views.append(view)
    history.sizes.append((line.time_s, len(members), history.target))
    history._lost_in_view.clear()
    history.generation, history.reason = line.generation, ""
    if history.stopped_s is not None:  # said by a coordinator that was cut off, of its own side alone
        history.stopped_s = history.status = None
        if history.incidents and history.incidents[-1].outcome is Outcome.STOPPED:
            history.incidents[-1].outcome, history.incidents[-1].ended_s = Outcome.OPEN, None
    for member in history.members.values():
        member.rank = None
    for rank, name in enumerate(view.members):
        member = _member(history, name, line.time_s)
        member.rank = rank
        _become(member, MemberState.ACTIVE, line.time_s, "")
    for incident in history._not_restored:
        if len(view.members) >= incident.size:
            incident.restored_s = line.time_s
    history._not_restored = [incident for incident in history._not_restored if incident.restored_s is None]


def _on_recovered(history: History, line: Line) -> None:
    _go_on(history, line, Outcome.RECOVERED, ())


def _on_members_admitted(history: History, line: Line) -> None:
    _go_on(history, line, Outcome.ADMITTED, line.names("joined"))


def _go_on(history: History, line: Line, outcome: Outcome, joined: tuple[str, ...]) -> None:
    latency_s, rounds, step = line.number("latency_s"), line.count("rounds"), line.count("step")
    parts = [(name, line.number(f"{name}_s")) for name in ("park", "rebuild", "settle")]
    redone = line.text("redone") or None
    if latency_s is None:
        raise DamagedError
    told = {name: value for name, value in line.values.items() if name != "time"}
    if told == history._recovery:
        return  # said again, to a coordinator that might not have heard of it
    history._recovery = told
    noticed_s = line.time_s - latency_s  # by rank 0
    incident = history.incident or _open(history, line, began_s=noticed_s)  # if its beginning was lost
    if joined and not incident.losses:
        incident.cause = "join"
    incident.joined, incident.rounds, incident.step, incident.redone = joined, rounds or 0, step, redone
    incident.began_s = max(0.0, min(incident.began_s, noticed_s))  # rank 0 may have known before the coordinator
    _end(history, incident, line.time_s, outcome)
    rest_s = incident.duration_s(line.time_s)
    for name, part_s in (("detect", noticed_s - incident.began_s), *parts):
        incident.phases[name] = min(rest_s, max(0.0, part_s or 0.0))
        rest_s -= incident.phases[name]
    incident.phases["catch_up"] = rest_s
    if step is not None:
        history.step = step if history.step is None else max(history.step, step)
        for name in {*history.view, *(loss.member for loss in incident.losses)}:
            _member(history, name, line.time_s).last_step = step
    history.reason = ""


def _on_training_started(history: History, line: Line) -> None:
    if history._first_step_s is None:
        history._first_step_s = line.time_s


def _on_quorum_missing(history: History, line: Line) -> None:
    history.reason = line.text("reason")


def _on_member_left(history: History, line: Line) -> None:
    detail = line.text("detail")
    history.target = max(0, history.target - (history.stopped_s is None and line.subject in history.members))
    _become(_member(history, line.subject, line.time_s), MemberState.LEFT, line.time_s, detail)


def _on_member_exited(history: History, line: Line) -> None:
    detail, incarnation = line.text("detail"), line.count("incarnation")
    member = _member(history, line.subject, line.time_s)
    if incarnation is not None and incarnation < member.incarnation:
        return  # of a process whose successor is there already
    if member.state in (MemberState.LOST, MemberState.LEFT):
        return
    _become(member, MemberState.ENDED, line.time_s, detail)


def _on_straggler_detected(history: History, line: Line) -> None:
    _member(history, line.subject, line.time_s).is_straggler = True


def _on_straggler_recovered(history: History, line: Line) -> None:
    _member(history, line.subject, line.time_s).is_straggler = False


def _on_gradient_mismatch(history: History, line: Line) -> None:
    history.differing = line.names("members")


def _on_gradients_compared(history: History, _: Line) -> None:
    history.differing = ()


def _on_node_silent(history: History, line: Line) -> None:
    node = line.count("node")
    if node is None:
        raise DamagedError
    history.silent_nodes[node] = line.time_s


def _on_node_heard(history: History, line: Line) -> None:
    node = line.count("node")
    if node is None:
        raise DamagedError
    history.silent_nodes.pop(node, None)


def _on_checkpoint_saved(history: History, line: Line) -> None:
    step, kind, size_bytes = line.count("step"), line.text("kind"), line.count("bytes")
    duration_s, blocked_s = line.number("duration_s"), line.number("blocked_s")
    history.checkpoints.append(Checkpoint(line.time_s, step, kind, size_bytes, duration_s, blocked_s))


def _on_checkpoint_failed(history: History, _line: Line) -> None:
    history.num_checkpoints_failed += 1


def _on_checkpoint_skipped(history: History, _line: Line) -> None:
    history.num_checkpoints_skipped += 1


def _on_job_stopped(history: History, line: Line) -> None:
    history.reason = line.text("reason")
    _stop(history, line)


def _on_job_finished(history: History, line: Line) -> None:
    history.status = line.count("status")
    _stop(history, line)


def _stop(history: History, line: Line) -> None:
    if history.stopped_s is None:
        history.stopped_s = line.time_s
    if history.incident is not None:
        _end(history, history.incident, line.time_s, Outcome.STOPPED)


def _open(history: History, line: Line, began_s: float) -> Incident:
    incident = Incident(max(0.0, began_s), line.time_s, history.generation, len(history.view))
    history.incidents.append(incident)
    history._not_restored.append(incident)
    return incident


def _end(history: History, incident: Incident, time_s: float, outcome: Outcome) -> None:
    incident.ended_s, incident.outcome = max(time_s, incident.began_s), outcome
    history._ended = incident


def _member(history: History, name: str, time_s: float) -> Member:
    return history.members.setdefault(name, Member(name, MemberState.EXPECTED, time_s))


def _become(member: Member, state: MemberState, time_s: float, detail: str) -> None:
    if member.state is not state:
        member.state, member.since_s = state, time_s
    member.detail = detail


HANDLERS: dict[str, Callable[[History, Line], None]] = {
    "job_started": _on_job_started,
    "member_joined": _on_member_joined,
    "spare_ready": _on_spare_ready,
    "failure_detected": _on_failure_detected,
    "view_suspended": _on_view_suspended,
    "link_failed": _on_link_failed,
    "view_committed": _on_view_committed,
    "recovered": _on_recovered,
    "members_admitted": _on_members_admitted,
    "training_started": _on_training_started,
    "quorum_missing": _on_quorum_missing,
    "member_left": _on_member_left,
    "member_exited": _on_member_exited,
    "gradient_mismatch": _on_gradient_mismatch,
    "gradients_compared": _on_gradients_compared,
    "straggler_detected": _on_straggler_detected,
    "straggler_recovered": _on_straggler_recovered,
    "node_silent": _on_node_silent,
    "node_heard": _on_node_heard,
    "checkpoint_saved": _on_checkpoint_saved,
    "checkpoint_failed": _on_checkpoint_failed,
    "checkpoint_skipped": _on_checkpoint_skipped,
    "job_stopped": _on_job_stopped,
    "job_finished": _on_job_finished,
}

ONLY_TOLD = frozenset(
    {
        "catch_up_begun",
        "caught_up",
        "checkpoint_restored",
        "coordinator_restarted",
        "evaluation_incomplete",
        "evaluation_redealt",
        "failed",
        "gradient_not_finite",
        "join_declined",
        "member_stacks",
        "rollback_requested",
    }
)
"""Events that change nothing here."""

_SILENT = ("connection", "heartbeat", "hang")
"""Causes of a loss that had happened some time before it was noticed."""
