"""Members that end, fail, stop or hang in odd ways between collectives.

    endings.py OUT MODE...

Each member appends JSON lines to OUT/<node>-<slot>.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import lightning_ft  # noqa: F401 - registers the backend
from lightning_ft.comm.sockets import open_sockets, ports

SLOT = int(os.environ.get("LIGHTNING_FT_MEMBER", "0/0").split("/")[1])

Write = Callable[..., None]


def total(value: float = 1.0) -> float:
    """Sum a value over the members."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def leave_or_raise(write: Write) -> None:
    """Member 3 ends early, member 1 raises later, the others go on."""
    for step in range(60):
        if (SLOT, step) == (3, 20):
            write(event="left")
            sys.exit(0)
        if (SLOT, step) == (1, 40):
            raise ValueError("member 1 has had enough")
        write(event="sum", step=step, value=total(2.0**SLOT), size=dist.get_world_size())


def all_raise(write: Write) -> None:
    """All raise at the same place."""
    total()
    raise ValueError(f"member {SLOT} has had enough")


def impossible(write: Write) -> None:
    """Ask for what torch can't do, and go on."""
    group = dist.new_group([0, 1])

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            write(event="attempt", name=name, error=type(error).__name__, text=str(error), sum=total())
        else:
            write(event="attempt", name=name, error=None, text="", sum=total())

    attempt("dtype", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)))
    attempt("gather dtype", lambda: dist.all_gather([torch.ones(1).short() for _ in range(2)], torch.ones(1).short()))
    attempt("device", lambda: dist.all_reduce(torch.ones(2, device="meta")))
    attempt("dtype of one", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16 if SLOT else torch.float32)))
    attempt("slot shape", lambda: dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(2)))
    attempt("slot shape of one", lambda: dist.all_gather([torch.ones(2 + SLOT) for _ in range(2)], torch.ones(2)))
    attempt("slot number", lambda: dist.all_gather([torch.ones(2)], torch.ones(2)))
    attempt("op", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
    attempt("unsupported", lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)))
    handle = dist.all_reduce(torch.ones(2), async_op=True)  # an innocent number of WORLD beside a failing sub-group
    attempt("sub-group", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group))
    handle.wait()


def shapes(write: Write) -> None:
    """Sum tensors of different lengths."""
    total()
    try:
        dist.all_reduce(torch.ones(2 + 2 * SLOT))
    except RuntimeError as error:
        write(event="error", text=str(error))


def _sleep_in_child(path: str) -> None:
    found = [found for found in map(ports, open_sockets()) if found is not None]
    tcp = [pair for pair in found if pair[1] != int(os.environ["MASTER_PORT"])]  # torch's own store
    pathlib.Path(path).write_text(json.dumps({"pid": os.getpid(), "tcp": tcp}))
    time.sleep(3600)


def forks(out: pathlib.Path, write: Write) -> None:
    """Member 1 has forked children when it is killed; the others don't wait for them."""
    group = dist.new_group([0, 1])
    for step in range(40):
        if SLOT == 1 and step == 20:
            if os.fork() == 0:
                sys.exit(0)  # ends like a program: its exit handlers run
            _, status = os.wait()
            context = multiprocessing.get_context("fork")
            files = [out / f"child-{index}.json" for index in range(2)]
            for file in files:
                context.Process(target=_sleep_in_child, args=(str(file),), daemon=True).start()
            while not all(file.exists() and file.read_text() for file in files):
                time.sleep(0.01)
            write(event="forked", status=status)
        write(event="sum", step=step, value=total(2.0**SLOT), size=dist.get_world_size())
        if SLOT == 1 and step == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        if SLOT < 2 and step == 10:
            dist.barrier(group)


def groups(write: Write) -> None:
    """Make, use and destroy many sub-groups, with names that torch counts and with names that it repeats."""
    for number in range(40):
        if number == 10:
            write(event="descriptors", count=len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - names alone
        group = dist.new_group([0, 1], use_local_synchronization=bool(number % 2))
        tensor = torch.tensor([2.0**SLOT])
        dist.all_reduce(tensor, group=group)
        write(event="sum", value=tensor.item(), size=dist.get_world_size(group))
        dist.destroy_process_group(group)
        dist.barrier()
    write(event="descriptors", count=len(os.listdir("/proc/self/fd")))  # noqa: PTH208


def orphan(write: Write) -> None:
    """Go on until killed."""
    step = 0
    while True:
        total()
        write(event="sum", step=step)
        step += 1
        time.sleep(0.01)


def main() -> None:
    """Run one mode after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("modes", nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    log = (arguments.out / f"0-{SLOT}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    dist.init_process_group("ft")
    modes = {mode.__name__: mode for mode in (leave_or_raise, all_raise, impossible, shapes, groups, orphan)}
    modes["forks"] = functools.partial(forks, arguments.out)
    for mode in arguments.modes:
        modes[mode](write)
    write(event="end")


if __name__ == "__main__":
    main()
