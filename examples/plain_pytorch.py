"""The same without Lightning: a hand-written loop on the backend `ft`.

    lightning-ft run --nproc-per-node 4 examples/plain_pytorch.py

Kill any of the four processes while it runs: the others finish the step they are in and go on, without it. (For one
that comes back see `lightning_ft.ElasticState`.)
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import lightning_ft

BATCH_SIZE = 16
NUM_EPOCHS = 15
NUM_TEST = 360


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, then for the test: the same on every rank."""
    digits = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    order = torch.randperm(len(digits["labels"]), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits["images"], dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(digits["labels"], dtype=torch.int64)[order]
    return images[NUM_TEST:], labels[NUM_TEST:], images[:NUM_TEST], labels[:NUM_TEST]


def main() -> None:
    """Train, then let rank 0 say how good the model is."""
    dist.init_process_group("ft")
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = lightning_ft.ft_ddp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(NUM_EPOCHS):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        position = 0
        while True:
            # Asked anew for each step. They change only inside of collectives, and for all survivors at the same one:
            # so all cut the same batches, although somebody may die at any moment.
            rank, world_size = dist.get_rank(), dist.get_world_size()
            if position + world_size * BATCH_SIZE > len(order):
                break
            start = position + rank * BATCH_SIZE
            batch = order[start : start + BATCH_SIZE]
            position += world_size * BATCH_SIZE
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} of {NUM_EPOCHS} with {dist.get_world_size()} ranks", flush=True)
    if dist.get_rank() == 0:
        with torch.no_grad():
            hits = model.module(test_images).argmax(dim=1) == test_labels
        print(f"test accuracy: {hits.double().mean().item():.2%} of {NUM_TEST} digits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
