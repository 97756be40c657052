"""How a number of samples for each step is dealt to whatever number of ranks."""

from __future__ import annotations

import math
from typing import NamedTuple


class StepShape(NamedTuple):
    """Of which batches a step is made, on each rank.

    Attributes:
        num_batches: That are accumulated.
        batch_size: Samples in each.
    """

    num_batches: int
    batch_size: int

    @property
    def num_samples(self) -> int:
        """Of one rank."""
        return self.num_batches * self.batch_size


def step_shape(global_batch: int, num_members: int, batch_size: int) -> StepShape:
    """Choose batches that together have as many samples as a step is to have, or nearly so.

    A step has `num_members * num_batches * batch_size` samples: they all count alike if all batches are equally large.
    From one to two times the fewest batches that fit are tried, the fewest first. If none of these makes the number
    exact, it is the fewest, and the nearest number that can be had with them.

    Args:
        global_batch: Samples that a step is to have, >= 1.
        num_members: Among how many ranks, >= 1.
        batch_size: Samples that a rank can take at once, >= 1.
    """
    fewest = math.ceil(global_batch / (num_members * batch_size))
    shapes = [
        StepShape(count, max(1, round(global_batch / (num_members * count)))) for count in range(fewest, 2 * fewest + 1)
    ]
    return next((shape for shape in shapes if num_members * shape.num_samples == global_batch), shapes[0])
