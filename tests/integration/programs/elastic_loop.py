"""A plain PyTorch loop whose dead members come back: `elastic_loop.py OUT STEPS [--sleep S]`.

Each member appends JSON lines to OUT/<node>-<slot>.jsonl, all its processes to the same file.
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
import torch.distributed as dist

if __name__ == "__main__":
    sys.modules["lightning"] = None  # type: ignore[assignment]  # plain PyTorch must do without it, and starts faster
import lightning_ft


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Train, and write down each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--sleep", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    member, incarnation = os.environ["LIGHTNING_FT_MEMBER"], int(os.environ["LIGHTNING_FT_INCARNATION"])
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), "incarnation": incarnation, **line}) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    torch.manual_seed(incarnation)  # a joiner's own start is another one
    dist.init_process_group("ft")
    width = arguments.width
    module = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model = lightning_ft.ft_ddp(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    write(event="ready", rank=dist.get_rank(), size=dist.get_world_size())
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, scheduler=scheduler, step=0)
    while state.step < arguments.steps:
        state.boundary()
        generator = torch.Generator().manual_seed(1000 * state.step + int(member.split("/")[1]))
        batch = torch.randn(16, 8, generator=generator)
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(arguments.sleep)
        write(event="step", step=state.step, size=dist.get_world_size(), rank=dist.get_rank(), hash=digest(module))
        state.step += 1
    write(event="end", lr=scheduler.get_last_lr()[0], step=state.step)


if __name__ == "__main__":
    sys.exit(main())
