"""Inner groups of several members inside one process, each driven by a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lightning_ft.comm.gloo import Build, GlooTransport, InnerGroup
from lightning_ft.comm.place import Place

Result = TypeVar("Result")

_prefixes = (f"test{os.getpid()}-{number}" for number in itertools.count())


def together(*calls: Callable[[], Result]) -> list[Result]:
    """Run calls at the same time, each in its thread."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(90) for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def transports(num_members: int, timeout_s: float = 90.0) -> Iterator[list[GlooTransport]]:
    """Make a transport for each member."""
    made = [GlooTransport("127.0.0.1", timeout_s) for _ in range(num_members)]
    try:
        yield made
    finally:
        for transport in made:
            transport.close()


def prepare(members: Sequence[GlooTransport]) -> list[Build]:
    """Prepare the builds of one group, at the first member's store."""
    prefix = next(_prefixes)
    return [transport.build(prefix, rank, len(members), members[0].address) for rank, transport in enumerate(members)]


def make(members: Sequence[GlooTransport]) -> list[InnerGroup]:
    """Make a group."""
    return together(*(build.result for build in prepare(members)))


def places(members: Sequence[GlooTransport], generation: int = 1) -> list[Place]:
    """Make a group as operations see it."""
    names = tuple(f"0/{rank}" for rank in range(len(members)))
    return [Place(inner, names, rank, generation) for rank, inner in enumerate(make(members))]
