"""Time and memory of the elastic sampler against DistributedSampler's, on a large data set.

    python benchmarks/sampler.py [--length 10000000] [--repeats 5]

Times are of whole epochs of rank 0, divided by its batches: DistributedSampler makes all indices before the first,
the elastic sampler as they are drawn. Both take turns, and the ratio is taken for each pair of neighbouring epochs.
Memory is what a fresh process needed at its peak beyond what it had after its imports. Exit status 1: a limit was
missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from torch.utils.data import BatchSampler, DistributedSampler

from lightning_ft.data.sampler import ElasticDistributedSampler

BATCH = 32
SAMPLERS: dict[str, type[DistributedSampler[int]]] = {
    "stock": DistributedSampler,
    "elastic": ElasticDistributedSampler,
}

TIME_LIMIT = 1.01
"""Of DistributedSampler's."""

MEMORY_LIMIT_MB = 4.0
"""Beyond the permutation, 8 bytes a sample, or if there is none in all."""

COUNT_LIMIT_S = 20e-6
"""A thousandth of a step of 20 ms."""

REDEAL_LIMIT_S = 1e-3


def make(kind: str, length: int, num_replicas: int, *, is_shuffled: bool = True) -> DistributedSampler[int]:
    """Make rank 0's sampler."""
    return SAMPLERS[kind](range(length), num_replicas, 0, shuffle=is_shuffled)  # type: ignore[arg-type]


def plain(sampler: Iterable[int]) -> Iterator[list[int]]:
    """Yield batches straight from the iterator."""
    iterator = iter(sampler)
    while batch := [*itertools.islice(iterator, BATCH)]:
        yield batch


def batched(sampler: Iterable[int]) -> Iterator[list[int]]:
    """Yield batches as a DataLoader gets them."""
    return iter(BatchSampler(sampler, BATCH, drop_last=False))


def counted(sampler: Iterable[int]) -> Iterator[list[int]]:
    """The same, and each is counted, if the sampler counts."""
    record = getattr(sampler, "record_batch", lambda _: None)
    for batch in batched(sampler):
        yield batch
        record(len(batch))


WAYS: dict[str, Callable[[Iterable[int]], Iterator[list[int]]]] = {
    "plain iterator": plain,
    "BatchSampler": batched,
    "BatchSampler, each batch recorded": counted,
}


ROWS: list[tuple[int, str, float | None]] = [
    (8, "plain iterator", TIME_LIMIT),
    (8, "BatchSampler", TIME_LIMIT),
    (8, "BatchSampler, each batch recorded", TIME_LIMIT),
    (1, "plain iterator", TIME_LIMIT),
    (1, "BatchSampler", TIME_LIMIT),
    (1, "BatchSampler, each batch recorded", None),
]
"""Ranks, way, limit. DistributedSampler wastes nothing with one rank; what recording costs has a limit of its own."""


def epoch_s(sampler: DistributedSampler[int], way: str, epoch: int) -> float:
    """Return how long an epoch takes per batch."""
    sampler.set_epoch(epoch)
    gc.collect()
    begin_s = time.perf_counter()
    num_batches = sum(1 for _ in WAYS[way](sampler))
    return (time.perf_counter() - begin_s) / num_batches


def measure_time(length: int, num_replicas: int, way: str, limit: float | None, repeats: int) -> bool:
    """Print a row, and return whether the limit was kept."""
    stock, elastic = make("stock", length, num_replicas), make("elastic", length, num_replicas)
    pairs = []
    for epoch in range(1, repeats + 1):
        order = [stock, elastic] if epoch % 2 else [elastic, stock]
        times_s = {sampler: epoch_s(sampler, way, epoch) for sampler in order}
        pairs.append((times_s[stock], times_s[elastic]))
    ratio = statistics.median(ours_s / stock_s for stock_s, ours_s in pairs)
    stock_s, ours_s = (statistics.median(times_s) for times_s in zip(*pairs, strict=True))
    print(
        f"| time per batch, {num_replicas} rank(s), {way}, us | {stock_s * 1e6:.2f} | {ours_s * 1e6:.2f} | {ratio:.3f} "
        f"| {'' if limit is None else limit} |",
        flush=True,
    )
    return limit is None or ratio <= limit


def measure_memory(length: int, *, is_shuffled: bool) -> bool:
    """Print a row, and return whether the limit was kept."""
    peaks_mb = []
    for kind in SAMPLERS:
        arguments = [kind, str(length), str(int(is_shuffled))]
        command = [sys.executable, str(pathlib.Path(__file__)), "--peak-of", *arguments]
        peaks_mb.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    limit_mb = MEMORY_LIMIT_MB + (length * 8 / 1e6 if is_shuffled else 0.0)
    what = "shuffled" if is_shuffled else "in order"
    print(
        f"| peak memory, 8 ranks, {what}, MB | {peaks_mb[0]:.1f} | {peaks_mb[1]:.1f} "
        f"| {peaks_mb[1] / max(peaks_mb[0], 0.1):.3f} | {limit_mb:.1f} MB |",
        flush=True,
    )
    return bool(peaks_mb[1] <= limit_mb)


def peak_mb(kind: str, length: int, *, is_shuffled: bool) -> float:
    """Return by how much this process grows at most while it draws an epoch."""
    for _ in batched(make(kind, 1000, 8, is_shuffled=is_shuffled)):
        pass  # what torch and the allocator set up at their first use
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before_mb = status_mb("VmHWM")
    for _ in batched(make(kind, length, 8, is_shuffled=is_shuffled)):
        pass
    return status_mb("VmHWM") - before_mb


def status_mb(name: str) -> float:
    """Return a field of this process's status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (text,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(text.split()[1]) * 1024 / 1e6


def measure_calls(length: int) -> bool:
    """Print what counting a step and dealing again take, in the middle of an epoch with holes."""
    sampler = ElasticDistributedSampler(range(length), 8, 0)  # type: ignore[arg-type]
    sampler.record_batch(BATCH, range(7))
    num_steps = 1000
    begin_s = time.perf_counter()
    for _ in range(num_steps):
        sampler.record_batch(BATCH, range(8))
    count_s = (time.perf_counter() - begin_s) / num_steps
    redeals_s = []
    for step in range(200):
        sampler.record_batch(BATCH, [rank for rank in range(8) if rank not in (1 + step % 7, 1 + step * step % 7)])
        begin_s = time.perf_counter()
        sampler.redeal(range(8))
        redeals_s.append(time.perf_counter() - begin_s)
    redeal_s = statistics.median(redeals_s)
    print(f"| record_batch, 8 ranks, us | | {count_s * 1e6:.2f} | | {COUNT_LIMIT_S * 1e6:g} us |")
    print(f"| redeal after two deaths in each step, us | | {redeal_s * 1e6:.0f} | | {REDEAL_LIMIT_S * 1e6:g} us |")
    return count_s <= COUNT_LIMIT_S and redeal_s <= REDEAL_LIMIT_S


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=10_000_000, help="samples of the data set")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of epochs for each time")
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of is not None:
        kind, length, is_shuffled = arguments.peak_of
        print(peak_mb(kind, int(length), is_shuffled=bool(int(is_shuffled))))
        return 0
    length = arguments.length
    print(f"| {length:,} samples, batches of {BATCH} | DistributedSampler | elastic | ratio | limit |")
    print("|---|---|---|---|---|")
    kept = [measure_time(length, *row, arguments.repeats) for row in ROWS]
    kept += [measure_memory(length, is_shuffled=is_shuffled) for is_shuffled in (True, False)]
    kept.append(measure_calls(length))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
