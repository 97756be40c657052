"""Digests, differences and the majority: what is found of a wrong bit, wherever it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft.chunks import (
    FARTHEST,
    GRADIENTS,
    PARAMETERS,
    Subject,
    chunks_of,
    compare,
    differences,
    digest_there,
    digests_of,
    fold,
    read,
    write,
)

CHUNK_BYTES = 64


def subject(tensor: torch.Tensor, *pieces: tuple[int, int, str], kind: str = GRADIENTS) -> Subject:
    return Subject(kind, "it", tensor, lambda: pieces or ((0, tensor.numel(), "all"),))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@given(st.data())
def test_a_flipped_bit_is_found_and_healed(data: st.DataObject) -> None:
    """Whichever, in whatever tensor: that chunk alone differs, and is bit for bit the other's when that was written."""
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(1, 200))
    right = torch.randint(0, 100, (size,)).to(dtype)
    if data.draw(st.booleans()):
        right = right.repeat(2, 1).t()[:, 0:1]  # with gaps
    wrong = right.clone(memory_format=torch.preserve_format)
    index, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * right.itemsize - 1))
    one = wrong.flatten()[index : index + 1].clone()
    one.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    wrong.view(-1, 1)[index] = one
    subjects = [[subject(torch.arange(3)), subject(tensor)] for tensor in (right, wrong)]
    rows = [digests_of(found, CHUNK_BYTES)[0] for found in subjects]
    chunks = chunks_of(subjects[0], CHUNK_BYTES)
    assert all(len(row) == len(chunks) for row in rows)
    (found,) = differences([rows[0], rows[1], rows[0]])
    assert (found.holders, found.others, found.is_majority) == ((0, 2), (1,), True)
    chunk = chunks[found.chunk]
    assert chunk.start <= index * right.itemsize < chunk.end
    divergence, names = compare(subjects[1][1], chunk, read(subjects[0][1], chunk))
    assert names == ["all"]
    assert divergence > 0 or not dtype.is_floating_point or bool((one == 0).all())  # -0 is 0
    write(subjects[1][1], chunk, read(subjects[0][1], chunk))
    assert digests_of(subjects[1], CHUNK_BYTES)[0] == rows[0]
    assert digest_there(wrong.flatten(), CHUNK_BYTES) == digest_there(right.flatten(), CHUNK_BYTES)


@given(st.data())
def test_on_a_device_every_single_wrong_element_is_found(data: st.DataObject) -> None:
    """By the sums that are made there; here they run on the CPU."""
    dtype = data.draw(st.sampled_from([*DTYPES, torch.complex128]))
    right = torch.randint(0, 100, (data.draw(st.integers(1, 100)),)).to(dtype)
    wrong = right.clone()
    index = data.draw(st.integers(0, right.nbytes - 1))
    wrong.view(torch.uint8)[index] ^= data.draw(st.integers(1, 255))
    rows = [digest_there(tensor, CHUNK_BYTES) for tensor in (right, wrong, right)]
    (found,) = differences(rows)
    assert found.others == (1,)
    assert found.chunk == index // CHUNK_BYTES
    assert digest_there(right[:0], CHUNK_BYTES) == []


def test_two_wrong_elements_that_cancel_out_are_found_on_a_device() -> None:
    """Their sum is as it was, but they have changed places."""
    right = torch.tensor([1.0, 2.0, 3.0])
    assert digest_there(right, CHUNK_BYTES) != digest_there(right.flip(0), CHUNK_BYTES)


ROWS = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=1, max_size=7)
)


@given(ROWS, st.randoms())
def test_the_majority_decides_whatever_the_order(rows: list[list[int]], random: object) -> None:
    """As a naive count of each chunk says; a rank is right or wrong by what it holds, not by its number."""
    found = {one.chunk: one for one in differences(rows)}
    for index, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) == 1:
            assert index not in found
            continue
        one = found[index]
        assert sorted((*one.holders, *one.others)) == list(range(len(rows)))
        held = {column[rank] for rank in one.holders}
        assert len(held) == 1
        assert not held.intersection(column[rank] for rank in one.others)
        assert all(len(one.holders) >= column.count(value) for value in column)
        assert one.is_majority == any(2 * column.count(value) > len(column) for value in column)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for one in differences([rows[rank] for rank in order]):
        if one.is_majority:
            assert {order[rank] for rank in one.holders} == set(found[one.chunk].holders)


@given(st.integers(3, 9).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))), st.data())
def test_fewer_than_half_can_not_win(size_and_wrong: tuple[int, set[int]], data: st.DataObject) -> None:
    """Even if all who are wrong hold the same."""
    size, wrong = size_and_wrong
    wrong = set(sorted(wrong)[: (size - 1) // 2])
    right = data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3))
    rows = [[value + 1 for value in right] if rank in wrong else right for rank in range(size)]
    found = differences(rows)
    assert len(found) == (3 if wrong else 0)
    assert all(set(one.others) == wrong and one.is_majority for one in found)


def test_of_two_neither_is_right() -> None:
    """The first is only what the other is compared with."""
    (one,) = differences([[1, 2], [1, 3]])
    assert (one.chunk, one.holders, one.others, one.is_majority) == (1, (0,), (1,), False)


def test_what_differs_is_named() -> None:
    """Pieces that only lie in the same chunk are not."""
    tensor = torch.arange(8.0)
    own = subject(tensor, (0, 3, "weight"), (3, 5, "bias"), (5, 8, "last"))
    (chunk,) = chunks_of([own], CHUNK_BYTES)
    other = read(own, chunk)
    other[4] *= 1.5
    assert compare(own, chunk, other) == (pytest.approx(1 / 3), ["bias"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_far_and_told(value: float) -> None:
    """In gradients; a parameter may hold what it likes. Finite numbers whose sum overflows are finite."""
    tensor = torch.ones(40)
    tensor[33] = value
    own = subject(tensor)
    assert not digests_of([own], CHUNK_BYTES)[1]
    assert digests_of([subject(tensor, kind=PARAMETERS)], CHUNK_BYTES)[1]
    chunk = chunks_of([own], CHUNK_BYTES)[-1]
    assert compare(own, chunk, torch.ones(8)) == (FARTHEST, ["all"])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert digests_of([subject(torch.full((40,), torch.finfo(dtype).max, dtype=dtype))], CHUNK_BYTES)[1]


def test_a_digest_of_digests_depends_on_their_order() -> None:
    """And has 64 bits."""
    assert fold([1, 2]) != fold([2, 1])
    assert 0 <= fold([1 << 63, 0]) < 1 << 64
