"""Batches of an epoch whose rest was dealt anew: none is so small that the model could not take it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.utils.data import BatchSampler
from typing_extensions import override

from lightning_ft.data.sampler import ElasticDistributedSampler


class LevelBatchSampler(BatchSampler):
    """BatchSampler as long as nobody fails; after that the last two batches of the epoch are equally large.

    A user chooses batch size and data set so that the last batch is large enough, for BatchNorm as an example, which
    raises for a single sample. When a rank dies, what is left per rank may be any number. The batches are as many as
    before. If a single sample is all that is left, it is in its batch twice, which leaves its mean what it is.
    """

    sampler: ElasticDistributedSampler

    @override
    def __iter__(self) -> Iterator[list[int]]:
        if not self._is_level:
            yield from super().__iter__()
            return
        indices, num_left = iter(self.sampler), self.sampler.num_left
        while num_left:
            size = self._size(num_left)
            batch = list(itertools.islice(indices, size))
            yield batch * 2 if len(batch) == 1 < self.batch_size else batch
            num_left -= size

    def num_samples(self, num_batches: int) -> int:
        """Return how many samples of the share its next batches hold."""
        start = num_left = self.sampler.num_left
        for _ in range(num_batches):
            num_left -= self._size(num_left)
        return start - num_left

    @property
    def _is_level(self) -> bool:
        return not (self.drop_last or self.sampler.is_first_deal)

    def _size(self, num_left: int) -> int:
        if self._is_level and self.batch_size < num_left < 2 * self.batch_size:
            return -(-num_left // 2)
        return min(self.batch_size, num_left)
