"""The collectives of one sequence, each able to be started again, kept and handed over.

Three primitives carry everything: reduce (everybody gets the sum), gather (everybody gets all slots) and broadcast.
What torch offers beyond them (reduce to one, scatter, gather to one, reduce-scatter) is one of the three with a result
that is the same on every member, since only such a result can be handed to a member that missed it (PROTOCOL.md#M4).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ft.comm.place import SMALL_BYTES, Place, acknowledge, as_bytes, broadcast, gather_now, gather_rows
from lightning_ft.errors import MembershipChangedError, ProtocolViolationError


class Kind(enum.IntEnum):
    """What a number was for; sent at the exchange, so that the event log can say what was redone."""

    NONE = 0
    OTHER = 1
    REDUCTION = 2
    COMMIT = 3


class Operation(ABC):
    """One numbered collective.

    Subclasses keep their inputs until they are final, so that `start` can be called again on another place.

    Attributes:
        members: The visible view when the caller issued it: its arguments are functions of these.
        number: Its collective number, given when it is submitted.
        final_generation: Generation in which the first member finished it, once it is final.
        final_members: Who was in the group then.
        is_void: Its result is that it has none (PROTOCOL.md#M6).
        error: What the caller gets instead of a result.
    """

    kind = Kind.OTHER
    name = "collective"

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.number = 0
        self.final_generation = 0
        self.final_members: tuple[str, ...] = ()
        self.is_final = False
        self.is_void = False
        self.error: Exception | None = None

    @abstractmethod
    def start(self, place: Place) -> Sequence[dist.Work]:
        """Issue the first inner works, from the kept inputs. Called again after a failure, on another place."""

    @abstractmethod
    def finish(self, place: Place) -> None:
        """Deliver the result after all works of `start` have succeeded; may run further inner collectives."""

    @abstractmethod
    def payload(self) -> list[Tensor]:
        """Return the kept result: contiguous, the same on every member, unchanged until the next number is final."""

    @abstractmethod
    def adopt(self, payload: list[Tensor]) -> None:
        """Deliver a result that another member kept."""

    def echo(self, num_members: int) -> None:
        """Deliver what the result would be if all members were copies of this one: the answer to who is in no view.

        Raises:
            MembershipChangedError: There is none.
        """
        raise MembershipChangedError(f"{self.name} failed: this process has not been admitted to the job yet")

    def receive_into(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return flat uint8 tensors of `sizes` bytes into which a handed over payload is received."""
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def is_redoable(self, members: tuple[str, ...]) -> bool:
        """Whether the caller's arguments still mean the same among `members` (PROTOCOL.md#M6)."""
        return True


def gather_into(slots: Sequence[Tensor], tensor: Tensor, place: Place) -> None:
    """As `gather_now`, into one tensor per member."""
    _load(slots, list(gather_now(place, tensor)))


def _load(targets: Sequence[Tensor], payload: Sequence[Tensor]) -> None:
    _check_sizes([target.nbytes for target in targets], payload)
    for target, source in zip(targets, payload, strict=True):
        if target.numel():  # an empty one's bytes may lie where its type can't
            target.copy_(source.view(target.dtype).view(target.shape))


def _check_sizes(expected: Sequence[int], payload: Sequence[Tensor]) -> None:
    found = [tensor.nbytes for tensor in payload]
    if found != expected:  # trying again in the next view would find the same
        raise ProtocolViolationError(
            f"adopting a result failed: expected tensors of {expected} bytes, got {found}. The ranks called the same "
            "collective with tensors of different sizes."
        )


class Reduce(Operation):
    """Everybody gets the reduction of everybody's tensors, in place.

    Args:
        tensors: Changed in place.
        op: SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR; AVG divides by the number of members at the end.
        deliver: Called when the tensors hold the result.
        is_slotted: The tensors have one slot per rank.
    """

    name = "all_reduce"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        deliver: Callable[[], object] | None = None,
        *,
        is_slotted: bool = False,
    ) -> None:
        super().__init__()
        self._tensors = [tensor.detach() for tensor in tensors]  # autograd refuses to write into parameters
        self._is_slotted = is_slotted
        self._is_average = op == dist.ReduceOp.AVG
        self._op = op
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.SUM if self._is_average else op  # type: ignore[assignment]
        self._deliver = deliver
        self._saved = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self._reduced = self._tensors
        self._was_started = False

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        if self._was_started:
            for tensor, saved in zip(self._tensors, self._saved, strict=True):
                tensor.copy_(saved)
        self._was_started = True
        # Gloo takes memory for contiguous: it would reduce what lies between a strided tensor's elements.
        self._reduced = [tensor.contiguous() for tensor in self._tensors]
        works = [place.allreduce(tensor, self._options) for tensor in self._reduced if tensor.numel()]
        return works or [acknowledge(place)]

    @override
    def finish(self, place: Place) -> None:
        for tensor, saved, reduced in zip(self._tensors, self._saved, self._reduced, strict=True):
            if self._is_average:
                reduced.copy_(reduced / place.size)  # also for integers, as Lightning does on Gloo
            if reduced.data_ptr() != tensor.data_ptr():
                tensor.copy_(reduced)
            saved.copy_(reduced)
        if self._deliver is not None:
            self._deliver()

    @override
    def payload(self) -> list[Tensor]:
        return self._saved

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        _load(self._saved, payload)
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)
        if self._deliver is not None:
            self._deliver()

    @override
    def echo(self, num_members: int) -> None:
        for tensor in self._tensors:
            if self._op == dist.ReduceOp.SUM:
                tensor.mul_(num_members)
            elif self._op == dist.ReduceOp.PRODUCT:
                tensor.pow_(num_members)
            elif self._op == dist.ReduceOp.BXOR and num_members % 2 == 0:
                tensor.zero_()
        if self._deliver is not None:
            self._deliver()

    @override
    def is_redoable(self, members: tuple[str, ...]) -> bool:
        return not self._is_slotted or members == self.members


