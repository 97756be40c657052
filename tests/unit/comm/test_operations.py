"""Each operation gives the same however it came to its result: at once, redone, or handed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from tests.unit.comm import inner_groups

from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.operations import (
    Broadcast,
    BroadcastBytes,
    Gather,
    GatherBytes,
    Operation,
    Reduce,
)
from lightning_ft.comm.place import SMALL_BYTES, Place, as_bytes
from lightning_ft.errors import ProtocolViolationError

NUM_MEMBERS = 3
NUMERIC = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
SHAPES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "flat": lambda dtype: torch.zeros(5, dtype=dtype),
    "0-dim": lambda dtype: torch.zeros((), dtype=dtype),
    "empty": lambda dtype: torch.zeros((2, 0), dtype=dtype),
    "transposed": lambda dtype: torch.zeros((2, 3), dtype=dtype).t(),
    "strided": lambda dtype: torch.zeros((4, 6), dtype=dtype)[:, ::2],
}


@pytest.fixture(scope="module")
def members() -> Iterator[list[GlooTransport]]:
    """Three members."""
    with inner_groups.transports(NUM_MEMBERS) as made:
        yield made


@pytest.fixture(scope="module")
def places(members: list[GlooTransport]) -> list[Place]:
    """Where they run."""
    return inner_groups.places(members)


def finish(operation: Operation, place: Place) -> None:
    for work in operation.start(place):
        work.wait()
    operation.finish(place)


def run(operations: Sequence[Operation], places: Sequence[Place]) -> None:
    inner_groups.together(
        *(
            lambda operation=operation, place=place: finish(operation, place)
            for operation, place in zip(operations, places, strict=True)
        )
    )


def redo(operations: Sequence[Operation], members: Sequence[GlooTransport], places: Sequence[Place]) -> None:
    """Start on a group that breaks before everybody has come, as if the last member had died; then run elsewhere."""
    broken = inner_groups.places(members)
    works = [work for index in range(NUM_MEMBERS - 1) for work in operations[index].start(broken[index])]
    for place in broken:
        place.inner.sever()
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    for member, place in zip(members, broken, strict=True):
        member.free(place.inner)
    run(operations, places)


def hand_over(source: Operation, target: Operation) -> None:
    """Do what a sequence does with the bytes of a payload."""
    payload = [as_bytes(tensor) for tensor in source.payload()]
    received = target.receive_into([tensor.numel() for tensor in payload])
    for to, tensor in zip(received, payload, strict=True):
        to.copy_(tensor)
    target.adopt(received)


def filled(shape: str, dtype: torch.dtype, rank: int) -> torch.Tensor:
    tensor = SHAPES[shape](dtype)
    return tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 7 + 10 * rank + 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
def test_reduce(members: list[GlooTransport], places: list[Place], dtype: torch.dtype, shape: str) -> None:
    """A sum is the same at once, redone and handed over, and touches nothing beside its tensor."""
    expected = filled(shape, dtype, 0) + filled(shape, dtype, 1) + filled(shape, dtype, 2)
    for way in (run, lambda operations, _: redo(operations, members, places)):
        tensors = [filled(shape, dtype, rank) for rank in range(NUM_MEMBERS)]
        operations = [Reduce([tensor]) for tensor in tensors]
        way(operations, places)
        late = filled(shape, dtype, 1)
        late_operation = Reduce([late])
        hand_over(operations[2], late_operation)
        for tensor in (*tensors, late):
            assert torch.equal(tensor, expected), (tensor, expected)
            if shape == "strided":
                assert not tensor._base[:, 1::2].any(), "elements between those of the tensor were changed"  # type: ignore[index]
        assert as_bytes(late_operation.payload()[0]).tolist() == as_bytes(operations[0].payload()[0]).tolist()


def test_reduce_averages_over_those_who_finish_it(places: list[Place]) -> None:
    """An average is divided by the number of members at the end, also of integers."""
    for dtype in (torch.float32, torch.int64):
        tensors = [torch.full((2,), 10 * rank + 1, dtype=dtype) for rank in range(NUM_MEMBERS)]
        run([Reduce([tensor], dist.ReduceOp.AVG) for tensor in tensors], places)
        assert all(torch.equal(tensor, torch.full((2,), 11, dtype=dtype)) for tensor in tensors)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*NUMERIC, torch.bool], ids=str)
def test_gather(members: list[GlooTransport], places: list[Place], dtype: torch.dtype, shape: str) -> None:
    """The slots are the same at once, redone and handed over."""
    own = [filled(shape, dtype, rank) for rank in range(NUM_MEMBERS)]
    for way in (run, lambda operations, _: redo(operations, members, places)):
        slots = [[SHAPES[shape](dtype) for _ in range(NUM_MEMBERS)] for _ in range(NUM_MEMBERS + 1)]
        operations = [Gather(slots[rank], own[rank]) for rank in range(NUM_MEMBERS)]
        way(operations, places)
        hand_over(operations[1], Gather(slots[NUM_MEMBERS], own[0]))
        for found in slots:
            assert all(torch.equal(slot, tensor) for slot, tensor in zip(found, own, strict=True))


@pytest.mark.parametrize("is_any_root", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*NUMERIC, torch.bool, torch.int16, torch.complex64], ids=str)
def test_broadcast(
    members: list[GlooTransport], places: list[Place], dtype: torch.dtype, shape: str, is_any_root: bool
) -> None:
    """The root's tensors arrive at once, redone and handed over, of any type, also beside one of another type."""
    for way in (run, lambda operations, _: redo(operations, members, places)):
        tensors = [[torch.full((3,), rank, dtype=torch.uint8), filled(shape, dtype, rank)] for rank in range(4)]
        operations = [Broadcast(tensors[rank], 1, is_any_root=is_any_root) for rank in range(NUM_MEMBERS)]
        way(operations, places)
        hand_over(operations[2], Broadcast(tensors[3], 1, is_any_root=is_any_root))
        for first, second in tensors:
            assert first.tolist() == [1, 1, 1]
            assert torch.equal(second, filled(shape, dtype, 1))


