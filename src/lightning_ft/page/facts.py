"""What the page and the report show, as JSON: the job's history, and what the coordinator knows now.

Everything is decided here, so that whatever draws it only draws. Times are Unix seconds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ft.history.state import History, Incident, Member, MemberState, Outcome

VERSION = 1
"""Of the facts. The page that is open in a browser loads itself anew when it changes."""

MAX_INCIDENTS = 200
MAX_SENTENCES = 200
MAX_POINTS = 1000
"""Of the latest of each so many are shown; a job that runs for weeks may have more."""

_MAX_TEXT = 600

_FROM_LOG = {
    MemberState.EXPECTED: "expected",
    MemberState.ACTIVE: "running",
    MemberState.SPARE: "spare",
    MemberState.LOST: "lost",
    MemberState.LEFT: "left",
    MemberState.ENDED: "ended",
}
_FROM_COORDINATOR = {
    "awaited": "expected",
    "running": "running",
    "parked": "parked",
    "leaving": "leaving",
    "gone": "lost",
    "released": "left",
}
"""The states that are shown, by the log's and by the coordinator's words (PROTOCOL.md, The status of a job)."""

_IN_THE_JOB = ("running", "parked", "leaving")

CAUSES = {
    "exit": "process ended",
    "connection": "connection lost",
    "heartbeat": "silent",
    "hang": "hung",
    "slow": "too slow",
    "leave": "left",
    "join": "joined",
    "link": "link failed",
    "unknown": "suspended",
}
"""Causes of incidents in words."""


def facts(
    history: History,
    now_s: float,
    told: Mapping[str, Any] | None = None,
    *,
    earlier_runs: int = 0,
) -> dict[str, Any]:
    """Return all that is shown.

    Args:
        history: Of the run.
        now_s: The moment to show it at; for a log the time of its last event.
        told: What the coordinator says (`coordinator.status_view`); None: there is only the log.
        earlier_runs: How many runs the log has besides this one.
    """
    members = _members(history, now_s, told)
    end_s = history.end_s(now_s)
    incidents = history.incidents
    return {
        "version": VERSION,
        "now_s": now_s,
        "is_live": told is not None,
        "verdict": _verdict(history, members, told),
        "started_s": history.started_s,
        "trains_since_s": history.trains_since_s,
        "stopped_s": history.stopped_s,
        "end_s": end_s,
        "generation": told["generation"] if told is not None else history.generation,
        "step": max((row["step"] for row in members if row["step"] is not None), default=None),
        "num_members": sum(row["rank"] is not None for row in members),
        "target": _target(history, told),
        "goodput": history.goodput(now_s),
        "capacity": history.capacity(now_s),
        "ring": list(told["ring"] if told is not None and told["generation"] else history.view),
        "members": members,
        "incidents": [_incident(incident, end_s) for incident in reversed(incidents[-MAX_INCIDENTS:])],
        "num_incidents": len(incidents),
        "num_failures": sum(bool(incident.losses) or incident.cause == "link" for incident in incidents),
        "recovery_s": _recovery_s(incidents),
        "standstills": [list(each) for each in history.standstills(now_s)[-MAX_POINTS:]],
        "lost_before_s": sum(last_s - first_s for first_s, last_s in history.standstills(now_s)[:-MAX_POINTS]),
        "sizes": [list(size) for size in history.sizes[-MAX_POINTS:]],
        "checkpoints": {
            "num_saved": len(history.checkpoints),
            "num_failed": history.num_checkpoints_failed,
            "num_skipped": history.num_checkpoints_skipped,
            "last": dataclasses.asdict(history.checkpoints[-1]) if history.checkpoints else None,
            "times_s": [checkpoint.time_s for checkpoint in history.checkpoints[-MAX_POINTS:]],
        },
        "sentences": [
            [each.time_s, each.member, each.generation, each.level, _short(each.text)]
            for each in reversed([*history.sentences][-MAX_SENTENCES:])
        ],
        "log": {
            "num_events": history.num_events,
            "num_unknown": history.num_unknown,
            "num_damaged": history.num_damaged,
            "earlier_runs": earlier_runs,
        },
    }


def _members(history: History, now_s: float, told: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if told is None:
        rows = [_from_log(member) for member in history.members.values()]
    else:
        limit_s = float(history.settings.get("heartbeat_timeout") or 10.0) / 2
        rows = [_from_coordinator(row, history.members.get(row["member"]), now_s, limit_s) for row in told["members"]]
        known = {row["member"] for row in rows}
        rows += [
            _from_joiner(row, history.members.get(row["member"]))
            for row in told["joiners"]
            if row["member"] not in known
        ]
        waiting = {row["member"] for row in told["joiners"]}
        for row in rows:
            row["is_back"] = row["member"] in waiting and row["state"] not in _IN_THE_JOB
    return sorted(rows, key=lambda row: _in_order(row["member"]))


def _from_log(member: Member) -> dict[str, Any]:
    state = _FROM_LOG[member.state]
    return {
        "member": member.member,
        "host": member.host,
        "rank": member.rank if state in _IN_THE_JOB else None,
        "state": state,
        "step": member.last_step,
        "age_s": None,
        "is_late": False,
        "doing": "",
        "pid": member.pid,
        "restarts": member.restarts,
        "is_straggler": member.is_straggler,
        "detail": _short(member.detail),
        "since_s": member.since_s,
        "is_back": False,
    }


def _from_coordinator(row: Mapping[str, Any], known: Member | None, now_s: float, limit_s: float) -> dict[str, Any]:
    state, age_s = _FROM_COORDINATOR[row["state"]], row["heartbeat_age_s"]
    is_in = state in _IN_THE_JOB
    shown = _from_log(known or Member(row["member"], MemberState.EXPECTED, now_s))
    return {
        **shown,
        "host": row["host"],
        "rank": row["rank"],
        "state": state,
        "step": row["step"] if is_in else shown["step"],
        "age_s": age_s if is_in else None,
        "is_late": is_in and age_s is not None and age_s > limit_s,
        "doing": _short(row["doing"]) if is_in else "",
        "is_straggler": row["is_straggler"],
    }


def _from_joiner(row: Mapping[str, Any], known: Member | None) -> dict[str, Any]:
    return {
        **_from_log(known or Member(row["member"], MemberState.SPARE, 0.0)),
        "host": row["host"],
        "rank": None,
        "state": "spare",
        "age_s": row["heartbeat_age_s"],
    }


def _in_order(member: str) -> tuple[tuple[int, int | str], ...]:
    """Sort `2/0` before `10/0`, and whatever is no logical id after them."""
    return tuple((0, int(part)) if part.isdecimal() and part.isascii() else (1, part) for part in member.split("/"))


def _target(history: History, told: Mapping[str, Any] | None) -> int:
    return int(told["target"]) if told is not None else history.target


def _recovery_s(incidents: Sequence[Incident]) -> float | None:
    """How long training stood still on average, of the incidents in which somebody was lost."""
    took = [incident.duration_s(0.0) for incident in incidents if incident.outcome is Outcome.RECOVERED]
    return statistics.fmean(took) if took else None


def _incident(incident: Incident, end_s: float) -> dict[str, Any]:
    return {
        "began_s": incident.began_s,
        "ended_s": incident.ended_s,
        "duration_s": incident.duration_s(end_s),
        "outcome": incident.outcome.value,
        "cause": incident.cause,
        "title": CAUSES.get(incident.cause, incident.cause),
        "is_failure": bool(incident.losses) or incident.cause in ("link", "unknown"),
        "reason": _short(incident.reason),
        "losses": [
            {
                "member": loss.member,
                "host": loss.host,
                "cause": CAUSES.get(loss.cause, loss.cause),
                "detail": _short(loss.detail),
                "doing": _short(loss.doing),
            }
            for loss in incident.losses
        ],
        "joined": list(incident.joined),
        "phases": incident.phases,
        "rounds": incident.rounds,
        "step": incident.step,
        "redone": incident.redone,
        "generation": incident.generation,
        "restored_s": incident.restored_s,
    }


def _verdict(history: History, members: Sequence[Mapping[str, Any]], told: Mapping[str, Any] | None) -> dict[str, Any]:
    """How the job is, in a word, a title and sentences: what somebody reads who has five seconds.

    `level`: `good`, `warn`, `bad`, `wait` (it has not begun) or `over`. `since_s`: since when it is so, if it goes on.
    """
    target = _target(history, told)
    num_in = sum(row["rank"] is not None for row in members)
    incident = history.incident
    if history.stopped_s is not None or (told is not None and told["phase"] == "stopped"):
        return _ended(history, told)
    if not (told["generation"] if told is not None else history.views):
        awaited = [row["member"] for row in members if row["state"] == "expected"]
        text = f"Waiting for {_listed(awaited)}." if awaited else "All members are there."
        return _said("wait", "Starting", text, history.started_s)
    if (told is not None and told["phase"] == "suspended") or incident is not None:
        reason = history.reason or (told["reason"] if told is not None else "")
        texts = [_lost_in(incident)] if incident is not None else []
        texts += [f"It can't go on yet: {reason}."] if reason else []
        since_s = None if incident is None else incident.began_s
        calm = incident is not None and incident.cause in ("join", "leave")
        title = "Taking members in" if calm else "Training stands still"
        return _said("warn" if calm else "bad", title, " ".join(filter(None, texts)), since_s)
    if num_in < target:
        missing = [row for row in members if row["state"] in ("lost", "expected")]
        texts = [f"{row['member']} ({_why(row)})" for row in missing]
        title = f"Training with {num_in} of {target} members"
        since_s = min((row["since_s"] for row in missing), default=None)
        return _said("warn", title, f"Missing: {_listed(texts, 5)}." if texts else "", since_s)
    worries = [f"{row['member']} holds the others up." for row in members if row["is_straggler"]]
    worries += [f"Nothing is heard of {row['member']} for {row['age_s']:.0f} s." for row in members if row["is_late"]]
    worries += [f"Nothing is heard of the agent of node {node}." for node in sorted(history.silent_nodes)]
    if history.differing:
        worries.append(f"What {_listed(list(history.differing), 3)} held was not what the others held.")
    if worries:
        return _said("warn", "Training, with trouble", " ".join(worries[:3]), None)
    return _said("good", "Training", "All members are there." if num_in > 1 else "Its member is there.", None)


def _ended(history: History, told: Mapping[str, Any] | None) -> dict[str, Any]:
    reason = history.reason or (told["reason"] if told is not None else "")
    text = f"{reason[:1].upper()}{reason[1:]}." if reason else ""
    if history.status:
        return _said("bad", f"Failed with status {history.status}", text, history.stopped_s)
    if history.status == 0:
        return _said("over", "Finished", text, history.stopped_s)
    return _said("over", "Stopped", text, history.stopped_s)


def _said(level: str, title: str, text: str, since_s: float | None) -> dict[str, Any]:
    return {"level": level, "title": title, "text": _short(text), "since_s": since_s}


def _lost_in(incident: Incident) -> str:
    if not incident.losses:
        return f"{incident.reason[:1].upper()}{incident.reason[1:]}." if incident.reason else ""
    lost = [f"{loss.member} is lost ({loss.detail or CAUSES.get(loss.cause, loss.cause)})" for loss in incident.losses]
    return f"{_listed(lost, 3)}."


def _why(row: Mapping[str, Any]) -> str:
    why = row["detail"] or ("not there yet" if row["state"] == "expected" else "lost")
    return f"{why}; back, waits to join" if row["is_back"] else why


def _listed(texts: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return f"{', '.join(texts[:limit])}{more}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def in_words(shown: Mapping[str, Any]) -> str:
    """Return facts as text for a terminal."""
    verdict, goodput = shown["verdict"], shown["goodput"]
    lines = [f"{verdict['title']}. {verdict['text']}".strip()]
    share = "" if goodput is None else f", goodput {goodput:.2%}, {shown['capacity']:.2%} of its members on average"
    lines.append(
        f"{shown['num_members']} of {shown['target']} members, generation {shown['generation']}, "
        f"step {'-' if shown['step'] is None else shown['step']}{share}"
    )
    recovery = "" if shown["recovery_s"] is None else f", {duration(shown['recovery_s'])} on average"
    num = shown["num_failures"]
    lines.append(f"{num} failure{'' if num == 1 else 's'}{recovery}")
    for incident in reversed(shown["incidents"]):
        who = ", ".join([loss["member"] for loss in incident["losses"]] or incident["joined"])
        parts = [f"{name.replace('_', ' ')} {duration(part_s)}" for name, part_s in incident["phases"].items()]
        start_s = incident["began_s"] - (shown["started_s"] or 0.0)
        lines.append(
            f"  +{duration(start_s)}  {incident['title']} {who}: {duration(incident['duration_s'])}"
            f"{' (' + ', '.join(parts) + ')' if parts else ', goes on'}"
        )
    log = shown["log"]
    if log["num_damaged"] or log["num_unknown"]:
        lines.append(f"left out: damaged lines {log['num_damaged']}, unknown events {log['num_unknown']}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Say a duration to a person: `8 ms`, `1.3 s`, `2 min 5 s`, `3 h 20 min`, `5 d 2 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for unit_s, limit, large, small in ((1, 3600, "min", "s"), (60, 1440, "h", "min")):
        number = round(seconds / unit_s)
        if number < limit:
            return f"{number // 60} {large} {number % 60} {small}"
    number = round(seconds / 3600)
    return f"{number // 24} d {number % 24} h"
