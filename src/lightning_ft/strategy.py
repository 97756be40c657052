"""The Lightning strategy `ft_ddp`: adapts DDPStrategy to the resilient group and FaultTolerantDDP."""

from __future__ import annotations

import contextlib
import datetime
import functools
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ft import lightning_deal, lightning_internals, lightning_metrics, promotion
from lightning_ft.boundary import Boundary
from lightning_ft.child import watch_agent
from lightning_ft.comm.backend import confirm_membership, progress
from lightning_ft.ddp import FaultTolerantDDP, StepCommit
from lightning_ft.faultpoints import reach
from lightning_ft.launch.launcher import AgentLauncher
from lightning_ft.lightning_checkpoints import DeltaCheckpointIO
from lightning_ft.lightning_evaluation import CompleteEvaluations, EvaluationReports
from lightning_ft.lightning_ranks import RanksOfTheRing
from lightning_ft.lightning_refresh import DataRefresher
from lightning_ft.stopping import Stopping


class FaultTolerantDDPStrategy(RanksOfTheRing, DDPStrategy):
    """Data-parallel training that goes on, in the same step, when ranks die.

    With `LIGHTNING_FT_ENABLE=0` it is DDPStrategy, nothing else. A setting left at None is taken from
    `LIGHTNING_FT_<NAME>`, else from the default in `lightning_ft.config.Settings`.

    Args:
        accelerator: As for DDPStrategy.
        parallel_devices: As for DDPStrategy.
        cluster_environment: As for DDPStrategy.
        checkpoint_io: As for DDPStrategy.
        precision_plugin: As for DDPStrategy.
        ddp_comm_state: State of the communication hook.
        ddp_comm_hook: fp16 or bf16 compression, PowerSGD; run on any device.
        ddp_comm_wrapper: As for DDPStrategy.
        min_world_size: Fewest members that may go on.
        max_failures: Most members that may be missing at once.
        heartbeat_interval: Seconds between two signs of life.
        heartbeat_timeout: Seconds of silence after which a member is given up.
        timeout: Seconds that a collective may wait for a member that shows no progress; `"auto"`: learned.
        max_link_failures: How often the connection of two live members may fail in ten minutes.
        evict_stragglers: Whether a member that takes three times the median of all for a step is given up.
        respawn: Whether a rank whose process failed is started again, to join the others.
        max_restarts: How often, for each rank.
        rejoin_timeout: Seconds that ranks which are too few to go on wait for others to come back.
        max_world_size: Most ranks that the job may have, with those that join; None: as many as it starts with.
        spares: How many more processes each node has, ready to take the place of a rank that dies.
        catch_up: `blocking`: whoever joins gets the state while all wait; `pipelined`: most of it before.
        catch_up_slowdown: By which part of its time a step may be longer for that.
        on_resize: `scale_lr`: learning rates follow the number of ranks. `keep_global_batch`: steps keep their samples.
        uneven: `exact`: no sample twice in an epoch; ranks with fewer samples in a step weigh less.
        verify_every_n_steps: In one of so many steps the ranks compare their reduced gradients, bit for bit; 0: never.
        verify_state_every_n_steps: In one of so many, also parameters and optimizers' state; 0: never.
        verify_chunk_bytes: How large the parts are that are compared, handed over and named.
        verify_policy: `warn`, `heal` or `evict` who differs from the majority.
        topology: How all-reduces go: `ring`, `tree`, or `auto`, which changes no result.
        coordinator: `host:port` of the coordinator, if the agent shall not start one at a free port.
        process_group_backend: Backend inside `ft`: `gloo`.
        event_log: File of the event log.
        metrics_port: Port of the coordinator's host where Prometheus finds the job's metrics.
        metrics_host: Address to listen on there; other than loopback, whoever reaches it reads them.
        **ddp_kwargs: For DistributedDataParallel (`find_unused_parameters`, `static_graph`, `bucket_cap_mb`, ...).

    Raises:
        ValueError: A setting is wrong or unknown; nothing has been started.
    """

    strategy_name = "ft_ddp"

    def __init__(  # noqa: PLR0917 - Lightning's own order
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        min_world_size: int | None = None,
        max_failures: int | None = None,
        heartbeat_interval: float | None = None,
        heartbeat_timeout: float | None = None,
        timeout: float | Literal["auto"] | datetime.timedelta | None = None,
        coordinator: str | None = None,
        process_group_backend: str | None = None,
        event_log: str | None = None,
        max_link_failures: int | None = None,
        evict_stragglers: bool | None = None,  # noqa: FBT001 - jsonargparse takes either kind
        respawn: bool | None = None,  # noqa: FBT001
        max_restarts: int | None = None,
        rejoin_timeout: float | None = None,
        on_resize: Literal["keep", "scale_lr", "keep_global_batch"] | None = None,
        uneven: Literal["pad", "exact"] | None = None,
        max_world_size: int | None = None,
        spares: int | None = None,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
        catch_up: Literal["blocking", "pipelined"] | None = None,
        catch_up_slowdown: float | None = None,
        verify_every_n_steps: int | None = None,
        verify_state_every_n_steps: int | None = None,
        verify_chunk_bytes: int | None = None,
        verify_policy: Literal["warn", "heal", "evict"] | None = None,
        topology: Literal["ring", "tree", "auto"] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self._resolve_settings(
            timeout,
            ddp_kwargs,
            DDPStrategy.__init__,
            min_world_size=min_world_size,
            max_failures=max_failures,
            heartbeat_interval=heartbeat_interval,
            heartbeat_timeout=heartbeat_timeout,
            coordinator=coordinator,
            process_group_backend=process_group_backend,
            event_log=event_log,
            max_link_failures=max_link_failures,
            evict_stragglers=evict_stragglers,
            respawn=respawn,
            max_restarts=max_restarts,
            rejoin_timeout=rejoin_timeout,
            max_world_size=max_world_size,
            spares=spares,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            catch_up=catch_up,
            catch_up_slowdown=catch_up_slowdown,
            on_resize=on_resize,
            uneven=uneven,
            verify_every_n_steps=verify_every_n_steps,
            verify_state_every_n_steps=verify_state_every_n_steps,
            verify_chunk_bytes=verify_chunk_bytes,
            verify_policy=verify_policy,
            topology=topology,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=datetime.timedelta(seconds=self.settings.longest_timeout),
            **ddp_kwargs,
        )
        self._trainer: Trainer | None = None
        self._data: DataRefresher | None = None
        self._boundary: Boundary | None = None
        self._is_promoted = False
        self._stopping = Stopping(
            self,
            self.settings.min_world_size,
            self.settings.heartbeat_interval,
            depart=self._depart,
            agree=self._agree_on_requeue,
        )

    # -- who is in it -----------------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        self._number_ranks(super().set_world_ranks)

    def _on_renumbered(self) -> None:
        was_zero = lightning_internals.rank_zero_rank() == 0
        self.set_world_ranks()
        self._is_promoted |= self.global_rank == 0 and not was_zero
        if self._data is not None:
            self._data.ranks_changed()

    # -- starting ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        if not self.settings.enable:
            super()._configure_launcher()
            return
        assert self.cluster_environment is not None
        self._launcher = AgentLauncher(self.cluster_environment, self.num_processes, self.num_nodes, self.settings)

    @override
    def setup_distributed(self) -> None:
        if not self.settings.enable:
            super().setup_distributed()
            return
        watch_agent()
        reset_seed()
        self._process_group_backend = "ft"
        self._join_ring(self._on_renumbered)
        self.set_world_ranks()

    @override
    def setup(self, trainer: Trainer) -> None:
        if not self.settings.enable:
            super().setup(trainer)
            return
        self._trainer = trainer
        if self._boundary is None:
            self._boundary = self._adapt(trainer)
        promotion.prepare(trainer, self.broadcast)
        self._tell_log_directory(trainer)
        self._boundary.prepare_to_join()
        if trainer.state.fn == TrainerFn.FITTING:
            Boundary.num_fits += 1
            super().setup(trainer)
            if isinstance(self.model, FaultTolerantDDP):
                self.model.watch_optimizers(*self.optimizers)
        else:
            self._setup_evaluation(trainer)
        assert self.lightning_module is not None
        if self.group is not None:
            lightning_metrics.Exchange(self.group.gather_bytes).attach(self.lightning_module)

    def _adapt(self, trainer: Trainer) -> Boundary:
        """Have a Trainer's loops follow the members, from its first fit or evaluation on."""
        group = self.group
        lightning_deal.use_elastic_samplers()
        reports = EvaluationReports(group)
        self._data = DataRefresher(trainer, reports.on_dealt, reports.on_evaluated)
        lightning_internals.take_stop_signals(trainer, self._stopping)  # before what goes back, which is asked first
        boundary = Boundary(trainer, group, self.settings, on_joined=self._data.ranks_changed)
        if group is not None:
            lightning_metrics.watch_results(trainer, lambda: group.members)
            CompleteEvaluations(trainer, lambda: group.members, self.barrier, reports.on_complete)
        lightning_internals.around_each_batch(trainer, boundary.before_batch, boundary.after_batch)
        return boundary

    def _setup_evaluation(self, trainer: Trainer) -> None:
        """As DDPStrategy.setup without gradients, but the broadcast of the state has no root that must live."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.group is not None:
            for tensor in self.model.state_dict().values():
                self.group.broadcast_any_root([tensor]).wait()
        self.setup_precision_plugin()

    def _tell_log_directory(self, trainer: Trainer) -> None:
        directory = trainer.log_dir or trainer.default_root_dir  # a collective: every rank must ask
        if self.group is not None and self.is_global_zero:
            self.group.ring.report("log_directory", path=str(pathlib.Path(directory).absolute()))

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if not self.settings.enable:
            return super()._setup_model(model)
        device_ids = self.determine_ddp_device_ids()
        wrapped = FaultTolerantDDP(model, device_ids=device_ids, **self._ddp_kwargs)
        wrapped.on_commit = self._on_commit
        wrapped.verifier.is_scaled = getattr(self.precision_plugin, "scaler", None) is not None
        return wrapped

    @override
    def _register_ddp_hooks(self) -> None:
        if not self.settings.enable:
            super()._register_ddp_hooks()
        elif self._ddp_comm_hook is not None and isinstance(self.model, FaultTolerantDDP):
            hook = (
                self._ddp_comm_hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(self._ddp_comm_hook)
            )
            self.model.register_comm_hook(self._ddp_comm_state, hook)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.group is not None:
            lightning_deal.tell_shard(dataloader, self.global_rank, self.world_size)
        return super().process_dataloader(dataloader)

    # -- training ---------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        progress("moving a batch to the device")
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        reach("batch.start")
        progress(f"on_train_batch_start of batch {batch_idx}")
        confirm_membership(waits_for_coordinator=False)
        self._promote_if_due(has_progress=True)

    def _promote_if_due(self, *, has_progress: bool) -> None:
        if self._is_promoted and self._trainer is not None:
            self._is_promoted = False
            promotion.promote(self._trainer, has_progress=has_progress)

    @override
    def teardown(self) -> None:
        self._promote_if_due(has_progress=False)  # rank 0 died after the last batch, or in an evaluation
        if self.group is not None:
            self.group.ring.stop_catching_up()
            if isinstance(self.model, FaultTolerantDDP):
                self.model.hand_over_no_more()
        super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with _doing("training_step"), contextlib.nullcontext() if self._boundary is None else self._boundary.catching():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._boundary is not None and self._boundary.weight != 1.0:
            closure_loss = closure_loss * self._boundary.weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        reach("optimizer.enter")
        with _doing("optimizer_step"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        reach("optimizer.done")
        return output

    def _on_commit(self, commit: StepCommit) -> None:
        self._stopping.on_commit(commit)
        if self._boundary is not None:
            self._boundary.on_commit(commit)

    # -- coming and leaving -------------------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Whether this process is no joiner that waits still."""
        return self.group is None or self.group.ring.was_admitted

    def _agree_on_requeue(self, own: signal.Signals | None) -> signal.Signals | None:
        """All ranks save, and SLURM starts the job again, if any rank stops for that."""
        assert self._trainer is not None
        requeue = lightning_internals.requeue_signal(self._trainer)
        if requeue is None:
            return own
        num = self.reduce(torch.tensor(float(own == requeue)), reduce_op="sum")
        return requeue if float(num) > 0 else own

    def _depart(self) -> None:
        assert self.group is not None
        progress("leaving the job")
        self._is_promoted = False
        self.group.ring.depart()
        self.set_world_ranks()

    # -- evaluating -------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        progress("the start of a validation")
        reach("evaluation.start")

    @override
    def on_test_start(self) -> None:
        progress("the start of a test")
        reach("evaluation.start")

    @override
    def on_predict_start(self) -> None:
        progress("the start of a prediction")
        reach("evaluation.start")

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        reach("evaluation.batch")
        with _doing("validation_step"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        reach("evaluation.batch")
        with _doing("test_step"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        reach("evaluation.batch")
        with _doing("predict_step"):
            return super().predict_step(*args, **kwargs)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; of `DeltaCheckpoint`, too."""
        if not isinstance(self.checkpoint_io, DeltaCheckpointIO):
            self.checkpoint_io = DeltaCheckpointIO(self.checkpoint_io)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Have rank 0 write; if it dies before all know that it has, the next rank 0 writes again."""
        save = functools.partial(super().save_checkpoint, dict(checkpoint), filepath, storage_options)
        self._save_by_first(save)


@contextlib.contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say that a part of a step begins, and that it has ended: what follows is Lightning's and the user's."""
    progress(what)
    yield
    progress(f"after {what}: callbacks, loggers, data loading")
    confirm_membership(waits_for_coordinator=False)
