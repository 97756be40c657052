"""What a job's metrics count, and what a scrape shows of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.prometheus import promtool

from lightning_ft.config import Settings
from lightning_ft.coordinator.chronicle import Chronicle, fold
from lightning_ft.coordinator.metrics import Histogram, JobMetrics, Pace
from lightning_ft.coordinator.metrics_endpoint import MetricsEndpoint
from lightning_ft.coordinator.metrics_families import JobCollector, Moment
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.event_log import EventLog
from lightning_ft.membership import events, machine, state
from lightning_ft.membership.events import Address

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
MEMBERS = ("0/0", "0/1", "1/0")
SETTINGS = Settings(heartbeat_timeout=5.0)


def line(time_s: float, event: str, generation: int = 1, member: str | None = None, **fields: Any) -> str:
    values = {"time": time_s, "event": event, "generation": generation, "member": member, **fields}
    return json.dumps(values) + "\n"


def recovery(time_s: float, latency_s: float, victim: str, cause: str = "exit", generation: int = 1) -> list[str]:
    """A member is lost at `time_s`, and the others go on."""
    rest = [name for name in MEMBERS if name != victim]
    facts = {"park_s": 0.25 * latency_s, "rebuild_s": 0.5 * latency_s, "settle_s": 0.125 * latency_s, "rounds": 1}
    return [
        line(time_s, "failure_detected", generation, victim, cause=cause, detail="gone", doing="", late_s=None),
        line(time_s, "view_suspended", generation, victim, reason=f"{victim} is gone"),
        line(time_s + latency_s / 2, "view_committed", generation + 1, members=rest, reason="goes on"),
        line(
            time_s + latency_s, "recovered", generation + 1, rest[0], latency_s=latency_s, step=7, redone="reduce",
            contributors=rest, **facts,
        ),
    ]  # fmt: skip


def saved(time_s: float, duration_s: float, kind: str = "delta", num_bytes: int = 10) -> str:
    fields = {"mode": "lossless", "state_bytes": 100, "blocked_s": 0.5, "path": "x", "step": 1}
    return line(time_s, "checkpoint_saved", member="0/0", kind=kind, bytes=num_bytes, duration_s=duration_s, **fields)


BEGIN = [
    line(0.0, "job_started", 0, members=list(MEMBERS), settings={}),
    *(line(1.0, "member_joined", 0, name, incarnation=1, host="h", pid=1) for name in MEMBERS),
    line(2.0, "view_committed", 1, members=list(MEMBERS), reason="all are there"),
]

STORY = [
    *BEGIN,
    *recovery(100.0, 2.0, "1/0"),
    line(110.0, "member_joined", 2, "1/0", incarnation=2, host="h", pid=2),
    line(111.0, "members_admitted", 3, "0/0", latency_s=0.5, park_s=0.0, rebuild_s=0.0, settle_s=0.25, rounds=1, step=9,
         joined=["1/0"]),
    *recovery(200.0, 4.0, "0/1", "hang", generation=3),
    saved(300.0, 1.0, "base", 1000),
    saved(310.0, 3.0),
    saved(330.0, 2.0),
    line(331.0, "checkpoint_skipped", member="0/0", step=4, reason="the last is not done yet", count=1),
    line(332.0, "checkpoint_failed", member="0/0", step=5, cause="create ENOSPC", detail="full", count=1),
    line(333.0, "checkpoint_restored", member="0/0", step=1, source="storage", steps_lost=0, duration_s=1.0, path="x"),
    line(340.0, "coordinator_restarted", 4),
    line(341.0, "gradients_compared", 4, gradient_divergence=0.0),
    line(341.0, "gradient_mismatch", 4, gradient_divergence=2e-7, members=["0/1"]),
    line(342.0, "something_new", 4, text="x"),
]  # fmt: skip


def folded(lines: Sequence[str]) -> JobMetrics:
    metrics = JobMetrics()
    for each in lines:
        metrics.add(each)
    return metrics


def trained(num: int = 3) -> state.State:
    """A job of some members in its first view, one of which was heard a second later."""
    names = MEMBERS if num == 3 else tuple(f"{number // 8}/{number % 8}" for number in range(num))
    found = state.initial(names, 0.0, 60.0)
    hellos = [(1.0, events.Hello(name, 1, 0, Address("h", 5000))) for name in names]
    parks = [(1.0, events.Parked(name, 1, 0, 0, "start")) for name in names]
    for now_s, event in [*hellos, *parks, (2.0, events.Heartbeat(names[-1], 1, 7))]:
        found, _ = machine.step(SETTINGS, found, event, now_s)
    return found


def scrape(metrics: JobMetrics, pace: Pace | None = None, found: state.State | None = None) -> str:
    found = trained() if found is None else found
    moment = Moment(found, metrics, pace or Pace(), term=2, num_lost=3, now_s=4.0, time_s=350.0)
    return JobCollector(lambda: moment).text().decode()


def of_job(text: str) -> list[str]:
    """The lines of an exposition that are not about the coordinator's process."""
    return [row for row in text.splitlines() if "process_" not in row]


