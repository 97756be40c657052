"""Processes that write to one local store, are killed while they do, or race for the same names.

Usage: store_writers.py (kill | race) DIRECTORY ROUNDS
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import select
import signal
import sys
import threading
from pathlib import Path

from lightning_ft.checkpoint.claims import claim_generation, claimed_generations
from lightning_ft.checkpoint.stores.local import Kernel, LocalStore
from lightning_ft.errors import AlreadyThereError

NUM_WRITERS = 3


def content(generation: int, step: int) -> list[bytes]:
    """Return a pack's pieces, which say what they belong to."""
    return [f"{generation}-{step}-{piece};".encode() * 5000 for piece in range(3)]


def write_until_killed(directory: str, acknowledged: int) -> None:
    """Publish checkpoint after checkpoint, keeping one before the newest; tell of each that is published."""
    store = LocalStore(directory)
    claim = claim_generation(store)
    for step in range(1_000_000):
        name = f"{claim.generation}-{step}"
        store.create(f"data/{name}/r0.pack", content(claim.generation, step))
        claim.publish(f"manifests/{name}", [name.encode()])
        os.write(acknowledged, f"{name}\n".encode())
        store.replace("LATEST", name.encode())
        if step >= 2:
            old = f"{claim.generation}-{step - 2}"
            store.delete([f"manifests/{old}"])
            store.delete([f"data/{old}/r0.pack"])


def check(directory: str, last: str) -> None:
    """Everything that can be seen is whole, and the last one that was acknowledged can be seen."""
    store = LocalStore(directory)
    names = store.list("")
    for path in names:
        if path.startswith("data/"):
            generation, step = path.split("/")[1].split("-")
            assert store.read(path) == b"".join(content(int(generation), int(step))), f"{path} is damaged"
        elif path.startswith("manifests/"):
            name = path.removeprefix("manifests/")
            assert store.read(path) == name.encode(), f"{path} is damaged"
            assert f"data/{name}/r0.pack" in names, f"{path} lacks its pack"
    assert not last or f"manifests/{last}" in names, f"{last} was acknowledged, and is not there"


def kill(directory: str, rounds: int) -> None:
    """Kill a writer at a random moment, look at what is left, let the next one go on; and so forth."""
    dice = random.Random(0)
    num_published = num_leftovers = 0
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            write_until_killed(directory, writer)
            os._exit(1)
        os.close(writer)
        # It has begun to publish, unless it shall be killed even earlier.
        select.select([reader], [], [], dice.choice([0, 60]))
        select.select([], [], [], dice.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader) as acknowledged:
            published = acknowledged.read().split()
        num_published += len(published)
        num_leftovers += sum(1 for path in Path(directory).rglob(".*.tmp"))
        check(directory, published[-1] if published else "")
    store = LocalStore(directory)
    store.recover()
    assert not list(Path(directory).rglob(".*.tmp"))
    print(
        json.dumps({"published": num_published, "leftovers": num_leftovers, "claims": len(claimed_generations(store))})
    )


class Meeting(Kernel):
    """Has all writers come to the decisive call at the same time."""

    def __init__(self, barrier: threading.Barrier, *, has_links: bool) -> None:
        self._barrier, self._has_links = barrier, has_links

    def link(self, source: str, target: str) -> None:
        if not self._has_links:
            raise PermissionError(1, "no hard links here", target)
        self._barrier.wait(60)
        super().link(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        self._barrier.wait(60)
        super().rename_noreplace(source, target)


def race(directory: str, rounds: int) -> None:
    """Let several processes create the same objects at the same time; of each exactly one is told that it did."""
    fork = multiprocessing.get_context("fork")
    for has_links in (True, False):
        barrier = fork.Barrier(NUM_WRITERS)
        won = fork.SimpleQueue()

        def run(index: int, barrier: threading.Barrier = barrier, has_links: bool = has_links) -> None:
            store = LocalStore(directory, kernel=Meeting(barrier, has_links=has_links))
            mine = []
            for number in range(rounds):
                with contextlib.suppress(AlreadyThereError):
                    store.create(f"race/{has_links}/{number}", [f"{index}".encode() * 10_000])
                    mine.append(number)
                barrier.wait(60)
            won.put((index, mine))  # noqa: B023 - joined within this round

        writers = [fork.Process(target=run, args=(index,)) for index in range(NUM_WRITERS)]
        for writer in writers:
            writer.start()
        results = [won.get() for _ in writers]
        for writer in writers:
            writer.join()
        assert sorted(number for _, mine in results for number in mine) == list(range(rounds))
        store = LocalStore(directory)
        for index, mine in results:
            for number in mine:
                assert store.read(f"race/{has_links}/{number}") == f"{index}".encode() * 10_000
    assert not list(Path(directory).rglob(".*.tmp"))
    print(json.dumps({"winners": [len(mine) for _, mine in results]}))


if __name__ == "__main__":
    {"kill": kill, "race": race}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
