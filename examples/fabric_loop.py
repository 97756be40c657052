"""The same with Lightning Fabric: a hand-written loop, whose processes, devices and loaders Fabric sets up.

    python examples/fabric_loop.py --devices 4

Kill any of the four processes while it runs, rank 0 too: the others finish the step they are in and go on, with the log
as well, and it joins them again some seconds later.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft

NUM_TEST = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits in two parts, the same on every rank: for training, for the test."""
    digits = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    order = torch.randperm(len(digits["labels"]), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits["images"], dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(digits["labels"], dtype=torch.int64)[order]
    return TensorDataset(images[NUM_TEST:], labels[NUM_TEST:]), TensorDataset(images[:NUM_TEST], labels[:NUM_TEST])


def count_hits(model: nn.Module, batches: DataLoader[tuple[Tensor, ...]]) -> Tensor:
    """Return how many digits of this rank's share the model gets right, and how many there are."""
    hits = torch.zeros(2)
    with torch.no_grad():
        for images, labels in batches:
            right = model(images).argmax(dim=1) == labels
            hits += torch.tensor([right.sum(), len(labels)])
    return hits


def main() -> None:
    """Train, validate after each epoch, save at the end."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Fabric, on ranks that may die.")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--max-epochs", type=int, default=15)
    parser.add_argument("--log-dir", default="runs/fabric")
    arguments = parser.parse_args()

    logger = CSVLogger(arguments.log_dir, name=None, flush_logs_every_n_steps=10)
    fabric = Fabric(strategy="ft_ddp", accelerator="cpu", devices=arguments.devices, loggers=logger)
    fabric.launch()
    fabric.seed_everything(1)
    training, test = load()
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(DataLoader(training, batch_size=16, shuffle=True))
    validation = fabric.setup_dataloaders(DataLoader(test, batch_size=64))
    # All that a process needs that comes back; it gets it at its first boundary().
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, loader=loader, epoch=0, step=0)

    state.boundary()
    while state.epoch < arguments.max_epochs:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            fabric.backward(loss)  # returns with the average over the ranks that are left
            fabric.clip_gradients(model, optimizer, max_norm=10.0)
            optimizer.step()
            fabric.log("loss", loss, step=state.step)
            state.step += 1
            state.boundary()  # between two steps: others may join here
        hits, total = fabric.all_reduce(count_hits(model, validation), reduce_op="sum")
        fabric.log("accuracy", hits / total, step=state.step)
        fabric.print(f"epoch {state.epoch + 1} with {fabric.world_size} ranks: {hits / total:.2%}", flush=True)
        state.epoch += 1
    logger.finalize("success")
    fabric.save(f"{arguments.log_dir}/last.ckpt", {"model": model, "optimizer": optimizer, "epoch": state.epoch})


if __name__ == "__main__":
    main()
