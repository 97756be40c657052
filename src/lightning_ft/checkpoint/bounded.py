"""Rounds what is stored, not what is trained: each number is known to a stated part of itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from lightning_ft.checkpoint.records import Stream
from lightning_ft.checkpoint.tensors import Bytes

DEFAULT_ERROR = 1e-3

_LAYOUTS = {"float32": (np.float32, np.uint32, 23, 8), "float64": (np.float64, np.uint64, 52, 11)}
"""By dtype: of the number, of its bits; bits after the first, bits of the exponent."""


@dataclasses.dataclass(slots=True)
class Rounding:
    """Rounds chunks, and measures what that does.

    A number stays what the parent's reader has, if that is near enough; else it is rounded to the nearest with fewer
    bits. So the error is always to what is trained, and never adds up. Zeros, denormals, infinities and NaN are exact.

    Args:
        bound: For each number x what is stored differs from it by at most bound * |x|; above 0, below 1.
        only: The entries of the state, at its top, in which tensors are rounded; None: all.

    Attributes:
        measured: The largest difference so far, as a part of the number.
    """

    bound: float
    only: Collection[str] | None = None
    measured: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bound < 1:
            raise ValueError(f"error must be above 0 and below 1, got {self.bound!r}")

    def applies(self, stream: Stream) -> bool:
        """Whether a tensor's numbers are rounded: float32 or float64, more than one."""
        is_meant = self.only is None or stream.name.partition("/")[0] in self.only
        is_many = math.prod(stream.shape) > 1
        return stream.kind == "tensor" and stream.dtype in _LAYOUTS and is_meant and is_many

    def round(self, dtype: str, data: Bytes, reference: Bytes | None) -> Bytes:
        """Return what is stored for a chunk; memory of its own.

        Args:
            dtype: Of the stream.
            data: What is trained.
            reference: What a reader has of the parent's chunk; None: nothing.
        """
        number, unsigned, num_bits, num_exponent_bits = _LAYOUTS[dtype]
        exact, bits = data.view(number), data.view(unsigned)
        infinite = unsigned(((1 << num_exponent_bits) - 1) << num_bits)
        num_dropped = num_bits - min(num_bits, max(0, math.ceil(-math.log2(self.bound)) - 1))
        half, mask = (1 << num_dropped) >> 1, ~((1 << num_dropped) - 1)
        found = (bits + unsigned(half)) & unsigned(mask & ((1 << 8 * np.dtype(unsigned).itemsize) - 1))
        is_exact = (bits & infinite == 0) | (bits & infinite == infinite) | (found & infinite == infinite)
        found[is_exact] = bits[is_exact]
        with np.errstate(all="ignore"):
            if reference is not None:
                known = reference.view(number)
                # Less than the bound by more than this comparison may itself be wrong.
                is_near = np.abs(exact - known) <= number(self.bound * (1 - 1e-6)) * np.abs(exact)
                is_near &= ~is_exact
                found[is_near] = known.view(unsigned)[is_near]
            rounded = found.view(number)
            size = np.abs(exact.astype(np.float64))
            error = np.abs(rounded.astype(np.float64) - exact) / size
            np.copyto(error, 0.0, where=is_exact)
        self.measured = max(self.measured, float(error.max(initial=0.0)))
        stored: Bytes = rounded.view(np.uint8)
        return stored
