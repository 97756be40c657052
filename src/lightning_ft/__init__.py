"""Fault-tolerant data-parallel training: ranks die, the survivors finish the very same step.

Importing it registers the torch.distributed backend `ft` and, where Lightning is used, the strategy `ft_ddp`. It
imports neither torch nor Lightning (see `registration`), and what is behind a public name when that is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ft.config import Settings
from lightning_ft.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CoordinatorLostError,
    EvictedError,
    FaultToleranceError,
    LaunchError,
    MembershipChangedError,
    ProtocolViolationError,
    QuorumLostError,
    RepeatedFailureError,
    StaleWriterError,
    StopRequested,
    StoreError,
    UnsupportedCheckpointError,
)
from lightning_ft.registration import register_when_imported

if TYPE_CHECKING:
    from lightning_ft.callbacks import FaultToleranceMonitor
    from lightning_ft.comm.backend import progress
    from lightning_ft.comm.process_group import FaultTolerantProcessGroup
    from lightning_ft.data.sampler import ElasticDistributedSampler
    from lightning_ft.ddp import FaultTolerantDDP, StepCommit, ft_ddp
    from lightning_ft.delta_checkpoint import DeltaCheckpoint
    from lightning_ft.elastic import ElasticState
    from lightning_ft.fabric import FaultTolerantFabricStrategy
    from lightning_ft.lightning_checkpoints import DeltaCheckpointIO
    from lightning_ft.metrics import CheckpointDuration, Goodput, GradientDivergence, RecoveryLatency
    from lightning_ft.strategy import FaultTolerantDDPStrategy

__version__ = "0.1.0"

__all__ = [
    "CheckpointDamagedError",
    "CheckpointDuration",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CoordinatorLostError",
    "DeltaCheckpoint",
    "DeltaCheckpointIO",
    "ElasticDistributedSampler",
    "ElasticState",
    "EvictedError",
    "FaultToleranceError",
    "FaultToleranceMonitor",
    "FaultTolerantDDP",
    "FaultTolerantDDPStrategy",
    "FaultTolerantFabricStrategy",
    "FaultTolerantProcessGroup",
    "Goodput",
    "GradientDivergence",
    "LaunchError",
    "MembershipChangedError",
    "ProtocolViolationError",
    "QuorumLostError",
    "RecoveryLatency",
    "RepeatedFailureError",
    "Settings",
    "StaleWriterError",
    "StepCommit",
    "StopRequested",
    "StoreError",
    "UnsupportedCheckpointError",
    "ft_ddp",
    "progress",
]

_HOME_OF = {
    "CheckpointDuration": "metrics",
    "DeltaCheckpoint": "delta_checkpoint",
    "DeltaCheckpointIO": "lightning_checkpoints",
    "ElasticDistributedSampler": "data.sampler",
    "ElasticState": "elastic",
    "FaultToleranceMonitor": "callbacks",
    "FaultTolerantDDP": "ddp",
    "FaultTolerantDDPStrategy": "strategy",
    "FaultTolerantFabricStrategy": "fabric",
    "FaultTolerantProcessGroup": "comm.process_group",
    "Goodput": "metrics",
    "GradientDivergence": "metrics",
    "RecoveryLatency": "metrics",
    "StepCommit": "ddp",
    "ft_ddp": "ddp",
    "progress": "comm.backend",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_imported()
