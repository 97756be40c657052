"""Any event log, whole or cut off, with any damage, against a twin that looks at all lines for each question."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given

from lightning_ft.history.fold import add, histories
from lightning_ft.history.state import PHASES, History, MemberState, Outcome

IDS = ("0/0", "0/1", "1/0", "1/1")

members = st.sampled_from(IDS)
views = st.lists(members, min_size=1, unique=True)
seconds = st.floats(0, 30)
causes = st.sampled_from(["exit", "connection", "heartbeat", "hang", "slow"])


def _event(name: str, *, about: bool = False, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    common = {"event": st.just(name), "member": members if about else st.none(), "generation": st.integers(0, 9)}
    return st.fixed_dictionaries(common | fields)


_times = {"latency_s": seconds, "park_s": seconds, "rebuild_s": seconds, "settle_s": seconds}
_counts = {"rounds": st.integers(1, 3), "step": st.integers(0, 99)}

known = st.one_of(
    _event("job_started", members=views, settings=st.just({"spares": 1})),
    _event("member_joined", about=True, incarnation=st.integers(1, 3), host=st.just("node"), pid=st.integers(1, 99)),
    _event("spare_ready", about=True, incarnation=st.integers(1, 3), host=st.just("node"), pid=st.integers(1, 99)),
    _event(
        "failure_detected",
        about=True,
        cause=causes,
        detail=st.text(),
        late_s=st.none() | seconds,
        detect_s=st.none() | seconds,
    ),
    _event("view_suspended", about=True, reason=st.sampled_from(["0/1 parked: join", "0/0 is gone"])),
    _event("view_committed", members=views, reason=st.text()),
    _event("view_committed", members=views, reason=st.text()),
    _event("recovered", about=True, **_times, **_counts),
    _event("members_admitted", about=True, **_times, **_counts, joined=views),
    _event("link_failed", about=True, peer=members),
    _event("training_started", about=True),
    _event("quorum_missing", reason=st.text()),
    _event("member_left", about=True, detail=st.text()),
    _event("member_exited", about=True, status=st.integers(-15, 3), detail=st.text()),
    _event("job_stopped", reason=st.text()),
    _event("job_finished", status=st.integers(0, 143)),
    _event("straggler_detected", about=True),
    _event("straggler_recovered", about=True),
    _event("gradient_mismatch", members=views),
    _event("gradients_compared", step=st.integers(0, 9)),
    _event("node_silent", node=st.integers(0, 2), late_s=seconds),
    _event("failed", about=True, exception=st.text()),
    _event(
        "checkpoint_saved", about=True, kind=st.text(), bytes=st.integers(0, 10**12), duration_s=st.none() | seconds
    ),
    _event("checkpoint_failed", about=True, count=st.integers(1, 3)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
unknown = st.fixed_dictionaries(
    {"event": st.just("of_a_later_version"), "generation": st.integers(0, 9), "member": st.none() | st.text()},
    optional={"members": json_values, "detail": json_values},
)


@st.composite
def logs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw events of one run in any order; the first two make it likely that something trains."""
    events = [draw(_event("job_started", members=views)), draw(_event("view_committed", members=views))]
    events += [event for event in draw(st.lists(known, max_size=20)) if event["event"] != "job_started"]
    now_s = 1000.0
    for event in events:
        now_s += draw(st.floats(0, 20))
        event["time"] = now_s
    return events


def fold(events: Sequence[dict[str, Any] | str | bytes]) -> History:
    """Fold events, or lines."""
    history = History()
    for event in events:
        add(history, json.dumps(event) if isinstance(event, dict) else event)
    return history


def facts(history: History) -> dict[str, Any]:
    """All that a history says, but for what it counts and repeats."""
    left_out = ("num_events", "num_unknown", "num_damaged", "sentences", "started_s", "last_s", "_ended")
    return {name: value for name, value in vars(history).items() if name not in left_out}


