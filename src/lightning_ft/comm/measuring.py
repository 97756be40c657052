"""How long all-reduces take among the members of a view, in numbers that all of them know."""

from __future__ import annotations

import time

import torch

from lightning_ft.comm.place import Place, gather_now
from lightning_ft.comm.topology import LARGEST_BYTES, RING_ONLY, TINY_BYTES, Choice, Times
from lightning_ft.membership.arrangement import num_levels, tree

_ROUNDS = {TINY_BYTES: 5, LARGEST_BYTES: 3}
"""How often each size is reduced each way; the fastest counts: the first along the tree begins its thread."""


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
    return Times(place.size, num_levels(tree(place.members)), *rows.max(dim=0).values.tolist())


def _took_ns(place: Place, num_bytes: int, choice: Choice) -> int:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    place.choice = choice
    began_ns = time.monotonic_ns()
    place.inner.wait(place.allreduce(tensor))
    place.choice = RING_ONLY
    return time.monotonic_ns() - began_ns
