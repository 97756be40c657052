"""One Lightning run for step_time.py, until it is killed: `step.py STRATEGY DEVICES WIDTH DEPTH BATCH`.

Rank 0 writes the time of each batch start to $BENCH_DIR/STRATEGY.laps (8 bytes each, CLOCK_MONOTONIC), and after batch
60 its memory to STRATEGY.json.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import struct
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
    """Writes down when each batch starts."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.settled_mb = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Model) -> None:
        """Open the file."""
        self.laps = os.open(self.path.with_suffix(".laps"), os.O_WRONLY | os.O_CREAT) if trainer.is_global_zero else -1

    def on_train_batch_start(self, trainer: L.Trainer, module: Model, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if self.laps < 0:
            return
        os.write(self.laps, struct.pack("<d", time.monotonic()))
        if batch_idx == 5:
            self.settled_mb = memory_mb("VmRSS")
        if batch_idx == 60:
            num_parameters = sum(p.numel() for p in module.parameters())
            result = {"settled_mb": self.settled_mb, "peak_mb": memory_mb("VmHWM"), "parameters": num_parameters}
            self.path.with_suffix(".json").write_text(json.dumps(result))


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """The same sample, as often as anybody asks."""

    def __init__(self, width: int) -> None:
        self.sample = torch.randn(width)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def main() -> None:
    """Run until killed."""
    strategy, devices, width, depth, batch = sys.argv[1], *map(int, sys.argv[2:])
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    directory = pathlib.Path(os.environ["BENCH_DIR"])
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock(directory / strategy)],
        default_root_dir=directory,
    )
    sampler = torch.utils.data.SequentialSampler(Batches(width))  # a shuffled list of a million would take memory
    trainer.fit(Model(width, depth), torch.utils.data.DataLoader(Batches(width), batch_size=batch, sampler=sampler))


if __name__ == "__main__":
    main()
