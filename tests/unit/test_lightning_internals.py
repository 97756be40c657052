"""The private parts of Lightning that are used are still what they were; fails first when they change."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.utils.data import DistributedSampler, TensorDataset

from lightning_ft import lightning_internals


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (data_connector._InfiniteBarrier, "__exit__", "self.barrier()"),
        (_TrainingEpochLoop, "_broadcast_sigterm_tensor", "raise SIGTERMException"),
        (_TrainingEpochLoop, "advance", "self._broadcast_sigterm_tensor()"),
        (_SignalConnector, "register_signal_handlers", "[self._sigterm_notifier_fn]"),
        (_FitLoop, "setup_data", "self._combined_loader is not None and not self._should_reload_train_dl"),
        (_FitLoop, "on_advance_start", "self.setup_data()"),
        (_FitLoop, "on_advance_end", "on_train_epoch_end"),
        (_EvaluationLoop, "setup_data", "self._combined_loader is not None and trainer_fn == TrainerFn.FITTING"),
        (DDPStrategy, "setup_environment", "self.setup_distributed()"),
        (DDPStrategy, "configure_ddp", "self._setup_model(self.model)"),
        (subprocess_script, "_basic_subprocess_cmd", "sys.argv"),
        (subprocess_script, "_hydra_subprocess_cmd", "get_original_cwd"),
    ],
)
def test_lightning_is_what_was_read(owner: object, name: str, text: str) -> None:
    """The function is there, and does what is relied on."""
    assert text in inspect.getsource(getattr(owner, name))


def test_prepare_data_waits_on_the_resilient_barrier() -> None:
    """Lightning looks the barrier up where it is replaced."""
    assert "with _InfiniteBarrier():" in inspect.getsource(data_connector._DataConnector.prepare_data)


def test_the_trainer_has_what_is_replaced() -> None:
    """The attributes that are overridden on instances exist there."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert trainer._signal_connector.received_sigterm is False
    assert trainer.fit_loop._combined_loader is None
    assert trainer.fit_loop.epoch_loop.val_loop._combined_loader is None
    lightning_internals.take_stop_signals(trainer, lambda _: None, lambda: None)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 7, 24, 1003])
def test_a_renumbered_sampler_is_as_if_made_anew(length: int, drop_last: bool) -> None:
    """The arithmetic is DistributedSampler's own."""
    data = TensorDataset(torch.zeros(length))
    for before, now in ((4, 3), (3, 2), (2, 5)):
        sampler = DistributedSampler(data, before, 0, drop_last=drop_last)
        expected = DistributedSampler(data, now, 1, drop_last=drop_last)
        lightning_internals.renumber_sampler(sampler, rank=1, num_replicas=now)
        assert list(sampler) == list(expected)
        assert len(sampler) == len(expected)
