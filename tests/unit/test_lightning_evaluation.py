"""Validations of real fits whose other ranks die; and what of Lightning that relies on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ft import lightning_evaluation
from lightning_ft.data.sampler import ElasticDistributedSampler

pytestmark = pytest.mark.filterwarnings("default")  # what Lightning warns of, of itself and of the test


@pytest.mark.parametrize(
    "text",
    [
        "self._store_dataloader_outputs()",
        "self._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)",
        "self.reset()",
        "self._data_fetcher = data_fetcher",
        "_process_dataloader(trainer, trainer_fn, stage, dl)",
        "trainer._logger_connector.update_eval_epoch_metrics()",
        '_mode == "sequential"',
    ],
)
def test_lightning_is_what_was_read(text: str) -> None:
    """The loop does what is relied on."""
    assert text in inspect.getsource(_EvaluationLoop)
    assert issubclass(_ResultMetric, torchmetrics.Metric)


class Counts(torchmetrics.Metric):
    """How often each number was seen."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(100, dtype=torch.long), dist_reduce_fx="sum")

    @override
    def update(self, numbers: torch.Tensor) -> None:
        self.counts += torch.bincount(numbers, minlength=100)

    @override
    def compute(self) -> torch.Tensor:
        return self.counts.sum().float()


class Rank(pl.LightningModule):
    """One rank of a job whose members, each time that all wait for each other, are the next in a list."""

    def __init__(self, rank: int, members: Sequence[tuple[int, ...]], lengths: Sequence[int], **trainer: Any) -> None:
        super().__init__()
        self.metric = Counts()
        self.steps: list[tuple[int, int, list[int]]] = []
        self.results: list[torch.Tensor] = []
        self.completed: list[tuple[str, list[int], int]] = []
        self.present, self.coming = members[0], list(members[1:])
        self.rank_in_job, self.lengths = rank, lengths
        self.trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, **trainer
        )
        lightning_evaluation.CompleteEvaluations(
            self.trainer,
            lambda: self.present,  # type: ignore[arg-type, return-value]
            self.wait_for_all,
            lambda *told: self.completed.append(told),  # type: ignore[arg-type]
        )
        self.num_members = len(members[0])

    def wait_for_all(self) -> None:
        """Find out who has died."""
        if self.coming:
            self.present = self.coming.pop(0)

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count in a metric, and log a sum and a mean."""
        self.steps.append((dataloader_idx, batch_idx, batch.tolist()))
        self.metric.update(batch)
        self.log("sum", batch.sum().float(), reduce_fx="sum", on_epoch=True)
        self.log("mean", batch.float().mean(), on_epoch=True, batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        """Take what this rank would give to the others."""
        self.results.append(self.metric.counts.clone())

    def validate(self, batch_size: int = 4, num_workers: int = 0, **loader: Any) -> dict[str, float]:
        """Validate, and return what was logged."""
        loaders = [
            DataLoader(
                range(length),  # type: ignore[arg-type]
                batch_size,
                sampler=ElasticDistributedSampler(range(length), self.num_members, self.rank_in_job, shuffle=False),  # type: ignore[arg-type]
                num_workers=num_workers,
                **loader,
            )
            for length in self.lengths
        ]
        self.trainer.validate(self, loaders, verbose=False)
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


@pytest.mark.parametrize("length", [36, 21, 5])
@pytest.mark.parametrize(
    "members",
    [
        [(0, 1, 2)],
        [(0, 1, 2), (0, 2), (0, 2)],
        [(0, 1, 2), (2,), (2,)],
        [(0, 1, 2), (1, 2), (2,), (2,)],
        [(0, 1, 2, 3), (0, 2, 3), (0, 3), (0, 3)],
    ],
)
def test_each_sample_counts_once_whoever_dies(members: list[tuple[int, ...]], length: int) -> None:
    """In metrics and in what is logged; only the padding that there was without a death counts twice."""
    counts = torch.zeros(100, dtype=torch.long)
    logged = []
    ranks = [Rank(rank, members, [length]) for rank in members[-1]]
    for rank in ranks:
        logged.append(rank.validate())
        counts += rank.results[0]
    padding = list(range(-length % len(members[0])))
    expected = torch.ones(length, dtype=torch.long)
    kept = [number for number in padding if (length + number) % len(members[0]) in members[-1]]
    expected[kept] += 1
    assert counts[:length].tolist() == expected.tolist()
    total = sum(range(length)) + sum(kept)
    assert sum(values["sum"] for values in logged) == total
    sizes = [int(rank.results[0].sum()) for rank in ranks]
    assert sum(values["mean"] * size for values, size in zip(logged, sizes, strict=True)) == pytest.approx(total)
    assert len({len(rank.steps) for rank in ranks}) == 1, "or collectives in a step would not fit together"
    lengths = [sum(len(batch) for _, _, batch in rank.steps) for rank in ranks]
    assert len(set(lengths)) == 1, "or what a user gathers at the end would have different shapes"
    for rank in ranks:
        dead = [member for member in members[0] if member not in members[-1]]
        assert [(stage, sorted(lost)) for stage, lost, _ in rank.completed] == [("validation", dead)]


def test_each_of_several_loaders_is_completed_before_its_metrics() -> None:
    """Deaths are made up for in the loader in which they are noticed, with its own index, and with workers."""
    members = [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2)]
    ranks = [Rank(rank, members, [12, 30]) for rank in (0, 2)]
    for rank in ranks:
        rank.validate(num_workers=1)
    seen = [
        [number for rank in ranks for index, _, batch in rank.steps if index == loader for number in batch]
        for loader in (0, 1)
    ]
    assert sorted(seen[0]) == [number for number in range(12) if number % 3 != 1], "who was there for it did the rest"
    assert sorted(seen[1]) == [*range(30)]
    for rank in ranks:
        indices = [at for loader, at, _ in rank.steps if loader == 1]
        assert indices == [*range(len(indices))]


@pytest.mark.parametrize(("options", "num_each"), [({"limit_val_batches": 2}, 8), ({}, 12)])
def test_what_would_not_have_been_evaluated_is_not(options: dict[str, Any], num_each: int) -> None:
    """A limit, and a last batch that is dropped, hold for the share of the dead, too."""
    rank = Rank(0, [(0, 1), (0,), (0,)], [30], **options)
    rank.validate(drop_last=True)
    assert int(rank.results[0].sum()) == 2 * num_each
    assert rank.results[0].max() == 1


def test_what_was_not_dealt_by_us_is_not_completed() -> None:
    """A loader of unknown order stays incomplete, and nobody says otherwise."""
    rank = Rank(0, [(0, 1), (0,), (0,)], [])
    rank.trainer.validate(rank, DataLoader(range(8), 4), verbose=False)  # type: ignore[arg-type]
    assert rank.completed == []
    assert len(rank.steps) == 2
