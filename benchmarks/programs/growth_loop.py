"""Train so many parameters until killed, on `ft_ddp` or on torch's DDP: `growth_loop.py OUT KIND MILLIONS`.

KIND is `ft` (started by an agent) or `gloo` (by torchrun). Each process appends JSON lines to OUT/<rank>.jsonl: its
start, when each step ended, and its memory now and then.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_ft

WIDTH = 512
MEMORY_EVERY = 8
"""Steps."""


def memory_mb() -> float:
    """Return what this process holds."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    """Train."""
    out, kind, millions = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(kind)
    with (out / f"{dist.get_rank()}.jsonl").open("w") as log:

        def write(**line: object) -> None:
            log.write(json.dumps({"time": time.time(), **line}) + "\n")
            log.flush()

        write(event="start", pid=os.getpid())
        num_layers = max(1, round(millions * 1e6 / WIDTH**2))
        net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
        model = lightning_ft.ft_ddp(net) if kind == "ft" else DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        inputs = torch.randn(4, WIDTH)
        for step in itertools.count():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            write(event="step", step=step, **({} if step % MEMORY_EVERY else {"memory_mb": memory_mb()}))


if __name__ == "__main__":
    main()
