"""The state of a fit, from the ranks that have it to one that joins them.

Read in lightning 2.6.6 (tests/unit/test_rejoin.py fails clearly if it changes): `_CheckpointConnector.dump_checkpoint`,
`_loaded_checkpoint`, `restore_datamodule`, `restore_model`, `restore_callbacks` and `restore_training_state`; `_Loop`'s
`_restarting`, `_loaded_from_state_dict` and `_resuming_from_checkpoint`; `_LoggerConnector._callback_metrics` and what
`_OF_LOGGING` names; `_FitLoop.on_advance_start`, `setup_data` and `_last_train_dl_reload_epoch`;
`Trainer._val_check_time_interval`; `_version` of loggers; `_ResultCollection`, `_ResultMetric`, `_Metadata` and
`_Sync`, and where loops keep their `_results`; of the validation's loop what `_OF_VALIDATION` names, and of
ModelCheckpoint what `_OF_CHECKPOINTS` names: their states lack it, but what they decide depends on it, and all ranks
must decide alike.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _set_sampler_epoch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ft.comm.replay import Trained
from lightning_ft.comm.transfer import State
from lightning_ft.elastic import loading_in_place, parameters_and_rest, random_state, set_random_state
from lightning_ft.errors import LaunchError

_OF_VALIDATION = ("_max_batches", "_has_run", "_last_val_dl_reload_epoch")
_OF_LOGGING = ("_first_loop_iter", "_current_fx")
_OF_SYNC = ("_should", "rank_zero_only")
_OF_VALUE = ("value", "cumulated_batch_size")
_OF_CHECKPOINTS = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


_UNABLE = (LearningRateFinder, StochasticWeightAveraging, BaseFinetuning)
"""What changes a fit in ways that its state does not tell."""


def check_able(trainer: Trainer) -> None:
    """Refuse a fit that can't be joined in its middle; the ranks that are in it don't notice.

    Raises:
        LaunchError: It has a callback, or a validation by time, that a rank can't take over. Or it is no fit, but what
            writes results.
    """
    if trainer.state.fn in {TrainerFn.TESTING, TrainerFn.PREDICTING}:
        raise LaunchError("joining the job failed: a rank can't come back to a test or prediction. Set respawn=False.")
    known: Any = trainer  # Lightning sets what follows from outside
    unable = next((type(callback).__name__ for callback in known.callbacks if isinstance(callback, _UNABLE)), None)
    if known._val_check_time_interval is not None:
        unable = "a val_check_interval in time"
    if unable is not None:
        raise LaunchError(f"joining the job failed: a rank can't come back to a fit with {unable}. Set respawn=False.")


def dump(trainer: Trainer, data: list[dict[str, Any]] | None) -> State:
    """Return what a rank needs to go on at this batch; tensors are not copied.

    Args:
        trainer: In a fit, before a batch is drawn.
        data: State of what deals the data.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    parameters, buffers = parameters_and_rest(trainer.lightning_module, checkpoint.pop("state_dict"))
    replicated = _replicated(trainer, parameters, checkpoint.pop("optimizer_states"))
    epoch_loop = trainer.fit_loop.epoch_loop
    val_loop = epoch_loop.val_loop
    own = {
        "checkpoint": checkpoint,
        "buffers": buffers,
        "data": data,
        "versions": [vars(logger).get("_version") for logger in trainer.loggers],
        "checkpoints": [_of_checkpoints(callback) for callback in trainer.checkpoint_callbacks],
        "metrics": dict(trainer._logger_connector._callback_metrics),
        "logging": {name: getattr(trainer._logger_connector, name) for name in _OF_LOGGING},
        "results": [_logged(results) for results in (epoch_loop._results, val_loop._results)],
        "should_stop": trainer.should_stop,
        "last_reload": trainer.fit_loop._last_train_dl_reload_epoch,
        "accumulate": trainer.accumulate_grad_batches,
        "val_loop": {name: getattr(val_loop, name) for name in _OF_VALIDATION},
        "random": random_state(),
    }
    return State(replicated, own)


def trained(trainer: Trainer) -> Trained:
    """Return what the optimizers of a fit change."""

    def replicated() -> dict[str, Any]:
        strategy = trainer.strategy
        parameters, _ = parameters_and_rest(trainer.lightning_module, strategy.lightning_module_state_dict())
        return _replicated(trainer, parameters, [strategy.optimizer_state(own) for own in trainer.optimizers])

    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
    return Trained(list(trainer.lightning_module.parameters()), optimizers, replicated)


def _replicated(trainer: Trainer, parameters: dict[str, Any], optimizer_states: list[Any]) -> dict[str, Any]:
    replicated = {"state_dict": parameters, "optimizer_states": optimizer_states}
    if not trainer.lightning_module.automatic_optimization:  # else the next batch begins without any
        replicated["gradients"] = {name: value.grad for name, value in trainer.lightning_module.named_parameters()}
    return replicated


