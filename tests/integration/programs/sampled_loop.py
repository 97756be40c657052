"""A plain PyTorch loop over a data set that writes down which samples each step consumed.

    sampled_loop.py OUT LENGTH EPOCHS [--batch N] [--workers N] [--hold STEP] [--world-size N] [--resume FILE]

Each member appends JSON lines to OUT/<node>-<slot>.jsonl. With --hold, the steps from that one on wait, each for a
moment, while members are missing, so that these are back before the data end. If all are asked to stop, the place in
the data is saved in OUT/saved.pt; --resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lightning_ft


class Numbers(Dataset[torch.Tensor]):
    """The numbers from 0 on, each its own sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("length", type=int)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--hold", type=int, default=1 << 62)
    parser.add_argument("--world-size", type=int, default=0, help="how many members the job has when it is whole")
    parser.add_argument("--resume", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    """Train, and write down each step."""
    arguments = _arguments()
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    dist.init_process_group("ft")
    num_expected = arguments.world_size or dist.get_world_size()
    model = lightning_ft.ft_ddp(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    dataset = Numbers(arguments.length)
    sampler = lightning_ft.ElasticDistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=arguments.batch,
        sampler=sampler,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
    )
    commits: list[lightning_ft.StepCommit] = []
    model.on_commit = commits.append
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)
    if arguments.resume is not None:
        saved = torch.load(arguments.resume)
        sampler.load_state_dict(saved["sampler"])
        state.epoch = saved["epoch"]

    def train() -> None:
        while state.epoch < arguments.epochs:
            sampler.set_epoch(state.epoch)
            while sampler.redeal() or sampler.num_left:
                for batch in loader:
                    state.boundary()
                    if sampler.redeal():
                        break
                    is_held = state.step >= arguments.hold and dist.get_world_size() < num_expected
                    time.sleep(0.25 if is_held else 0.0)
                    write(event="draws", step=state.step, epoch=state.epoch, ids=batch.tolist())
                    model(batch[:, None].float()).sum().backward()
                    write(event="committed", step=state.step, contributors=commits[-1].contributors)
                    optimizer.step()
                    sampler.record_batch(len(batch), commits[-1].contributors)
                    state.step += 1
            state.epoch += 1

    try:
        train()
    except lightning_ft.StopRequested:
        if dist.get_rank() == 0:
            torch.save({"sampler": sampler.state_dict(), "epoch": state.epoch}, arguments.out / "saved.pt")
        write(event="stopped", step=state.step)
        raise
    write(event="end", world_size=dist.get_world_size())


if __name__ == "__main__":
    sys.exit(main())
