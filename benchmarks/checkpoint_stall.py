"""How long training stands still for its checkpoints, and what they cost besides, side by side with what else there is.

    python benchmarks/checkpoint_stall.py [--num-millions 100] [--rows 256] [--saves 3] [--ways lossless,full]

One device, all cores, a network of so many million parameters with Adam on batches of so many rows, checkpoints to a
local disk. In turn: nothing; the modes of `DeltaCheckpoint`; `full`: Lightning's ModelCheckpoint (torch.save); `async`:
the same with AsyncCheckpointIO; `dcp`: torch.distributed.checkpoint.async_save; and nothing again. All save every 4
steps, gradlog at each (of this state too much for the time, if a step takes less than a second), and snap at the tenth.

An iteration lasts from one batch's start to the next. `blocked` is how much longer than the median without saves the
longest of those took in which a save began; of gradlog, for which each step stands still, what the longest took in its
own code. `in all` is by how much all iterations of an interval are longer, so it includes what the writing in the
background takes away from training: the cores are shared. Both are also parts of an iteration. The last column says
how much time must lie between two saves for all that to be 3 %. It means something on a machine that does nothing
else. Exit status 1: DeltaCheckpoint's default blocks for more than 10 % of an iteration.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import logging
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from report import figure
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft
from lightning_ft.checkpoint.gradlog import GradientLog

HARD_LIMIT = 0.10
AIM = 0.03
WIDTH = 1000
EVERY = {"snap": 10, "gradlog": 1}
OTHERS_EVERY = 4
NOT_COUNTED = 3
"""The first iterations allocate the optimizer's state; gradlog's also write a base."""


class Model(L.LightningModule):
    """Residual layers of a million weights each, with gradients as real ones are."""

    def __init__(self, num_millions: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_millions)]
        self.layers = torch.nn.ModuleList(layers)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Predict each row from itself, shifted."""
        hidden = batch[0]
        for layer in self.layers:
            normal = torch.nn.functional.layer_norm(hidden, (WIDTH,))
            hidden = hidden + 0.1 * torch.nn.functional.gelu(layer(normal))
        return torch.nn.functional.mse_loss(hidden, batch[0].roll(1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one with two numbers for each parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Watch(Callback):
    """Notes when each batch begins, and what our own code has taken until then."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []
        self.own_s: list[float] = []
        self.taken_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it."""
        self.starts_s.append(time.perf_counter())
        self.own_s.append(self.taken_s)


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


@contextlib.contextmanager
def timed(watch: Watch, *functions: tuple[type, str]) -> Iterator[None]:
    """Add up what methods take."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                watch.taken_s += time.perf_counter() - began_s

        return call

    kept = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for owner, name, function in kept:
        setattr(owner, name, around(function))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def measure(
    way: str, arguments: argparse.Namespace, directory: pathlib.Path, data: TensorDataset
) -> tuple[list[float], list[float], int, int, float]:
    """Train.

    Returns:
        The iterations that count, what our own code took of each, at how many of them a save was begun and how many of
        those were left out, and bytes stored per save.
    """
    L.seed_everything(1, verbose=False)
    watch = Watch()
    callbacks: list[Callback] = [watch]
    plugins: list[Any] = []
    every = EVERY.get(way, OTHERS_EVERY)
    saves: Any = None
    if way in {"full", "async"}:
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=every, save_top_k=-1))
        plugins += [AsyncCheckpointIO()] if way == "async" else []
    elif way == "dcp":
        callbacks.append(DistributedCheckpoint(directory, every))
    elif way != "none":
        saves = lightning_ft.DeltaCheckpoint(directory, every_n_train_steps=every, mode=way, keep_last=1000)
        callbacks.append(saves)
    num_saves = 1 if way == "snap" else arguments.saves
    first = every - 1 if way != "gradlog" else 2 * NOT_COUNTED
    num_counted = num_saves * OTHERS_EVERY
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=first + num_counted + 1,
        callbacks=callbacks,
        plugins=plugins,
        logger=False,
        enable_checkpointing=any(isinstance(part, ModelCheckpoint) for part in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own = (GradientLog, "stepping"), (GradientLog, "stepped"), (lightning_ft.DeltaCheckpoint, "_save")
    with timed(watch, *own):
        trainer.fit(Model(arguments.num_millions), DataLoader(data, arguments.rows))
    ends = zip(watch.starts_s, watch.starts_s[1:], strict=False)
    owns = zip(watch.own_s, watch.own_s[1:], strict=False)
    iterations = [end - start for start, end in ends][first : first + num_counted]
    own_s = [end - start for start, end in owns][first : first + num_counted]
    num_files: collections.Counter[str] = collections.Counter()
    for path in directory.rglob("*"):
        if path.is_file():
            # By checkpoint: of DeltaCheckpoint without the base, which is one of 32.
            relative = path.relative_to(directory).as_posix()
            name = relative.rpartition("/")[0] if relative.startswith("data/") else relative.partition("/")[0]
            num_files[name] += path.stat().st_size
    kept = sorted((name, size) for name, size in num_files.items() if saves is None or name.startswith("data/"))
    sizes = [size for _, size in (kept[1:] if saves is not None and len(kept) > 1 else kept)]
    num_begun = num_counted if way == "gradlog" else num_saves
    return iterations, own_s, num_begun, saves.num_skipped if saves else 0, statistics.mean(sizes) if sizes else 0.0


def row(way: str, found: tuple[list[float], list[float], int, int, float], plain_s: float) -> tuple[str, float]:
    """Return a line of the table, and how long training was blocked."""
    iterations, own_s, num_saves, num_skipped, stored = found
    begins = max(own_s) if way == "gradlog" else max(iterations[:: len(iterations) // num_saves]) - plain_s
    extra_s = max(0.0, sum(iterations) - len(iterations) * plain_s) / num_saves
    blocked_s = max(begins, 0.0)
    name = {
        "full": "ModelCheckpoint (torch.save)",
        "async": "the same, AsyncCheckpointIO",
        "dcp": "torch DCP, async_save",
    }.get(way, f"DeltaCheckpoint, {way}")
    skipped = f", {num_skipped} left out" if num_skipped else ""
    text = (
        f"| {name} | {num_saves}{skipped} | {1000 * blocked_s:.0f} ms | {blocked_s / plain_s:.1%} | "
        f"{1000 * extra_s:.0f} ms | {extra_s / plain_s:.1%} | {stored / 1e6:.0f} | {extra_s / AIM:.1f} s |"
    )
    figure(f"checkpoint_stall/{way}/blocked", [blocked_s])
    figure(f"checkpoint_stall/{way}/all", [extra_s])
    return text, blocked_s


def main() -> int:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-millions", type=int, default=100)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--ways", default="lossless,gradlog,snap,bounded,full,async,dcp")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_ft").setLevel(logging.ERROR)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for torch's own
    data = TensorDataset(torch.randn(32 * arguments.rows, WIDTH))
    found, began_s = {}, time.monotonic()
    for way in ("none", *arguments.ways.split(","), "none again"):
        with tempfile.TemporaryDirectory() as name:
            found[way] = measure(way.partition(" ")[0], arguments, pathlib.Path(name), data)
        print(f"{way}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    first, last = (found.pop(name)[0] for name in ("none", "none again"))
    plain_s = statistics.median([*first, *last])
    drift = statistics.median(last) / statistics.median(first) - 1
    full_mb = arguments.num_millions * 12 * WIDTH * WIDTH / 1e6
    print(
        f"{arguments.num_millions} million parameters with Adam ({full_mb:.0f} MB), "
        f"batches of {arguments.rows} rows, {torch.get_num_threads()} threads. "
        f"An iteration without saves: {1000 * plain_s:.0f} ms (at the end {drift:+.1%}).\n\n"
        "| | saves | blocked, longest | of an iteration | in all, per save | of an iteration | stored, MB per save | "
        "time between saves of which all is 3 % |\n|---|---|---|---|---|---|---|---|"
    )
    blocked_s = {}
    for way, result in found.items():
        text, blocked_s[way] = row(way, result, plain_s)
        print(text, flush=True)
    dist.destroy_process_group()
    return int(blocked_s.get("lossless", 0.0) / plain_s > HARD_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