class Twin:
    """The same questions, each answered from all events."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        recoveries = [event for event in events if event["event"] in ("recovered", "members_admitted")]
        again = [event for last, event in itertools.pairwise(recoveries) if {**last, "time": event["time"]} == event]
        self.events = [event for event in events if not any(event is other for other in again)]

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in names]

    def state(self, member: str) -> MemberState | None:
        """The last event that says where it is; an exit says nothing of whom nobody waits for."""
        said: list[MemberState] = []
        for event in self.events:
            name, about = event["event"], event["member"] == member
            if name == "job_started" and member in event["members"]:
                said.append(MemberState.EXPECTED)
            if name == "view_committed" and member in event["members"]:
                said.append(MemberState.ACTIVE)
            if about and name in _SAYS:
                said.append(_SAYS[name])
            if about and name.startswith("straggler"):
                said.append(said[-1] if said else MemberState.EXPECTED)
        kept: list[MemberState] = []
        for state in said:
            if not (state is MemberState.ENDED and kept and kept[-1] in (MemberState.LOST, MemberState.LEFT)):
                kept.append(state)
        return kept[-1] if kept else None

    def pauses(self) -> list[tuple[float, float | None]]:
        """When the view was suspended, from the failure on."""
        found: list[list[Any]] = []
        has_view, stop = False, None
        for event in self.events:
            name, now_s = event["event"], event["time"]
            is_open = bool(found) and found[-1][1] is None
            if name == "view_committed":
                has_view = True
                if stop is not None and found and found[-1][2]:
                    found[-1][1:] = [None, False]
                stop = None
            elif name in ("failure_detected", "view_suspended") and has_view and stop is None and not is_open:
                is_late = event.get("cause") in ("connection", "heartbeat", "hang")
                blind_s = event.get("detect_s")
                if blind_s is None:
                    blind_s = event["late_s"] or 0.0 if is_late else 0.0
                found.append([now_s - blind_s, None, False])
            elif name in ("recovered", "members_admitted"):
                noticed_s = now_s - event["latency_s"]
                if not is_open:
                    found.append([noticed_s, None, False])
                found[-1][:2] = [min(found[-1][0], noticed_s), now_s]
            elif name in ("job_stopped", "job_finished"):
                stop = now_s if stop is None else stop
                if is_open:
                    found[-1][1:] = [now_s, True]
        return [(first_s, last_s) for first_s, last_s, _ in found]

    def end_s(self, now_s: float) -> float:
        """The first word of its end since the last view."""
        ends = []
        for event in self.events:
            if event["event"] == "view_committed":
                ends = []
            if event["event"] in ("job_stopped", "job_finished"):
                ends.append(event["time"])
        return min([now_s, *ends[:1]])

    def shares(self, now_s: float) -> tuple[float, float] | None:
        """Goodput and capacity: each piece of time between two events is looked at in its middle."""
        committed = self.named("view_committed")
        end_s = self.end_s(now_s)
        if not committed or committed[0]["time"] >= end_s:
            return None
        since_s = next((event["time"] for event in self.named("training_started")), committed[0]["time"])
        if since_s >= end_s:
            return None
        pauses = [(first_s, end_s if last_s is None else last_s) for first_s, last_s in self.pauses()]
        edges = {since_s, end_s, *(edge for pause in pauses for edge in pause), *(line["time"] for line in self.events)}
        marks = sorted(edge for edge in edges if since_s <= edge <= end_s)
        good_s = had_s = 0.0
        for first_s, last_s in itertools.pairwise(marks):
            middle_s = (first_s + last_s) / 2
            good_s += (last_s - first_s) * (not any(began_s < middle_s < ended_s for began_s, ended_s in pauses))
            view = [event for event in committed if event["time"] <= first_s][-1]
            had_s += (last_s - first_s) * self.num_there(view, first_s) / self.target(view)
        return good_s / (end_s - since_s), had_s / (end_s - since_s)

    def num_there(self, view: dict[str, Any], now_s: float) -> int:
        """How many of a view had not been given up yet."""
        later = self.events[self.events.index(view) + 1 :]
        lost = {line["member"] for line in later if line["event"] == "failure_detected" and line["time"] <= now_s}
        return len({*view["members"]} - lost)

    def target(self, until: dict[str, Any]) -> int:
        """How many members the job should have at a view."""
        target, seen, stopped = 0, set(), False
        for event in self.events:
            if event["event"] == "job_started":
                target = len(event["members"])
                seen |= {*event["members"]}
            if event["event"] == "member_left" and event["member"] in seen and not stopped:
                target = max(0, target - 1)
            if event["event"] in ("job_stopped", "job_finished"):
                stopped = True
            if event["event"] == "view_committed":
                target, stopped = max(target, len(event["members"]), 1), False
                seen |= {*event["members"]}
            if event["member"] and event["event"] in (*_SAYS, "straggler_detected", "straggler_recovered"):
                seen.add(event["member"])
            if event is until:
                break
        return target


_SAYS = {
    "member_joined": MemberState.ACTIVE,
    "spare_ready": MemberState.SPARE,
    "failure_detected": MemberState.LOST,
    "member_left": MemberState.LEFT,
    "member_exited": MemberState.ENDED,
}


def close(one: float | None, other: float | None) -> bool:
    """Whether two shares are equal but for rounding."""
    return one is other is None or (one is not None and other is not None and abs(one - other) < 1e-6)


@given(logs(), st.floats(0, 100))
def test_history_agrees_with_a_naive_twin(events: list[dict[str, Any]], more_s: float) -> None:
    """States of members, incidents, goodput and capacity are what all lines together say, at any later moment."""
    history, twin, now_s = fold(events), Twin(events), events[-1]["time"] + more_s
    assert history.num_events == len(events)
    assert history.num_damaged == history.num_unknown == 0
    assert {member.member: member.state for member in history.members.values()} == {
        member: state for member in IDS if (state := twin.state(member)) is not None
    }
    found = [(incident.began_s, incident.ended_s) for incident in history.incidents]
    assert found == twin.pauses()
    shares = twin.shares(now_s) or (None, None)
    assert close(history.goodput(now_s), shares[0])
    assert close(history.capacity(now_s), shares[1])


@given(logs())
def test_phases_add_up_to_the_incident(events: list[dict[str, Any]]) -> None:
    """However odd the figures, no phase is negative, and all of them are the time for which training stood still."""
    history = fold(events)
    for incident in history.incidents:
        assert all(value >= 0 for value in incident.phases.values())
        if incident.outcome in (Outcome.RECOVERED, Outcome.ADMITTED):
            assert tuple(incident.phases) == PHASES
            assert abs(sum(incident.phases.values()) - incident.duration_s(0.0)) < 1e-6
            assert incident.restored_s is None or incident.restored_s >= incident.noticed_s


@given(logs(), st.data())
def test_any_prefix_is_a_history(events: list[dict[str, Any]], data: st.DataObject) -> None:
    """A log that is cut off, in the middle of a line too, says what its whole lines say; what is over stays."""
    text = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    end = data.draw(st.integers(0, len(text)))
    lines = text[:end].splitlines(keepends=True)
    (history,) = histories(lines)
    num_whole = text[:end].count(b"\n")
    is_torn = bool(text[:end]) and not text[:end].endswith(b"\n") and history.num_damaged == 1
    assert history.num_events == len(lines) - is_torn
    assert history.num_events >= num_whole
    later = fold(events)
    for before, after in zip(history.incidents, later.incidents, strict=False):
        if before.outcome in (Outcome.RECOVERED, Outcome.ADMITTED):
            assert dataclasses.replace(before, restored_s=None) == dataclasses.replace(after, restored_s=None)


damage = st.one_of(
    st.text(),
    st.binary(),
    json_values.map(json.dumps),
    known.map(json.dumps),  # without a time
    known.map(lambda event: json.dumps(event | {"time": 1e300})),
    known.map(lambda event: json.dumps(event | {"time": 5, "generation": -1})),
    st.builds(
        lambda event, bad: json.dumps({"time": 5, "generation": 1, **dict.fromkeys(event[2:], bad)} | dict(event[:2])),
        st.sampled_from(
            [
                (("event", "view_committed"), ("member", None), "members"),
                (("event", "recovered"), ("member", "0/0"), "latency_s"),
                (("event", "recovered"), ("member", "0/0"), "latency_s", "step"),
                (("event", "member_left"), ("member", "0/0"), "detail"),
                (("event", "node_silent"), ("member", None), "node"),
                (("event", "job_stopped"), ("member", None), "reason"),
            ]
        ),
        st.sampled_from([True, [1], [[]], {}, {"a": 1}, -1.5]),
    ),
    st.sampled_from(["failure_detected", "member_joined", "straggler_detected"]).map(
        lambda name: json.dumps({"time": 5, "event": name, "generation": 1, "member": None})
    ),
)


@given(logs(), st.lists(st.tuples(st.integers(0, 30), damage | unknown)))
@example([], [(0, "[" * 100_000)])
@example([], [(0, '{"time": 1, "event": "x", "generation": 1, "member": null, "a": ' + "[" * 900 + "]" * 900 + "}")])
def test_what_is_not_understood_changes_nothing(
    events: list[dict[str, Any]], noise: list[tuple[int, dict[str, Any] | str | bytes]]
) -> None:
    """Damaged lines and unknown events, wherever they stand, are counted and have no other effect."""
    noisy: list[Any] = [*events]
    for position, line in noise:
        noisy.insert(position, line | {"time": 1e9} if isinstance(line, dict) else line)
    history, clean = fold(noisy), fold(events)
    assert facts(history) == facts(clean)
    assert history.num_events == clean.num_events
    assert history.num_damaged + history.num_unknown == len(noise)
    assert history.num_unknown >= sum(isinstance(line, dict) for _, line in noise)


@given(logs(), st.permutations(IDS))
def test_the_order_of_members_does_not_matter(events: list[dict[str, Any]], order: list[str]) -> None:
    """Under other names in another order everybody has the same history."""
    names = dict(zip(IDS, order, strict=True))

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return names.get(value, value) if isinstance(value, str) else value

    other = fold([{name: renamed(value) for name, value in event.items()} for event in events])
    history, now_s = fold(events), events[-1]["time"] + 1
    assert {names[name]: member.state for name, member in history.members.items()} == {
        name: member.state for name, member in other.members.items()
    }
    assert history.goodput(now_s) == other.goodput(now_s)
    assert history.capacity(now_s) == other.capacity(now_s)
    assert [incident.phases for incident in history.incidents] == [incident.phases for incident in other.incidents]


@given(st.lists(logs(), min_size=1, max_size=3))
def test_each_run_in_a_file_has_its_own_history(runs: list[list[dict[str, Any]]]) -> None:
    """A job that is started again appends to its log; its runs do not mix."""
    found = histories(json.dumps(event) for events in runs for event in events)
    assert [facts(history) for history in found] == [facts(fold(events)) for events in runs]