class Gather(Operation):
    """Everybody gets everybody's tensor, one slot per rank.

    Args:
        slots: One tensor per rank, written in place.
        tensor: Own contribution, contiguous.
        deliver: Called once the slots are filled.

    Attributes:
        deliver: As given.
    """

    name = "all_gather"

    def __init__(self, slots: Sequence[Tensor], tensor: Tensor, deliver: Callable[[], object] | None = None) -> None:
        super().__init__()
        wrong = next((slot for slot in slots if slot.nbytes != tensor.nbytes), None)
        if wrong is not None:  # the others may not have made the same mistake: it must be entered all the same
            self.error = ValueError(
                f"all_gather failed: expected slots of {tensor.nbytes} bytes as the tensor's, got one of {wrong.nbytes}"
            )
        self._slots = [slot.detach() for slot in slots]
        self._tensor = tensor.detach()
        self.deliver = deliver
        self._rows = torch.empty(0)
        self._kept: list[Tensor] = []

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        self._rows, works = gather_rows(place, self._tensor)
        return works

    @override
    def finish(self, place: Place) -> None:
        self.adopt(list(self._rows))

    @override
    def payload(self) -> list[Tensor]:
        return self._kept

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        self._kept = payload
        if self.error is None:
            _load(self._slots, payload)
            if self.deliver is not None:
                self.deliver()

    @override
    def echo(self, num_members: int) -> None:
        self.adopt([self._tensor.reshape(-1)] * num_members)

    @override
    def is_redoable(self, members: tuple[str, ...]) -> bool:
        return members == self.members


