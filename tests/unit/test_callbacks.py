"""The metrics of fault tolerance, and the callback that logs them."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import Metric

from lightning_ft import FaultToleranceMonitor
from lightning_ft.comm import backend
from lightning_ft.metrics import CheckpointDuration, Goodput, GradientDivergence, RecoveryLatency

pytestmark = pytest.mark.filterwarnings("default")  # what Lightning and torchmetrics warn of, of themselves

SECONDS = st.floats(0, 1e6)


def test_lightning_is_what_was_read() -> None:
    """Its own callbacks ask the same."""
    assert "trainer._logger_connector.should_update_logs" in inspect.getsource(LearningRateMonitor.on_train_batch_start)


def merged(metrics: list[Metric]) -> Metric:
    """The first of the ranks' metrics, which is synced with the others when it computes."""
    first = metrics[0]
    columns = iter(list(zip(*(tensors(metric) for metric in metrics), strict=True)))
    first.distributed_available_fn = lambda: True
    first.dist_sync_fn = lambda _tensor, **_: list(next(columns))
    return first


def tensors(metric: Metric) -> list[torch.Tensor]:
    states = metric.metric_state.values()
    return [torch.cat(state) if isinstance(state, list) else state for state in states]  # type: ignore[arg-type]


@given(st.lists(st.lists(SECONDS, min_size=1), min_size=1, max_size=3))
def test_latency_and_duration_are_of_all_ranks(ranks: list[list[float]]) -> None:
    """A mean, and the nearest rank of all values."""
    latencies, durations = [], []
    for values in ranks:
        latency, duration = RecoveryLatency(), CheckpointDuration(0.9)
        for value in values:
            latency.update(value)
            duration.update(value)
        latencies.append(latency)
        durations.append(duration)
    flat = sorted(value for values in ranks for value in values)
    assert merged(latencies).compute() == pytest.approx(sum(flat) / len(flat))
    assert merged(durations).compute() == flat[math.ceil(0.9 * len(flat)) - 1]


def test_metrics_of_nothing() -> None:
    """No recovery took any time, and a job that has not begun has lost none; an unmade comparison says nothing."""
    assert RecoveryLatency().compute() == 0
    assert CheckpointDuration().compute() == 0
    assert Goodput().compute() == 1
    assert GradientDivergence().compute().isnan()


def test_divergence_is_the_largest() -> None:
    """NaN in a rank's gradients is as far as can be."""
    metric = GradientDivergence()
    for value in (1e-7, 0.0, 1e-6):
        metric.update(value)
    assert metric.compute() == 1e-6
    metric.update(math.nan)
    assert metric.compute() == math.inf


def test_goodput_is_what_is_not_lost() -> None:
    """Of all time that has passed; never below 0."""
    metric = Goodput()
    metric.update(total_s=90.0)
    metric.update(total_s=10.0, lost_s=20.0)
    assert metric.compute() == 0.8
    metric.update(lost_s=1000.0)
    assert metric.compute() == 0


@pytest.mark.parametrize("quantile", [0.0, -1.0, 1.5])
def test_quantile_out_of_range_is_named(quantile: float) -> None:
    """A share is above 0 and at most 1."""
    with pytest.raises(ValueError, match=f"got {quantile}"):
        CheckpointDuration(quantile)


class Reporting(BoringModel):
    """Reports as the parts of a job do, from its second batch on."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Lose a member, and save."""
        if batch_idx == 1:
            backend.report("recovered", latency_s=0.25)
            backend.report("recovered", latency_s=0.75)
            backend.report("checkpoint_saved", duration_s=2.0)
            backend.report("gradients_compared", gradient_divergence=3e-7)
        return super().training_step(batch, batch_idx)["loss"]  # type: ignore[index, no-any-return, return-value]


def test_monitor_logs_beside_the_module(tmp_path: Path) -> None:
    """In the steps that are logged, what is known by then; a fit that goes on has the numbers of its checkpoint."""
    logger = CSVLogger(tmp_path)
    options = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    monitor = FaultToleranceMonitor(prefix="job/")
    trainer = pl.Trainer(
        callbacks=[monitor], logger=logger, max_steps=4, log_every_n_steps=2, limit_val_batches=0, **options
    )
    trainer.fit(Reporting())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    table = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert [int(row["step"]) for row in table] == [1, 3], "one row for each step that is logged"
    assert [float(row["job/recovery_latency"]) for row in table] == [0.5, 0.5]
    assert [float(row["job/checkpoint_duration_p99"]) for row in table] == [2.0, 2.0]
    assert float(table[0]["job/gradient_divergence"]) == pytest.approx(3e-7)
    assert [float(row["job/recoveries"]) for row in table] == [2, 2]
    assert {float(row["job/world_size"]) for row in table} == {1}
    assert all(0 <= float(row["job/goodput"]) <= 1 for row in table)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert not backend._followers, "it follows nothing after the fit"

    resumed = FaultToleranceMonitor(prefix="job/")
    pl.Trainer(callbacks=[resumed], logger=False, enable_checkpointing=False, max_steps=4, **options).fit(
        BoringModel(), ckpt_path=tmp_path / "last.ckpt", weights_only=True
    )
    assert resumed.values()["recovery_latency"] == 0.5
    assert resumed.values()["checkpoint_duration_p99"] == 2.0
    assert float(resumed.goodput.lost_s) == 1.0
