"""Rounds what is trained to few bits, so that little has to be stored; the run goes on from what was rounded.

A rounded number has `SNAP_BITS` bits after the first. Of a parameter its change since the last save is rounded, of the
optimizer's averages they themselves. Rounding is stochastic: up or down, with the probabilities that keep the mean. The
random numbers depend on the seed, the step and the tensor alone, never on a generator that a user's code draws from,
so all ranks round alike, and dropout and shuffling stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_ft.checkpoint.format import hash_of

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


def rounded(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return float32 numbers with `SNAP_BITS` bits after the first, stochastically rounded; infinities and NaN stay.

    Args:
        values: float32, contiguous.
        generator: Of the tensor's device; it is drawn from.
    """
    bits = values.view(torch.int32)
    dither = torch.empty((values.numel() + 1) // 2, dtype=torch.int64, device=values.device).random_(
        generator=generator
    )
    kept = dither.view(torch.int32)[: values.numel()].view(values.shape)
    # The sign is apart, so this rounds the magnitude; a carry goes into the exponent, which is the next number.
    found = kept.bitwise_and_((1 << _DROPPED) - 1).add_(bits).bitwise_and_(-1 << _DROPPED)
    is_beyond = (found.bitwise_and(_EXPONENT) == _EXPONENT) | (bits.bitwise_and(_EXPONENT) == _EXPONENT)
    return torch.where(is_beyond, bits, found).view(torch.float32)


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
                average.copy_(self._round(average, step, number, part + 1))
            reference = self._references.get(parameter)
            if reference is None:
                self._references[parameter] = parameter.detach().clone()
            else:
                reference += self._round(parameter - reference, step, number, 0)
                parameter.copy_(reference)

    def _round(self, values: torch.Tensor, step: int, number: int, part: int) -> torch.Tensor:
        generator = torch.Generator(values.device)
        generator.manual_seed(int.from_bytes(hash_of(f"{self._seed} {step} {number} {part}".encode())[:4], "little"))
        return rounded(values.contiguous(), generator)


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
