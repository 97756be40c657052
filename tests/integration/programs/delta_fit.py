"""A fit that saves differential checkpoints, and goes on from the last one.

    delta_fit.py OUT STEPS... [--devices N] [--strategy ft_ddp|ddp] [--every N] [--pause S] [--wait] [--gives-up ...]
        [--url s3://bucket/run]

Each rank appends a JSON line per batch to OUT/<rank's member or number>.jsonl: the step, the samples, and the weights'
hash before it. The checkpoints are in OUT/run, or at the URL. With several STEPS there are as many fits, each with a
Trainer of its own; the first goes on from "last", the others from the directory. With --wait no save is left out: each
batch waits for the last one.
With --gives-up 0/1@13,0/0@26! a member can't go on with the step, once for each time that it is named; with the second
the newest checkpoint is lost as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft

NUM_SAMPLES = 150


def weights_hash(state: dict[str, Any]) -> str:
    """Return a hash of weights, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].detach().numpy().tobytes())
    return digest.hexdigest()[:16]


class Model(L.LightningModule):
    """Dropout makes each step depend on the random numbers of the rank."""

    def __init__(self, out: pathlib.Path, pause_s: float, gives_up: list[str]) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
        self.out = out
        self.pause_s = pause_s
        self.gives_up = gives_up

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Write down where the fit is, and train."""
        time.sleep(self.pause_s)
        name = os.environ.get("LIGHTNING_FT_MEMBER", str(self.global_rank)).replace("/", "-")
        line = {
            "step": self.global_step,
            "samples": batch[1].tolist(),
            "hash": weights_hash(self.state_dict()),
            "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
        }
        with (self.out / f"{name}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        moment = f"{name.replace('-', '/')}@{self.global_step}"
        if f"{moment}!" in self.gives_up:
            max((self.out / "run" / "manifests").iterdir()).unlink()
        found = next((entry for entry in self.gives_up if entry.rstrip("!") == moment), None)
        if found is not None:
            self.gives_up.remove(found)
            raise lightning_ft.FaultToleranceError("the loss is not finite")
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one with a state."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Patience(Callback):
    """Waits for a save before the next batch."""

    def __init__(self, saves: lightning_ft.DeltaCheckpoint) -> None:
        self.saves = saves

    def on_train_batch_start(self, *_: Any) -> None:
        """Wait."""
        if self.saves._saver is not None:
            self.saves._saver.wait()


def main() -> None:
    """Fit once, or again and again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("steps", type=int, nargs="+")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--strategy", default="ft_ddp")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--mode", default="lossless")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--gives-up", default="")
    parser.add_argument("--url")
    arguments = parser.parse_args()
    url = arguments.url or str(arguments.out / "run")
    for index, num_steps in enumerate(arguments.steps):
        fit(arguments, num_steps, url, url if index else "last")
    if arguments.strategy == "ddp":  # which leaves its threads to the end of the process
        torch.distributed.destroy_process_group()


def fit(arguments: argparse.Namespace, num_steps: int, url: str, path: str) -> None:
    """Fit, from a checkpoint on if there is one."""
    L.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 8), torch.arange(NUM_SAMPLES))
    saves = lightning_ft.DeltaCheckpoint(url, mode=arguments.mode, every_n_train_steps=arguments.every)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_steps=num_steps,
        max_epochs=-1,
        logger=False,
        callbacks=[saves, *([Patience(saves)] if arguments.wait else [])],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=5, shuffle=True)
    trainer.fit(Model(arguments.out, arguments.pause, arguments.gives_up.split(",")), loader, ckpt_path=path)
    print(f"rank {trainer.global_rank}: saved {saves.num_saved}, failed {saves.num_failed}", flush=True)


if __name__ == "__main__":
    main()