class Broadcast(Operation):
    """Everybody gets the root's tensors, in place.

    Args:
        tensors: The root's are read, the others' written.
        root: Rank of the root in the visible view.
        is_any_root: Everybody's tensors are valid contributions, so that whoever has the root's rank when the number is
            finished may be the root.
        is_slotted: The tensors have one slot per rank.
        deliver: Called once the tensors are written.
    """

    name = "broadcast"

    def __init__(
        self,
        tensors: Sequence[Tensor],
        root: int,
        *,
        is_any_root: bool = False,
        is_slotted: bool = False,
        deliver: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._root = root
        self._is_any_root = is_any_root
        self._is_slotted = is_slotted
        self._deliver = deliver
        self._flat = torch.cat([as_bytes(tensor.detach().contiguous()) for tensor in tensors])
        self._sent = self._flat

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        is_root = place.rank == self._root
        self._sent = self._flat
        if 0 < self._flat.numel() <= SMALL_BYTES:
            self._sent = self._flat.clone() if is_root else torch.zeros_like(self._flat)
            return [place.allreduce(self._sent)]
        if not self._flat.numel():
            return [acknowledge(place)]
        if self._is_any_root and not is_root:
            self._sent = self._flat.clone()
        return [broadcast(place, self._sent, self._root), acknowledge(place)]

    @override
    def finish(self, place: Place) -> None:
        self.adopt([self._sent])

    @override
    def payload(self) -> list[Tensor]:
        return [self._flat]

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        _check_sizes([self._flat.nbytes], payload)
        (self._flat,) = payload
        self._sent = self._flat
        start = 0
        for tensor in self._tensors:
            found = self._flat[start : start + tensor.nbytes]
            if start % tensor.itemsize:  # a view of another dtype must be aligned
                found = found.clone()
            tensor.detach().copy_(found.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        if self._deliver is not None:
            self._deliver()

    @override
    def echo(self, num_members: int) -> None:
        if not self._is_any_root and self._root != num_members - 1:  # what only another has can't be known
            super().echo(num_members)
        self.adopt([self._flat])

    @override
    def is_redoable(self, members: tuple[str, ...]) -> bool:
        if self._is_slotted and members != self.members:
            return False
        if self._is_any_root:
            return self._root < len(members)
        return members[self._root : self._root + 1] == self.members[self._root : self._root + 1]


class GatherBytes(Operation):
    """Everybody gets everybody's bytes, as many entries as the view has members in which the number is finished.

    Args:
        data: Own contribution, any length.

    Attributes:
        entries: The result, in rank order of `final_generation`.
    """

    name = "gather_bytes"

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self._sizes = torch.empty(0)
        self.entries: list[Tensor] = []

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        self._sizes, works = gather_rows(place, torch.tensor([self._data.numel()]))
        return works

    @override
    def finish(self, place: Place) -> None:
        sizes = self._sizes.view(torch.int64).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: self._data.numel()] = self._data
        rows = gather_now(place, padded)
        self.entries = [row[:size] for row, size in zip(rows, sizes, strict=True)]

    @override
    def payload(self) -> list[Tensor]:
        return self.entries

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        self.entries = payload

    @override
    def echo(self, num_members: int) -> None:
        self.entries = [self._data] * num_members


class BroadcastBytes(Operation):
    """Everybody gets bytes of any length from the root; everybody can make them, so that the root may die.

    Args:
        make: Called on the root, once for each start.
        root: Rank of the root in the view in which the number is finished.

    Attributes:
        data: The result, uint8, shape [num_bytes].
    """

    name = "broadcast_bytes"

    def __init__(self, make: Callable[[], bytes], root: int) -> None:
        super().__init__()
        self._make = make
        self._root = root
        self._size = torch.zeros(1, dtype=torch.int64)
        self.data = torch.empty(0, dtype=torch.uint8)

    @override
    def start(self, place: Place) -> Sequence[dist.Work]:
        if place.rank == self._root:
            self.data = torch.frombuffer(bytearray(self._make()), dtype=torch.uint8)
        self._size = torch.tensor([self.data.numel() if place.rank == self._root else 0])
        return [place.allreduce(self._size)]

    @override
    def finish(self, place: Place) -> None:
        if place.rank != self._root:
            self.data = torch.empty(int(self._size), dtype=torch.uint8)
        place.inner.wait(broadcast(place, self.data, self._root))
        place.inner.wait(acknowledge(place))

    @override
    def payload(self) -> list[Tensor]:
        return [self.data]

    @override
    def adopt(self, payload: list[Tensor]) -> None:
        (self.data,) = payload

    @override
    def echo(self, num_members: int) -> None:
        self.data = torch.frombuffer(bytearray(self._make()), dtype=torch.uint8)

    @override
    def is_redoable(self, members: tuple[str, ...]) -> bool:
        return self._root < len(members)
