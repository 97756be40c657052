"""All-reduces along the tree: the results, several at once, and what happens when a link breaks."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from tests.unit.comm import inner_groups

from lightning_ft.comm.gloo import GlooTransport, RingBrokenError
from lightning_ft.comm.measuring import measure
from lightning_ft.comm.place import Place
from lightning_ft.comm.topology import FEWEST, LARGEST_BYTES, RING_ONLY, Choice, Times, choose, needs_times
from lightning_ft.comm.tree import TreeWork, combiner
from lightning_ft.config import AUTO, RING, TREE

NAMES = ("0/0", "0/1", "0/2", "0/3", "1/0", "1/2", "2/0")
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.fixture(scope="module")
def members() -> Iterator[list[GlooTransport]]:
    """Seven members on three nodes."""
    with inner_groups.transports(len(NAMES)) as made:
        yield made


def make_places(members: list[GlooTransport], choice: Choice = Choice(is_all=True)) -> list[Place]:  # noqa: B008
    """Make a group whose all-reduces go as chosen."""
    made = inner_groups.places(members)
    for place in made:
        place.members = NAMES[: len(made)]
        place.choice = choice
    return made


@pytest.fixture(scope="module")
def places(members: list[GlooTransport]) -> Iterator[list[Place]]:
    """Where all that can goes along the tree."""
    made = make_places(members)
    yield made
    for member, place in zip(members, made, strict=True):
        member.free(place.inner)


def reduced(places: list[Place], tensors: list[torch.Tensor], op: str = "SUM") -> list[dist.Work]:
    """All-reduce in place; returns the works, which have ended."""
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, op)

    def run(place: Place, tensor: torch.Tensor) -> dist.Work:
        work = place.allreduce(tensor, options)
        place.inner.wait(work)
        return work

    return inner_groups.together(
        *(functools.partial(run, *pair) for pair in zip(places, tensors, strict=True)),
    )


def drawn(seed: int, num: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each member."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(NAMES), num)
    if dtype in FLOATS:
        return list(torch.randn(shape, generator=generator).to(dtype))
    return list(torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 100, 20_000]), st.sampled_from(INTEGERS), st.sampled_from(OPS))
def test_integers_come_out_as_around_the_ring(
    places: list[Place], seed: int, num: int, dtype: torch.dtype, op: str
) -> None:
    """Whatever is done with them, of all sizes, those that wrap included."""
    own = drawn(seed, num, dtype)
    along_tree, around_ring = [tensor.clone() for tensor in own], [tensor.clone() for tensor in own]
    assert all(isinstance(work, TreeWork) for work in reduced(places, along_tree, op))
    for place in places:
        place.choice = RING_ONLY
    assert not any(isinstance(work, TreeWork) for work in reduced(places, around_ring, op))
    for place in places:
        place.choice = Choice(is_all=True)
    assert all(torch.equal(tensor, around_ring[0]) for tensor in (*along_tree, *around_ring))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_added_up_in_one_order(places: list[Place], dtype: torch.dtype) -> None:
    """All members have the same bits, those of the sum in the tree's order; the shape does not matter."""
    own = drawn(7, 40_000, dtype)
    tensors = [tensor.clone().view(200, 200) for tensor in own]
    reduced(places, tensors)
    a, b, c, d, e, f, g = own
    expected = (((a + b) + (c + d)) + (e + f)) + g
    assert all(torch.equal(tensor.flatten(), expected) for tensor in tensors)
    with torch.inference_mode():
        within = [tensor.clone() for tensor in own]
    reduced(places, within)
    assert all(torch.equal(tensor, expected) for tensor in within)


def test_two_have_a_ring_only(members: list[GlooTransport]) -> None:
    """It takes as many messages, and gives the same bits."""
    pair = make_places(members[:2])
    tensors = [torch.ones(3), torch.ones(3)]
    assert not any(isinstance(work, TreeWork) for work in reduced(pair, tensors))
    assert all(tensor.tolist() == [2.0] * 3 for tensor in tensors)
    for member, place in zip(members, pair, strict=False):
        member.free(place.inner)


