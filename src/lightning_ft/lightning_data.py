"""An epoch's data, dealt anew when the ranks change: at once for a fit, with the next epoch for all else.

Read in lightning 2.6.6 (tests/unit/test_lightning_data.py fails clearly if it changes):
`trainer.connectors.data_connector._get_distributed_sampler` and `_parse_num_batches`,
`_FitLoop._combined_loader`, `_data_fetcher`, `max_batches`, `setup_data` and `on_advance_end`,
`_TrainingEpochLoop.batch_progress` and `_should_accumulate`, `CombinedLoader.limits`, `_DataFetcher.fetched`, `length`
and `done`,
`_EvaluationLoop._combined_loader`, `setup_data` and `_on_evaluation_end`, `_PredictionLoop._combined_loader`,
`setup_data` and `_on_predict_end`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_ft.comm.backend import progress
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.data.batches import LevelBatchSampler
from lightning_ft.data.sampler import ElasticDistributedSampler

_stock_sampler = data_connector._get_distributed_sampler


def use_elastic_samplers() -> None:
    """Have Lightning put an `ElasticDistributedSampler` where it puts a `DistributedSampler` into a fit's loader."""
    data_connector._get_distributed_sampler = _get_distributed_sampler


def _get_distributed_sampler(
    dataloader: Any,
    shuffle: bool,  # noqa: FBT001 - Lightning's
    overfit_batches: float,
    mode: RunningStage | None = None,
    **kwargs: Any,
) -> Any:
    stock = _stock_sampler(dataloader, shuffle, overfit_batches, mode=mode, **kwargs)
    is_ours = isinstance(dist.group.WORLD, FaultTolerantProcessGroup) and mode == RunningStage.TRAINING
    if not is_ours or not isinstance(dataloader.sampler, RandomSampler | SequentialSampler):
        return stock
    return ElasticDistributedSampler(
        stock.dataset, stock.num_replicas, stock.rank, stock.shuffle, stock.seed, stock.drop_last
    )


class _Deal(NamedTuple):
    """What draws the batches of a fit whose data can be dealt anew in the middle of an epoch."""

    sampler: ElasticDistributedSampler
    batches: LevelBatchSampler
    has_workers: bool

    @property
    def num_left(self) -> int:
        """Batches that are left of this rank's share."""
        batches = self.sampler.num_left / self.batches.batch_size
        return math.floor(batches) if self.batches.drop_last else math.ceil(batches)


