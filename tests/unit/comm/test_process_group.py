"""What torch calls on a group, from Python and from C++."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.comm import inner_groups

from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.operations import Operation
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.sequence import CollectiveSequence
from lightning_ft.comm.works import PendingWork
from lightning_ft.errors import MembershipChangedError

UNSUPPORTED = frozenset(
    {
        *("allgather_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
        *("all_to_all_single", "alltoall", "recv_anysource", "_end_coalescing"),
    }
)
"""Called by torch.distributed, and refused by the base class with a RuntimeError."""


class SoloRing:
    """Runs the numbers of a group of one member, which nobody breaks."""

    member = "0/0"
    is_outside = False

    def __init__(self, transport: GlooTransport) -> None:
        self.sequence = CollectiveSequence("world", (self.member,))
        (self.sequence.place,) = inner_groups.places([transport])
        self.world = self.sequence
        self.num_waits = 0
        self.view: Any = type("View", (), {"generation": 1, "is_severed": False})

    def submit(self, sequence: CollectiveSequence, operation: Operation) -> None:
        if sequence.pending is not None:
            self.finish(sequence, sequence.pending)
        sequence.enter(operation, sequence.visible)
        sequence.start()

    def finish(self, sequence: CollectiveSequence, operation: Operation) -> None:
        self.num_waits += 1
        if not operation.is_final:
            sequence.finish()
            sequence.show(operation)
        if operation.error is not None:
            raise operation.error

    def run(self, sequence: CollectiveSequence, operation: Operation) -> None:
        self.submit(sequence, operation)
        self.finish(sequence, operation)

    def poll(self, sequence: CollectiveSequence, operation: Operation) -> bool:
        if not operation.is_final:
            self.finish(sequence, operation)
        return True


@pytest.fixture
def group() -> Iterator[FaultTolerantProcessGroup]:
    """A group of one, known to torch by its name."""
    with inner_groups.transports(1) as (transport,):
        ring: Any = SoloRing(transport)
        made = FaultTolerantProcessGroup(ring, ring.sequence)
        made._set_group_name("solo")
        yield made


def test_torch_calls_only_what_is_there() -> None:
    """Every method that torch.distributed calls on a group is defined here or known to be unsupported."""
    source = inspect.getsource(dist.distributed_c10d)
    called = set(re.findall(r"work = group\.(\w+)\(", source)) | set(re.findall(r"return group\.(\w+)\(\[", source))
    assert {"allreduce", "broadcast", "barrier", "send", "recv"} <= called, "torch calls its groups in another way"
    defined = set(vars(FaultTolerantProcessGroup))
    assert called - defined - UNSUPPORTED == set(), "torch calls methods that comm/process_group.py does not have"


def test_the_virtual_methods_of_torch_have_not_moved() -> None:
    """What C++ calls by name still exists in torch's class, so that it reaches this one's."""
    names = ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "barrier", "_allgather_base", "rank", "size")
    for name in (*names, "_set_group_name", "_set_group_desc", "group_name", "shutdown", "abort"):
        assert hasattr(dist.ProcessGroup, name), f"torch.distributed.ProcessGroup has no {name} any more"
    assert isinstance(dist.distributed_c10d._world.pg_group_ranks, dict)


def test_names(group: FaultTolerantProcessGroup) -> None:
    """Torch reads back the name that it gave, the rank, the size and the backend."""
    group._set_group_desc("a test")
    assert (group.group_name, group.group_desc, group.name()) == ("solo", "a test", "ft")
    assert (group.rank(), group.size()) == (0, 1)


def test_cpp_waits_for_works_made_in_python(group: FaultTolerantProcessGroup) -> None:
    """C++ that starts several broadcasts and keeps only their works gets each of them waited for and right."""
    ring: Any = group.ring
    for _ in range(20):
        tensors = [torch.full((size,), float(size)) for size in (3, 400, 50_000)]
        expected = [tensor.clone() for tensor in tensors]
        gc.collect()
        before = ring.num_waits
        dist._broadcast_coalesced(group, tensors, 64, 0)
        assert ring.num_waits > before
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(tensors, expected, strict=True))


def test_cpp_finds_the_group_by_its_name(group: FaultTolerantProcessGroup) -> None:
    """A functional collective, which C++ starts on a group that it looks up, is a number like any other."""
    torch._C._distributed_c10d._register_process_group("solo", group)
    try:
        found = torch.ops._c10d_functional.all_reduce(torch.full((3,), 5.0), "sum", "solo")
        found = torch.ops._c10d_functional.wait_tensor(found)
        assert found.tolist() == [5.0] * 3
        assert group.sequence.last is not None
        assert group.sequence.last.is_final
    finally:
        torch._C._distributed_c10d._unregister_process_group("solo")


def test_works_can_be_dropped(group: FaultTolerantProcessGroup) -> None:
    """A work that nobody keeps is finished by the next call, and its memory is given back."""
    kept = torch.ones(3)
    group.allreduce([kept])
    gc.collect()
    group.barrier().wait()
    gc.collect()
    assert group.sequence.completed == 2
    assert not [found for found in gc.get_objects() if type(found) is PendingWork]


def test_works_answer_torch(group: FaultTolerantProcessGroup) -> None:
    """A work can be polled, waited for again, and turned into a future."""
    tensor = torch.full((2,), 3.0)
    work = group.allreduce([tensor])
    while not work.is_completed():
        pass
    assert work.is_success()
    assert work.wait()
    assert work.result()[0] is tensor
    assert group.allreduce([tensor]).get_future().wait()[0] is tensor


def test_collectives_of_one_member(group: FaultTolerantProcessGroup) -> None:
    """Every call gives a single member its own contribution."""
    own = torch.arange(4.0)
    outputs = [torch.zeros(4) for _ in range(6)]
    group.allgather([[outputs[0]]], [own]).wait()
    group.gather([[outputs[1]]], [own]).wait()
    group.scatter([outputs[2]], [[own]]).wait()
    group.reduce_scatter([outputs[3]], [[own]]).wait()
    group.all_gather_single(outputs[4], own).wait()
    group.reduce_scatter_single(outputs[5], own).wait()
    assert all(torch.equal(output, own) for output in outputs)
    assert group.gather_bytes(b"x") == [b"x"]
    assert group.broadcast_bytes(lambda: b"y") == b"y"


def test_wrong_arguments_are_refused_before_they_are_entered(group: FaultTolerantProcessGroup) -> None:
    """A number of slots or a root that can't be right is the caller's error, and takes no number."""
    own = torch.ones(2)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    for call in (
        lambda: group.allgather([[own, own]], [own]),
        lambda: group.broadcast([own], options),
        lambda: group.broadcast([own, own]),
        lambda: group.scatter([own], [[own, own]]),
    ):
        with pytest.raises(ValueError, match=r"needs one tensor for each|must be a rank|expected one tensor"):
            call()
    assert group.sequence.completed == 0
    assert group.sequence.pending is None


@pytest.mark.parametrize("name", ["allgather", "scatter", "gather"])
def test_arguments_made_for_members_that_just_changed(group: FaultTolerantProcessGroup, name: str) -> None:
    """Slots for the members before the last number, which changed them, raise an error that says to call again."""
    group.barrier().wait()
    last = group.sequence.last
    assert last is not None
    last.members = ("0/0", "0/1")  # as if 0/1 had been lost in it
    own = torch.ones(2)
    arguments = ([own], [[own, own]]) if name == "scatter" else ([[own, own]], [own])
    with pytest.raises(MembershipChangedError, match="call again"):
        getattr(group, name)(*arguments).wait()
    group.barrier().wait()


def test_point_to_point_is_refused_while_members_change(group: FaultTolerantProcessGroup) -> None:
    """A message on a view that is broken raises an error that says what to do."""
    group.ring.view.is_severed = True
    with pytest.raises(MembershipChangedError, match="not repeated"):
        group.send([torch.ones(1)], 0, 0)
    with pytest.raises(MembershipChangedError, match="not repeated"):
        group.recv([torch.ones(1)], 0, 0)
