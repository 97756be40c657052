"""Everything that reaches into Lightning beyond its public interface, in one place.

Read in lightning 2.6.6 (tests/unit/test_lightning_internals.py fails clearly if it changes):
`trainer.connectors.data_connector._InfiniteBarrier` and that of `fabric.fabric`, `_TrainingEpochLoop.
_broadcast_sigterm_tensor`, `on_advance_end` and `_skip_next_val`, `_FitLoop.reset`, `on_advance_end`, `epoch_progress`,
`on_save_checkpoint`, `on_load_checkpoint`, `setup_data` and `_load_combined_loader_states`,
`_SignalConnector._sigterm_notifier_fn`, `_slurm_sigusr_handler_fn`, `_register_signal` and `received_sigterm`,
`_TrainingEpochLoop.advance`, `_CheckpointConnector.dump_checkpoint`, `Precision._after_closure` (who calls it, and that
nothing changes gradients after it), `rank_zero_only.rank`, and in
`fabric.strategies.launchers.subprocess_script` `_basic_subprocess_cmd` and `_hydra_subprocess_cmd`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from lightning.fabric import fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities import rank_zero as pytorch_rank_zero
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.stopping import Stopping


class _ResilientBarrier(data_connector._InfiniteBarrier):
    """Lightning waits for `prepare_data` on a Gloo group of its own, which would outlive no member."""

    def __enter__(self) -> Self:
        if not isinstance(dist.group.WORLD, FaultTolerantProcessGroup):
            super().__enter__()
            return self
        self.barrier = dist.barrier
        return self


def install_barrier() -> None:
    """Have Lightning wait for `prepare_data`, and Fabric for its first rank, on WORLD, if that is an `ft` group."""
    data_connector._InfiniteBarrier = _ResilientBarrier  # type: ignore[misc]
    fabric._InfiniteBarrier = _ResilientBarrier  # type: ignore[misc]


def child_command(slot: int) -> tuple[Sequence[str], str | None]:
    """Return the command line that runs the user's script again, and the directory for it (None: this one)."""
    if subprocess_script._HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            return subprocess_script._hydra_subprocess_cmd(slot)
    return subprocess_script._basic_subprocess_cmd(), None


def set_rank_zero_rank(rank: int) -> None:
    """Set the rank by which `rank_zero_only` decides."""
    for function in (fabric_rank_zero.rank_zero_only, pytorch_rank_zero.rank_zero_only):
        function.rank = rank  # type: ignore[attr-defined]


def rank_zero_rank() -> int | None:
    """Return the rank by which `rank_zero_only` decides."""
    rank: int | None = getattr(pytorch_rank_zero.rank_zero_only, "rank", None)
    return rank


def requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """Return the signal at which Lightning saves a checkpoint and has SLURM start the job again, if it does so."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def take_stop_signals(trainer: Trainer, stopping: Stopping) -> None:
    """Take SIGTERM and SIGINT out of Lightning's hands.

    For SIGTERM it broadcasts a flag at every batch, and again from within the signal handler, where it meets any other
    collective; SIGINT ends each rank wherever it is. Here the handler only notes the signal; all ranks learn it with a
    step's commit, and whoever is to stop does so at the end of a batch, before a validation. A second SIGINT is
    Python's own. So is SLURM's signal before the end of its time, at which Lightning saves within the signal handler.

    Args:
        trainer: Before its signal handlers are registered.
        stopping: Is told of each signal, asked at the end of each batch, and told when handlers are in place.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    requeue = connector._slurm_sigusr_handler_fn
    register, on_advance_end = connector.register_signal_handlers, loop.on_advance_end

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stopping.on_signal(signal.Signals(number))

    def register_all() -> None:
        register()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is the user's
            connector._register_signal(signal.SIGINT, note)
        stopping.catch_up()

    def stop_if_agreed(data_fetcher: Any) -> None:
        reason = stopping.reason()
        loop._skip_next_val |= reason is not None
        on_advance_end(data_fetcher)
        if reason == signal.SIGINT:
            raise KeyboardInterrupt
        if reason is not None:
            if reason == requeue_signal(trainer):
                requeue(reason, None)  # type: ignore[arg-type]  # it does not use the frame
            connector.received_sigterm = True
            raise SIGTERMException

    connector._slurm_sigusr_handler_fn = note  # type: ignore[method-assign, assignment]
    connector._sigterm_notifier_fn = note  # type: ignore[method-assign, assignment]
    connector.register_signal_handlers = register_all  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    loop.on_advance_end = stop_if_agreed  # type: ignore[method-assign]


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning saves of a fit. All ranks call it; tensors are not copied."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def draw_epoch_anew(trainer: Trainer) -> None:
    """Make the iterator of an epoch again of which nothing was drawn: it depends on random numbers."""
    loop = trainer.fit_loop
    if loop.epoch_loop.batch_progress.current.ready == 0 and loop._data_fetcher is not None:
        iter(loop._data_fetcher)


