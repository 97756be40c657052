"""The loop of plain_loop.py on stock DDP, made to resume: rank 0 saves a checkpoint at every step."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until ended from outside."""
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    path, step = out / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    with (out / f"{rank}.jsonl").open("a") as log:
        while True:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, out / "new.pt")
                (out / "new.pt").replace(path)
            log.write(json.dumps({"time": time.time(), "step": step, "pid": os.getpid()}) + "\n")
            log.flush()


if __name__ == "__main__":
    main()
