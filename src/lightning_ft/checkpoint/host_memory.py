"""Memory of the host, and what is done to much of it while training stands still."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from lightning_ft.checkpoint.tensors import Bytes

_MAX_THREADS = 8

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class HostMemory:
    """Memory that is used again: the first use of fresh memory takes ten times as long as a copy into old."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        """Return uint8 memory of a length."""
        while self._free:
            memory = self._free.pop()
            if memory.numel() == num_bytes:
                return memory
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def give_back(self, memory: torch.Tensor) -> None:
        """Say that nobody reads it any more. Threads: any."""
        self._free.append(memory)


def copy_in_threads(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy bytes (uint8, one dimension) into memory on the host, from wherever they are: (to, from)."""
    hosts = [(to.numpy(), source.numpy()) for to, source in copies if source.device.type == "cpu"]
    in_threads(_copy, hosts)
    devices = set()
    for to, source in copies:
        if source.device.type != "cpu":
            to.copy_(source, non_blocking=True)
            devices.add(source.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _copy(copy: tuple[Bytes, Bytes]) -> None:
    np.copyto(*copy)


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor | None:
    """Return as many threads as torch would use, less the caller's; None: it would use that alone."""
    num_others = min(torch.get_num_threads(), _MAX_THREADS) - 1
    return concurrent.futures.ThreadPoolExecutor(num_others, "lightning_ft guard") if num_others > 0 else None


def in_threads(function: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
    """Return what a function that does not hold the interpreter's lock makes of each job: equal ones, in order.

    Not by torch's own threads: what is done to each MiB is too little to wake them for.
    """
    threads = _threads()
    if threads is None:
        return [function(job) for job in jobs]
    num_parts = min(torch.get_num_threads(), _MAX_THREADS)

    def take(part: int) -> list[_Result]:
        return [function(job) for job in jobs[part::num_parts]]

    others = [threads.submit(take, part) for part in range(1, num_parts)]
    parts = [take(0), *(other.result() for other in others)]
    return [parts[number % num_parts][number // num_parts] for number in range(len(jobs))]
