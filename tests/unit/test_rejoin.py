"""A fit that takes another one's state over before its first batch is that fit from there on."""

from __future__ import annotations

import contextlib
import inspect
import io
import shutil
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_ft import lightning_internals, rejoin
from lightning_ft.comm.transfer import State
from lightning_ft.errors import LaunchError

pytestmark = pytest.mark.filterwarnings("default")  # what Lightning warns of, of itself and of the test


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (_CheckpointConnector, "dump_checkpoint", '"state_dict": self._get_lightning_module_state_dict()'),
        (_CheckpointConnector, "dump_checkpoint", 'checkpoint["optimizer_states"] = optimizer_states'),
        (_CheckpointConnector, "restore_training_state", "self.restore_optimizers_and_schedulers()"),
        (_CheckpointConnector, "restore_callbacks", "if not self._loaded_checkpoint:"),
        (_Loop, "load_state_dict", "self._resuming_from_checkpoint = True"),
        (_Loop, "on_iteration_done", "self._loaded_from_state_dict = False"),
        (ModelCheckpoint, "load_state_dict", "if self.dirpath == dirpath_from_ckpt:"),
        (_FitLoop, "on_advance_start", 'call._call_lightning_module_hook(trainer, "on_train_epoch_start")'),
        (_FitLoop, "advance", "self.epoch_loop.run(self._data_fetcher)"),
        (_FitLoop, "setup_data", "self._data_fetcher.setup(combined_loader)"),
        (_ResultCollection, "log", "meta != self[key].meta"),
        (_ResultMetric, "compute", "cumulated_batch_size = self.meta.sync(self.cumulated_batch_size)"),
    ],
)
def test_lightning_is_what_was_read(owner: object, name: str, text: str) -> None:
    """The function is there, and does what is relied on."""
    assert text in inspect.getsource(getattr(owner, name))


def test_checkpoints_have_what_is_taken_over() -> None:
    """A ModelCheckpoint decides by these, and its own state lacks them."""
    callback = ModelCheckpoint()
    assert set(rejoin._OF_CHECKPOINTS) <= set(vars(callback))


@pytest.mark.parametrize("function", [TrainerFn.TESTING, TrainerFn.PREDICTING, TrainerFn.VALIDATING])
def test_nobody_comes_back_to_what_writes_results(function: TrainerFn) -> None:
    """A copy of a rank would write that rank's results, too; a validation may come before a fit."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.state.fn = function
    with (
        contextlib.nullcontext() if function == TrainerFn.VALIDATING else pytest.raises(LaunchError, match="come back")
    ):
        rejoin.check_able(trainer)


class Net(pl.LightningModule):
    """Dropout, a scheduler, what an epoch's start sets, and a batch that depends on where the fit stands."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.metric = MeanMetric()
        self.factor = 1.0
        self.seen: list[tuple[int, int, int]] = []
        self.ends: list[dict[str, float]] = []

    def on_train_epoch_start(self) -> None:
        """Set what no state tells."""
        self.factor = 1.0 / (1 + self.current_epoch)
        with torch.no_grad():
            self.net[2].weight.mul_(self.factor)
        self.log("factor", self.factor, sync_dist=True)

    def train_dataloader(self) -> Any:
        """Return what depends on the epoch, too."""
        return DataLoader(TensorDataset(torch.full((6,), self.current_epoch)), 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Draw by epoch and batch, so that the loader does not matter."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        assert float(batch[0]) == self.current_epoch // every * every
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        x = torch.full((2, 4), float(self.current_epoch + batch_idx)).sin()
        loss = self.factor * self.net(x).pow(2).mean()
        self.log("loss", loss, on_epoch=True, on_step=True)
        self.log("highest", loss, on_epoch=True, on_step=False, reduce_fx=max)
        self.metric.update(loss)
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self) -> None:
        """Keep what Lightning reduces, in its order."""
        logged = self.trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["log"]
        self.ends.append({key: float(value) for key, value in logged.items()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Something to monitor."""
        self.log("val_loss", -float(self.global_step))

    def configure_optimizers(self) -> Any:
        """Return an optimizer and a scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class ManualNet(Net):
    """Steps with every second batch of its own accord."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Let gradients lie between batches."""
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


def fit(tmp_path: Any, before: Any, seed: int, kind: type[Net], reload_every: int) -> tuple[pl.Trainer, Net]:
    """Train three epochs of six batches; `before` is called before each batch."""
    torch.manual_seed(seed)
    module = kind()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        val_check_interval=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=reload_every,
        callbacks=[
            ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=3, save_last=True),
            EarlyStopping("val_loss", patience=99),
        ],
    )
    lightning_internals.around_each_batch(trainer, lambda: before(trainer), lambda: None)
    trainer.fit(module, val_dataloaders=DataLoader(TensorDataset(torch.zeros(6)), 1))
    return trainer, module


