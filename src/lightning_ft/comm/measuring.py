"""How long all-reduces take among the members of a view, in numbers that all of them know."""

from __future__ import annotations

import time

import torch

from lightning_ft.comm.place import Place, gather_now
from lightning_ft.comm.topology import LARGEST_BYTES, RING_ONLY, TINY_BYTES, Choice, Times, zeros

_ROUNDS = {TINY_BYTES: 3, LARGEST_BYTES: 2}
"""How often each size is reduced each way; the fastest counts: the first of a view begins its thread."""


def measure(place: Place) -> Times:
    """Measure on a new place; all its members must.

    Raises:
        RuntimeError: A member failed.
    """
    own = [
        min(_took_ns(place, num_bytes, choice) for _ in range(num_rounds))
        for num_bytes, num_rounds in _ROUNDS.items()
        for choice in (RING_ONLY, Choice(is_all=True))
    ]
    rows = gather_now(place, torch.tensor(own, dtype=torch.int64)).view(torch.int64)
    ring_tiny, tree_tiny, ring_largest, tree_largest = rows.max(dim=0).values.tolist()
    return Times(place.members, (ring_tiny, tree_tiny), (ring_largest, tree_largest))


def _took_ns(place: Place, num_bytes: int, choice: Choice) -> int:
    tensor = zeros(num_bytes)
    place.choice = choice
    began_ns = time.monotonic_ns()
    place.inner.wait(place.allreduce(tensor))
    place.choice = RING_ONLY
    return time.monotonic_ns() - began_ns
