"""Batches of an epoch whose rest was dealt anew."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, TensorDataset

from lightning_ft.data.batches import LevelBatchSampler
from lightning_ft.data.sampler import ElasticDistributedSampler


def sampler_of(length: int, num_members: int) -> ElasticDistributedSampler:
    return ElasticDistributedSampler(TensorDataset(torch.zeros(length)), num_members, 0, seed=3)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 17), st.booleans())
def test_without_a_failure_they_are_the_stock_ones(length: int, num_members: int, size: int, drop_last: bool) -> None:
    """Also in the middle of an epoch, as after a resume."""
    sampler = sampler_of(length, num_members)
    stock, level = (kind(sampler, size, drop_last) for kind in (BatchSampler, LevelBatchSampler))
    assert list(level) == list(stock)
    sampler.record_batch(min(size, sampler.num_left))
    assert list(level) == list(stock)


@given(st.integers(8, 200), st.integers(2, 17), st.integers(0, 2), st.sampled_from([(0,), (0, 1), (0, 2, 1, 3, 4)]))
def test_after_one_none_is_far_too_small(length: int, size: int, num_steps: int, members: tuple[int, ...]) -> None:
    """Each sample of the share is there, in as many batches; only a share smaller than a batch makes a small one."""
    sampler = sampler_of(length, 4)
    for _ in range(num_steps):
        sampler.record_batch(min(size, sampler.num_left))
    sampler.record_batch(min(size, sampler.num_left), [0, 2, 3])
    sampler.redeal(members)
    batches = LevelBatchSampler(sampler, size, drop_last=False)
    num_left = sampler.num_left
    drawn = list(batches)
    assert len(drawn) == math.ceil(num_left / size) == len(list(BatchSampler(sampler, size, drop_last=False)))
    assert [index for batch in drawn for index in batch][:num_left] == list(sampler)
    sizes = [len(batch) for batch in drawn]
    assert all(2 <= count <= size for count in sizes)
    assert num_left == 1 or min(sizes, default=size) >= min(size // 2, num_left)
    for count in range(len(sizes) + 1):
        assert batches.num_samples(count) == min(num_left, sum(sizes[:count])), "a lone sample counts once"


def test_the_last_two_are_equal_and_a_lone_sample_is_there_twice() -> None:
    """129 of a share, in batches of 8, would end in one of a single sample."""
    sampler = sampler_of(410, 4)
    sampler.record_batch(8, [0, 1, 2])
    sampler.redeal((0, 1, 2))
    batches = LevelBatchSampler(sampler, 8, drop_last=False)
    assert [len(batch) for batch in batches] == [8] * 15 + [5, 4]
    sampler.record_batch(128)
    (batch,) = batches
    assert batch[0] == batch[1]
    assert batches.num_samples(1) == 1


@pytest.mark.parametrize(("size", "expected"), [(8, [8] * 16), (1, [1] * 129)])
def test_what_the_user_chose_stays(size: int, expected: list[int]) -> None:
    """A last batch that is dropped, and batches of one."""
    sampler: Any = sampler_of(410, 4)
    sampler.record_batch(8, [0, 1, 2])
    sampler.redeal((0, 1, 2))
    assert [len(batch) for batch in LevelBatchSampler(sampler, size, drop_last=size > 1)] == expected
