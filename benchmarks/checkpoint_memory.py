"""Host memory that saving takes, as a multiple of state / ranks, which must not exceed 2.2.

    python benchmarks/checkpoint_memory.py [--num-ranks 2] [--num-mb 600] [--num-saves 6]

Each rank is a process with the whole state (of which a tenth changes between two saves, and in the last quarter every
number does) and saves its share in the background, as `DeltaCheckpoint` does, bases and differences. Measured is how
far the resident memory of each process rises above what it is with the state alone, at its peak. It does not depend on
what else the machine does. Exit status 1: the limit was missed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import pathlib
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_ft.checkpoint.saver import Saver
from lightning_ft.checkpoint.writer import Writer

LIMIT = 2.2


def resident_bytes(field: str) -> int:
    """Return a figure of this process: `VmRSS`, or `VmHWM`, the highest since it was reset."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def rank_main(rank: int, arguments: argparse.Namespace, url: str, pipe: Connection) -> None:
    """Save again and again; send how much memory that took."""
    torch.set_num_threads(1)
    num_parts = 24
    size = arguments.num_mb * 1_000_000 // 4 // num_parts
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {f"part{index}": torch.randn(size, generator=generator) for index in range(num_parts)}
    warm = Saver(Writer(f"{url}-warm{rank}"))  # what libraries take at their first use is not for the state
    warm.start(warm.writer.plan(1), {"x": torch.randn(3_000_000)}, time.monotonic())
    warm.wait()
    del warm
    gc.collect()
    saver = Saver(Writer(url, rank=rank, num_ranks=arguments.num_ranks, base_every=4))
    before = resident_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for step in range(1, arguments.num_saves + 1):
        for index in range(num_parts):
            if index >= num_parts * 3 // 4:
                state[f"part{index}"] += 1e-3
            elif index % 10 == step % 10:
                state[f"part{index}"][: size // 3].mul_(1.0001)
        if rank == 0:
            pipe.send(saver.writer.plan(step))
        saver.start(pipe.recv(), state, time.monotonic())
        saver.wait()
        error = saver.take_error()
        if error is not None:
            raise error
        pipe.send("done")
        pipe.recv()
    pipe.send(resident_bytes("VmHWM") - before)


def main() -> int:
    """Run the ranks, and say what they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--num-mb", type=int, default=600)
    parser.add_argument("--num-saves", type=int, default=6)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(arguments.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, arguments, f"{directory}/run", theirs))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for _ in range(arguments.num_saves):
            plan = pipes[0].recv()
            for pipe in pipes:
                pipe.send(plan)
            for pipe in pipes:
                pipe.recv()
            for pipe in pipes:
                pipe.send("next")
        taken = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    share = arguments.num_mb * 1_000_000 / arguments.num_ranks
    for rank, num_bytes in enumerate(taken):
        print(f"rank {rank}: {num_bytes / 1e6:.0f} MB, {num_bytes / share:.2f} x state / ranks (at most {LIMIT})")
    return int(max(taken) / share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
