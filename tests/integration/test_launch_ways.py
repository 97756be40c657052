"""The ways a user starts a job: LightningCLI with YAML, Hydra, without fault tolerance, with a wrong setting."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_ft
from tests.integration import jobs
from tests.integration.test_lightning import check_data, log_rows

ALL = ("0/0", "0/1", "0/2")

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 20
  enable_progress_bar: false
  default_root_dir: {root}
  strategy:
    class_path: lightning_ft.FaultTolerantDDPStrategy
    init_args:
      min_world_size: {min_world_size}
      heartbeat_timeout: 5.0
      find_unused_parameters: false
"""


def _run(program: list[str], cwd: pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(jobs.PROGRAMS / program[0]), *program[1:]]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=90, check=False)


def test_lightning_cli_with_yaml(tmp_path: pathlib.Path) -> None:
    """A strategy configured in YAML starts its ranks and writes its event log into the run's directory."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(root=tmp_path, min_world_size=1))
    done = _run(["cli_fit.py", "fit", "--config", str(config)], tmp_path)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("lightning_logs/version_*/ft_events.jsonl")
    events = [line["event"] for line in jobs.read_lines(log)]
    assert events[0] == "job_started"
    assert events[-1] == "job_finished"


@pytest.mark.filterwarnings("default")  # of how Lightning uses jsonargparse
def test_lightning_cli_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--trainer.strategy ft_ddp` is enough."""
    arguments = ["--trainer.strategy", "ft_ddp", "--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["cli_fit.py", *arguments])
    trainer = LightningCLI(BoringModel, BoringDataModule, run=False, seed_everything_default=False).trainer
    assert type(trainer.strategy) is lightning_ft.FaultTolerantDDPStrategy
    assert trainer.world_size == 2


@pytest.mark.filterwarnings("default")  # of how Lightning uses jsonargparse
def test_lightning_cli_names_a_wrong_value(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value ends the program before anything is started, with its name."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(root=tmp_path, min_world_size=0))
    monkeypatch.setattr(sys, "argv", ["cli_fit.py", "--config", str(config)])
    with pytest.raises((SystemExit, ValueError)) as raised:
        LightningCLI(BoringModel, BoringDataModule, run=False, seed_everything_default=False)
    assert "min_world_size must be at least 1, got 0" in capsys.readouterr().err + str(raised.value)


def test_hydra(tmp_path: pathlib.Path) -> None:
    """A script that Hydra starts runs once per rank, with its overrides."""
    done = _run(["hydra_fit.py", "+steps=7", f"+out={tmp_path}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text().split()[0] for rank in range(2)] == ["7", "7"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_ranks_at_the_same_batch(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    """All ranks' SIGTERM, or Ctrl-C, is learned by all with the same commit: all end in peace, with equal weights."""
    with jobs.running_script(tmp_path, ["lightning_fit.py", "--devices", "2", "--epochs", "1000"]) as job:
        job.wait_until(lambda: len(job.records("0/1")) > 40)
        job.process.send_signal(number)
        assert job.finish() == (1 if number == signal.SIGINT else 0), job.output()  # as Lightning's own
        assert not [event for event in job.events() if event["event"] in ("failure_detected", "failed")], job.output()
        last = [[line for line in job.records(member) if line["event"] == "batch"][-1] for member in ("0/0", "0/1")]
        assert last[0]["step"] == last[1]["step"], job.output()
        assert last[0]["hash"] == last[1]["hash"]


def test_too_few_would_be_left_so_all_stop(tmp_path: pathlib.Path) -> None:
    """Two of three can't leave a job that needs two."""
    program = ["lightning_fit.py", "--devices", "3", "--epochs", "1000"]
    settings = {"LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1", "LIGHTNING_FT_MIN_WORLD_SIZE": "2"}
    with jobs.running_fit(tmp_path, 3, program, settings) as job:
        job.wait_until(lambda: len(job.records("0/1")) > 40)
        job.kill("0/0", signal.SIGTERM)
        job.kill("0/2", signal.SIGTERM)
        assert job.finish() == 0, job.output()
        last = [[line["step"] for line in job.records(member) if line["event"] == "batch"][-1] for member in ALL]
        assert len(set(last)) == 1, job.output()


def test_whoever_gets_sigterm_alone_leaves_the_others(tmp_path: pathlib.Path) -> None:
    """Between two batches, with no sample lost; it is not started again, and writes no more. Here it is rank 0."""
    member = "0/0"
    program = ["lightning_fit.py", "--devices", "3", "--epochs", "12", "--case", "batchnorm", "--test"]
    settings = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1"}
    with jobs.running_fit(tmp_path, 3, program, settings) as job:
        job.wait_until(lambda: len(job.records(member)) > 40)
        job.kill(member, signal.SIGTERM)
        assert job.finish() == 0, job.output()
        events = job.events()
        names = {event["event"] for event in events}
        assert not names & {"failure_detected", "failed", "members_admitted"}, job.output()
        assert [event["member"] for event in events if event["event"] == "member_left"] == [member], job.output()
        exits = [event["status"] for event in events if event["event"] == "member_exited"]
        assert exits == [0, 0, 0], job.output()
        assert job.records(member)[-1]["event"] == "batch"
        others = [other for other in ALL if other != member]
        assert all(job.records(other)[-1]["event"] == "end" for other in others), job.output()
        check_data(job, ("0/0", "0/1", "0/2"), 12)
        steps = [line["step"] for line in job.records(others[0]) if line["event"] == "batch"]
        assert [int(row["step"]) for row in log_rows(job, "batchnorm") if row["loss"]] == list(range(len(steps)))
