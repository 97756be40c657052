"""A module's metrics stay right while ranks die: what is put together is of the same ranks.

torchmetrics gathers each state of a metric by itself. If a rank dies between two of them, its share is in the first and
not in the second: a mean with a sum of three ranks and a count of two, predictions without their targets. So here all
states of a metric travel in one exchange, which has a dead rank's share whole or not at all. Lightning sums a logged
mean and its weight one after the other: what it has put together while the ranks changed is put together anew.

Read in torchmetrics 1.9 and lightning 2.6.6 (tests/unit/test_lightning_metrics.py fails clearly if it changes):
`Metric._sync_dist` hands each tensor to `dist_sync_fn`, in the same order whenever it is called; `_computed` of a
Metric and of a `_ResultMetric` is the last result; `_ResultCollection.metrics`; the loops' `_results`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

Gather = Callable[[bytes], list[bytes]]
"""Returns what each rank has given, by rank, whoever of them is there; the same on all ranks."""


class Exchange:
    """Syncs metrics over the ranks, each in one exchange.

    Args:
        gather: Of the group of all ranks.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def attach(self, module: LightningModule) -> None:
        """Sync all metrics in a module so, but those with a `dist_sync_fn` or a group of their own."""
        for metric in module.modules():
            if not isinstance(metric, Metric) or metric.process_group is not None:
                continue
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, Exchange):  # of an earlier fit
                metric.dist_sync_fn = self
                metric._sync_dist = _Sync(metric, self)  # type: ignore[method-assign]

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Gather one tensor, for whoever uses a metric's `dist_sync_fn` by itself."""
        return [tensors[0] for tensors in self.rows([tensor])]

    def rows(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Gather tensors in one exchange.

        Returns: Those of each rank, on the own ones' devices.

        Raises:
            RuntimeError: Ranks have different numbers of them; on all ranks alike.
        """
        rows = [_unpack(data) for data in self._gather(_pack(tensors))]
        counts = [len(row) for row in rows]
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"syncing a metric failed: the ranks have {counts} tensors in its states. A list state whose reduction "
                "is not `cat` must have as many entries on each rank."
            )
        columns = [_of_one_kind(column) for column in zip(*rows, strict=True)]
        placed = [[each.to(own.device) for each in column] for column, own in zip(columns, tensors, strict=True)]
        return [list(row) for row in zip(*placed, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _default_sync, ()  # in another process there is another group


class _Sync:
    """`_sync_dist` of one metric; a copy of the metric has its own, and one that is unpickled torchmetrics'."""

    def __init__(self, metric: Metric, exchange: Exchange) -> None:
        self._metric = metric
        self._exchange = exchange

    def __call__(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        sync = functools.partial(type(self._metric)._sync_dist, self._metric)
        if dist_sync_fn not in (self._exchange, gather_all_tensors) or process_group is not None:
            sync(dist_sync_fn, process_group=process_group)
            return
        own: list[Tensor] = []

        def note(tensor: Tensor, **_: Any) -> list[Tensor]:
            own.append(tensor)
            return [tensor]

        with self._unchanged():
            sync(note)
        if own:
            columns = iter([list(column) for column in zip(*self._exchange.rows(own), strict=True)])
            sync(lambda _tensor, **_: next(columns))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        states = {name: getattr(self._metric, name) for name in self._metric._reductions}
        try:
            yield
        finally:
            for name, state in states.items():
                setattr(self._metric, name, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sync:
        return _Sync(copy.deepcopy(self._metric, memo), self._exchange)

    def __reduce__(self) -> tuple[Any, ...]:
        return _default_method, (self._metric,)


def watch_results(trainer: Trainer, members: Callable[[], tuple[str, ...]]) -> None:
    """Have what is logged for an epoch put together by the same ranks, value by value.

    Args:
        trainer: Its loops are changed.
        members: Returns who is in the job; it changes at the same collective on all ranks.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        watch(loop._results, members)


def watch(results: Any, members: Callable[[], tuple[str, ...]]) -> None:
    """As `watch_results`, of one collection of results."""
    results.metrics = functools.partial(_metrics_of_the_same, results, results.metrics, members)


def _metrics_of_the_same(results: Any, metrics: Callable[[Any], Any], members: Callable[[], Any], on_step: Any) -> Any:
    if on_step:  # what a step has logged is known
        return metrics(on_step)
    while True:
        before = members()
        unknown = [result for result in results.values() if result._computed is None]
        found = metrics(on_step)
        if members() == before:
            return found
        forget(unknown)


def forget(results: Sequence[Any]) -> None:
    """Have what is logged be put together anew when it is asked for next."""
    for result in results:
        result._computed = None
        if isinstance(result.value, Metric):
            for metric in result.value.modules():
                if isinstance(metric, Metric):
                    metric._computed = None


def _of_one_kind(column: Sequence[Tensor]) -> list[Tensor]:
    """Give whoever has no entries in a list state the others' type and shape: it can't know them."""
    known = next((tensor for tensor in column if tensor.numel() and tensor.dim()), None)
    if known is None:
        return list(column)
    return [tensor if tensor.numel() else known.new_empty((0, *known.shape[1:])) for tensor in column]


def _pack(tensors: Sequence[Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save([tensor.detach().cpu().clone() for tensor in tensors], buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> list[Tensor]:
    tensors: list[Tensor] = torch.load(io.BytesIO(data), weights_only=True)
    return tensors


def _default_sync() -> Any:
    return gather_all_tensors


def _default_method(metric: Metric) -> Any:
    return types.MethodType(type(metric)._sync_dist, metric)
