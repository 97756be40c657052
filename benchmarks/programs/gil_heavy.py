"""Healthy training that often holds the interpreter's lock for long, until it is killed: `gil_heavy.py OUT`.

In some steps one rank, in others all, spend a second of CPU time in a single call that lets no other thread run: a
regular expression that backtracks, or the sorting of a long list. How long each took on the clock is written to
OUT/<node>-<slot>.jsonl.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import lightning_ft

CPU_S = 1.0
EVERY_STEPS = 10


def backtrack(text: str) -> None:
    """Look for what is not there, from each position to the end."""
    re.search(r"a*b", text)


def sort(numbers: list[float]) -> None:
    """Sort a copy."""
    sorted(numbers)


def fitted(work: Callable[[int], Callable[[], object]], size: int, power: float) -> Callable[[], object]:
    """Return work of the size that takes `CPU_S`, if it grows with that power of the size."""
    piece = work(size)
    begin_s = time.thread_time()
    piece()
    return work(int(size * (CPU_S / (time.thread_time() - begin_s)) ** (1 / power)))


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    slot, num_slots = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    chance = random.Random(member)
    pieces = (
        fitted(lambda size: partial(backtrack, "a" * size), 10_000, 2.0),
        fitted(lambda size: partial(sort, [chance.random() for _ in range(size)]), 200_000, 1.0),
    )
    dist.init_process_group("ft")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 4))
    model = lightning_ft.ft_ddp(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (pathlib.Path(sys.argv[1]) / f"{member.replace('/', '-')}.jsonl").open("a") as log:
        log.write(json.dumps({"event": "start", "pid": os.getpid()}) + "\n")
        for step in itertools.count():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
            loss.backward()
            optimizer.step()
            turn, rest = divmod(step, EVERY_STEPS)
            if rest == 0 and (turn % 2 == 0 or turn // 2 % num_slots == slot):  # all of them, then one of them
                begin_s = time.monotonic()
                pieces[turn // 2 % len(pieces)]()
                log.write(json.dumps({"event": "held", "step": step, "wall_s": time.monotonic() - begin_s}) + "\n")
                log.flush()


if __name__ == "__main__":
    main()