@pytest.mark.parametrize("numel", [16, SMALL_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_broadcast_is_exact_to_the_bit(places: list[Place], dtype: torch.dtype, numel: int) -> None:
    """Negative zeros, infinities and every kind of NaN arrive as they are."""
    pattern = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1.5, 3.0], dtype=dtype)
    words = pattern.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    words[4] |= 5  # a NaN with a payload
    source = pattern.repeat(numel // 8)
    tensors = [torch.full_like(source, rank) for rank in range(NUM_MEMBERS)]
    tensors[2].copy_(source)
    late = torch.zeros_like(source)
    operations = [Broadcast([tensor], 2) for tensor in tensors]
    run(operations, places)
    hand_over(operations[0], Broadcast([late], 2))
    for tensor in (*tensors, late):
        assert torch.equal(as_bytes(tensor), as_bytes(source))


def test_bytes(members: list[GlooTransport], places: list[Place]) -> None:
    """Bytes of any length, none among them, are gathered and broadcast alike on every way."""
    data = [b"", b"first", b"second" * 1000]
    for way in (run, lambda operations, _: redo(operations, members, places)):
        gathers = [GatherBytes(own) for own in data]
        way(gathers, places)
        late = GatherBytes(b"late")
        hand_over(gathers[0], late)
        for gather in (*gathers, late):
            assert [entry.numpy().tobytes() for entry in gather.entries] == data
        broadcasts = [BroadcastBytes(lambda: b"of the root", 0) for _ in range(NUM_MEMBERS)]
        way(broadcasts, places)
        after = BroadcastBytes(lambda: b"never", 0)
        hand_over(broadcasts[1], after)
        for broadcast in (*broadcasts, after):
            assert broadcast.data.numpy().tobytes() == b"of the root"


def test_a_result_of_another_size_is_refused() -> None:
    """A member whose tensors have another size than the result can't adopt it, however often it is tried."""
    source = Reduce([torch.ones(3)])
    for target in (Reduce([torch.ones(4)]), Broadcast([torch.ones(4)], 0), Gather([torch.ones(4)], torch.ones(4))):
        with pytest.raises(ProtocolViolationError, match="different sizes"):
            hand_over(source, target)


def test_parameters_can_be_communicated(members: list[GlooTransport], places: list[Place]) -> None:
    """Tensors that require gradients are written to like others, also when redone and handed over."""
    for way in (run, lambda operations, _: redo(operations, members, places)):
        parameters = [[torch.nn.Parameter(torch.full((2,), float(rank))) for _ in range(3)] for rank in range(4)]
        reduces = [Reduce([own[0]], dist.ReduceOp.AVG) for own in parameters]
        way(reduces[:3], places)
        hand_over(reduces[0], reduces[3])
        broadcasts = [Broadcast([own[1]], 2) for own in parameters]
        way(broadcasts[:3], places)
        hand_over(broadcasts[0], broadcasts[3])
        slots = [[torch.nn.Parameter(torch.zeros(2)) for _ in range(3)] for _ in range(4)]
        gathers = [Gather(own, parameters[rank][2]) for rank, own in enumerate(slots)]
        way(gathers[:3], places)
        hand_over(gathers[0], gathers[3])
        for own, found in zip(parameters, slots, strict=True):
            assert [own[0].tolist(), own[1].tolist()] == [[1.0, 1.0], [2.0, 2.0]]
            assert [slot.tolist() for slot in found] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_what_is_redoable() -> None:
    """Who may be missing depends on what the arguments say of ranks."""

    def redoable(operation: Operation, members: str) -> bool:
        operation.members = tuple("abcd")
        return operation.is_redoable(tuple(members))

    tensor = torch.ones(4)
    assert redoable(Reduce([tensor]), "bd")
    assert not redoable(Reduce([tensor], is_slotted=True), "abc")
    assert not redoable(Gather([tensor], tensor), "abc")
    assert redoable(Broadcast([tensor], 1), "abd")
    assert not redoable(Broadcast([tensor], 1), "acd"), "the root is gone"
    assert not redoable(Broadcast([tensor], 1), "bcd"), "the root has another rank"
    assert not redoable(Broadcast([tensor], 3), "abc")
    assert redoable(Broadcast([tensor], 1, is_any_root=True), "cd")
    assert not redoable(Broadcast([tensor], 1, is_any_root=True), "c")
    assert not redoable(Broadcast([tensor], 0, is_slotted=True), "abc")
    assert redoable(GatherBytes(b""), "c")
    assert redoable(BroadcastBytes(bytes, 0), "c")
