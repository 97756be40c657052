"""How well a job stands failures, as torchmetrics: what `FaultToleranceMonitor` logs, for whoever counts by himself.

Each takes the keyword arguments of a torchmetrics.Metric.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class RecoveryLatency(Metric):
    """Mean seconds from the noticing of a failure until training goes on; should be below 5.

    0 if there was no recovery. Over several ranks: of all recoveries that they have seen.
    """

    full_state_update = False
    higher_is_better = False
    total_s: Tensor
    num: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total_s", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, latency_s: float) -> None:
        """Count one recovery; `latency_s` in seconds, >= 0."""
        self.total_s += latency_s
        self.num += 1

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total_s / self.num.clamp(min=1)


class CheckpointDuration(Metric):
    """Seconds that a share of the saved checkpoints did not exceed; should be below 10 % of the interval.

    0 if none was saved.

    Args:
        quantile: The share, > 0 and <= 1.
        **kwargs: As for torchmetrics.Metric.

    Raises:
        ValueError: It is none.
    """

    full_state_update = False
    higher_is_better = False
    durations_s: list[Tensor]

    def __init__(self, quantile: float = 0.99, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 < quantile <= 1:
            raise ValueError(f"quantile must be above 0 and at most 1, got {quantile!r}")
        self.quantile = quantile
        self.add_state("durations_s", [], dist_reduce_fx="cat")

    def update(self, duration_s: float) -> None:
        """Count one checkpoint; `duration_s` from the moment it was due until it was saved, in seconds, >= 0."""
        self.durations_s.append(torch.tensor([duration_s], dtype=torch.float64, device=self.device))

    def compute(self) -> Tensor:
        """Return the nearest rank."""
        if len(self.durations_s) == 0:
            return torch.tensor(0.0, dtype=torch.float64, device=self.device)
        ordered = dim_zero_cat(self.durations_s).sort().values
        return ordered[max(0, math.ceil(self.quantile * ordered.numel()) - 1)]


class GradientDivergence(Metric):
    """The largest relative difference that ranks had in the reduced gradients; should be below 1e-5.

    NaN if nobody has compared them.
    """

    full_state_update = False
    higher_is_better = False
    largest: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("largest", torch.tensor(-1.0, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, divergence: float) -> None:
        """Take in one comparison, >= 0; NaN or Inf in a rank's gradients is infinitely far."""
        value = divergence if math.isfinite(divergence) else math.inf
        self.largest = self.largest.clamp(min=value)

    def compute(self) -> Tensor:
        """Return the largest."""
        return torch.where(self.largest < 0, torch.full_like(self.largest, math.nan), self.largest)


class Goodput(Metric):
    """The share of the time in which the job made progress, from 0 to 1.

    1 before any time has passed. Over several ranks: the mean, weighted with the time of each.
    """

    full_state_update = False
    higher_is_better = True
    total_s: Tensor
    lost_s: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("total_s", "lost_s"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total_s: float = 0.0, lost_s: float = 0.0) -> None:
        """Add time that has passed, and how much of it was lost, in seconds, >= 0."""
        self.total_s += total_s
        self.lost_s += lost_s

    def compute(self) -> Tensor:
        """Return the share."""
        if self.total_s <= 0:
            return torch.ones_like(self.total_s)
        return (1 - self.lost_s / self.total_s).clamp(0, 1)