class EpochData:
    """What is left of the epoch that a fit is in.

    It counts what each commit consumed. Who missed one has left what it had drawn for it to the others. When the ranks
    have changed, the rest is dealt anew: the epoch then has other lengths, and its iterator is made again, with all
    that it had drawn ahead thrown away.

    Args:
        trainer: Of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._num_open = 0  # batches before the present one that no commit has counted
        self._is_counted = False  # the present one
        self._is_stale = False
        self._has_joined = False
        self._has_gradients_left = False
        self._epoch = (0, 0)
        self._num_skipped = 0  # batches of this epoch that were trained on before this fit was resumed
        loop = trainer.fit_loop.epoch_loop
        accumulates = loop._should_accumulate
        # What follows a step follows it also if it was that of the last batch, which is not the last any more.
        loop._should_accumulate = lambda: not self._has_gradients_left and accumulates()  # type: ignore[method-assign]

    @property
    def deal(self) -> _Deal | None:
        """How the batches are drawn; None if they can't be dealt anew before the next epoch.

        That takes a single loader, a sampler that Lightning has put in, and batches that are made of what it yields one
        after the other.
        """
        fit = self._trainer.fit_loop
        combined = fit._combined_loader
        if (
            combined is None
            or len(combined.flattened) != 1
            or isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher)
        ):
            return None
        (loader,) = combined.flattened
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        if type(batches) is BatchSampler and isinstance(sampler, ElasticDistributedSampler):
            batches.__class__ = LevelBatchSampler  # a loader takes no other one
        if type(batches) is not LevelBatchSampler:
            return None
        return _Deal(batches.sampler, batches, loader.num_workers > 0)

    @property
    def is_at_boundary(self) -> bool:
        """Whether ranks may join: all that was drawn is counted, and there is a batch left for each that might."""
        deal = self.deal
        if deal is None or self._num_open:
            return False
        world = dist.get_world_size()
        num_expected = max(world, self._trainer.num_devices * self._trainer.num_nodes)
        return deal.sampler.num_left * world >= deal.batches.batch_size * num_expected

    def before_batch(self) -> None:
        """Draw from the present deal. Called on all ranks at the same batch."""
        self._is_counted = False
        deal = self.deal
        if deal is None:
            return
        epoch = (id(deal.sampler), deal.sampler.epoch)
        if epoch != self._epoch:
            # One that a checkpoint has begun is dealt whole, as Lightning does it, and ends so many batches earlier.
            self._epoch, self._num_open = epoch, 0
            self._num_skipped = 0 if deal.sampler.num_taken else self._num_done
        if self._num_open == 0:
            number = deal.sampler.num_deals
            is_stale = deal.sampler.redeal()
            if deal.sampler.num_deals != number or self._has_joined:
                self._measure(deal)
                self._trainer.fit_loop.max_batches = max(self._trainer.fit_loop.max_batches, self._num_done + 1)
            # Workers have begun to draw, perhaps from the deal of another epoch; without them the iterator has not
            # asked the sampler yet, so that it is as new as the deal.
            self._is_stale |= is_stale and deal.has_workers
        self._has_joined = False
        if self._is_stale:
            self._draw_anew()
        if self._has_gradients_left:
            self._has_gradients_left = False
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad()

    def joined(self) -> None:
        """This process has got the state of the others: what it had drawn is none of its share."""
        self._has_joined = True

    def after_batch(self) -> None:
        """The batch is over, with or without a commit."""
        self._num_open += not self._is_counted

    def on_commit(self, contributors: Iterable[str]) -> None:
        """A step is final: count what it consumed. With several in a batch, the first."""
        deal = self.deal
        if deal is None or self._is_counted:
            return
        deal.sampler.record_batch(deal.batches.num_samples(self._num_open + 1), contributors)
        self._num_open, self._is_counted = 0, True
        if deal.sampler.redeal():  # now, not with the next batch: this one may have been the last
            self._measure(deal)

    @property
    def _num_done(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _measure(self, deal: _Deal) -> None:
        """Correct the lengths that Lightning has computed when the epoch began."""
        trainer, fit, done = self._trainer, self._trainer.fit_loop, self._num_done
        total = done + max(0, deal.num_left - self._num_skipped)
        total = max(
            done, int(data_connector._parse_num_batches(RunningStage.TRAINING, total, trainer.limit_train_batches))
        )
        fit.max_batches = total
        assert fit._combined_loader is not None
        fit._combined_loader.limits = [total - done]
        batches = fit.epoch_loop.batch_progress
        # The step of what was the last batch is done in the middle of a window of accumulation.
        self._has_gradients_left |= batches.is_last_batch and total > done
        batches.is_last_batch = total == done
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(total * trainer.val_check_interval))
        self._is_stale = True

    def _draw_anew(self) -> None:
        fit = self._trainer.fit_loop
        fetcher = fit._data_fetcher
        assert fetcher is not None
        progress("drawing batches from a new deal")
        iter(fetcher)
        fetcher.fetched, fetcher.length = self._num_done, int(fit.max_batches)
        fetcher.done = fetcher.fetched >= fetcher.length
        self._is_stale = False


class DataRefresher:
    """Deals an epoch's data among the ranks there are when it begins.

    An epoch that is under way keeps its deal; the next one is dealt anew, with the right lengths.

    Args:
        trainer: Its loops are changed.
        on_dealt: Called before a loop's data are dealt, if they are.
        on_evaluated: Called with `validation`, `test` or `predict` when the results of one are complete, before
            anybody acts on them.
    """

    def __init__(self, trainer: Trainer, on_dealt: Callable[[], None], on_evaluated: Callable[[str], None]) -> None:
        self._stale: set[int] = set()
        self._on_dealt = on_dealt
        validation = trainer.fit_loop.epoch_loop.val_loop
        evaluations = {
            "validation": (validation, trainer.validate_loop),
            "test": (trainer.test_loop,),
            "predict": (trainer.predict_loop,),
        }
        self._loops: list[Any] = [trainer.fit_loop]
        end_of_epoch = functools.partial(progress, "the end of an epoch")
        trainer.fit_loop.on_advance_end = _after(end_of_epoch, trainer.fit_loop.on_advance_end)  # type: ignore[method-assign]
        for stage, loops in evaluations.items():
            for loop in loops:
                self._loops.append(loop)
                end = "_on_predict_end" if stage == "predict" else "_on_evaluation_end"
                setattr(loop, end, _after(functools.partial(on_evaluated, stage), getattr(loop, end)))
        for loop in self._loops:
            self._wrap(loop)

    def ranks_changed(self) -> None:
        """The ranks are others from here on."""
        self._stale = {id(loop) for loop in self._loops}

    def _wrap(self, loop: Any) -> None:
        original = loop.setup_data

        def setup_data() -> None:
            self._on_dealt()
            if id(loop) in self._stale:
                self._stale.discard(id(loop))
                if loop._combined_loader is not None:
                    for loader in loop._combined_loader.flattened:
                        sampler = getattr(loader, "sampler", None)
                        if isinstance(sampler, DistributedSampler) and not isinstance(
                            sampler, ElasticDistributedSampler
                        ):
                            renumber_sampler(sampler, dist.get_rank(), dist.get_world_size())
                    loop._combined_loader = None
            original()

        loop.setup_data = setup_data


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def renumber_sampler(sampler: DistributedSampler[Any], rank: int, num_replicas: int) -> None:
    """Give a sampler that a user holds on to other ranks, by its constructor's arithmetic."""
    sampler.rank, sampler.num_replicas = rank, num_replicas
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last and length % num_replicas:
        sampler.num_samples = math.ceil((length - num_replicas) / num_replicas)
    else:
        sampler.num_samples = math.ceil(length / num_replicas)
    sampler.total_size = sampler.num_samples * num_replicas
