"""A fit of one device goes on with the batch that would have come, whatever its loaders draw by."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler
from torch.utils.data import dataloader as torch_dataloader

import lightning_ft

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's advice


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (_FitLoop, "setup_data", "self._load_combined_loader_states()"),
        (_TrainingEpochLoop, "on_run_start", "data_fetcher.fetched += self.batch_progress.current.ready"),
        (_TrainingEpochLoop, "reset", "You're resuming from a checkpoint that ended before the epoch ended"),
        (torch_dataloader._BaseDataLoaderIter, "__init__", "self._sampler_iter = iter(self._index_sampler)"),
        (DataLoader, "__len__", "return len(self._index_sampler)"),
    ],
)
def test_lightning_and_torch_are_what_was_read(owner: object, name: str, text: str) -> None:
    """The function is there, and does what is relied on."""
    assert text in inspect.getsource(getattr(owner, name))


class Numbers(Dataset[torch.Tensor]):
    """Samples that say which they are; the noise on them is drawn when they are read."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(1)


class Model(L.LightningModule):
    """Notes each batch, and the weight before it."""

    def __init__(self, loaders: Callable[[], Any]) -> None:
        super().__init__()
        self.loaders = loaders
        self.net = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(1, 1))
        self.seen: list[tuple[int, list[list[float]], float]] = []

    def train_dataloader(self) -> Any:
        return self.loaders()

    def on_train_epoch_start(self) -> None:
        torch.rand(3)  # the samplers draw after this, or before it

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        ids = [part.flatten().tolist() for part in parts]
        self.seen.append((self.global_step, ids, self.net[1].weight.item()))
        return self.net(torch.cat([part.reshape(-1, 1) for part in parts])).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]  # with each epoch


def _fit(tmp_path: pathlib.Path, loaders: Callable[[], Any], steps: int, saves: str | None = None) -> Model:
    L.seed_everything(3, verbose=False)
    model = Model(loaders)
    callback = lightning_ft.DeltaCheckpoint(tmp_path / str(saves), every_n_train_steps=steps)
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[callback] if saves else [],
        enable_checkpointing=bool(saves),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path="last" if saves else None)
    return model


def _weighted() -> Any:
    weights = torch.linspace(1, 2, 22)
    return DataLoader(Numbers(), 4, sampler=WeightedRandomSampler(weights.tolist(), 22))


def _two() -> Any:
    return {"long": DataLoader(Numbers(), 4, shuffle=True), "short": DataLoader(Numbers(7), 3, shuffle=True)}


@pytest.mark.parametrize(
    ("loaders", "num_done"),
    [
        (lambda: DataLoader(Numbers(), 4, shuffle=True), 9),
        (lambda: DataLoader(Numbers(), 4, shuffle=True), 12),
        (lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(7)), 9),
        (lambda: DataLoader(Numbers(), None, sampler=RandomSampler(Numbers())), 30),
        (_weighted, 3),
        (_two, 11),
    ],
    ids=["shuffled", "at an end", "generator", "no batches", "weighted", "two"],
)
@pytest.mark.filterwarnings("error:You're resuming from a checkpoint that ended before the epoch")
def test_the_next_batch_is_the_one_that_would_have_come(
    tmp_path: pathlib.Path, loaders: Callable[[], Any], num_done: int
) -> None:
    """With its noise, and bitwise the weights, to the end of the next epoch; twice interrupted."""
    whole = _fit(tmp_path, loaders, num_done + 30)
    for steps in (num_done, num_done + 2, num_done + 30):
        part = _fit(tmp_path, loaders, steps, "run")
    assert part.seen == whole.seen[num_done + 2 :]


def test_workers_go_on_too(tmp_path: pathlib.Path) -> None:
    """The samples are those that would have come; what workers draw themselves is not continued."""
    whole = _fit(tmp_path, _with_worker, 14)
    for steps in (9, 14):
        part = _fit(tmp_path, _with_worker, steps, "run")
    expected, found = ([[round(number - 0.05) for number in ids[0]] for _, ids, _ in fit.seen] for fit in (whole, part))
    assert found == expected[9:]


def _with_worker() -> Any:
    return DataLoader(Numbers(), 4, shuffle=True, num_workers=1)
