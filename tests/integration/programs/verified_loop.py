"""Trains models whose ranks compare what they have, each twice: as it should be, then with a machine that is wrong.

    verified_loop.py OUT [--redo] [--kinds NAME...]

What is wrong is one bit, flipped when a step's reduction is done and nobody has compared yet; with --redo that is all
that is tried, then it is wrong each time that it is done again. Without, parameters and the optimizer's state come
next, then a rank has NaN before the reduction, one is given up for a flipped bit, and at last one may be killed (named
point `last.step`, then any of those of the comparison).
Each member appends JSON lines to OUT/<node>-<slot>.jsonl: the weights' hash after each step of each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from plain_loop import Net, batch, is_side_used, make_optimizer, register_hook, weights_hash

import lightning_ft
from lightning_ft.faultpoints import reach
from lightning_ft.reduction import GradientReduction
from lightning_ft.verification import Check, Verifier

KINDS: dict[str, tuple[str, dict[str, bool], str, int]] = {
    "plain": ("mlp", {}, "", 1),
    "view": ("mlp", {"gradient_as_bucket_view": True}, "", 2),
    "unused": ("unused", {"find_unused_parameters": True}, "", 1),
    "static": ("static", {"static_graph": True}, "", 1),
    "hook": ("mlp", {}, "fp16", 2),
}
"""Model, options of DDP, communication hook, and how many batches are accumulated."""

NUM_STEPS = 5

wrong: list[str] = []
"""What is wrong with this member in this step."""


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit of a tensor of float32."""
    tensor.data.view(-1).view(torch.int32)[3] ^= 1 << 20


def be_wrong_in_time() -> None:
    """Flip bits between a reduction and the comparison that follows it."""
    begin, digest = Verifier.begin, Verifier._digest

    def begin_wrong(verifier: Verifier, reduction: GradientReduction) -> Check | None:
        parameter = next(reversed(list(verifier._parameters())))[1]
        if "bucket" in wrong:
            flip(next(part for part in reversed(reduction.parts) if part.tensor.is_floating_point()).tensor)
        if "parameter" in wrong:
            flip(parameter)
        if "state" in wrong:
            flip(verifier.optimizers[0].state[parameter]["exp_avg"])
        return begin(verifier, reduction)

    def digest_wrong(verifier: Verifier, check: Check) -> None:
        if "always" in wrong:
            flip(check.subjects[0].tensor)
        digest(verifier, check)

    Verifier.begin, Verifier._digest = begin_wrong, digest_wrong  # type: ignore[method-assign]


class Run:
    """A training from the beginning."""

    def __init__(self, kind: str, member: str) -> None:
        torch.manual_seed(0)
        model, options, hook, self.accumulate = KINDS[kind]
        self.kind, self.member, self.step = model, member, 0
        self.net = Net(model, 64)
        self.model = lightning_ft.ft_ddp(self.net, bucket_cap_mb=0.01, **options)
        register_hook(self.model, hook)
        self.optimizer = make_optimizer("adamw", self.net.parameters())
        self.model.watch_optimizers(self.optimizer)

    def take_step(self, *what: str) -> str:
        """Take one in which something is wrong here. Returns: The weights' hash after it."""
        wrong[:] = what
        self.optimizer.zero_grad()
        for part in range(self.accumulate):
            self.model.require_backward_grad_sync = part == self.accumulate - 1
            x, y = batch(self.member, self.step, part)
            logits = self.model(x, is_side_used(self.kind, self.member, self.step))
            loss = torch.nn.functional.cross_entropy(logits, y)
            (loss * (float("nan") if "nan" in what else 1.0)).backward()
        wrong.clear()
        gradients = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.optimizer.step()
        self.step += 1
        return weights_hash(self.net)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps(line) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    dist.init_process_group("ft")
    be_wrong_in_time()
    here = int(member[-1])
    what = ("bucket",) if arguments.redo else ("bucket", "parameter", "state")
    for kind in arguments.kinds:
        clean, run = Run(kind, member), Run(kind, member)
        hashes = [clean.take_step() for _ in range(NUM_STEPS)]
        found = [run.take_step()]
        for step in range(1, NUM_STEPS):
            is_mine = step <= len(what) and here == step % dist.get_world_size()
            found.append(run.take_step(what[step - 1]) if is_mine else run.take_step())
        write(event="run", kind=kind, hashes=hashes, found=found)
    if arguments.redo:
        try:
            run.take_step(*("always",) * here)
        except lightning_ft.FaultToleranceError as error:
            write(event="failed", text=str(error), hash=weights_hash(run.net))
            raise
    write(event="nan", before=weights_hash(run.net), after=run.take_step(*("nan",) * (here == 2)))
    before = run.model.verifier._settings
    run.model.verifier._settings = dataclasses.replace(before, verify_policy="evict")
    run.step = clean.step  # the step with NaN has changed nothing
    expected = clean.take_step()
    write(event="evicted", expected=expected, hash=run.take_step(*("bucket",) * (here == 3)))
    run.model.verifier._settings = before
    found = run.take_step()  # whoever was given up raises in it; the others take it without
    write(event="without", expected=clean.take_step(), hash=found)
    expected = clean.take_step()
    reach("last.step")
    write(event="end", expected=expected, hash=run.take_step(*("bucket",) * (here == 0)))


if __name__ == "__main__":
    sys.exit(main())
