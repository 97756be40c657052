"""A job's metrics in Prometheus' words (docs/metrics.md): names, types, labels, help."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lightning_ft.coordinator.metrics import Histogram, JobMetrics, Pace
from lightning_ft.membership.state import Phase, State, Status

_IN_THE_RING = (Status.RUNNING, Status.PARKED, Status.LEAVING)


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """All that a scrape shows.

    Attributes:
        state: The core's.
        metrics: From the event log.
        pace: From heartbeats.
        term: The coordinator's.
        num_lost: Lines that the event log lost.
        now_s: The coordinator's monotonic clock.
        time_s: Unix seconds.
    """

    state: State
    metrics: JobMetrics
    pace: Pace
    term: int
    num_lost: int
    now_s: float
    time_s: float


class JobCollector(Collector):
    """Makes the families anew for each scrape, in a registry of its own.

    Args:
        look: Returns what there is now.
    """

    def __init__(self, look: Callable[[], Moment]) -> None:
        self._look = look
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # the coordinator's own

    def collect(self) -> Iterator[Metric]:
        """Yield all families; one of which nothing is known yet is left out."""
        yield from families(self._look())

    def text(self) -> bytes:
        """Return the exposition, in version 0.0.4 of the text format."""
        return generate_latest(self._registry)


def families(moment: Moment) -> Iterator[Metric]:
    """Yield a job's families; one of which nothing is known yet is left out."""
    yield from _headlines(moment.metrics)
    yield from _job(moment)
    yield from _recoveries(moment.metrics)
    yield from _steps(moment)
    yield from _checkpoints(moment.metrics)
    yield from _members(moment)
    yield from _coordinator(moment)


def _headlines(metrics: JobMetrics) -> Iterator[Metric]:
    yield from _gauge(
        "ft_recovery_latency_avg",
        "Mean seconds from rank 0's noticing of a failure until training goes on. Should be below 5.",
        metrics.latency_avg_s(),
    )
    yield from _gauge(
        "ft_checkpoint_duration_p99",
        "Seconds that 99 % of the last 1000 saved checkpoints did not exceed. "
        "Should be below a tenth of ft_checkpoint_interval_seconds.",
        metrics.checkpoint_p99_s(),
    )
    yield from _gauge(
        "ft_checkpoint_interval_seconds",
        "Median of the last 100 intervals between two saves.",
        metrics.checkpoint_interval_s(),
    )
    yield from _gauge(
        "ft_gradient_divergence",
        "Largest relative difference of the reduced gradients when ranks last compared them. Should be below 1e-5.",
        metrics.divergence,
    )


def _job(moment: Moment) -> Iterator[Metric]:
    state, history = moment.state, moment.metrics.history
    is_over, tally = state.phase is Phase.STOPPED, state.tally
    size = 0 if is_over or state.generation == 0 else tally.running + tally.parked + tally.leaving
    yield from _gauge("ft_world_size", "Members of the current view that are in the job.", size)
    yield from _gauge("ft_target_world_size", "Members that the job should have.", state.target)
    yield from _gauge("ft_generation", "Number of the current view.", state.generation)
    is_suspended = state.generation > 0 and state.phase is Phase.SUSPENDED
    yield from _gauge("ft_suspended", "1 while training stands still for a change of members, else 0.", is_suspended)
    yield from _gauge("ft_spares", "Processes that are ready to join and wait for a place.", len(state.joiners))
    yield from _gauge(
        "ft_goodput_ratio",
        "Share of the time since the first step in which the job made progress.",
        history.goodput(moment.time_s),
    )
    yield from _gauge(
        "ft_capacity_ratio",
        "Share of its members that the job had on average since the first step.",
        history.capacity(moment.time_s),
    )


