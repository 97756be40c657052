"""The private parts of Lightning that are used are still what they were; fails first when they change."""

from __future__ import annotations

import inspect
import os
import pathlib
import signal
import types
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_ft import lightning_internals


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (data_connector._InfiniteBarrier, "__exit__", "self.barrier()"),
        (_TrainingEpochLoop, "_broadcast_sigterm_tensor", "raise SIGTERMException"),
        (_TrainingEpochLoop, "advance", "self._broadcast_sigterm_tensor()"),
        (_TrainingEpochLoop, "run", "self.on_advance_end(data_fetcher)"),
        (_TrainingEpochLoop, "on_advance_end", "if self._skip_next_val:"),
        (_SignalConnector, "register_signal_handlers", "[self._sigterm_notifier_fn]"),
        (Precision, "_wrap_closure", "closure_result = closure()\n        self._after_closure(model, optimizer)\n"),
        (Precision, "_after_closure", "self._clip_gradients("),
        (Precision, "clip_grad_by_norm", "torch.nn.utils.clip_grad_norm_(parameters, clip_val)\n"),
        (MixedPrecision, "optimizer_step", "self._after_closure(model, optimizer)\n"),
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
    assert trainer.fit_loop.epoch_loop._skip_next_val is False


STOP_AT = 3


class Stopped(BoringModel):
    """Gets a signal in one of its batches, and counts what happens after that."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number
        self.batches = self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == STOP_AT:
            os.kill(os.getpid(), self.number)
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validations += 1


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("num_batches", [STOP_AT + 1, 10], ids=["last", "middle"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_takes_effect_at_the_end_of_the_batch(
    tmp_path: pathlib.Path, number: signal.Signals, num_batches: int
) -> None:
    """With one rank as with many, at the fit's last batch too, and before a validation; handlers are put back."""
    before = signal.getsignal(number)
    noted: list[signal.Signals] = []
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=num_batches,
        val_check_interval=STOP_AT + 1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stopping = types.SimpleNamespace(
        on_signal=noted.append, reason=lambda: noted[0] if noted else None, catch_up=lambda: None
    )
    lightning_internals.take_stop_signals(trainer, stopping)
    model = Stopped(number)
    with pytest.raises(SystemExit):
        trainer.fit(model)
    assert noted == [number]
    assert (model.batches, model.validations) == (STOP_AT + 1, 0)
    assert signal.getsignal(number) in (before, signal.SIG_IGN), "Lightning ignores SIGINT once it has ended a fit"
    signal.signal(number, before)
