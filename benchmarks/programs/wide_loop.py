"""A plain loop that trains many parameters with AdamW: `wide_loop.py OUT MILLIONS ACCUMULATE`.

With WIDE_LOOP_PINS in the environment each process of a node has processors of its own, as far as there are enough.
Each member appends JSON lines to OUT/<node>-<slot>.jsonl: when each step ended, how much of processors' time the
process had had by then (both seconds), and how many had taken the step.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

import lightning_ft

_WIDTH = 1024


def main() -> None:
    """Train until killed."""
    out, millions, accumulate = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    if "WIDE_LOOP_PINS" in os.environ:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(member.split("/")[1]) % len(processors)]})
    log = (out / f"{member.replace('/', '-')}.jsonl").open("a")
    dist.init_process_group("ft")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(max(1, millions * 1_000_000 // _WIDTH**2))]
    model = lightning_ft.ft_ddp(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, step=0)
    inputs = torch.randn(64, _WIDTH)
    while True:
        state.boundary()
        optimizer.zero_grad()
        for part in range(accumulate):
            if part < accumulate - 1:
                with model.no_sync():
                    model(inputs).square().mean().backward()
            else:
                model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        line = {"event": "step", "time": time.time(), "step": state.step, "size": dist.get_world_size()}
        line["cpu_s"] = time.process_time()
        log.write(json.dumps(line | {"pid": os.getpid()}) + "\n")
        log.flush()


if __name__ == "__main__":
    main()
