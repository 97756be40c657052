"""A Lightning fit for soak.py that writes down all that a checker needs: `soak_fit.py OUT TASK NODES SLOTS [EPOCHS]`.

TASK is `digits` or `language`, the model of that example. Without EPOCHS it trains until there is a file OUT/stop. Each
member appends JSON lines to OUT/<node>-<slot>.jsonl: which samples it drew, who contributed to which step, the weights'
hash after it, and what it uses of the machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pathlib
import sys
import threading
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_ft

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

BATCH_SIZE = 8
USAGE_EVERY = 5
"""Epochs."""


class Numbered(Dataset[Any]):
    """Samples with their numbers."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index], index


class Recorder(L.Callback):
    """Writes what happened, and ends the fit when it is told to."""

    def __init__(self, out: pathlib.Path, *, has_end: bool) -> None:
        member = os.environ["LIGHTNING_FT_MEMBER"]
        self.stop = None if has_end else out / "stop"
        self.file = (out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(self, **line: object) -> None:
        """Append a line."""
        self.file.write(json.dumps({"time": time.time(), **line}) + "\n")
        self.file.flush()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say who it is, and listen to the commits."""
        self.write(event="start", pid=os.getpid(), incarnation=int(os.environ["LIGHTNING_FT_INCARNATION"]))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen to the commits."""
        model: Any = trainer.strategy.model
        inner = model.on_commit

        def committed(commit: lightning_ft.StepCommit) -> None:
            self.write(event="commit", step=commit.step, contributors=commit.contributors)
            inner(commit)

        model.on_commit = committed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Write which samples are drawn."""
        self.write(event="draws", step=trainer.global_step, epoch=trainer.current_epoch, index=batch[1].tolist())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what the weights are."""
        step = trainer.global_step - 1
        self.write(event="step", step=step, epoch=trainer.current_epoch, hash=weights_hash(pl_module))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All end at the same epoch."""
        if trainer.current_epoch % USAGE_EVERY == 0:
            self.write(event="usage", epoch=trainer.current_epoch, **usage())
        if self.stop is not None:
            is_over = torch.tensor(float(self.stop.exists()))
            if trainer.strategy.reduce(is_over, reduce_op="sum") > 0:
                trainer.should_stop = True


def usage() -> dict[str, int]:
    """Return what this process uses."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    memory_kb = int(next(line for line in status if line.startswith("VmRSS")).split()[1])
    return {
        "memory_kb": memory_kb,
        "descriptors": len([*pathlib.Path("/proc/self/fd").iterdir()]),
        "threads": threading.active_count(),
        "all_threads": len([*pathlib.Path("/proc/self/task").iterdir()]),
    }


def weights_hash(module: torch.nn.Module) -> str:
    """Return a hash of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def make(task: str) -> tuple[L.LightningModule, Any, Any, Any]:
    """Return the model, what it trains on, and what it is validated and tested on."""
    example: Any = importlib.import_module({"digits": "digits", "language": "language_model"}[task])
    if task == "digits":
        training, validation, test = example.load(1)
        kind, score = example.DigitsModel, lambda model: example.test_accuracy(model, test)
    else:
        held_back = len(example.TEXT) // 10
        training, validation = (
            example.Windows(text) for text in (example.TEXT[:-held_back], example.TEXT[-held_back:])
        )
        kind, score = example.GPT, lambda model: -bits(model, validation)

    class Model(kind):  # type: ignore[misc, valid-type]
        """Takes the numbers of the samples off."""

        def training_step(self, batch: Any) -> torch.Tensor:
            """Train."""
            loss: torch.Tensor = super().training_step(batch[0])
            return loss

    return Model(), Numbered(training), validation, score


@torch.no_grad()
def bits(model: Any, data: Any) -> float:
    """Return the loss on what was held back, bits per character."""
    model.eval()
    losses = [model.loss(batch).item() for batch in DataLoader(data, batch_size=64, drop_last=True)]
    return sum(losses) / len(losses) * 1.442695


def main() -> None:
    """Train."""
    out, task, num_nodes, num_slots = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    num_epochs = int(sys.argv[5]) if len(sys.argv) > 5 else -1
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    model, training, validation, score = make(task)
    recorder = Recorder(out, has_end=num_epochs > 0)
    trainer = L.Trainer(
        strategy="ft_ddp",
        devices=num_slots,
        num_nodes=num_nodes,
        accelerator="cpu",
        max_epochs=num_epochs,
        check_val_every_n_epoch=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
        default_root_dir=out,
    )
    trainer.fit(
        model,
        DataLoader(training, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(validation, batch_size=64),
    )
    recorder.write(event="end", hash=weights_hash(model), score=score(model), num_samples=len(training))


if __name__ == "__main__":
    main()