def _recoveries(metrics: JobMetrics) -> Iterator[Metric]:
    counts, members = metrics.counts, metrics.history.members.values()
    yield from _counter("ft_failures", "Members that were lost.", metrics.failures, "cause")
    phases = HistogramMetricFamily(
        "ft_recovery_seconds", "Duration of each phase of a recovery; they add up to it.", labels=("cause", "phase")
    )
    for labels, histogram in metrics.phases.items():
        _fill(phases, labels, histogram)
    yield phases
    yield from _histogram(
        "ft_recovery_latency_seconds",
        "From rank 0's noticing of a failure until training goes on.",
        metrics.latency,
    )
    yield from _histogram("ft_join_seconds", "How long training was held up by who joined.", metrics.joins)
    yield from _counter("ft_joins", "Members that joined while the job ran.", counts["joined"])
    yield from _counter("ft_joins_declined", "Processes that asked to join and could not.", counts["join_declined"])
    yield from _counter("ft_leaves", "Members that left in peace while others went on.", counts["member_left"])
    restarts = sum(member.restarts for member in members)
    yield from _counter("ft_restarts", "Processes of members that were started again, and came.", restarts)
    yield from _counter("ft_exceptions", "Processes that ended with an exception.", counts["failed"])
    mismatches, not_finite = counts["gradient_mismatch"], counts["gradient_not_finite"]
    yield from _counter("ft_gradient_mismatches", "Steps in which ranks did not hold the same.", mismatches)
    yield from _counter("ft_gradients_not_finite", "Times that ranks began to have NaN or Inf.", not_finite)
    yield from _counter("ft_link_failures", "Connections between live members that broke.", counts["link_failed"])
    yield from _counter(
        "ft_evaluations_incomplete",
        "Validations, tests and predictions that do not cover all of their data.",
        counts["evaluation_incomplete"],
    )


def _steps(moment: Moment) -> Iterator[Metric]:
    steps = moment.pace.steps(moment.state.view.members)
    if steps is not None:
        yield from _counter("ft_steps", "Gradient steps that the job has committed.", steps)
    yield from _histogram("ft_step_seconds", "From the commit of a step to that of the next.", moment.pace.seconds)


def _checkpoints(metrics: JobMetrics) -> Iterator[Metric]:
    yield from _counter("ft_checkpoints", "Checkpoints, by what came of them.", metrics.checkpoints, "result")
    yield from _counter("ft_checkpoint_bytes", "Bytes stored for checkpoints.", metrics.checkpoint_bytes, "kind")
    yield from _histogram(
        "ft_checkpoint_duration_seconds", "From the moment a checkpoint was due until it was saved.", metrics.saves
    )
    yield from _counter(
        "ft_checkpoint_blocked_seconds", "How long training stood still for checkpoints.", metrics.checkpoint_blocked_s
    )
    yield from _gauge(
        "ft_checkpoint_last_saved_timestamp_seconds", "When the last checkpoint was saved.", metrics.saved_s
    )


def _members(moment: Moment) -> Iterator[Metric]:
    state, clock_s = moment.state, moment.state.clock_s(moment.now_s)
    ages = GaugeMetricFamily(
        "ft_heartbeat_age_seconds", "Time since a member of the view was last heard.", labels=("member",)
    )
    num_slow = 0
    for name in state.view.members:
        member = state.members[name]
        if member.status in _IN_THE_RING and state.is_current(member):
            num_slow += member.is_straggler
            if member.last_heard_s is not None:
                ages.add_metric((name,), max(0.0, clock_s - member.last_heard_s))
    yield ages
    yield from _gauge("ft_stragglers", "Members that hold all others up.", num_slow)
    yield from _gauge("ft_silent_nodes", "Nodes whose agent is not heard of.", len(moment.metrics.history.silent_nodes))


def _coordinator(moment: Moment) -> Iterator[Metric]:
    yield from _gauge("ft_coordinator_term", "Of the coordinator; 0: it can have no successor.", moment.term)
    yield from _counter(
        "ft_coordinator_restarts",
        "Coordinators that went on from what the last one had decided.",
        moment.metrics.counts["coordinator_restarted"],
    )
    yield from _counter("ft_event_log_lost_lines", "Lines that could not be written.", moment.num_lost)
    build = GaugeMetricFamily("ft_build_info", "Version of lightning_ft; always 1.", labels=("version",))
    build.add_metric((_version(),), 1)
    yield build


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("lightning-ft")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _gauge(name: str, help_text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, help_text, value=float(value))


def _counter(
    name: str, help_text: str, value: float | Mapping[str, float], label: str | None = None
) -> Iterator[Metric]:
    if not isinstance(value, Mapping):
        yield CounterMetricFamily(name, help_text, value=value)
        return
    family = CounterMetricFamily(name, help_text, labels=(label or "",))
    for key, count in value.items():
        family.add_metric((key,), count)
    yield family


def _histogram(name: str, help_text: str, histogram: Histogram) -> Iterator[Metric]:
    family = HistogramMetricFamily(name, help_text, labels=())
    _fill(family, (), histogram)
    yield family


def _fill(family: Any, labels: Iterable[str], histogram: Histogram) -> None:
    buckets, cumulated = [], 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        cumulated += count
        buckets.append((f"{bound:g}" if bound != float("inf") else "+Inf", cumulated))
    family.add_metric(tuple(labels), buckets=buckets, sum_value=histogram.total)