def sent_ahead(trainer: pl.Trainer, replicated: dict[str, Any]) -> Any:
    """Put a state where it belongs. Returns: It, as it is there."""
    trainer.lightning_module.load_state_dict(replicated["state_dict"], strict=False)
    trainer.optimizers[0].load_state_dict(replicated["optimizer_states"][0])
    return rejoin.trained(trainer).replicated()


@pytest.mark.parametrize(("kind", "reload_every"), [(Net, 1), (ManualNet, 2)])
@pytest.mark.parametrize(("epoch", "batch"), [(0, 2), (1, 0), (1, 3), (2, 5)])
def test_a_fit_goes_on_where_another_is(
    tmp_path: Any, epoch: int, batch: int, kind: type[Net], reload_every: int
) -> None:
    """With weights, optimizer, scheduler, generators, counters and callbacks; in an epoch's middle or at its start."""
    kept: list[bytes] = []

    def keep(trainer: pl.Trainer) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if (trainer.current_epoch, progress.current.ready) == (epoch, batch):
            buffer = io.BytesIO()
            torch.save(tuple(rejoin.dump(trainer, {"of": "the sampler"})), buffer)
            kept.append(buffer.getvalue())

    expected_trainer, expected = fit(tmp_path / "first", keep, 1, kind, reload_every)
    (state,) = kept
    shutil.rmtree(tmp_path / "first")  # or the same checkpoints would get other names
    has_joined = []

    def join(trainer: pl.Trainer) -> None:
        if not has_joined:
            found = State(*torch.load(io.BytesIO(state), weights_only=False))
            if kind is Net:
                found = State(sent_ahead(trainer, found.replicated), found.own)
            begun = rejoin.begin_epoch(trainer, found)
            assert rejoin.restore(trainer, begun) == {"of": "the sampler"}
            fetcher = trainer.fit_loop._data_fetcher
            assert fetcher is not None
            with torch.random.fork_rng():  # which a new iterator draws from, here as on all ranks
                iter(fetcher)
            fetcher.fetched = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            has_joined.append(True)

    trainer, module = fit(tmp_path / "second", join, 2, kind, reload_every)
    assert module.seen == [seen for seen in expected.seen if seen[:2] >= (epoch, batch)]
    for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert trainer.global_step == expected_trainer.global_step == (18 if kind is Net else 9)
    assert [list(end) for end in module.ends] == [list(end) for end in expected.ends[epoch:]]
    first, *rest = module.ends
    assert rest == expected.ends[epoch + 1 :]
    reduced = {"metric", "factor"}  # over all ranks: this one has nothing to add of what came before it
    assert {key: first[key] for key in set(first) - reduced} == {
        key: value for key, value in expected.ends[epoch].items() if key not in reduced
    }
    assert trainer.callback_metrics["val_loss"] == expected_trainer.callback_metrics["val_loss"]
    for callback, other in zip(trainer.callbacks, expected_trainer.callbacks, strict=True):
        if isinstance(callback, ModelCheckpoint | EarlyStopping):
            assert callback.state_dict() == other.state_dict()
