"""Count what a healthy step of `ft_ddp`, or of torch's DDP, asks of Gloo and of the allocator.

`counted_loop.py OUT KIND`: rank 0 writes OUT/KIND.json. KIND: `ft` (started by `lightning-ft run`) or
`gloo` (by torchrun).
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_ft
from lightning_ft.comm.gloo import InnerGroup

NUM_STEPS = 10
NUM_WARM = 3
"""DDP cuts its buckets anew after the first step, and nothing of ours is allocated later."""

COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "barrier", "send", "recv")

calls: collections.Counter[str] = collections.Counter()


class Counted:
    """A group that counts its collectives and their bytes."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in COLLECTIVES:
            return found

        def call(*values: Any, **more: Any) -> Any:
            calls["collectives"] += 1
            calls["bytes"] += sum(tensor.nbytes for tensor in tensors_in([*values, *more.values()]))
            return found(*values, **more)

        return call


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Find the tensors among arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def make_net() -> torch.nn.Module:
    """Return a few layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))


def stepper(model: torch.nn.Module) -> Callable[[], None]:
    """Return what trains a model for a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()

    return step


def allocated_bytes(step: Callable[[], None]) -> int:
    """Return what a step allocates for tensors."""
    step()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.function_events)


def main() -> None:
    """Train, and count."""
    out, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    make_inner = InnerGroup.__init__

    def counting(inner: InnerGroup, group: Any, *values: Any, **more: Any) -> None:
        make_inner(inner, Counted(group), *values, **more)  # type: ignore[arg-type]

    InnerGroup.__init__ = counting  # type: ignore[method-assign]
    dist.init_process_group(kind)
    wrap = lightning_ft.ft_ddp if kind == "ft" else DistributedDataParallel
    alone, model = make_net(), wrap(make_net(), bucket_cap_mb=0.04)
    step = stepper(model)
    for _ in range(NUM_WARM):
        step()
    calls.clear()
    for _ in range(NUM_STEPS):
        step()
    counts = {name: number / NUM_STEPS for name, number in calls.items()}
    # What layers allocate is the machine's own.
    counts["allocated_bytes"] = allocated_bytes(step) - allocated_bytes(stepper(alone))
    if dist.get_rank() == 0:
        (out / f"{kind}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