def test_what_only_gloo_defines_stays_around_the_ring(places: list[Place]) -> None:
    """The greatest of floats (one may be no number), and what it refuses."""
    tensors = [torch.tensor([float(rank), -float(rank)]) for rank in range(len(NAMES))]
    assert not any(isinstance(work, TreeWork) for work in reduced(places, tensors, "MAX"))
    assert all(tensor.tolist() == [6.0, 0.0] for tensor in tensors)
    assert combiner(dist.ReduceOp.SUM, torch.bool) is None
    assert combiner(dist.ReduceOp.BAND, torch.float32) is None


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_many_at_once_do_not_meet(places: list[Place], data: st.DataObject) -> None:
    """Large and small, along the tree and around the ring, begun in one order by all and waited for in any."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 50, 30_000]), min_size=2, max_size=6))
    orders = [data.draw(st.permutations(range(len(sizes)))) for _ in NAMES]
    late = data.draw(st.integers(0, len(NAMES) - 1))
    is_late = threading.Event()

    def run(place: Place) -> list[float]:
        if place.rank == late:
            is_late.wait(60)
        tensors = [torch.full((size,), float(place.rank + 10 * nth)) for nth, size in enumerate(sizes)]
        works = []
        for nth, tensor in enumerate(tensors):
            place.choice = Choice(is_all=nth % 3 != 2)
            works.append(place.allreduce(tensor))
        place.choice = Choice(is_all=True)
        if place.rank == (late + 1) % len(NAMES):
            assert not works[0].is_completed()
            is_late.set()
        for nth in orders[place.rank]:
            place.inner.wait(works[nth])
        assert all(work.is_completed() for work in works)
        assert all((tensor == tensor[0]).all() for tensor in tensors)
        return [float(tensor[0]) for tensor in tensors]

    found = inner_groups.together(*(functools.partial(run, place) for place in places))
    assert found == [[21.0 + 70.0 * nth for nth in range(len(sizes))]] * len(NAMES)


@pytest.mark.parametrize("missing", [0, 2, 3, 6])
def test_whoever_is_missing_nobody_has_the_sum(members: list[GlooTransport], missing: int) -> None:
    """Nobody's ends before all have begun it; when the group is severed all fail."""
    broken = make_places(members)
    present = [place for place in broken if place.rank != missing]
    works = [(place, place.allreduce(torch.ones(2))) for place in present for _ in range(3)]
    assert not any(work.is_completed() for _, work in works)
    broken[missing].inner.sever()  # as if it had died: whoever has a link to it fails; the others when they sever
    for place in present:
        place.inner.sever()
    for place, work in works:
        with pytest.raises((RuntimeError, RingBrokenError)):  # Gloo may lose a message that is just being sent
            place.inner.wait(work)
    for member, place in zip(members, broken, strict=True):
        member.free(place.inner)


def test_a_broken_link_is_noticed_at_once(members: list[GlooTransport]) -> None:
    """Without being told, whoever waits for a member that is gone, or for one that waits for it, fails."""
    broken = make_places(members)
    works = {place.rank: place.allreduce(torch.ones(3)) for place in broken if place.rank != 3}
    broken[3].inner.sever()
    for rank in (2, 0, 1):
        with pytest.raises(RuntimeError, match="along the tree failed"):
            broken[rank].inner.wait(works[rank])
        broken[rank].inner.sever()
    for member, place in zip(members, broken, strict=True):
        member.free(place.inner)


def test_a_group_has_one_thread_and_only_if_it_needs_it(members: list[GlooTransport]) -> None:
    """However many all-reduces there are; it ends with the group."""

    def num_threads() -> int:
        return sum(thread.name == "lightning_ft tree" for thread in threading.enumerate())

    before = num_threads()
    made = make_places(members, RING_ONLY)
    reduced(made, [torch.ones(1) for _ in NAMES])
    assert num_threads() == before
    for place in made:
        place.choice = Choice(is_all=True)
    for _ in range(5):
        reduced(made, [torch.ones(1) for _ in NAMES])
    assert num_threads() == before + len(NAMES)
    for member, place in zip(members, made, strict=True):
        member.free(place.inner)
    assert num_threads() == before


def test_all_members_agree_on_the_times(members: list[GlooTransport], places: list[Place]) -> None:
    """What was measured on each is the same on all, so what is chosen from it is too."""
    found = inner_groups.together(*(functools.partial(measure, place) for place in places))
    assert found == [found[0]] * len(NAMES)
    assert (found[0].num_members, found[0].num_levels) == (len(NAMES), 2)
    assert min(dataclasses.astuple(found[0])) > 0
    assert all(place.choice == RING_ONLY for place in places)
    for place in places:
        place.choice = Choice(is_all=True)


EIGHT = tuple(f"0/{slot}" for slot in range(FEWEST))


@pytest.mark.parametrize(
    ("tiny", "largest", "exact_bytes"),
    [
        ((100, 100), (500, 100), 0),  # no gain where the tree is at its best
        ((300, 100), (900, 700), LARGEST_BYTES),
        ((300, 100), (500, 700), LARGEST_BYTES // 2),
        ((300, 100), (500, 1100), LARGEST_BYTES // 4),
    ],
)
def test_auto_sends_along_the_tree_what_is_faster_so(
    tiny: tuple[int, int], largest: tuple[int, int], exact_bytes: int
) -> None:
    """Up to the size at which both take as long; and never what would come out otherwise."""
    times = Times(8, 3, *tiny, *largest)
    choice = choose(AUTO, EIGHT, times)
    assert choice == Choice(exact_bytes)
    assert choose(RING, EIGHT, times) == RING_ONLY
    assert choose(TREE, EIGHT, None) == Choice(is_all=True)
    assert choice.is_tree(torch.zeros(1, dtype=torch.int64)) == (exact_bytes > 0)
    assert not choice.is_tree(torch.zeros(1))
    assert not choice.is_tree(torch.zeros(LARGEST_BYTES + 1, dtype=torch.uint8))


def test_auto_keeps_to_the_ring_among_few() -> None:
    """There nothing is measured; what fewer members take follows from what was measured among all."""
    assert not needs_times(AUTO, EIGHT[1:])
    assert needs_times(AUTO, EIGHT)
    assert not needs_times(RING, EIGHT)
    assert choose(AUTO, EIGHT, None) == RING_ONLY
    sixteen = tuple(f"0/{slot}" for slot in range(16))
    times = Times(16, 4, 300, 200, 300, 300)
    assert choose(AUTO, sixteen, times) == Choice(LARGEST_BYTES)
    assert choose(AUTO, sixteen[:8], times) == RING_ONLY  # 7 of 15 hops, but 3 of 4 levels
    assert choose(AUTO, sixteen[:3], times) == RING_ONLY
