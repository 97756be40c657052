"""How many batches of which size make up a step."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lightning_ft.data.global_batch import StepShape, step_shape


@pytest.mark.parametrize(
    ("global_batch", "num_members", "batch_size", "expected"),
    [
        (128, 4, 32, (1, 32)),
        (128, 2, 32, (2, 32)),
        (128, 1, 32, (4, 32)),
        (128, 8, 32, (1, 16)),
        (120, 3, 30, (2, 20)),
        (256, 3, 32, (3, 28)),  # 252; no number of equal batches of 3 ranks is exact
        (128, 3, 32, (2, 21)),  # 126
        (2, 3, 1, (1, 1)),  # 3: each rank has a sample
    ],
)
def test_examples(global_batch: int, num_members: int, batch_size: int, expected: tuple[int, int]) -> None:
    """Exact where it can be, else near, with no batch that is larger than the user's."""
    assert step_shape(global_batch, num_members, batch_size) == StepShape(*expected)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 70), st.integers(1, 12))
def test_it_is_exact_whenever_the_number_of_ranks_divides(whole: int, accumulate: int, size: int, members: int) -> None:
    """If as many batches of the user's size make it up; and no batch is larger than that in any case."""
    global_batch = whole * accumulate * size
    shape = step_shape(global_batch, members, size)
    assert 1 <= shape.batch_size <= size
    num_samples = members * shape.num_samples
    if (whole * accumulate) % members == 0:
        assert (num_samples, shape.batch_size) == (global_batch, size)
    assert num_samples <= max(2 * global_batch, members * shape.num_batches)
