"""Metrics that are synced in one exchange: what torchmetrics makes of the same states, of whoever takes part."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_ft import lightning_metrics
from lightning_ft.lightning_metrics import Exchange

pytestmark = pytest.mark.filterwarnings("default")  # what Lightning and torchmetrics warn of, of themselves


def test_what_is_relied_on_is_there() -> None:
    """In torchmetrics and Lightning."""
    assert "self._sync_dist(dist_sync_fn, process_group=process_group)" in inspect.getsource(torchmetrics.Metric.sync)
    assert "dist_sync_fn = gather_all_tensors" in inspect.getsource(torchmetrics.Metric.sync)
    assert "self._reductions" in inspect.getsource(torchmetrics.Metric._sync_dist)
    assert "self._computed is not None" in inspect.getsource(_ResultMetric._wrap_compute)
    assert list(inspect.signature(_ResultCollection.metrics).parameters) == ["self", "on_step"]


class States(torchmetrics.Metric):
    """One state of each kind."""

    def __init__(self) -> None:
        super().__init__(distributed_available_fn=lambda: True)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-1e9), dist_reduce_fx="max")
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("numbers", [], dist_reduce_fx="cat")
        self.add_state("histogram", torch.zeros(3, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        """Take in integers."""
        self.total += values.sum()
        self.largest = torch.maximum(self.largest, values.max().float())
        self.rows.append(torch.stack([values, values], dim=1))
        self.numbers.append(values)
        self.histogram += torch.bincount(values % 3, minlength=3)

    def compute(self) -> dict[str, Any]:
        """All that the states say."""
        rows, numbers = dim_zero_cat(self.rows), dim_zero_cat(self.numbers)
        return {
            "total": self.total.item(),
            "largest": self.largest.item(),
            "rows": rows.tolist(),
            "numbers": (numbers.tolist(), numbers.dtype),
            "histogram": self.histogram.tolist(),
        }


def exchange_of(ranks: list[Any], get: Callable[[Any], torchmetrics.Metric], present: list[int]) -> list[Any]:
    """Compute on each rank that is there; whoever is not took part in nothing. The gathers go rank by rank."""
    packed: list[list[bytes]] = []

    def record(data: bytes) -> list[bytes]:
        packed[-1].append(data)
        raise InterruptedError

    for index in present:  # what each gives, in order
        packed.append([])
        metric = get(ranks[index])
        module = torch.nn.ModuleList([metric])
        Exchange(record).attach(module)  # type: ignore[arg-type]
        with pytest.raises(InterruptedError):
            metric.sync(metric.dist_sync_fn)
        metric._cache = None
    results = []
    for index in present:
        metric = get(ranks[index])
        calls: list[bytes] = []

        def give(data: bytes, calls: list[bytes] = calls) -> list[bytes]:
            calls.append(data)
            return [each[0] for each in packed]

        Exchange(give).attach(torch.nn.ModuleList([metric]))  # type: ignore[arg-type]
        results.append(metric.compute())
        assert len(calls) == 1, "one exchange for all states"
    return results


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), max_size=3), min_size=1, max_size=4),
    st.data(),
)
def test_a_sync_is_of_the_same_ranks_in_all_states(shares: list[list[list[int]]], data: st.DataObject) -> None:
    """Of those that take part, one without data among them: as one metric that has seen all that they have."""
    ranks = []
    for batches in shares:
        metric = States()
        for batch in batches:
            metric.update(torch.tensor(batch))
        ranks.append(metric)
    present = data.draw(st.lists(st.sampled_from(range(len(shares))), min_size=1, unique=True).map(sorted))
    seen = [torch.tensor(batch) for index in present for batch in shares[index]]
    if not seen:
        return
    whole = States()
    whole.distributed_available_fn = None
    for batch in seen:
        whole.update(batch)
    results = exchange_of(ranks, lambda rank: rank, present)
    assert results == [whole.compute()] * len(present)
    for index, metric in enumerate(ranks):  # each goes on with its own
        assert metric.total.item() == sum(sum(batch) for batch in shares[index])


def test_ranks_with_different_numbers_of_entries_are_refused() -> None:
    """Torch would pair up what does not belong together, or hang."""
    rows = [lightning_metrics._pack([torch.ones(2)] * count) for count in (1, 2)]
    with pytest.raises(RuntimeError, match=r"\[1, 2\] tensors"):
        Exchange(lambda _: rows).rows([torch.ones(2)])


def test_copies_and_pickles_of_a_metric_work() -> None:
    """A copy is synced by itself, in the same group; what comes out of a pickle is torchmetrics' alone."""
    metric = torchmetrics.MeanMetric()
    Exchange(lambda data: [data, data]).attach(torch.nn.ModuleList([metric]))  # type: ignore[arg-type]
    metric.distributed_available_fn = None
    copied = copy.deepcopy(metric)
    copied.distributed_available_fn = lambda: True
    copied.update(3.0)
    copied.sync(copied.dist_sync_fn)
    assert (copied.weight.item(), metric.weight.item()) == (2.0, 0.0)
    thawed = pickle.loads(pickle.dumps(metric))  # noqa: S301 - ours
    assert thawed.dist_sync_fn is gather_all_tensors
    thawed.update(5.0)
    assert thawed.compute() == 5.0


def test_a_group_or_a_function_of_the_users_is_left_alone() -> None:
    """Whoever brings one knows what it does."""
    own = torchmetrics.MeanMetric(dist_sync_fn=lambda tensor, group=None: [tensor, tensor, tensor])
    Exchange(lambda data: [data]).attach(torch.nn.ModuleList([own]))  # type: ignore[arg-type]
    own.distributed_available_fn = lambda: True
    own.update(1.0)
    own.sync(own.dist_sync_fn)
    assert own.weight == 3


@pytest.mark.parametrize(("dies_at", "mean"), [(1, 3.0), (2, 3.0), (3, 4.0)])
def test_a_mean_has_sum_and_weight_of_the_same_ranks(dies_at: int, mean: float) -> None:
    """The second of two ranks dies before one of the two reductions: its share is in none of them; else in both."""
    others = [{6.0: 10.0, 2.0: 2.0}]  # what the other rank adds to the sum and to the weight
    num_reduced = 0

    def reduce(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        nonlocal num_reduced
        num_reduced += 1
        if num_reduced == dies_at:
            others.clear()
        return tensor + sum(other[tensor.item()] for other in others)

    results = _ResultCollection(training=True)
    lightning_metrics.watch(results, lambda: ("0/0", "0/1")[: 1 + len(others)])
    for value in (2.0, 4.0):
        results.log("training_step", "mean", torch.tensor(value), sync_dist=True, sync_dist_fn=reduce, batch_size=1)
    assert results.metrics(on_step=False)["log"]["mean"] == mean
    assert num_reduced == (2 if dies_at == 3 else 4), "they are put together once more, if at all"


def test_results_of_a_trainer_are_watched() -> None:
    """Those of its training, its validations and its tests."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    lightning_metrics.watch_results(trainer, lambda: ("0/0",))
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    assert all("metrics" in vars(loop._results) for loop in loops)
