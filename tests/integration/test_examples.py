"""Each example does what it says; for SLURM's and Kubernetes' see test_nodes.py."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import fsspec
import pytest
import yaml

from tests.conformance.servers import s3_server
from tests.integration import jobs

EXAMPLES = jobs.ROOT / "examples"


def percent(text: str, output: str) -> list[float]:
    """Return the percentages that a program has printed after a text."""
    return [float(found) for found in re.findall(rf"{text}([0-9.]+)%", output)]


def test_lightning_examples(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits, the language model, LightningCLI and S3: all learn; what is to be saved is saved, and gone on with."""
    config = EXAMPLES / "lightning_cli.yaml"
    programs = {
        "digits.py": "--devices 2 --max-epochs 4",
        "language_model.py": "--devices 2 --max-steps 100",
        "lightning_cli.py": f"fit --config {config} --trainer.devices 2 --trainer.max_epochs 2",
        "s3.py": "s3://bucket/digits --devices 2 --max-epochs 1",
    }
    for name, value in {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    lines = [f"{name} {arguments}" for name, arguments in programs.items()]
    more = "s3.py s3://bucket/digits --devices 2 --max-epochs 2"
    with s3_server(tmp_path / "s3.txt") as endpoint, contextlib.chdir(tmp_path):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        fsspec.filesystem("s3").mkdir("bucket")
        with jobs.running_fit(tmp_path, 2, ["examples.py", *lines, more]) as job:
            assert job.finish(150) == 0, job.output()
            ended = [line["name"] for line in job.records("0/1") if line["event"] == "ended"]
        assert fsspec.filesystem("s3").ls("bucket/digits/manifests")
    assert ended == [*programs, "s3.py"]
    output = (tmp_path / "output.txt").read_text()
    assert percent("test accuracy: ", output) >= [80.0], output
    bits, simple = re.findall(r"([0-9.]+) bits per character; by their frequencies alone ([0-9.]+)", output)[0]
    assert float(bits) < float(simple) - 0.5, output
    (figures,) = tmp_path.glob("runs/language_model/version_*/metrics.csv")
    assert {"ft/goodput", "ft/world_size", "train_bits", "val_bits"} <= set(
        figures.read_text().split("\n")[0].split(",")
    )
    assert list(tmp_path.glob("runs/language_model/checkpoints/manifests/*00100"))
    assert list(tmp_path.glob("runs/lightning_cli/checkpoints/manifests/*"))
    steps = [int(found) for found in re.findall(r"trained (\d+) steps; the checkpoints are at s3:", output)]
    assert steps[1] == 2 * steps[0], output
    restored = [event for event in job.events() if event["event"] == "checkpoint_restored"]
    assert [event["path"].partition("/manifests")[0] for event in restored] == ["s3://bucket/digits"], job.output()


def test_the_configuration_of_lightning_cli_is_for_four() -> None:
    """What the test changes is what the command line may change: the file itself has all else."""
    trainer = yaml.safe_load((EXAMPLES / "lightning_cli.yaml").read_text())["trainer"]
    assert (trainer["devices"], trainer["strategy"]["init_args"]["min_world_size"]) == (4, 2)


def test_plain_example(tmp_path: pathlib.Path) -> None:
    """Rank 0 dies and comes back; then another in a collective that can't be finished: all go back, and on with it."""
    faults = {"LIGHTNING_FT_FAIL_AT": "0/0=commit.done@3; 0/1=all_gather.enter@2"}
    settings = {"LIGHTNING_FT_RESPAWN": "1", "LIGHTNING_FT_MIN_WORLD_SIZE": "3"}  # nobody goes on without the dead
    with jobs.running_fit(tmp_path, 3, ["examples.py", "plain_pytorch.py"], settings | faults) as job:
        assert job.finish(150) == 0, job.output()
        output = (tmp_path / "output.txt").read_text()
        assert percent("test accuracy: ", output) >= [90.0], output
        epochs = [int(found) for found in re.findall(r"^epoch (\d+) of 15", output, re.MULTILINE)]
        assert epochs == list(range(1, 16)), output
        lost = [event["member"] for event in job.events() if event["event"] == "failure_detected"]
        assert sorted(lost) == ["0/0", "0/1"], job.output()
        assert "failed" not in {event["event"] for event in job.events()}, job.output()
        assert all(job.records(member)[-1]["event"] == "ended" for member in ("0/0", "0/1", "0/2")), job.output()


def test_fabric_example(tmp_path: pathlib.Path) -> None:
    """Started as a stranger would, in a directory of his own: the process becomes the agent."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fabric_loop.py"), "--devices", "2", "--max-epochs", "6"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = percent(r"epoch \d with 2 ranks: ", done.stdout)
    assert len(accuracies) == 6, done.stdout
    assert accuracies[-1] > 85, done.stdout
    (log,) = tmp_path.glob("runs/fabric/version_*/metrics.csv")
    assert len(log.read_text().splitlines()) > 6 * 45
    assert (log.parent / "ft_events.jsonl").exists()
    assert (tmp_path / "runs/fabric/last.ckpt").exists()
