"""Fabric's loaders, whose data are dealt anew among the ranks that are left.

Read in lightning 2.6.6 (tests/unit/test_fabric.py fails clearly if it changes): `Fabric._get_distributed_sampler`,
which makes the samplers; `Fabric._setup_dataloader`, which makes the loaders; `_FabricDataLoader`, its `_dataloader`
and `_device`, and that its `__iter__` begins an epoch each time that it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.wrappers import _FabricDataLoader
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ft.comm.backend import progress
from lightning_ft.data.batches import LevelBatchSampler
from lightning_ft.data.sampler import ElasticDistributedSampler
from lightning_ft.lightning_deal import elastic_sampler, level_batches, tell_shard
from lightning_ft.lightning_refresh import renumber_sampler


def use_elastic_loaders(fabric: Fabric, follow: Callable[[ElasticFabricDataLoader], None]) -> None:
    """Have a Fabric make loaders that follow the ranks.

    Args:
        fabric: Before it sets up loaders.
        follow: Called with each loader that must be told of commits.
    """
    known: Any = fabric
    make_sampler, set_up = known._get_distributed_sampler, known._setup_dataloader

    def get_distributed_sampler(dataloader: Any, **kwargs: Any) -> Any:
        return elastic_sampler(dataloader, make_sampler(dataloader, **kwargs))

    def setup_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = set_up(*args, **kwargs)
        if level_batches(loader) is not None:
            loader.__class__ = ElasticFabricDataLoader
            loader.begin()
            follow(loader)
        else:
            loader.__class__ = RenumberedFabricDataLoader
        return loader

    known._get_distributed_sampler, known._setup_dataloader = get_distributed_sampler, setup_dataloader


class RenumberedFabricDataLoader(_FabricDataLoader):
    """A loader whose data can't be dealt anew in an epoch: the next one is dealt to the ranks that there are then."""

    @override
    def __iter__(self) -> Iterator[Any]:
        loader, rank, world_size = self._dataloader, dist.get_rank(), dist.get_world_size()
        if isinstance(loader.sampler, DistributedSampler):
            renumber_sampler(loader.sampler, rank, world_size)
        tell_shard(loader, rank, world_size)
        return super().__iter__()


class ElasticFabricDataLoader(_FabricDataLoader):
    """A loader of which each sample is trained on once in an epoch, whoever dies or joins.

    What a backward has reduced counts as consumed, with what was drawn before it since the last one; if ranks have
    changed then, what is left of the epoch is dealt anew, and the next batch is of the new deal. A loop without a
    backward, as a validation, gets its share as it was dealt when it began. A loop that is left before its end has
    ended its epoch.

    It can be part of an `ElasticState`, and has the place in the epoch as `state_dict`. Draw a batch when it is needed,
    not before the backward of the last one.
    """

    _dataloader: Any
    _device: Any

    def begin(self) -> None:
        """Take up the first epoch."""
        self._batches: LevelBatchSampler = self._dataloader.batch_sampler
        self._deal: ElasticDistributedSampler = self._batches.sampler
        self._epoch = 0
        self._is_begun = False  # it may be by the process that this one's state is from
        self._num_open = 0
        self._has_trained = False
        self._drawing: object = None  # the iterator that is asked for batches, whose end is that of the epoch

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._is_begun:
            self._deal.set_epoch(self._epoch)
            self._is_begun, self._has_trained = True, False
        self._deal.redeal()
        self._drawing = own = object()
        try:
            for batch in self._rest_of_epoch():
                yield batch
                self._drawing = own
        finally:
            if self._drawing is own:  # else a state was loaded since, and nobody goes on with this one
                self._num_open = 0
                self._is_begun = False
                self._epoch += 1

    def _rest_of_epoch(self) -> Iterator[Any]:
        while True:
            for batch in self._dataloader:
                self._num_open += 1
                progress("a batch")
                yield batch if self._device is None else move_data_to_device(batch, self._device)
                if self._num_open == 0 and self._deal.redeal():
                    break
            if self._num_open and self._has_trained:  # gradients that were not reduced are lost to all
                self._record(None)
            if not self._has_trained or not (self._deal.redeal() or self._batches.num_left):
                return

    def on_commit(self, contributors: Iterable[str]) -> None:
        """Count what has been drawn: a backward has reduced gradients, of these members."""
        if self._num_open:
            self._record(contributors)

    def _record(self, contributors: Iterable[str] | None) -> None:
        self._deal.record_batch(self._batches.num_samples(self._num_open), contributors)
        self._num_open, self._has_trained = 0, True

    def check_boundary(self) -> None:
        """Refuse others here, if a batch was drawn for the ranks that there are.

        Raises:
            RuntimeError: It was.
        """
        if self._num_open:
            raise RuntimeError(
                "boundary() failed: a batch has been drawn, but there was no backward that reduces since. Who joins "
                "would share data that are in work. Call boundary() before the loop over the loader, and as the last "
                "thing in it; with gradient accumulation, after each step of the optimizer."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is, as what JSON can hold; the same on all ranks."""
        state = {"epoch": self._epoch, "is_begun": self._is_begun, "has_trained": self._has_trained}
        return {**state, "sampler": self._deal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, among the ranks that there are.

        Raises:
            ValueError: It is of other data. Nothing changed.
        """
        self._deal.load_state_dict(state["sampler"])
        self._epoch, self._is_begun, self._has_trained = state["epoch"], state["is_begun"], state["has_trained"]
        self._num_open, self._drawing = 0, None
