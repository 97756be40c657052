"""A callback that logs how well a fit stands failures.

Read in lightning 2.6.6 (tests/unit/test_callbacks.py fails clearly if it changes):
`trainer._logger_connector.should_update_logs`, as Lightning's own callbacks use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_ft.comm import backend
from lightning_ft.metrics import CheckpointDuration, Goodput, GradientDivergence, RecoveryLatency


class FaultToleranceMonitor(Callback):
    """Logs recoveries, checkpoints and goodput through the Trainer's loggers, beside what the module logs.

    `recovery_latency` (seconds, mean), `checkpoint_duration_p99` (seconds), `gradient_divergence`, `goodput` (0 to 1),
    `recoveries` and `world_size`, each after the prefix, at every step that is logged; what has not happened yet is
    left out. They are what the rank that logs has seen: a rank that comes back goes on with the numbers of another one,
    a fit that is resumed with those of the checkpoint; what checkpoints take, only rank 0 knows, which saves them.

    Args:
        prefix: Before each name.

    Attributes:
        recovery_latency: From the noticing of each failure until training went on.
        checkpoint_duration: Of `DeltaCheckpoint`'s saves.
        gradient_divergence: Of comparisons of the gradients.
        goodput: Of the time since the fit began, without the recoveries and what joins held up.
    """

    def __init__(self, prefix: str = "ft/") -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._last_s = time.monotonic()
        # Each rank has seen what there was: no collective, which would cost time, and break with the next failure.
        self.recovery_latency = RecoveryLatency(sync_on_compute=False)
        self.checkpoint_duration = CheckpointDuration(sync_on_compute=False)
        self.gradient_divergence = GradientDivergence(sync_on_compute=False)
        self.goodput = Goodput(sync_on_compute=False)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_s = time.monotonic()
        backend.unfollow(self.take)
        backend.follow(self.take)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        backend.unfollow(self.take)

    def take(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in what this process reports; from any thread."""
        with self._lock:
            if event in ("recovered", "members_admitted"):
                self.goodput.update(lost_s=float(fields["latency_s"]))
            if event == "recovered":
                self.recovery_latency.update(float(fields["latency_s"]))
            elif event == "checkpoint_saved":
                self.checkpoint_duration.update(float(fields["duration_s"]))
            if "gradient_divergence" in fields:
                self.gradient_divergence.update(float(fields["gradient_divergence"]))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        connector: Any = trainer._logger_connector
        if connector.should_update_logs:
            for name, value in self.values().items():
                pl_module.log(f"{self._prefix}{name}", value, on_step=True, on_epoch=False)
            pl_module.log(f"{self._prefix}world_size", float(trainer.world_size), on_step=True, on_epoch=False)

    def values(self) -> dict[str, float]:
        """Return what is known by now, without the prefix."""
        with self._lock:
            now_s = time.monotonic()
            self.goodput.update(total_s=now_s - self._last_s)
            self._last_s = now_s
            found = {"recoveries": float(self.recovery_latency.num), "goodput": float(self.goodput.compute())}
            metrics = {
                "recovery_latency": self.recovery_latency,
                "checkpoint_duration_p99": self.checkpoint_duration,
                "gradient_divergence": self.gradient_divergence,
            }
            return found | {name: float(metric.compute()) for name, metric in metrics.items() if metric.update_called}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return it without tensors: those of a checkpoint are the same on all ranks, which these are not."""
        with self._lock:
            return {
                name: {"state": _numbers(metric.metric_state), "updates": metric.update_count}
                for name, metric in self._metrics().items()
            }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._lock:
            for name, metric in self._metrics().items():
                saved = state_dict[name]
                for state, value in saved["state"].items():
                    present = getattr(metric, state)
                    if isinstance(present, list):
                        setattr(metric, state, [torch.tensor(each, dtype=torch.float64) for each in value])
                    else:
                        setattr(metric, state, torch.tensor(value, dtype=present.dtype, device=present.device))
                metric._update_count, metric._computed = saved["updates"], None

    def _metrics(self) -> dict[str, Any]:
        names = ("recovery_latency", "checkpoint_duration", "gradient_divergence", "goodput")
        return {name: getattr(self, name) for name in names}


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [each.tolist() for each in value] if isinstance(value, list) else value.tolist()
        for name, value in state.items()
    }
