"""A hand-written PyTorch loop on backend `ft` that writes down everything a checker needs.

    plain_loop.py OUT STEPS [--model mlp|batchnorm|unused|static|checkpoint] [--hook fp16|bf16|gather|powersgd]
                  [--optimizer sgd|adamw] [--accumulate N] [--sync-every N] [--bucket-view] [--slow MEMBER]
                  [--stillborn MEMBER...] [--full] [--double] [--ahead BYTES]

With --full only those steps count that the whole job has done, so that it does not end before its dead are back; the
others are done slowly, so that they are not too many. With --hold all wait before such a step until there is a file
OUT/go-STEP.

Each member appends JSON lines to OUT/<node>-<slot>.jsonl: for each step who contributed, and the weights' hash after.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import lightning_ft
from lightning_ft.reduction import GradientReduction


class Net(torch.nn.Module):
    """A few layers; one can stay unused, or have running statistics (all kinds but `mlp`).

    All is smooth: at the kink of a ReLU the last bit of an input decides on a gradient, and no reference would be near.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        is_plain = kind == "mlp"  # a bias before a BatchNorm has no gradient but the rounding, which AdamW magnifies
        self.first = torch.nn.Linear(16, width, bias=is_plain)
        self.norm = torch.nn.Identity() if is_plain else torch.nn.BatchNorm1d(width)
        self.side = torch.nn.Linear(16, width, bias=is_plain)
        self.second = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, is_side_used: bool) -> torch.Tensor:
        """Return logits, shape [batch, 4]."""
        if self.kind == "checkpoint":
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        else:
            hidden = self.first(x)
        if is_side_used:
            hidden = hidden + self.side(x)
        activate = torch.nn.functional.silu
        return self.last(activate(self.second(activate(self.norm(hidden)))))


def batch(member: str, step: int, part: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a member: a function of who it is and of the step, so that a checker can repeat it."""
    seed = int(hashlib.sha256(f"{member} {step} {part}".encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def is_side_used(kind: str, member: str, step: int) -> bool:
    """Whether a member uses the side branch in a step."""
    return kind not in ("unused", "static") or (kind == "unused" and (int(member[-1]) + step) % 3 == 0)


def weights_hash(module: torch.nn.Module) -> str:
    """Return a hash of all parameters, bit for bit (buffers are each rank's own between two broadcasts)."""
    return tensors_hash(module.parameters())


def tensors_hash(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of tensors, bit for bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def make_optimizer(kind: str, parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of that name."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--hook", default="")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sync-every", type=int, default=0)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--slow", default="", help="member that works longer for a step than the others")
    parser.add_argument("--wide", default="", help="member that builds another model than the others")
    parser.add_argument("--stillborn", nargs="*", default=(), help="members that die before they join")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--hold", type=int, nargs="*", default=(), help="steps")
    parser.add_argument("--world-size", type=int, default=0, help="how many members the job has when it is whole")
    parser.add_argument("--ahead", type=int, default=0, help="bytes of the state that a step sends ahead to joiners")
    parser.add_argument("--double", action="store_true", help="in 64 bits: however long, a reference stays near")
    return parser.parse_args()


def holders(kept: object, depth: int) -> list[str]:
    """Say what keeps an object that should be gone, for a person."""
    told: list[str] = []
    level = [kept]
    for number in range(depth):
        following = []
        for found in level:
            for holder in gc.get_referrers(found):
                if holder is level or holder is following or holder is sys._getframe():
                    continue
                following.append(holder)
                what = f"{holder.f_code.co_qualname}:{holder.f_lineno}" if hasattr(holder, "f_code") else repr(holder)
                told.append(f"{number} {type(holder).__name__} {what[:150]}")
        level = following[:20]
    return told or ["nothing that the collector knows"]


def gather_and_average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as a hook that compresses does, by everybody's own."""
    slots = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    work = dist.all_gather(slots, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: torch.stack(done.value()[0]).mean(0))


def register_hook(model: lightning_ft.FaultTolerantDDP, name: str) -> None:
    """Give a model the communication hook of that name, if there is one."""
    if name in ("fp16", "bf16"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    elif name == "gather":
        model.register_comm_hook(None, gather_and_average)
    elif name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def main() -> None:  # noqa: C901, PLR0915
    """Run the loop."""
    arguments = _arguments()
    torch.set_num_threads(1)
    if arguments.ahead:
        from ahead import send_ahead

        send_ahead(arguments.ahead)
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    gc.disable()  # what only the collector frees is found at the end
    write(event="start", pid=os.getpid())
    if member in arguments.stillborn:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("ft")
    torch.manual_seed(0)
    net = Net(arguments.model, arguments.width + (member == arguments.wide))
    model = lightning_ft.ft_ddp(
        net,
        find_unused_parameters=arguments.model == "unused",
        static_graph=arguments.model == "static",
        gradient_as_bucket_view=arguments.bucket_view,
        bucket_cap_mb=0.01,
    )
    register_hook(model, arguments.hook)
    optimizer = make_optimizer(arguments.optimizer, model.parameters())
    commits: list[lightning_ft.StepCommit] = []
    model.on_commit = commits.append
    buffers: list[str] = []  # as each forward finds them
    net.norm.register_forward_pre_hook(lambda module, _: buffers.append(tensors_hash(module.buffers())))
    state = lightning_ft.ElasticState(model=model, optimizer=optimizer, step=0, left=arguments.steps)
    num_expected = arguments.world_size or dist.get_world_size()
    while state.left:
        state.boundary()
        if not commits:
            write(event="in", step=state.step, hash=weights_hash(net), world_size=dist.get_world_size())
        step, is_full = state.step, dist.get_world_size() == num_expected or not arguments.full
        time.sleep(0.0 if is_full else 0.05)
        while step in arguments.hold and not (arguments.out / f"go-{step}").exists():
            time.sleep(0.01)
        optimizer.zero_grad()
        for part in range(arguments.accumulate):
            is_last = part == arguments.accumulate - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                if member == arguments.slow:
                    time.sleep(0.05)
                x, y = batch(member, step, part)
                logits = model(x, is_side_used(arguments.model, member, step))
                loss = torch.nn.functional.cross_entropy(logits, y) / arguments.accumulate
                loss.backward()
        assert commits[-1].step == step, "each step commits once"
        write(event="committed", step=step, contributors=commits[-1].contributors, index=commits[-1].step)
        optimizer.step()
        digest = weights_hash(net) + buffers[-arguments.accumulate]  # the first forward has those of rank 0
        write(event="step", step=step, hash=digest, world_size=dist.get_world_size(), rank=dist.get_rank())
        if arguments.sync_every and step % arguments.sync_every == 0:
            total = torch.tensor([float(step)])
            dist.all_reduce(total)
            write(event="all_reduce", step=step, value=total.item(), world_size=dist.get_world_size())
            dist.barrier()
        state.step += 1
        state.left -= is_full
    torch.save(net.state_dict(), arguments.out / f"{member.replace(chr(47), chr(45))}.pt")
    reductions = [found for found in gc.get_objects() if isinstance(found, GradientReduction)]
    held = holders(reductions.pop(), depth=14) if len(reductions) == 1 else []
    write(event="end", hash=weights_hash(net), num_reductions=len(held) or len(reductions), held=held)


if __name__ == "__main__":
    sys.exit(main())
