"""What both strategies `ft_ddp` have in common, the Trainer's and Fabric's: ranks, and what they exchange."""

from __future__ import annotations

import datetime
import inspect
import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.strategy import TBroadcast
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ft import lightning_internals
from lightning_ft.comm.backend import confirm_membership, progress, starts_late
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.config import Settings
from lightning_ft.faultpoints import reach
from lightning_ft.launch.launcher import member_environment


class RanksOfTheRing:
    """Base of a strategy, before one of Lightning's: ranks are those of the ring, and a lost rank stops no collective.

    As long as WORLD is no `ft` group, all is as in Lightning's strategy.
    """

    cluster_environment: ClusterEnvironment | None
    num_processes: Any
    num_nodes: Any
    settings: Settings

    def _resolve_settings(
        self,
        timeout: float | str | datetime.timedelta | None,
        others: Iterable[str],
        *more_takers: Callable[..., Any],
        **settings: Any,
    ) -> None:
        """Set `settings` to what the arguments and the environment say.

        Args:
            timeout: As the strategies take it.
            others: Names of the arguments that are none of ours.
            more_takers: Who else may take them, besides DistributedDataParallel.
            settings: All else; None: not given.

        Raises:
            ValueError: A setting is wrong, or nobody takes an argument.
        """
        takers = (DistributedDataParallel.__init__, *more_takers)
        unknown = sorted(set(others) - {name for taker in takers for name in inspect.signature(taker).parameters})
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is no setting of {type(self).__name__} and no argument of DistributedDataParallel"
            )
        timeout_s = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        self.settings = Settings.resolve(timeout=timeout_s, **settings)

    @property
    def group(self) -> FaultTolerantProcessGroup | None:
        """WORLD, once it is there."""
        world = dist.group.WORLD if dist.is_initialized() else None
        return world if isinstance(world, FaultTolerantProcessGroup) else None

    @property
    def global_rank(self) -> int:
        """The rank in the ring, which may change with each collective."""
        if self.group is not None:
            return self.group.rank()
        if starts_late():  # whoever it is, it is none that writes for all
            return max(1, int(self.num_nodes * self.num_processes) - 1)
        return cast("int", super().global_rank)  # type: ignore[misc]

    @property
    def world_size(self) -> int:
        """How many ranks there are now."""
        return cast("int", super().world_size) if self.group is None else self.group.size()  # type: ignore[misc]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning makes samplers with."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _number_ranks(self, number: Callable[[], None]) -> None:
        """Tell Lightning who this is.

        Args:
            number: As Lightning does it, for the ranks that a job starts with.
        """
        if self.cluster_environment is not None:
            self.cluster_environment = member_environment(self.cluster_environment)
        if self.group is None and not starts_late():
            number()
            return
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.global_rank)
            self.cluster_environment.set_world_size(self.world_size)
        lightning_internals.set_rank_zero_rank(self.global_rank)

    def _join_ring(self, on_renumbered: Callable[[], None]) -> None:
        """Make WORLD, if it is not there.

        Args:
            on_renumbered: Called in the training thread when ranks have changed.
        """
        if not dist.is_initialized():
            lightning_internals.install_barrier()
            environment = self.cluster_environment
            assert environment is not None
            dist.init_process_group(
                "ft",
                store=dist.HashStore(),  # never asked: the members meet at their own stores
                rank=0 if starts_late() else environment.node_rank() * self.num_processes + environment.local_rank(),
                world_size=self.num_nodes * self.num_processes,
            )
        if self.group is not None and on_renumbered not in self.group.ring.on_renumbered:
            self.group.ring.on_renumbered.append(on_renumbered)
            self.group.ring.on_lost.append(_fall_silent)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return rank `src`'s object on all ranks; if that rank dies meanwhile, that of whoever has its number then."""
        if self.group is None:
            return cast("TBroadcast", super().broadcast(obj, src))  # type: ignore[misc]
        result: TBroadcast = _unpickle(self.group.broadcast_bytes(lambda: _pickle(obj), src))
        return result

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - Lightning's
        """Stack the ranks' tensors, shape [number of ranks that took part, *tensor.shape]."""
        is_world = group is None or group is self.group
        if self.group is None or not is_world or (sync_grads and torch.is_grad_enabled()):
            return cast("Tensor", super().all_gather(tensor, group, sync_grads))  # type: ignore[misc]
        return torch.stack(self._gather(tensor))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        assert self.group is not None
        shape = struct.pack(f"<{1 + tensor.dim()}q", tensor.dim(), *tensor.shape)
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [_read_tensor(entry, tensor) for entry in self.group.gather_bytes(shape + raw)]

    def _save_by_first(self, save: Callable[[], None]) -> None:
        """Have rank 0 write; if it dies before all know that it has, the next rank 0 writes again.

        Args:
            save: Writes on rank 0, as Lightning does; called on all ranks.
        """
        progress("saving a checkpoint")
        is_written = self.group is None
        if is_written:
            save()
        while self.group is not None and not is_written:
            writer = self.group.members[0]
            reach("checkpoint.save")
            if self.group.rank() == 0:
                confirm_membership()
            save()
            reach("checkpoint.saved")
            dist.barrier()
            is_written = self.group.members[0] == writer


def _fall_silent() -> None:
    """The others may go on without this process: what it would still log on its way out is theirs to log."""
    lightning_internals.set_rank_zero_rank(-1)


def _pickle(obj: object) -> bytes:
    """Serialise between ranks of one job, as torch's own object broadcast does."""
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _unpickle(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # the ranks of one job trust each other


def _read_tensor(entry: bytes, like: Tensor) -> Tensor:
    (num_dimensions,) = struct.unpack_from("<q", entry)
    shape = struct.unpack_from(f"<{num_dimensions}q", entry, 8)
    raw = bytearray(entry[8 * (1 + num_dimensions) :])
    flat = torch.frombuffer(raw, dtype=like.dtype) if raw else torch.empty(0, dtype=like.dtype)
    return flat.reshape(shape).to(like.device)
