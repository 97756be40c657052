"""Fault-tolerant data-parallel training: ranks die, the survivors finish the very same step.

Importing it registers the torch.distributed backend `ft` and, where Lightning is installed, the strategy `ft_ddp`.
"""

import contextlib

from lightning_ft.comm.backend import progress, register_backend
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.config import Settings
from lightning_ft.data.sampler import ElasticDistributedSampler
from lightning_ft.ddp import FaultTolerantDDP, StepCommit, ft_ddp
from lightning_ft.elastic import ElasticState
from lightning_ft.errors import (
    CoordinatorLostError,
    EvictedError,
    FaultToleranceError,
    LaunchError,
    MembershipChangedError,
    ProtocolViolationError,
    QuorumLostError,
    RepeatedFailureError,
)

__version__ = "0.1.0"

__all__ = [
    "CoordinatorLostError",
    "ElasticDistributedSampler",
    "ElasticState",
    "EvictedError",
    "FaultToleranceError",
    "FaultTolerantDDP",
    "FaultTolerantDDPStrategy",
    "FaultTolerantProcessGroup",
    "LaunchError",
    "MembershipChangedError",
    "ProtocolViolationError",
    "QuorumLostError",
    "RepeatedFailureError",
    "Settings",
    "StepCommit",
    "ft_ddp",
    "progress",
]

register_backend()

with contextlib.suppress(ModuleNotFoundError):  # plain PyTorch needs no Lightning
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_ft.strategy import FaultTolerantDDPStrategy

    FaultTolerantDDPStrategy.register_strategies(StrategyRegistry)
