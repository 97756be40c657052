"""How much less the checkpoints of a training take than full ones at the same cadence, bases included.

    python benchmarks/checkpoint_sizes.py [--saves 32]

Small real trainings: the model of characters of `snap_validation.py`; dense (in the mode gradlog wider: 1.7 M
parameters), and with adapters of rank 4 on frozen weights; and an embedding of 100,000 hashed rows with Adagrad and
sparse gradients, of which each step reads up to 976, as recommenders do. A full checkpoint is what `torch.save` writes.
Sizes are the same on any machine.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import snap_validation
import torch
from snap_validation import Model, texts, windows_of
from torch import nn

from lightning_ft.checkpoint.gradlog import GradientLog
from lightning_ft.checkpoint.snap import Snap
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Writer


class Adapted(nn.Module):
    """A linear layer that stays, and a product of two small ones that is learned."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return self.layer(inputs) + self.up(self.down(inputs))


class Sparse(nn.Module):
    """An embedding of hashed groups of four characters: of 100,000 rows a step reads less than a thousand."""

    NUM_ROWS = 100_003

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.num_kinds = num_kinds
        self.groups = nn.Embedding(self.NUM_ROWS, 32, sparse=True)
        self.head = nn.Linear(32, num_kinds)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        rows = torch.zeros_like(windows[:, 4:])
        for place in range(4):
            rows = (rows * self.num_kinds + windows[:, place : place - 4]) % self.NUM_ROWS
        return nn.functional.cross_entropy(self.head(self.groups(rows)).flatten(0, 1), windows[:, 4:].flatten())


def train(model: Any, dtype: torch.dtype | None, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Yield, with the gradients of each step, what takes the step."""
    training, _, _ = texts()
    batches = torch.Generator().manual_seed(1)
    while True:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model.loss(windows_of(training, batches))
        loss.backward()
        yield optimizer.step


def measure(name: str, mode: str, every: int, num_saves: int) -> float:
    """Return the size of so many checkpoints of a training, as a share of full ones."""
    torch.manual_seed(0)
    snap_validation.WIDTH = 256 if mode == "gradlog" else 96  # at each step there is time for a larger model
    _, _, num_kinds = texts()
    model: Any = Sparse(num_kinds) if name == "sparse embedding" else Model(num_kinds)
    if name == "LoRA":
        for layer in model.layers.layers:
            layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("down" in key or "up" in key)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if name == "sparse embedding":
        optimizer = torch.optim.Adagrad(trained, lr=0.05)  # Adam would go on changing each row that was ever read
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
    log, snap = GradientLog(optimizer, 0, 1), Snap()
    snap.begin([optimizer])
    stored = full = saved = 0
    with tempfile.TemporaryDirectory() as url:
        writer = Writer(str(pathlib.Path(url)), mode=mode)
        steps = train(model, torch.bfloat16 if "bf16" in name else None, optimizer)
        for step in range(1, every * num_saves + 1):
            take = next(steps)
            log.stepping()
            take()
            log.stepped()
            if step % every:
                continue
            if mode == "snap":
                snap.snap([optimizer], step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            flat = FlatState(state)
            is_base = mode == "gradlog" and log.check(flat, step - saved) is not None
            plan = writer.plan(step, is_base=is_base)
            if mode == "gradlog" and plan.parent is not None:
                writer.write(plan, log.logged(flat))
            else:
                log.rebase(flat)
                writer.write(plan, flat)
            manifest, saved = writer.conclude(plan), step
            buffer = io.BytesIO()
            torch.save(state, buffer)
            full += buffer.tell()
        stored = sum(path.stat().st_size for path in pathlib.Path(url).rglob("*") if path.is_file())
    assert manifest.mode == mode
    return stored / full


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=32)
    num_saves = parser.parse_args().saves
    print("| training | mode | steps between saves | less than full checkpoints |\n|---|---|---|---|", flush=True)
    for name, mode, every in (
        ("LoRA", "lossless", 10),
        ("sparse embedding", "lossless", 10),
        ("dense fp32", "gradlog", 1),
        ("dense bf16-mixed", "gradlog", 1),
        ("dense fp32", "snap", 10),
        ("dense fp32", "bounded", 10),
        ("dense fp32", "lossless", 10),
    ):
        print(f"| {name} | {mode} | {every} | {1 - measure(name, mode, every, num_saves):.1%} |", flush=True)


if __name__ == "__main__":
    main()
