"""How long training stands still for its checkpoints, side by side with what else there is.

    python benchmarks/checkpoint_stall.py [--num-millions 100] [--every 20] [--num-saves 5] [--ways delta,full]

One device, a model of so many million parameters with Adam, a save with every so many steps to a local disk, in turn
with: nothing; `delta`: DeltaCheckpoint; `full`: Lightning's ModelCheckpoint (torch.save); `async`: the same with
AsyncCheckpointIO; `dcp`: torch.distributed.checkpoint.async_save. An iteration lasts from one batch's start to the
next.

For each: the median of all iterations; the 99th percentile of those in which a save begins, less the median without
saves (`blocked`), as a share of the interval between two saves; how much longer the other iterations take, while
something is written in the background (`shared cores`); and what was stored per save. The figures mean something on a
machine that does nothing else. Exit status 1: DeltaCheckpoint blocks for more than 10 % of the interval.
"""

from __future__ import annotations

import argparse
import logging
import math
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft

HARD_LIMIT = 0.10


class Model(L.LightningModule):
    """As many layers as it takes; computing is cheap beside the optimizer, which is what a CPU would else not feel."""

    def __init__(self, num_millions: int) -> None:
        super().__init__()
        width = 1000
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(num_millions)))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return something to make smaller."""
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one with two numbers for each parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Watch(Callback):
    """Notes when each batch begins."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it."""
        self.starts_s.append(time.perf_counter())


class DistributedCheckpoint(Callback):
    """What a user would write with torch's own."""

    def __init__(self, directory: pathlib.Path, every: int) -> None:
        self.directory = directory
        self.every = every
        self.pending: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Wait for the last one, as it demands, and begin the next."""
        if trainer.global_step % self.every == 0:
            if self.pending is not None:
                self.pending.result()
            state = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            self.pending = dcp.async_save(state, checkpoint_id=self.directory / str(trainer.global_step))

    def on_train_end(self, *_: Any) -> None:
        """Wait for the last one."""
        if self.pending is not None:
            self.pending.result()


def measure(way: str, arguments: argparse.Namespace, directory: pathlib.Path) -> tuple[list[float], float]:
    """Train. Returns: The iterations, without the first; and bytes stored per save."""
    L.seed_everything(1, verbose=False)
    watch = Watch()
    callbacks: list[Callback] = [watch]
    plugins: list[Any] = []
    if way == "delta":
        callbacks.append(lightning_ft.DeltaCheckpoint(directory, every_n_train_steps=arguments.every, keep_last=1000))
    elif way in {"full", "async"}:
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=arguments.every, save_top_k=-1))
        plugins += [AsyncCheckpointIO()] if way == "async" else []
    elif way == "dcp":
        callbacks.append(DistributedCheckpoint(directory, arguments.every))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=arguments.every * arguments.num_saves + arguments.every,
        callbacks=callbacks,
        plugins=plugins,
        logger=False,
        enable_checkpointing=any(isinstance(part, ModelCheckpoint) for part in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(arguments.num_millions), DataLoader(TensorDataset(torch.randn(100_000, 1000)), 2))
    stored = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    iterations = [end - start for start, end in zip(watch.starts_s, watch.starts_s[1:], strict=False)]
    return iterations, stored / (arguments.num_saves + 1)


def main() -> int:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-millions", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--num-saves", type=int, default=5)
    parser.add_argument("--ways", default="delta,full,async,dcp")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for torch's own
    worst = 0.0
    print("way     iteration  blocked p99  of the interval  others  stored per save")
    for way in ("none", *arguments.ways.split(",")):
        with tempfile.TemporaryDirectory() as name:
            iterations, stored = measure(way, arguments, pathlib.Path(name))
        # Iteration i is that of step i + 1; the first one allocates the optimizer's state.
        begins = [took for index, took in enumerate(iterations) if (index + 1) % arguments.every == 0]
        others = [took for index, took in enumerate(iterations[1:], 1) if (index + 1) % arguments.every]
        if way == "none":
            plain = statistics.median(iterations[1:])
        blocked = sorted(begins)[math.ceil(0.99 * len(begins)) - 1] - plain
        share = blocked / (plain * arguments.every)
        slower = statistics.mean(others) / plain - 1
        worst = max(worst, share) if way == "delta" else worst
        print(
            f"{way:6} {1000 * statistics.median(iterations[1:]):8.1f} ms {1000 * blocked:9.1f} ms {share:14.1%} "
            f"{slower:+8.1%} {stored / 1e6:10.0f} MB"
        )
    dist.destroy_process_group()
    return int(worst > HARD_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
