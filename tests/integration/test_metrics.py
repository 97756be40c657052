"""A real Prometheus scrapes a real job, and shows what the job's event log says."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.integration import jobs
from tests.prometheus import program

HOLD_TO_KILL, HOLD_TO_LOOK = 10, 30


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def prometheus(folder: pathlib.Path, target: int) -> Iterator[str]:
    """Run one that scrapes a port of this host ten times a second; its address."""
    port = free_port()
    (folder / "prometheus.json").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "100ms"},
                "scrape_configs": [{"job_name": "ft", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
            }
        )
    )
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(address: str, query: str) -> dict[str, float]:
    """Return the newest value of each series, by its labels as Prometheus writes them."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310 - ours
            body: dict[str, Any] = json.load(response)
    except OSError:  # it is starting still
        return {}
    found = {}
    for series in body["data"]["result"]:
        labels = {key: text for key, text in series["metric"].items() if key not in ("__name__", "job", "instance")}
        name = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
        found[f"{series['metric']['__name__']}{{{name}}}"] = float(series["value"][1])
    return found


def expected(events: list[dict[str, Any]]) -> dict[str, float]:
    """What a scrape shows, according to the event log alone."""
    recovered = list({event["generation"]: event for event in events if event["event"] == "recovered"}.values())
    lost = Counter(event["cause"] for event in events if event["event"] == "failure_detected")
    latency_s = sum(event["latency_s"] for event in recovered)
    members = [event["members"] for event in events if event["event"] == "view_committed"][-1]
    found = {
        f"ft_failures_total{{cause={cause}}}": lost[cause]
        for cause in ("exit", "connection", "heartbeat", "hang", "slow")
    }
    cause = next(iter(lost))
    for name in ("park", "rebuild", "settle"):
        found[f"ft_recovery_seconds_sum{{cause={cause},phase={name}}}"] = sum(each[f"{name}_s"] for each in recovered)
    return found | {
        f"ft_recovery_seconds_count{{cause={cause},phase=settle}}": len(recovered),
        "ft_recovery_latency_seconds_sum{}": latency_s,
        "ft_recovery_latency_seconds_count{}": len(recovered),
        "ft_recovery_latency_avg{}": latency_s / len(recovered),
        "ft_world_size{}": len(members),
        "ft_generation{}": max(event["generation"] for event in events),
        "ft_target_world_size{}": 3,
        "ft_suspended{}": 0,
        "ft_joins_total{}": 0,
        "ft_coordinator_restarts_total{}": sum(event["event"] == "coordinator_restarted" for event in events),
    }


def test_scrapes_show_what_the_event_log_says(tmp_path: pathlib.Path) -> None:
    """Of a job that loses a member by SIGKILL, and then its coordinator: whose successor goes on counting."""
    port = free_port()
    settings = {"LIGHTNING_FT_METRICS_PORT": str(port), "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1"}
    program_and_arguments = ["plain_loop.py", "40", "--hold", str(HOLD_TO_KILL), str(HOLD_TO_LOOK)]
    with (
        prometheus(tmp_path, port) as address,
        jobs.running(tmp_path / "job", 3, program_and_arguments, settings) as job,
    ):

        def holds(step: int, members: tuple[str, ...]) -> bool:
            shown = ask(address, '{__name__=~"ft_steps_total|ft_heartbeat_age_seconds"}')
            heard = {f"ft_heartbeat_age_seconds{{member={name}}}" for name in members}
            return shown.get("ft_steps_total{}") == step and heard <= set(shown)

        def agrees() -> bool:
            told = expected(job.events())
            shown = ask(address, '{__name__=~"ft_.*"}')
            return {name: shown.get(name) for name in told} == pytest.approx(told)

        job.wait_until(lambda: holds(HOLD_TO_KILL, ("0/0", "0/1", "0/2")))
        job.kill("0/1")
        (job.out / f"go-{HOLD_TO_KILL}").touch()
        job.wait_until(lambda: holds(HOLD_TO_LOOK, ("0/0", "0/2")))
        job.wait_until(agrees)
        shown = ask(address, '{__name__=~"ft_.*"}')
        assert sum(value for name, value in shown.items() if name.startswith("ft_failures_total")) == 1
        assert HOLD_TO_LOOK - HOLD_TO_KILL <= shown["ft_step_seconds_count{}"] < HOLD_TO_LOOK
        assert 0 < shown["ft_goodput_ratio{}"] <= 1
        assert shown["ft_step_seconds_sum{}"] >= shown["ft_recovery_latency_seconds_sum{}"]

        (coordinator,) = [
            child for child in psutil.Process(job.process.pid).children()
            if any("coordinator.standalone" in part for part in child.cmdline())
        ]  # fmt: skip
        os.kill(coordinator.pid, signal.SIGKILL)
        job.wait_until(lambda: any(event["event"] == "coordinator_restarted" for event in job.events()))
        job.wait_until(agrees)
        job.wait_until(lambda: holds(HOLD_TO_LOOK, ("0/0", "0/2")))
        (job.out / f"go-{HOLD_TO_LOOK}").touch()
        assert job.finish() == 0, job.output()
        resets = ask(address, "label_replace(resets(ft_steps_total[5m]), '__name__', 'resets', '', '')")
        assert resets == {"resets{}": 0}, "it has never gone back"
