"""The alerts and the dashboard that come with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.prometheus import promtool

import lightning_ft.monitoring

FOLDER = Path(lightning_ft.monitoring.__file__).parent
ALERTS = FOLDER / "alerts.yml"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
METRICS = set(re.findall(r"^\| `(ft_\w+)` \| \w+ \|", DOCUMENT, re.MULTILINE))
SUFFIXES = ("_bucket", "_sum", "_count")

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]

HEALTHY = {
    "ft_build_info": "1x120",
    "ft_suspended": "0x120",
    "ft_world_size": "4x120",
    "ft_target_world_size": "4x120",
    "ft_steps_total": "0+100x120",
    "ft_failures_total{cause='exit'}": "0x30 1x90",
    "ft_recovery_latency_seconds_sum": "0x30 0.2x90",
    "ft_recovery_latency_seconds_count": "0x30 1x90",
    "ft_goodput_ratio": "0.99x120",
    "ft_gradient_divergence": "0.000002x120",
    "ft_checkpoint_duration_p99": "5x120",
    "ft_checkpoint_interval_seconds": "300x120",
    "ft_checkpoint_last_saved_timestamp_seconds": "0+60x120",
    "ft_checkpoints_total{result='saved'}": "0+1x120",
    "ft_checkpoints_total{result='failed'}": "0x60 1x60",
    "ft_stragglers": "0x120",
    "ft_silent_nodes": "0x120",
    "ft_heartbeat_age_seconds{member='0/0'}": "1x120",
    "ft_coordinator_restarts_total": "0x60 1x60",
    "ft_event_log_lost_lines_total": "0x120",
}
"""A job that has lost a member and a checkpoint, and goes on well, for two hours: a value each minute."""

UNHEALTHY = {
    "FtTrainingStandsStill": {"ft_suspended": "0x110 1x10"},
    "FtNoProgress": {"ft_steps_total": "0+100x70 7000x50"},
    "FtEndpointGone": {"ft_build_info": "1x112 stale"},
    "FtMembersMissing": {"ft_world_size": "4x100 3x20"},
    "FtRecoverySlow": {"ft_recovery_latency_seconds_sum": "0x90 6x30"}
    | {"ft_recovery_latency_seconds_count": "0x90 1x30"},
    "FtFailuresFrequent": {
        "ft_failures_total{cause='exit'}": "0x80 3x40",
        "ft_failures_total{cause='hang'}": "0x80 3x40",
    },
    "FtCheckpointSlow": {"ft_checkpoint_duration_p99": "5x100 31x20"},
    "FtCheckpointFailing": {"ft_checkpoints_total{result='saved'}": "0+1x80 80x40"}
    | {"ft_checkpoints_total{result='failed'}": "0x100 2x20"},
    "FtCheckpointOverdue": {"ft_checkpoint_last_saved_timestamp_seconds": "0+60x80 4800x40"},
    "FtGradientDivergence": {"ft_gradient_divergence": "0.000002x119 0.00001"},
    "FtGoodputLow": {"ft_goodput_ratio": "0.99x80 0.9x40"},
    "FtStraggler": {"ft_stragglers": "0x100 1x20"},
    "FtNodeSilent": {"ft_silent_nodes": "0x110 1x10"},
    "FtHeartbeatLate": {"ft_heartbeat_age_seconds{member='0/0'}": "1x116 6 1x3"},
    "FtCoordinatorUnstable": {"ft_coordinator_restarts_total": "0x90 5x30"},
    "FtEventLogLossy": {"ft_event_log_lost_lines_total": "0x110 1x10"},
}
"""What is different if an alert fires, and no other."""


def expressions() -> Iterator[tuple[str, str]]:
    """Where one stands, and what it says."""
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    yield from ((panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"])
    yield from ((found["name"], found["expr"]) for found in dashboard["annotations"]["list"])


def test_promtool_accepts_the_rules() -> None:
    """They are what Prometheus reads."""
    promtool("check", "rules", "--lint-fatal", str(ALERTS))


def test_expressions_name_metrics_that_there_are() -> None:
    """In alerts and panels; a metric that is renamed is renamed in all."""
    for place, expression in expressions():
        for name in re.findall(r"\bft_\w+", expression):
            stem = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
            assert METRICS & {name, stem}, f"{place}: {name}"


def test_panels_lie_side_by_side() -> None:
    """None covers another."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """In its runbook; it is in the table of the documentation, with its severity."""
    assert len(rule["annotations"]["runbook"]) > 40
    assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in DOCUMENT


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Each if its metric is bad, by itself; none for a job that is well."""
    names = {rule["alert"] for rule in RULES}
    assert names == set(UNHEALTHY) == set(re.findall(r"^\| `(Ft\w+)` \|", DOCUMENT, re.MULTILINE))
    promtool("test", "rules", str(_written(tmp_path)))


def test_alert_tests_can_fail(tmp_path: Path) -> None:
    """A job that is well makes the test fail that expects an alert."""
    path = _written(tmp_path, series=HEALTHY)
    with pytest.raises(AssertionError, match="FtTrainingStandsStill"):
        promtool("test", "rules", str(path))


def _written(folder: Path, series: dict[str, str] | None = None) -> Path:
    """A file for `promtool test rules`: the healthy job, and one for each alert."""
    cases = {"": HEALTHY} | {name: series or HEALTHY | changed for name, changed in UNHEALTHY.items()}
    tests = [
        {
            "interval": "1m",
            "name": fires,
            "input_series": [{"series": _selector(name), "values": values} for name, values in values_of.items()],
            "promql_expr_test": [
                {
                    "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "2h",
                    "exp_samples": [{"labels": f'{{alertname="{fires}"}}', "value": 1}] if fires else [],
                }
            ],
        }
        for fires, values_of in cases.items()
    ]
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    return path


def _selector(name: str) -> str:
    metric, _, labels = name.partition("{")
    return f"{metric}{{job='ft',instance='node0:9464'{',' + labels if labels else '}'}"
