"""Rounds what is trained to few bits, so that little has to be stored; the run goes on from what was rounded.

A rounded number has `SNAP_BITS` bits after the first. Of a parameter its change since the last save is rounded, of the
optimizer's averages they themselves. Rounding is stochastic: up or down, with the probabilities that keep the mean. The
random numbers depend on the seed, the step and the tensor alone, never on a generator that a user's code draws from,
so all ranks round alike, and dropout and shuffling stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import torch

from lightning_ft.checkpoint.format import hash_of
from lightning_ft.checkpoint.tensors import is_dense

SNAP_BITS = 3
"""A number is known to one part in 8 afterwards, its mean over many saves exactly."""

MIN_STEPS = 10
"""So many optimizer steps lie between two roundings at least: what is rounded at every step learns worse."""

AVERAGES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
)
"""What optimizers call averages of gradients; whatever else they keep is not rounded."""

_DROPPED = 23 - SNAP_BITS
_EXPONENT = 0x7F800000
_LARGE = 2.0**127
"""From here on a number may have no next one to be rounded to."""

BLOCK = 1 << 16
"""So many numbers are rounded by the same random numbers, mixed anew for each block: what it takes stays in a cache."""

_MANY_BLOCKS = 512
"""So many at once where each operation costs the same however small it is: not on the CPU."""


@functools.cache
def _noise(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.random.Philox(key=0).random_raw(BLOCK // 2).view(np.int32)).to(device)


def round_flat(values: torch.Tensor, key: str) -> None:
    """Round float32 numbers to `SNAP_BITS` bits after the first, stochastically; infinities and NaN stay.

    Args:
        values: float32, one dimension, contiguous; changed in place.
        key: What the random numbers depend on, besides the place.
    """
    num_blocks = -(-values.numel() // BLOCK)
    # Philox counts: its numbers are the same on each machine, with each version of numpy.
    keys = np.random.Philox(key=int.from_bytes(hash_of(key.encode()), "little")).random_raw(num_blocks).view(np.int32)
    mixers = torch.from_numpy(keys.reshape(num_blocks, 2) | np.array([0, 1], np.int32)).to(values.device)
    at_once = 1 if values.device.type == "cpu" else _MANY_BLOCKS
    bits = values.view(torch.int32)
    dither = torch.empty(min(at_once, num_blocks), BLOCK, dtype=torch.int32, device=values.device)
    for first in range(0, num_blocks, at_once):
        part = bits[first * BLOCK : (first + at_once) * BLOCK]
        mixed = mixers[first : first + at_once]
        found = dither[: mixed.shape[0]]
        torch.bitwise_xor(_noise(values.device), mixed[:, :1], out=found)
        # An odd factor: for each block another order of the same numbers, of which the upper bits are the most mixed.
        found.mul_(mixed[:, 1:]).bitwise_right_shift_(32 - _DROPPED).bitwise_and_((1 << _DROPPED) - 1)
        # The sign is apart, so this rounds the magnitude; a carry goes into the exponent, which is the next number.
        sums = found.view(-1)[: part.numel()].add_(part).bitwise_and_(-1 << _DROPPED)
        least, most = values[first * BLOCK : (first + at_once) * BLOCK].aminmax()
        if not (float(least) > -_LARGE and float(most) < _LARGE):  # nor if there is a NaN
            is_beyond = (sums.bitwise_and(_EXPONENT) == _EXPONENT) | (part.bitwise_and(_EXPONENT) == _EXPONENT)
            sums = torch.where(is_beyond, part, sums)
        part.copy_(sums)


class Snap:
    """Rounds what optimizers train, in place.

    Args:
        seed: The same on all ranks.

    Invariants: a parameter is what it was at the last `snap` or `begin`, plus a rounded change, in one addition. So a
    fit that begins with what one `snap` has left rounds the next time as if it had never been interrupted.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._references: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take the parameters as they are for those of the last `snap`."""
        self._references = {parameter: parameter.detach().clone() for parameter, _ in _trained(optimizers)}

    def forget(self) -> None:
        """Have the next `snap` leave the parameters as they are: not all ranks know those of the last one."""
        self._references.clear()

    @torch.no_grad()
    def snap(self, optimizers: Iterable[torch.optim.Optimizer], step: int) -> None:
        """Round; all ranks call it with the same state.

        Args:
            optimizers: float32 parameters and averages are rounded, others stay as they are.
            step: Number of optimizer steps done.
        """
        for number, (parameter, averages) in enumerate(_trained(optimizers)):
            for part, average in enumerate(averages):
                self._round(average, step, number, part + 1)
            reference = self._references.get(parameter)
            if reference is None:
                self._references[parameter] = parameter.detach().clone()
            else:
                change = parameter - reference
                self._round(change, step, number, 0)
                reference += change
                parameter.copy_(reference)

    def _round(self, values: torch.Tensor, step: int, number: int, part: int) -> None:
        key = f"{self._seed} {step} {number} {part}"
        if is_dense(tuple(values.shape), tuple(values.stride())):
            round_flat(values.as_strided((values.numel(),), (1,)), key)
        else:
            copy = values.contiguous()
            round_flat(copy.view(-1), key)
            values.copy_(copy)


def _trained(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each float32 parameter with its averages."""
    return [
        (
            parameter,
            [
                value
                for name, value in sorted(optimizer.state.get(parameter, {}).items())
                if name in AVERAGES and isinstance(value, torch.Tensor) and value.dtype is torch.float32
            ],
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.dtype is torch.float32
    ]
