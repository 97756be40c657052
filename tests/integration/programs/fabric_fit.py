"""A small run with Fabric that writes down everything a checker needs.

    fabric_fit.py OUT LENGTH EPOCHS [--hold STEP] [--accumulate N]

Each member appends JSON lines to OUT/<node>-<slot>.jsonl: for each step the samples, who contributed, and the weights'
hash after. With --hold, the steps from that one on wait, each for a moment, while members are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import sys
import time

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft


def main() -> None:  # noqa: PLR0915
    """Train, and write down each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("length", type=int)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--hold", type=int, default=1 << 62)
    parser.add_argument("--accumulate", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    logger = CSVLogger(arguments.out / "logs", name=None, flush_logs_every_n_steps=3)
    fabric = Fabric(strategy="ft_ddp", accelerator="cpu", devices=arguments.devices, loggers=logger)
    write(event="start", pid=os.getpid())
    fabric.launch()
    fabric.seed_everything(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    numbers = TensorDataset(torch.arange(arguments.length))
    loader = fabric.setup_dataloaders(DataLoader(numbers, batch_size=4, shuffle=True))
    validation = fabric.setup_dataloaders(DataLoader(numbers, batch_size=64))
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, loader=loader, epoch=0, step=0)

    def weights_hash() -> str:
        digest = hashlib.sha256()
        for tensor in net.parameters():
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()

    def enter() -> None:
        if fabric.strategy.last_commit is None:
            write(event="in", step=state.step, hash=weights_hash(), world_size=fabric.world_size)

    state.boundary()
    enter()
    while state.epoch < arguments.epochs:
        ids: list[int] = []
        for index, (batch,) in enumerate(loader):
            is_held = state.step >= arguments.hold and fabric.world_size < arguments.devices
            time.sleep(0.25 if is_held else 0.0)
            ids += batch.tolist()
            is_step = (index + 1) % arguments.accumulate == 0
            if is_step:
                write(event="draws", step=state.step, epoch=state.epoch, ids=ids)
            with fabric.no_backward_sync(model, enabled=not is_step):
                fabric.backward(model(batch[:, None].float() / arguments.length).square().mean())
            if not is_step:
                continue
            commit = fabric.strategy.last_commit
            write(event="committed", step=state.step, contributors=commit.contributors, index=commit.step)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            write(event="step", step=state.step, hash=weights_hash(), rank=fabric.global_rank)
            fabric.log("number", float(state.step), step=state.step)
            ids = []
            state.step += 1
            state.boundary()
        with torch.no_grad():
            seen = [batch for (batch,) in validation]
        # As many as there are, and those that fill shares up: a rank's share is of the ranks that began the validation.
        counted = fabric.all_reduce(torch.cat(seen).unique().numel(), reduce_op="sum")
        total = fabric.all_gather(torch.tensor(1.0)).sum()
        fabric.print(f"epoch {state.epoch}: {int(counted)} validated by {int(total)}", flush=True)
        state.epoch += 1
    logger.finalize("success")
    fabric.save(arguments.out / "last.ckpt", {"model": model, "optimizer": optimizer, "loader": loader.state_dict()})
    rest = fabric.load(arguments.out / "last.ckpt", {"model": model, "optimizer": optimizer}, weights_only=False)
    write(event="end", hash=weights_hash(), world_size=fabric.world_size, epoch=rest["loader"]["epoch"])


if __name__ == "__main__":
    sys.exit(main())