def begin_epoch(trainer: Trainer, state: State) -> State:
    """Do what the others have done when the epoch began, unless it is the one that this process has begun itself.

    Hooks may do then, by the number of the epoch, what no state tells: set what is trained, or what a loader yields.

    Args:
        trainer: In a fit, before its first batch is drawn.
        state: From `dump`. Its tensors may be this process's own, where it was sent them ahead.

    Returns: The state as it is to be restored afterwards, whatever hooks have done to what is this process's own.
    """
    fit, begun = trainer.fit_loop, trainer.current_epoch
    fit.load_state_dict(state.own["checkpoint"]["loops"]["fit_loop"])
    go_on(fit)
    if trainer.current_epoch == begun:
        return state
    known: Any = trainer
    if any(not _is_lightnings(hooks) for hooks in (trainer.lightning_module, *known.callbacks)):
        state = State(copy.deepcopy(state.replicated), state.own)
    last_reload = state.own["last_reload"]
    if known.reload_dataloaders_every_n_epochs and last_reload != fit._last_train_dl_reload_epoch:
        _load_data_anew(fit, last_reload)
    assert fit._combined_loader is not None
    for loader in fit._combined_loader.flattened:
        _set_sampler_epoch(loader, trainer.current_epoch)
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")
    return state


def _is_lightnings(hooks: LightningModule | Callback) -> bool:
    """Whether what is done when an epoch begins is not a user's, who may change weights."""
    return type(hooks).on_train_epoch_start.__module__.split(".")[0] in {"lightning", __package__}


def _load_data_anew(fit: _FitLoop, epoch: int) -> None:
    """Ask for the loader as in this epoch, and have the fetcher that the epoch's loop holds draw from it."""
    fetcher: Any = fit._data_fetcher
    fetcher.teardown()
    fit._combined_loader = None
    progress: Any = fit.epoch_progress.current
    progress.processed, present = epoch, progress.processed
    fit.setup_data()
    progress.processed = present
    made: Any = fit._data_fetcher
    made.teardown()
    fetcher.setup(fit._combined_loader)
    fit._data_fetcher = fetcher


def restore(trainer: Trainer, state: State) -> list[dict[str, Any]] | None:
    """Take over what another rank dumped; the loops go on as if they had never been elsewhere.

    Args:
        trainer: In a fit, before its first batch is drawn.
        state: From `dump`.

    Returns: State of what deals the data.
    """
    own = state.own
    # Not strict: a script may give rank 0 more loggers or callbacks than the others.
    for logger, version in zip(trainer.loggers, own["versions"], strict=False):
        if version is not None:
            vars(logger)["_version"] = version
    for callback, values in zip(trainer.checkpoint_callbacks, own["checkpoints"], strict=False):
        vars(callback).update(values)  # before its state: that is forgotten if the directory is another
    connector = trainer._checkpoint_connector
    weights = {**own["buffers"], **state.replicated["state_dict"]}
    replicated = dict(state.replicated)
    gradients = replicated.pop("gradients", {})
    connector._loaded_checkpoint = {**own["checkpoint"], **replicated, "state_dict": weights}
    connector.restore_datamodule()
    with loading_in_place(trainer.lightning_module):
        connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    go_on(trainer.fit_loop)
    for name, parameter in trainer.lightning_module.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    trainer.should_stop = own["should_stop"]
    trainer._logger_connector._callback_metrics.update(own["metrics"])
    vars(trainer._logger_connector).update(own["logging"])
    epoch_loop = trainer.fit_loop.epoch_loop
    for results, logged in zip((epoch_loop._results, epoch_loop.val_loop._results), own["results"], strict=True):
        _expect(results, logged, trainer)
    trainer.fit_loop._last_train_dl_reload_epoch = own["last_reload"]
    trainer.accumulate_grad_batches = own["accumulate"]
    vars(epoch_loop.val_loop).update(own["val_loop"])
    set_random_state(own["random"])
    data: list[dict[str, Any]] | None = own["data"]
    return data


def _of_checkpoints(callback: object) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if name in _OF_CHECKPOINTS}


def _logged(results: _ResultCollection) -> list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return what has been logged so far, in order; values only of what is not reduced over the ranks."""
    found = []
    for key, metric in results.items():
        meta = vars(metric.meta).copy()
        sync = vars(meta.pop("_sync"))
        if metric.meta.reduce_fx not in {sum, max, min}:  # torch's functions are not found again by reference
            meta["reduce_fx"] = metric.meta.reduce_fx.__name__
        names = ["has_reset", *(() if sync["_should"] or not metric.is_tensor else _OF_VALUE)]
        values = {name: vars(metric)[name] for name in names if name in vars(metric)}
        found.append((key, meta, {name: sync[name] for name in _OF_SYNC}, {**values, "is_tensor": metric.is_tensor}))
    return found


def _expect(results: _ResultCollection, logged: list[Any], trainer: Trainer) -> None:
    """Have a rank reduce at the end of an epoch what the others reduce, in their order, with nothing to add so far."""
    results.clear()
    for key, kept, sync, values in logged:
        meta = _Metadata(**kept)
        meta.sync = _Sync(fn=trainer.strategy.reduce, **sync)
        metric = _ResultMetric(meta, values["is_tensor"])
        if meta.metric_attribute is not None:
            metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        vars(metric).update(values, _update_count=1)  # or Lightning warns that it never was updated here
        results[key] = metric.to(trainer.strategy.root_device)


def go_on(loop: _Loop) -> None:
    """Have a loop forget that its state was loaded: it is not started again from a checkpoint, but in its middle."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for part in vars(loop).values():
        if isinstance(part, _Loop):
            go_on(part)
