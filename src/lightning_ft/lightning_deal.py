"""The loaders of a fit whose data can be dealt anew, and the samplers that Lightning puts into them for that.

Read in lightning 2.6.6 (tests/unit/test_lightning_data.py fails clearly if it changes):
`trainer.connectors.data_connector._get_distributed_sampler`, `_FitLoop._combined_loader` and `_data_fetcher`,
`CombinedLoader._mode`, and `_shutdown_workers_and_reset_iterator` of its module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.data.batches import LevelBatchSampler
from lightning_ft.data.sampler import ElasticDistributedSampler

_stock_sampler = data_connector._get_distributed_sampler


def use_elastic_samplers() -> None:
    """Have Lightning put an `ElasticDistributedSampler` where it puts a `DistributedSampler`."""
    data_connector._get_distributed_sampler = _get_distributed_sampler


def _get_distributed_sampler(
    dataloader: Any,
    shuffle: bool,  # noqa: FBT001 - Lightning's
    overfit_batches: float,
    mode: RunningStage | None = None,
    **kwargs: Any,
) -> Any:
    stock = _stock_sampler(dataloader, shuffle, overfit_batches, mode=mode, **kwargs)
    is_ours = isinstance(dist.group.WORLD, FaultTolerantProcessGroup) and mode != RunningStage.PREDICTING
    return elastic_sampler(dataloader, stock) if is_ours else stock


def elastic_sampler(loader: Any, stock: Any) -> Any:
    """Return an `ElasticDistributedSampler` in the place of Lightning's, if a loader's data are in a known order.

    Args:
        loader: As the user has made it.
        stock: The sampler that Lightning would put into it.
    """
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        return stock
    return ElasticDistributedSampler(
        stock.dataset, stock.num_replicas, stock.rank, stock.shuffle, stock.seed, stock.drop_last
    )


def level_batches(loader: object) -> LevelBatchSampler | None:
    """Return a loader's batches, made level for when its data are dealt anew; None: they can't be dealt anew."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler and isinstance(batches.sampler, ElasticDistributedSampler):
        known: Any = batches
        known.__class__ = LevelBatchSampler  # a loader takes no other one
        known.full_size = known.batch_size
    return batches if isinstance(batches, LevelBatchSampler) else None


class Loader(NamedTuple):
    """What draws the batches of a loader whose data can be dealt anew in the middle of an epoch."""

    sampler: ElasticDistributedSampler
    batches: LevelBatchSampler
    has_workers: bool


class Deal(NamedTuple):
    """The loaders of a fit, all of which can be dealt anew, and how Lightning combines them."""

    loaders: list[Loader]
    mode: str

    @property
    def num_left(self) -> int:
        """Batches that are left of the epoch.

        A loader that has ended has none left, whether it starts again beside longer ones or not.
        """
        return (min if self.mode == "min_size" else max)(loader.batches.num_left for loader in self.loaders)

    @property
    def has_begun(self) -> bool:
        """Whether a step has been counted."""
        return any(loader.sampler.num_taken for loader in self.loaders)

    def is_enough_for(self, num_members: int) -> bool:
        """Whether each of so many members would have a batch."""
        world = dist.get_world_size()
        enough = (loader.sampler.num_left * world >= loader.batches.batch_size * num_members for loader in self.loaders)
        return all(enough) if self.mode == "min_size" else any(enough)

    def record(self, num_batches: int, contributors: Iterable[str]) -> bool:
        """Count a step, and deal anew if somebody missed it; returns whether."""
        for loader in self.loaders:
            loader.sampler.record_batch(loader.batches.num_samples(num_batches), contributors)
        return self.redeal()

    def redeal(self) -> bool:
        """Deal to the members there are; returns whether an iterator is older than the deal."""
        are_stale = [loader.sampler.redeal() for loader in self.loaders]
        return any(are_stale)

    @property
    def number(self) -> int:
        """Grows whenever anything is dealt anew."""
        return sum(loader.sampler.num_deals for loader in self.loaders)


def find_deal(fit: Any, *, is_exact: bool) -> Deal | None:
    """Return how the batches of a fit are drawn; None if they can't be dealt anew before the next epoch.

    Args:
        fit: Its loop.
        is_exact: Whether no sample is to be there twice to make shares equal, which takes a single loader.
    """
    combined = fit._combined_loader
    if combined is None or isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher):
        return None
    loaders = []
    for loader in combined.flattened:
        batches = level_batches(loader)
        if batches is None:
            return None
        batches.starts_again = combined._mode == "max_size_cycle" and len(combined.flattened) > 1
        batches.is_exact = is_exact and len(combined.flattened) == 1
        loaders.append(Loader(batches.sampler, batches, loader.num_workers > 0))
    return Deal(loaders, combined._mode) if loaders else None


def why_not(fit: Any) -> str:
    """Return what of a fit's data can't be dealt anew, if anything, for a sentence."""
    if isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher):
        return "what a training_step draws from a dataloader_iter"
    for loader in fit._combined_loader.flattened:
        if not isinstance(loader, DataLoader):
            return f"the data of a {type(loader).__name__}"
        if isinstance(loader.dataset, IterableDataset):
            return "an IterableDataset"
        if type(loader.batch_sampler) not in {BatchSampler, LevelBatchSampler}:
            return f"the batches of {type(loader.batch_sampler).__name__}"
        if not isinstance(loader.sampler, ElasticDistributedSampler):
            return f"what the sampler {type(loader.sampler).__name__} yields"
    return "the data"


def tell_shard(loader: object, rank: int, world_size: int) -> None:
    """Have an IterableDataset yield one of so many shards, if it can: it has a method `reshard(rank, world_size)`.

    Workers that hold a copy of it are ended, so that the next iterator's have the present one.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) and hasattr(dataset, "reshard"):
        _shutdown_workers_and_reset_iterator(loader)
        dataset.reshard(rank, world_size)
