"""Makes the names `ft` and `ft_ddp` known to torch and Lightning, as soon as each is imported, before or after us.

What is behind a name is imported when it is first used. So the command line, the agent and the coordinator start
without torch, and a plain loop without Lightning.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import wrapt

_DESCRIPTION = "Data-parallel training that outlives any of its ranks."


def register_when_imported() -> None:
    """Register with what is there already now, with the other later; idempotent."""
    wrapt.register_post_import_hook(_register_backend, "torch")
    wrapt.register_post_import_hook(_register_strategy, "lightning.pytorch")
    wrapt.register_post_import_hook(_register_fabric_strategy, "lightning.fabric")


def _register_backend(torch: ModuleType) -> None:
    backend = torch.distributed.Backend
    if "ft" not in backend.backend_list:
        backend.register_backend("ft", _make_group, extended_api=True, devices=["cpu", "cuda"])
    importlib.import_module("lightning_ft.comm.rendezvous")  # no name of it: it may be the one that imports torch


def _make_group(*arguments: Any) -> Any:
    from lightning_ft.comm.backend import make_group

    return make_group(*arguments)


def _register_strategy(_lightning: ModuleType) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    if "ft_ddp" not in StrategyRegistry:
        StrategyRegistry.register("ft_ddp", _make_strategy, _DESCRIPTION)


def _make_strategy(**settings: Any) -> Any:
    from lightning_ft.strategy import FaultTolerantDDPStrategy

    return FaultTolerantDDPStrategy(**settings)


def _register_fabric_strategy(_fabric: ModuleType) -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    if "ft_ddp" not in STRATEGY_REGISTRY:
        STRATEGY_REGISTRY.register("ft_ddp", _make_fabric_strategy, _DESCRIPTION)


def _make_fabric_strategy(**settings: Any) -> Any:
    from lightning_ft.fabric import FaultTolerantFabricStrategy

    return FaultTolerantFabricStrategy(**settings)
