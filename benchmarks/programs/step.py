"""One Lightning run for step_time.py: prints a JSON line with rank 0's step times and memory.

step.py STRATEGY DEVICES WIDTH DEPTH BATCH STEPS
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import statistics
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch

import lightning_ft  # noqa: F401 - registers ft_ddp


def memory_mb(field: str) -> float:
    """Return VmRSS or VmHWM of this process, MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1024


class Model(L.LightningModule):
    """Equal linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """A loss that needs every parameter."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The cheapest one, so that the reduction has the largest share."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Measures from batch start to batch start."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.settled_mb = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Model, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())
        if batch_idx == 5:
            self.settled_mb = memory_mb("VmRSS")


def main() -> None:
    """Run and print."""
    strategy, devices, width, depth, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        default_root_dir=os.environ.get("BENCH_DIR"),
    )
    data = (
        torch.randn(batch * steps * devices, width)
        if width * batch * steps < 50_000_000
        else torch.randn(batch, width).expand(steps * devices, batch, width).reshape(-1, width)
    )
    trainer.fit(Model(width, depth), torch.utils.data.DataLoader(data, batch_size=batch))
    if trainer.is_global_zero:
        laps = [after - before for before, after in zip(clock.times[10:], clock.times[11:], strict=False)]
        print(
            json.dumps(
                {
                    "step_s": statistics.median(laps),
                    "settled_mb": clock.settled_mb,
                    "peak_mb": memory_mb("VmHWM"),
                    "parameters": sum(p.numel() for p in trainer.model.parameters()),  # type: ignore[union-attr]
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
