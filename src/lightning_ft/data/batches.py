"""Batches of an epoch that may be dealt anew: none is so small that the model could not take it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from torch.utils.data import BatchSampler
from typing_extensions import override

from lightning_ft.data.cursor import Member
from lightning_ft.data.sampler import ElasticDistributedSampler


class LevelBatchSampler(BatchSampler):
    """BatchSampler as long as nobody fails; after that the last two batches of the epoch are equally large.

    A user chooses batch size and data set so that the last batch is large enough, for BatchNorm as an example, which
    raises for a single sample. When a rank dies, what is left per rank may be any number. The batches are as many as
    before. If a single sample is all that is left, it is in its batch twice, which leaves its mean what it is.

    Attributes:
        is_exact: Whether what fills shares up is left out: the last batch of some is then smaller than that of others.
            Only one of nothing else stays, to be weighed with 0.
        full_size: Samples in a batch as the user wants it; `batch_size` may be less.
        starts_again: Whether it is shorter than others beside it, and starts again at its end, perhaps before a step
            has counted its last batch: an iterator that is made after one of the same deal has ended yields a whole
            pass.
    """

    sampler: ElasticDistributedSampler
    full_size: int
    is_exact = False
    starts_again = False
    _ended_deal = -1

    @override
    def __iter__(self) -> Iterator[list[int]]:
        deal = self.sampler.num_deals
        if self.starts_again and self._ended_deal == deal:
            yield from self._batches_of(self.sampler.whole_share())
            return
        if not self.sampler.num_left:
            self.sampler.draw_nothing()
        elif self._is_level or self.is_exact:
            yield from self._rest(iter(self.sampler))
        else:
            yield from super().__iter__()
        self._ended_deal = deal

    @property
    def num_left(self) -> int:
        """How many batches are left of the share; as many for every member."""
        num_samples = self.sampler.num_left
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def num_samples(self, num_batches: int) -> int:
        """Return how many samples of the share its next batches hold; all, if there are fewer."""
        start = num_left = self.sampler.num_left
        for _ in range(min(num_batches, self.num_left)):
            num_left -= self._size(num_left)
        return start - num_left

    def num_of_each(self, num_open: int) -> Mapping[Member, int] | None:
        """Return how many samples each member has in a batch, which comes after so many that are not recorded.

        None: all have equally many.
        """
        if not self.is_exact or num_open + 1 < self.num_left:
            return None
        cursor = self.sampler.cursor
        upto, before = (
            [sum(map(len, positions)) for positions in cursor.next_of_each(self.num_samples(number))]
            for number in (num_open + 1, num_open)
        )
        found = {member: now - then for member, now, then in zip(cursor.members, upto, before, strict=True)}
        return found if len(set(found.values())) > 1 else None

    def _rest(self, indices: Iterator[int]) -> Iterator[list[int]]:
        num_left = self.sampler.num_left
        is_padded = self.is_exact and num_left > self.sampler.num_true
        for batch in self._level(indices) if self._is_level else self._batches_of(indices):
            num_left -= len(batch)
            if is_padded and not num_left and len(batch) > 1:
                batch.pop()
            yield batch * 2 if len(batch) == 1 < self.batch_size else batch

    def _batches_of(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while (batch := [*itertools.islice(indices, self.batch_size)]) and (
            len(batch) == self.batch_size or not self.drop_last
        ):
            yield batch

    def _level(self, indices: Iterator[int]) -> Iterator[list[int]]:
        num_left = self.sampler.num_left
        while num_left:
            size = self._size(num_left)
            yield [*itertools.islice(indices, size)]
            num_left -= size

    @property
    def _is_level(self) -> bool:
        return not (self.drop_last or self.sampler.is_first_deal)

    def _size(self, num_left: int) -> int:
        if self._is_level and self.batch_size < num_left < 2 * self.batch_size:
            return -(-num_left // 2)
        return min(self.batch_size, num_left)
