"""Without Lightning: a hand-written loop on the backend `ft`, with ranks that come back.

    lightning-ft run --nproc-per-node 4 examples/plain_pytorch.py

Kill any of the four processes while it runs: the others finish the step they are in and go on without it, and it joins
them again some seconds later.
"""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft

BATCH_SIZE = 16
NUM_EPOCHS = 15
NUM_TEST = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits in two parts, the same on every rank: for training, for the test."""
    digits = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    order = torch.randperm(len(digits["labels"]), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits["images"], dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(digits["labels"], dtype=torch.int64)[order]
    return TensorDataset(images[NUM_TEST:], labels[NUM_TEST:]), TensorDataset(images[:NUM_TEST], labels[:NUM_TEST])


def spread(value: Tensor) -> float:
    """Return the difference of the ranks' largest and smallest value.

    Raises:
        MembershipChangedError: A rank died during it: there is one slot for each, so it can't mean the same any more.
    """
    slots = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(slots, value)
    return (max(slots) - min(slots)).item()


def main() -> None:
    """Train, then let rank 0 say how good the model is."""
    dist.init_process_group("ft")
    torch.manual_seed(0)
    training, test = load()
    model = lightning_ft.ft_ddp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = lightning_ft.ElasticDistributedSampler(training)
    loader = DataLoader(training, batch_size=BATCH_SIZE, sampler=sampler)
    commits: collections.deque[lightning_ft.StepCommit] = collections.deque(maxlen=1)
    model.on_commit = commits.append
    # All that a process needs that comes back; it gets it at its first boundary().
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    def train_epoch() -> None:
        loss = torch.zeros(())
        while sampler.redeal() or sampler.num_left:
            for images, labels in loader:
                state.boundary()  # others may join here
                if sampler.redeal():  # the ranks have changed, so this batch may be another's now
                    break
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()  # never raises because a rank died: returns with the average over those that are left
                norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                if not norm.isfinite():  # the same on all ranks, so all of them raise
                    raise lightning_ft.FaultToleranceError("the gradient is not finite")
                optimizer.step()
                sampler.record_batch(len(images), commits[-1].contributors)
        difference = spread(loss.detach())
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            print(
                f"epoch {state.epoch + 1} of {NUM_EPOCHS} with {ranks} ranks, losses {difference:.3f} apart", flush=True
            )

    state.keep()  # to go back to: a copy in memory
    while state.epoch < NUM_EPOCHS:
        sampler.set_epoch(state.epoch)
        try:
            train_epoch()
        except lightning_ft.FaultToleranceError as error:
            # What reaches a loop is raised by all ranks at the same place. Some of the step may have been done, so all
            # go back to what they kept; restore() raises the error again if that can't help (QuorumLostError, ...).
            state.restore(error)
            continue
        state.epoch += 1
        state.keep()

    if dist.get_rank() == 0:
        images, labels = test.tensors
        with torch.no_grad():
            hits = model.module(images).argmax(dim=1) == labels
        print(f"test accuracy: {hits.double().mean().item():.2%} of {NUM_TEST} digits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
