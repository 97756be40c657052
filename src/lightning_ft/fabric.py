"""Fabric's strategy `ft_ddp`: adapts its DDPStrategy to the resilient group and FaultTolerantDDP.

Read in lightning 2.6.6 (tests/unit/test_fabric.py fails clearly if it changes): that the function which
`Fabric._wrap_and_launch` hands to a launcher is a `partial` of the Fabric's method `_wrap_with_setup`, which calls
`Strategy.setup_environment`; `DDPStrategy._setup_distributed`, `_set_world_ranks` and `_configure_launcher`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.types import _PATH
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ft import lightning_internals, promotion
from lightning_ft.child import watch_agent
from lightning_ft.comm.backend import confirm_membership, progress
from lightning_ft.config import Settings
from lightning_ft.ddp import FaultTolerantDDP, StepCommit
from lightning_ft.fabric_data import ElasticFabricDataLoader, use_elastic_loaders
from lightning_ft.faultpoints import reach
from lightning_ft.launch.launcher import AgentLauncher
from lightning_ft.lightning_ranks import RanksOfTheRing

_OF_THE_TRAINER = {"on_resize", "uneven", "enable"}
"""Settings of what Fabric leaves to the loop."""


class FaultTolerantFabricStrategy(RanksOfTheRing, DDPStrategy):
    """Data-parallel training with Fabric that goes on, in the same step, when ranks die.

    With `LIGHTNING_FT_ENABLE=0` it is DDPStrategy, nothing else.

    Args:
        accelerator: As for DDPStrategy.
        parallel_devices: As for DDPStrategy.
        cluster_environment: As for DDPStrategy.
        checkpoint_io: As for DDPStrategy.
        precision: As for DDPStrategy.
        timeout: As for FaultTolerantDDPStrategy.
        **settings: As for FaultTolerantDDPStrategy, but for `on_resize` and `uneven`; and for DistributedDataParallel.

    Attributes:
        last_commit: What all ranks learned at the end of the last backward.

    Raises:
        ValueError: A setting is wrong or unknown; nothing has been started.
    """

    def __init__(  # noqa: PLR0917 - Fabric's own order
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        timeout: float | str | datetime.timedelta | None = None,
        **settings: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(Settings)} - _OF_THE_TRAINER
        for_ddp = {name: value for name, value in settings.items() if name not in known}
        chosen = {name: value for name, value in settings.items() if name in known}
        self._resolve_settings(timeout, for_ddp, **chosen)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=chosen.get("process_group_backend"),
            timeout=datetime.timedelta(seconds=self.settings.longest_timeout),
            **for_ddp,
        )
        self.last_commit: StepCommit | None = None
        self._fabric: Fabric | None = None
        self._loaders: weakref.WeakSet[ElasticFabricDataLoader] = weakref.WeakSet()
        self._logs: _Logs | None = None
        self._is_promoted = False

    # -- starting ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        if not self.settings.enable:
            super()._configure_launcher()
            return
        assert self.cluster_environment is not None
        self._launcher = _FabricLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self.settings, adopt=self._adopt
        )

    @override
    def _set_world_ranks(self) -> None:
        self._number_ranks(super()._set_world_ranks)

    def _adopt(self, fabric: Fabric) -> None:
        if self._fabric is fabric:  # it launches again
            return
        self._fabric = fabric
        use_elastic_loaders(fabric, self._loaders.add)
        fabric.print = self._print  # type: ignore[method-assign]

    @override
    def _setup_distributed(self) -> None:
        if not self.settings.enable:
            super()._setup_distributed()
            return
        watch_agent()
        self._process_group_backend = "ft"
        self._join_ring(self._on_renumbered)
        self._set_world_ranks()
        if self._fabric is not None and self._logs is None and self.group is not None:
            promotion.prepare(self._fabric, self.broadcast)
            self._logs = _Logs(self._fabric)
            self.group.ring.carry(self._logs)
            self._promote_at_the_end(self._fabric)
            self._tell_log_directory(self._fabric)

    def _tell_log_directory(self, fabric: Fabric) -> None:
        if self.group is None or not self.is_global_zero:
            return
        directory = next((found for logger in fabric.loggers if (found := getattr(logger, "log_dir", None))), None)
        if directory is not None:
            self.group.ring.report("log_directory", path=str(pathlib.Path(directory).absolute()))

    @override
    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        if not self.settings.enable:
            return super().setup_module(module)
        wrapped = FaultTolerantDDP(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
        wrapped.on_commit = self._on_commit
        wrapped.verifier.is_scaled = getattr(self.precision, "scaler", None) is not None
        return wrapped

    # -- training ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._before_collective()
        progress("backward")
        super().backward(tensor, module, *args, **kwargs)
        confirm_membership(waits_for_coordinator=False)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        reach("optimizer.enter")
        progress("optimizer_step")
        output = super().optimizer_step(optimizer, **kwargs)
        progress("after optimizer_step")
        reach("optimizer.done")
        return output

    def _on_commit(self, commit: StepCommit) -> None:
        self.last_commit = commit
        for loader in self._loaders:
            loader.on_commit(commit.contributors)

    # -- collectives, saves -----------------------------------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._before_collective()
        super().barrier(*args, **kwargs)

    @override
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        self._before_collective()
        return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._before_collective()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def save_checkpoint(
        self, path: _PATH, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Have rank 0 write; if it dies before all know that it has, the next rank 0 writes again."""
        self._before_collective()
        save = functools.partial(super().save_checkpoint, path, state, storage_options, filter)
        self._save_by_first(save)

    # -- a new rank 0 -----------------------------------------------------------------------------------------------

    def _on_renumbered(self) -> None:
        was_zero = lightning_internals.rank_zero_rank() == 0
        self._set_world_ranks()
        self._is_promoted |= self.global_rank == 0 and not was_zero

    def _before_collective(self) -> None:
        """Where a new rank 0 has made every logging call that the old one had made: that one has not come farther."""
        if self._is_promoted and self._fabric is not None:
            self._is_promoted = False
            promotion.promote_logs(self._fabric)

    def _promote_at_the_end(self, fabric: Fabric) -> None:
        """Have a new rank 0 write what it has to before a loop closes its loggers."""
        for logger in fabric.loggers:
            for name in ("save", "finalize"):
                known: Any = logger
                setattr(logger, name, lightning_internals.run_before(self._before_collective, getattr(known, name)))

    def _print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each node that is left of it."""
        if self.group is None or self._is_first_of_node(self.group.members, self.group.ring.member):
            print(*args, **kwargs)  # noqa: T201 - that is what it is for

    @staticmethod
    def _is_first_of_node(members: tuple[str, ...], own: str) -> bool:
        node = own.partition("/")[0]
        return next(member for member in members if member.partition("/")[0] == node) == own


class _FabricLauncher(AgentLauncher):
    """As AgentLauncher; in a member, it hands over the Fabric that launches."""

    def __init__(self, *args: Any, adopt: Callable[[Fabric], None]) -> None:
        super().__init__(*args)
        self._adopt = adopt

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "LIGHTNING_FT_MEMBER" not in os.environ:
            return super().launch(function)
        known: Any = function
        self._adopt(known.func.__self__)
        return function(*args, **kwargs)


class _Logs:
    """Where a Fabric's logs are, for a rank that joins: it would have chosen the next free place."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = weakref.proxy(fabric)

    def prepare(self) -> None:
        """Nothing has to be done before."""

    def give(self) -> list[Any]:
        return [vars(logger).get("_version") for logger in self._fabric.loggers]

    def take(self, part: list[Any]) -> None:
        for logger, version in zip(self._fabric.loggers, part, strict=False):
            if version is not None:
                vars(logger)["_version"] = version
        promotion.forget(self._fabric)
