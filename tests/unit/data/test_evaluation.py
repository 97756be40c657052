"""What is evaluated again, and by whom."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from lightning_ft.data.cursor import Cursor
from lightning_ft.data.evaluation import EvaluationShares


@given(st.integers(0, 60), st.integers(1, 6), st.data())
def test_each_result_is_that_of_one_living_member(length: int, num_members: int, data: st.DataObject) -> None:
    """Whoever dies, in whatever order, all that was to be evaluated is, once, and nobody gets two samples more."""
    cursor = Cursor.begin(length, range(num_members))
    count = data.draw(st.integers(0, cursor.num_left))
    shares = EvaluationShares.begin(cursor, count)
    expected = sorted(itertools.chain(*itertools.chain(*cursor.next_of_each(count))))
    present = list(range(num_members))
    while True:
        held = [position for pieces in shares.of.values() for piece in pieces for position in piece]
        assert sorted(held) == expected
        assert list(shares.of) == present
        if len(present) == 1:
            break
        for member in data.draw(st.sets(st.sampled_from(present), min_size=1, max_size=len(present) - 1)):
            present.remove(member)
        before = shares
        shares, parts = shares.redeal(present)
        assert all(shares.of[member] == before.of[member] + parts[member] for member in present)
        sizes = [sum(map(len, parts[member])) for member in present]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