def samples(text: str) -> dict[str, float]:
    """Each line of an exposition, as it is written, with its value."""
    rows = [row.rpartition(" ") for row in text.splitlines() if not row.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_scrape_shows_what_the_log_says() -> None:
    """Failures by cause, recoveries with phases, joins, checkpoints; the three headlines."""
    shown = samples(scrape(folded(STORY)))
    expected = {
        'ft_failures_total{cause="exit"}': 1,
        'ft_failures_total{cause="hang"}': 1,
        'ft_failures_total{cause="heartbeat"}': 0,
        "ft_recovery_latency_avg": 3.0,
        "ft_recovery_latency_seconds_sum": 6.0,
        "ft_recovery_latency_seconds_count": 2,
        'ft_recovery_latency_seconds_bucket{le="2.5"}': 1,
        'ft_recovery_latency_seconds_bucket{le="+Inf"}': 2,
        'ft_recovery_seconds_sum{cause="exit",phase="park"}': 0.5,
        'ft_recovery_seconds_sum{cause="exit",phase="rebuild"}': 1.0,
        'ft_recovery_seconds_sum{cause="hang",phase="settle"}': 0.5,
        'ft_recovery_seconds_sum{cause="hang",phase="catch_up"}': 0.5,
        'ft_recovery_seconds_count{cause="hang",phase="detect"}': 1,
        "ft_join_seconds_sum": 0.5,
        "ft_joins_total": 1,
        "ft_restarts_total": 1,
        "ft_checkpoint_duration_p99": 3.0,
        "ft_checkpoint_interval_seconds": 14.5,  # due at 299, 307, 328
        'ft_checkpoint_bytes_total{kind="base"}': 1000,
        'ft_checkpoint_bytes_total{kind="delta"}': 20,
        'ft_checkpoints_total{result="saved"}': 3,
        'ft_checkpoints_total{result="skipped"}': 1,
        'ft_checkpoints_total{result="failed"}': 1,
        'ft_checkpoints_total{result="restored"}': 1,
        "ft_checkpoint_blocked_seconds_total": 1.5,
        "ft_checkpoint_last_saved_timestamp_seconds": 330.0,
        "ft_gradient_divergence": 2e-7,
        "ft_gradient_mismatches_total": 1,
        "ft_gradients_not_finite_total": 0,
        "ft_coordinator_restarts_total": 1,
        "ft_event_log_lost_lines_total": 3,
        "ft_coordinator_term": 2,
        "ft_world_size": 3,
        "ft_target_world_size": 3,
        "ft_suspended": 0,
        'ft_heartbeat_age_seconds{member="0/0"}': 3.0,
        'ft_heartbeat_age_seconds{member="1/0"}': 2.0,
    }
    assert {name: shown.get(name) for name in expected} == pytest.approx(expected)
    # 2 and 4 s of failures and half a second of a join, of what passed since step 0
    assert shown["ft_goodput_ratio"] == pytest.approx(1 - 6.5 / 348.0)


def test_what_is_not_known_is_absent() -> None:
    """A mean of nothing is no 0, nor is a divergence that nobody has looked for; counters are there from the start."""
    shown = samples(scrape(JobMetrics(), found=state.initial(MEMBERS, 0.0, 60.0)))
    unknown = ("ft_recovery_latency_avg", "ft_checkpoint_duration_p99", "ft_checkpoint_interval_seconds",
               "ft_gradient_divergence", "ft_goodput_ratio", "ft_steps_total")  # fmt: skip
    assert not [name for name in shown if name.startswith(unknown)]
    assert shown["ft_world_size"] == 0
    assert shown["ft_recovery_latency_seconds_count"] == shown['ft_failures_total{cause="hang"}'] == 0


def test_damaged_lines_change_nothing() -> None:
    """Not even one whose event is known and whose fields are odd."""
    damaged = [
        "{",
        "[1]",
        '{"event": "failure_detected"}',
        line(1.0, "failure_detected", 1, None, cause="exit"),
        line(1.0, "recovered", 1, "0/0", latency_s="soon"),
        line(1.0, "members_admitted", 1, "0/0", latency_s=1.0, joined="0/1"),
        line(1.0, "checkpoint_saved", 1, "0/0", kind="base", bytes=-1, duration_s="long"),
    ]
    metrics = folded([*STORY, *damaged])
    assert metrics.history.num_damaged == len(damaged)
    assert of_job(scrape(metrics)) == of_job(scrape(folded(STORY)))


def test_percentile_is_the_nearest_rank_of_the_last_saves() -> None:
    """Of 1000 saves the ten slowest are left out, and older ones do not count."""
    metrics = JobMetrics()
    for number in range(1500):
        metrics.add(saved(10.0 * number + 10, float(number)))
    assert metrics.checkpoint_p99_s() == 500 + 990 - 1


@given(st.lists(st.floats(0, 400), max_size=30), st.floats(0, 400), st.integers(0, 5))
def test_histogram_counts_each_value_in_each_bucket_that_holds_it(values: list[float], last: float, times: int) -> None:
    """As counting by hand does."""
    histogram = Histogram((0.5, 1.0, 300.0))
    for value in values:
        histogram.observe(value)
    histogram.observe(last, times)
    values = [*values, *[last] * times]
    cumulated = list(itertools.accumulate(histogram.counts))
    assert cumulated == [sum(value <= bound for value in values) for bound in (*histogram.bounds, float("inf"))]
    assert histogram.num == len(values)
    assert histogram.total == pytest.approx(sum(values))


@given(st.data())
def test_pace_loses_no_step_and_no_time(data: st.DataObject) -> None:
    """Whoever says when how far they are: each step that ended counts once, all of them with the time that passed."""
    durations_s = data.draw(st.lists(st.floats(0.01, 10), min_size=2, max_size=20))
    ends_s = list(itertools.accumulate(durations_s))  # of steps 1, 2, ...
    heard_s = sorted(data.draw(st.lists(st.floats(0, ends_s[-1] + 5), min_size=1, max_size=40)))
    pace, first = Pace(), None
    steps = [0]
    for number, now_s in enumerate(heard_s):
        late = data.draw(st.integers(0, 1))  # a rank may be one behind
        step = max(0, sum(end_s <= now_s for end_s in ends_s) - late)
        pace.hear(str(number % 2), step, now_s)
        steps.append(max(steps[-1], step))
        if first is None and steps[-1] > 0:
            first = steps[-1] if number == 0 else 1
    assert (pace.steps(("0",)) or 0) == steps[-1]
    assert pace.seconds.num == max(0, steps[-1] - (first or 0))
    assert pace.seconds.total <= heard_s[-1] - heard_s[0] + 1e-6


def test_steps_between_two_heartbeats_share_the_time() -> None:
    """A long wait belongs to the step that it came before."""
    pace = Pace()
    for now_s, step in ((0.0, 10), (1.0, 12), (2.0, 12), (602.0, 12), (603.0, 16)):
        pace.hear("0/0", step, now_s)
    assert pace.seconds.num == 6
    assert pace.seconds.total == pytest.approx(603.0)
    assert [
        round(bound, 3) for bound, count in zip(pace.seconds.bounds, pace.seconds.counts, strict=False) if count
    ] == [
        0.25,
        0.5,
    ]
    assert pace.seconds.counts[-1] == 1


def test_steps_are_told_once_all_members_were_heard() -> None:
    """One that is a step behind what was told before would look as if all began anew."""
    pace = Pace()
    pace.hear("0/0", 99, 0.0)
    assert pace.steps(MEMBERS) is None
    for name in MEMBERS[1:]:
        pace.hear(name, 100, 1.0)
    assert pace.steps(MEMBERS) == 100
    assert pace.steps((*MEMBERS, "1/1")) == 100, "a joiner makes it unknown no more"


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric in the table."""
    rows = re.findall(r"^\| `(ft_\w+)` \| (\w+) \|([^|]*)\|", DOCUMENT, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_table_is_that_of_the_code() -> None:
    """Each metric is documented with its type and its labels, and no other."""
    pace = Pace()
    for name in MEMBERS:
        pace.hear(name, 1, 0.0)
    found = {}
    for family in text_string_to_metric_families(scrape(folded(STORY), pace)):
        if not family.name.startswith("ft_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = (family.type, labels - {"le"})
    assert found == documented()


def test_promtool_finds_nothing_to_object_to() -> None:
    """Names, types, help texts and the format are as Prometheus has them."""
    pace = Pace()
    for name in MEMBERS:
        pace.hear(name, 1, 0.0)
    promtool("check", "metrics", text=scrape(folded(STORY), pace))


@given(st.integers(0, len(STORY)), st.integers(0, len(STORY)))
def test_chronicle_counts_each_line_once(num_before: int, num_read: int) -> None:
    """Those that an earlier coordinator wrote, and those that come while the file is read, in it already or not."""
    log = EventLog(clock=lambda: 0.0)
    chronicle = Chronicle(log)
    num_read = max(num_before, num_read)
    for each in STORY[num_before:]:
        log.append(each)
    chronicle._take(folded(STORY[:num_read]), set(STORY[:num_read]))
    assert of_job(scrape(chronicle.metrics)) == of_job(scrape(folded(STORY)))
    log.append(saved(400.0, 1.0))
    assert chronicle.metrics.checkpoints["saved"] == 4


def test_chronicle_without_the_file_keeps_no_lines_for_it(tmp_path: Path) -> None:
    """It counts what comes from now on, and waits for no file: a coordinator may run for months."""

    async def run() -> Chronicle:
        log = EventLog(tmp_path, clock=lambda: 0.0)  # a directory
        chronicle = Chronicle(log)
        log.append(saved(300.0, 1.0))
        chronicle.begin(is_resumed=True)
        async with asyncio.timeout(30):
            while chronicle._followed:
                await asyncio.sleep(0.001)
        log.append(saved(400.0, 1.0))
        log.close()
        return chronicle

    chronicle = asyncio.run(run())
    assert chronicle.metrics.checkpoints["saved"] == 2
    assert not chronicle._followed


def test_fold_takes_the_last_run_in_a_file(tmp_path: Path) -> None:
    """A job that is started again appends to its event log; its counters begin anew."""
    path = tmp_path / "events.jsonl"
    path.write_text("".join([*STORY, *STORY[: len(BEGIN) + 4]]))
    metrics, lines = fold(path)
    assert metrics.failures["exit"] == 1
    assert metrics.failures["hang"] == 0
    assert set(STORY) == set(lines)


async def get(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    """Status, content type and text, as soon as somebody listens."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    return response.status, response.headers["Content-Type"], await response.text()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.001)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_coordinator_serves_what_it_knows(tmp_path: Path) -> None:
    """In Prometheus' text format; heartbeats make the steps."""

    async def play() -> None:
        port = free_port()
        server = CoordinatorServer(Settings(metrics_port=port), ["0/0"], "secret", EventLog(tmp_path / "events.jsonl"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server.start(listener)
            for event in (
                events.Hello("0/0", 1, 0, Address("127.0.0.1", 1)),
                events.Parked("0/0", 1, 0, 0, "start"),
                events.Heartbeat("0/0", 1, 12),
            ):
                server._on_member_message(event)
            status, kind, text = await get(port)
            missing, _, _ = await get(port, "/")
            await server.stop()
        assert (status, missing, kind) == (200, 404, "text/plain; version=0.0.4; charset=utf-8")
        shown = samples(text)
        assert (shown["ft_steps_total"], shown["ft_world_size"], shown["ft_generation"]) == (12, 1, 1)
        assert shown["process_start_time_seconds"] > 0

    asyncio.run(play())


def test_port_that_is_taken_is_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once, and had as soon as it is free."""
    monkeypatch.setattr("lightning_ft.coordinator.metrics_endpoint._PAUSE_S", 0.01)

    async def play() -> str:
        with socket.create_server(("127.0.0.1", 0)) as other:
            endpoint = MetricsEndpoint("127.0.0.1", other.getsockname()[1], lambda: b"ft_x 1\n")
            await endpoint.start()
            while not caplog.records:
                await asyncio.sleep(0.001)
            port = other.getsockname()[1]
        _, _, text = await get(port)
        await endpoint.stop()
        return text

    assert asyncio.run(play()) == "ft_x 1\n"
    assert [record.message.partition(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "Metrics can't be served on 127.0.0.1"
    ]