def around_each_batch(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have functions called before and after each batch of a fit: after all that belongs to the one before it.

    Args:
        trainer: Its training loop is changed.
        before: Called before the batch is drawn; validations and the ends of epochs are over.
        after: Called when the batch's own hooks are over; not if it raised.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.advance

    def advance(data_fetcher: Any) -> None:
        if loop.restarting and loop._should_check_val_fx(data_fetcher):
            is_no_batch = loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last
        else:
            is_no_batch = False
        if is_no_batch:  # a fit that was resumed goes on with a validation
            original(data_fetcher)
            return
        before()
        original(data_fetcher)
        after()

    loop.advance = advance  # type: ignore[method-assign]


def around_epochs(trainer: Trainer, before_first: Callable[[], None], after_each: Callable[[], None]) -> None:
    """Have functions called around the epochs of a fit.

    Args:
        trainer: Its training loop is changed.
        before_first: Called when a fit begins: its state has been loaded, its data are set up.
        after_each: Called after all that belongs to an epoch, its validation and its schedulers' steps included.
    """
    fit = trainer.fit_loop
    fit.reset = run_before(before_first, fit.reset)  # type: ignore[method-assign]
    on_advance_end = fit.on_advance_end

    def end_epoch() -> None:
        on_advance_end()
        after_each()

    fit.on_advance_end = end_epoch  # type: ignore[method-assign]


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether an epoch is over with all that belongs to it, and the next one has not begun."""
    progressed: Any = trainer.fit_loop.epoch_progress.current
    return 0 < int(progressed.ready) == int(progressed.processed) == int(progressed.completed)


def around_optimizer_step(
    trainer: Trainer,
    stepping: Callable[[], None],
    clipped: Callable[[torch.Tensor, float], bool],
    stepped: Callable[[], None],
) -> Callable[[], None]:
    """Have functions called around each optimizer step of a fit with one optimizer.

    Args:
        trainer: Its optimizers are there.
        stepping: Called when the gradients are those that the optimizer uses, or are going to be clipped by their norm.
        clipped: Called in the latter case when that is done, with the norm and the limit. Returns whether that is
            enough; else `stepping` is called again.
        stepped: Called after the step; not if a scaler has left it out.

    Returns:
        What takes all that back.
    """
    precision, module = trainer.precision_plugin, trainer.lightning_module
    after_closure = precision._after_closure
    is_told = False

    def clip_by_norm(optimizer: Any, clip_val: float) -> None:
        nonlocal is_told
        parameters = list(precision.main_params(optimizer))
        stepping()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        is_told = clipped(norm, clip_val)

    def after(model: Any, optimizer: Any) -> None:
        nonlocal is_told
        is_told = False
        after_closure(model, optimizer)
        if not is_told:
            stepping()

    def undo() -> None:
        handle.remove()
        del precision._after_closure
        vars(precision).pop("clip_grad_by_norm", None)

    handle = trainer.optimizers[0].register_step_post_hook(lambda *_: stepped())
    precision._after_closure = after  # type: ignore[method-assign]
    if not is_overridden("configure_gradient_clipping", module):  # a user's own may do anything afterwards
        precision.clip_grad_by_norm = clip_by_norm  # type: ignore[method-assign]
    return undo


_IN_CHECKPOINTS = "lightning_ft"


def keep_in_checkpoints(fit: Any, state: Callable[[], Any], take: Callable[[Any], None]) -> None:
    """Have a fit's loop save a state of ours beside its own, and hand it back when a checkpoint is loaded.

    Args:
        fit: The loop of a fit.
        state: Called when a checkpoint is made; None: there is nothing to save.
        take: Called with what a checkpoint has; None: nothing.
    """
    save, load = fit.on_save_checkpoint, fit.on_load_checkpoint

    def on_save_checkpoint() -> dict[str, Any]:
        saved: dict[str, Any] = save()
        ours = state()
        return saved if ours is None else {**saved, _IN_CHECKPOINTS: ours}

    def on_load_checkpoint(state_dict: dict[str, Any]) -> None:
        take(state_dict.get(_IN_CHECKPOINTS))
        load(state_dict)

    fit.on_save_checkpoint, fit.on_load_checkpoint = on_save_checkpoint, on_load_checkpoint


def around_data_setup(
    fit: Any, before: Callable[[], bool], with_loaders: Callable[[], None], after: Callable[[], None]
) -> None:
    """Have functions called when a fit sets its data up.

    Args:
        fit: The loop of a fit.
        before: Called each time that it might. Returns whether Lightning would not, but for it: random numbers that are
            drawn then are drawn again afterwards, as if it had not.
        with_loaders: Called when it has, but has not drawn anything.
        after: Called each time that it might have.
    """
    set_up, load = fit.setup_data, fit._load_combined_loader_states

    def setup_data() -> None:
        with isolate_rng() if before() else contextlib.nullcontext():
            set_up()
        after()

    def load_states() -> None:
        load()
        with_loaders()

    fit.setup_data, fit._load_combined_loader_states = setup_data, load_states


def run_before(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls both, in this order, and returns what the second one does."""

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both
