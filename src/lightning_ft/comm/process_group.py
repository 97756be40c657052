"""Backend `ft`: a torch process group that outlives its members.

Everything that speaks torch.distributed arrives here: DDP, SyncBatchNorm, Lightning's barriers, a user's own
collectives. The methods' names are those by which c10d calls a group in torch 2.13.0
(tests/unit/comm/test_process_group.py fails clearly if they change).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.comm.operations import (
    Broadcast,
    BroadcastBytes,
    Gather,
    GatherBytes,
    Operation,
    Reduce,
    gather_into,
)
from lightning_ft.comm.place import Place
from lightning_ft.comm.ring import Ring
from lightning_ft.comm.sequence import CollectiveSequence
from lightning_ft.comm.tree import FIRST_TAG
from lightning_ft.comm.works import DoneWork, PendingWork, PointToPointWork
from lightning_ft.errors import MembershipChangedError

_Base: Any = dist.ProcessGroup  # torch's stubs know neither Python subclasses nor their methods' plain signatures


class FaultTolerantProcessGroup(_Base):  # type: ignore[misc]
    """A group of logical members over inner groups that come and go.

    Rank and size are those of the *visible view* (PROTOCOL.md): they change only between two collectives, at the same
    one on all members. Collectives are finished by the survivors whatever happens to the others; those whose arguments
    depend on the ranks raise MembershipChangedError on all survivors alike.

    Args:
        ring: This process's.
        sequence: Of this group.
    """

    def __init__(self, ring: Ring, sequence: CollectiveSequence) -> None:
        super().__init__(sequence.visible.index(ring.member), len(sequence.visible))
        self.ring = ring
        self.sequence = sequence
        self._is_direct = False
        self._group_name = ""
        self._group_desc = ""

    # -- who is in it -----------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """Logical ids in rank order."""
        place = self.sequence.place
        return place.members if self._is_direct and place is not None else self.sequence.visible

    def rank(self) -> int:
        """Return the own rank in the visible view."""
        return self.members.index(self.ring.member)

    def size(self) -> int:
        """Return the number of members of the visible view."""
        return len(self.members)

    getRank, getSize = rank, size  # noqa: N815 - what C++ calls

    def name(self) -> str:
        """Return the backend's name."""
        return "ft"

    getBackendName = name  # noqa: N815 - what C++ calls

    # torch keeps a group's name in its backends, and this group has none.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def getGroupName(self) -> str:  # noqa: N802 - what C++ calls
        """Return the name under which torch knows this group."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802 - what C++ calls
        """Return the description given to new_group."""
        return self._group_desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def shutdown(self) -> None:
        """Leave the job (WORLD) or forget the group (a sub-group); called by destroy_process_group."""
        if self.sequence is self.ring.world:
            self.ring.leave()
        else:
            self.ring.retire_group(self.sequence)

    abort = shutdown

    # -- collectives ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def direct(self) -> Iterator[None]:
        """Within it, collectives go to the inner group as they are: for hooks, which the caller redoes as a whole."""
        self._is_direct = True
        try:
            yield
        finally:
            self._is_direct = False

    def _submit(self, operation: Operation, result: object) -> PendingWork:
        self.ring.submit(self.sequence, operation)
        return PendingWork(self.ring, self.sequence, operation, result)

    def _place(self) -> Place:
        if self.sequence.place is None:
            raise RuntimeError("the view is broken")
        return self.sequence.place

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce in place on all members; AVG is supported."""
        opts = _options(opts, dist.AllreduceOptions)
        if self._is_direct:
            return self._place().group.allreduce(tensors, opts)  # type: ignore[no-any-return]
        return self._submit(Reduce(_each(tensors), opts.reduceOp), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors in place, as one number."""
        opts = _options(opts, dist.AllreduceCoalescedOptions)
        return self._submit(Reduce(tensors, opts.reduceOp), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce into the root's tensors. All members compute it, so that nobody is needed to finish it."""
        opts = _options(opts, dist.ReduceOptions)
        scratch = [tensor.detach().clone() for tensor in _each(tensors)]
        is_root = self.rank() == _root(opts, self.size())
        return self._submit(
            Reduce(scratch, opts.reduceOp, lambda: _copy(tensors, scratch) if is_root else None), tensors
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Copy the root's tensors to all members."""
        opts = _options(opts, dist.BroadcastOptions)
        if self._is_direct:
            return self._place().group.broadcast(tensors, opts)  # type: ignore[no-any-return]
        return self._submit(Broadcast(_each(tensors), _root(opts, self.size())), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Give every member every member's tensor, one slot per rank."""
        if self._is_direct:
            gather_into(outputs[0], _one(inputs), self._place())
            return DoneWork(outputs)
        slots = self._slots(outputs[0], "all_gather")
        return self._submit(Gather(slots, _one(inputs).contiguous()), outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Give the root every member's tensor. Moves what all_gather moves."""
        opts = _options(opts, dist.GatherOptions)
        own = _one(inputs).contiguous()
        slots = [torch.empty_like(own) for _ in range(self.size())]
        if self.rank() != _root(opts, self.size()):
            return self._submit(Gather(slots, own), outputs)
        operation = Gather(slots, own)
        try:
            operation.deliver = functools.partial(_copy, self._slots(outputs[0], "gather"), slots)
        except MembershipChangedError as error:  # the others don't know: it must be entered all the same
            operation.error = error
        return self._submit(operation, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Give each member its slot of the root's list. Moves what a broadcast of the list moves."""
        opts = _options(opts, dist.ScatterOptions)
        output, root, rank = _one(outputs), _root(opts, self.size()), self.rank()
        whole = torch.empty((self.size(), *output.shape), dtype=output.dtype, device=output.device)
        is_valid = torch.ones(1, dtype=torch.uint8)
        if rank == root:
            try:
                whole.copy_(torch.stack(self._slots(inputs[0], "scatter")))
            except MembershipChangedError:  # only the root can know, and the others must not wait for it
                is_valid.zero_()

        def deliver() -> None:
            if is_valid:
                output.copy_(whole[rank])
            else:
                operation.error = self._slots_error("scatter")

        operation = Broadcast([is_valid, whole], root, is_slotted=True, deliver=deliver)
        return self._submit(operation, outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Reduce slot by slot and give each member its own. Moves what an all_reduce of the list moves."""
        opts = _options(opts, dist.ReduceScatterOptions)
        output, rank = _one(outputs), self.rank()
        whole = torch.stack(self._slots(inputs[0], "reduce_scatter"))
        operation = Reduce([whole], opts.reduceOp, lambda: _copy([output], [whole[rank]]), is_slotted=True)
        return self._submit(operation, outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        whole = output.view(-1).view(self.size(), -1)
        return self._submit(Gather(list(whole), tensor.contiguous().view(-1)), output)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        slots = list(tensor.contiguous().view(self.size(), -1))
        return self.reduce_scatter([output.view(-1)], [slots], opts)

    all_gather_single = _allgather_base  # their names from torch 2.13 on
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all members."""
        return self._submit(Reduce([torch.zeros(1, dtype=torch.int32)]), [])

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send to one member. Not numbered, so not repeated.

        Raises:
            MembershipChangedError: The view is broken, or rank `dst` is another member in the next one.
        """
        place = self._point_to_point("send", dst, tag)
        return PointToPointWork(
            place.send(tensors, dst, tag), self.ring.activity, lambda: self._changing_error("send", dst)
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive from one member; as `send`."""
        place = self._point_to_point("recv", src, tag)
        return PointToPointWork(
            place.recv(tensors, src, tag), self.ring.activity, lambda: self._changing_error("recv", src)
        )

    def _point_to_point(self, what: str, peer: int, tag: int) -> Any:
        if tag >= FIRST_TAG:
            raise ValueError(f"{what} with rank {peer} failed: tags must be below {FIRST_TAG}, got {tag}")
        if self.ring.is_outside:
            raise MembershipChangedError(f"{what} with rank {peer} failed: this process has not been admitted yet")
        place, view = self.sequence.place, self.ring.view
        if place is None or view.is_severed or place.members != self.sequence.visible:
            raise self._changing_error(what, peer)
        return place.group

    def _changing_error(self, what: str, peer: int) -> MembershipChangedError:
        generation = self.ring.view.generation
        return MembershipChangedError(
            f"{what} with rank {peer} failed: the members are changing (generation={generation}). Point-to-point "
            "messages are not repeated; call a collective (barrier) first, read the new ranks and try again.",
            member=self.ring.member,
            generation=generation,
        )

    # -- beyond torch's own: calls that don't depend on who is in it --------------------------------------------------

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Give every member every member's bytes: as many entries as there are ranks when it is finished.

        Args:
            data: Own contribution, any length.
        Returns: One entry for each member that took part, in rank order; the same on all.
        """
        operation = GatherBytes(data)
        self.ring.run(self.sequence, operation)
        return [entry.numpy().tobytes() for entry in operation.entries]

    def broadcast_bytes(self, make: Callable[[], bytes], root: int = 0) -> bytes:
        """Give every member the bytes that `make` returns on the root: whoever has that rank when it is finished.

        Args:
            make: Called on the root only. Not empty.
            root: A rank.
        Returns: The same on all members.
        """
        operation = BroadcastBytes(make, root)
        self.ring.run(self.sequence, operation)
        return operation.data.numpy().tobytes()

    def broadcast_any_root(self, tensors: list[Tensor], root: int = 0) -> dist.Work:
        """As `broadcast`, but all tensors are valid, so that the root may die: whoever gets its rank is the root."""
        return self._submit(Broadcast(_each(tensors), root, is_any_root=True), tensors)

    def _slots(self, slots: Sequence[Tensor], what: str) -> list[Tensor]:
        if len(slots) == self.size():
            return list(slots)
        last = self.sequence.last
        if last is not None and last.is_final and len(slots) == len(last.members) != len(last.final_members):
            raise self._slots_error(what)
        raise ValueError(f"{what} needs one tensor for each of the {self.size()} ranks, got {len(slots)}")

    def _slots_error(self, what: str) -> MembershipChangedError:
        return MembershipChangedError(
            f"{what} failed: the members changed to {', '.join(self.members)} in the collective right before it, after "
            "its arguments had been made. Read the new rank and world size and call again.",
            member=self.ring.member,
            generation=self.ring.view.generation,
        )


def _options(given: Any, default: type) -> Any:
    return default() if given is None else given


def _root(opts: Any, size: int) -> int:
    root = int(opts.rootRank)
    if not 0 <= root < size:
        raise ValueError(f"the root must be a rank from 0 to {size - 1}, got {root}")
    return root


def _each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {len(tensors)}")
    return tensors


def _one(tensors: Sequence[Tensor]) -> Tensor:
    return _each(tensors)[0]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)
