"""Two models, each wrapped, in one backward: `two_models.py OUT STEPS` writes the weights' hash after each step."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import plain_loop
import torch
import torch.distributed as dist

import lightning_ft


def main() -> None:
    """Run the loop."""
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    dist.init_process_group("ft")
    torch.manual_seed(0)
    nets = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU()), torch.nn.Linear(64, 4))
    encoder, head = (lightning_ft.ft_ddp(net, bucket_cap_mb=0.001) for net in nets)
    optimizer = torch.optim.SGD(nets.parameters(), lr=0.05, momentum=0.9)
    with (pathlib.Path(sys.argv[1]) / f"{member.replace('/', '-')}.jsonl").open("a") as log:
        for step in range(int(sys.argv[2])):
            optimizer.zero_grad()
            x, y = plain_loop.batch(member, step, 0)
            torch.nn.functional.cross_entropy(head(encoder(x)), y).backward()
            optimizer.step()
            log.write(json.dumps({"step": step, "hash": plain_loop.weights_hash(nets)}) + "\n")
            log.flush()


if __name__ == "__main__":
    main()
