"""All gradients of one backward, summed over the members as one number (PROTOCOL.md, section 5)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.comm.gloo import InnerGroup, RingBrokenError
from lightning_ft.comm.operations import Kind, Operation
from lightning_ft.comm.place import Place, acknowledge, as_bytes
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.errors import ProtocolViolationError

CommHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Any]]

Layout = Iterable[tuple[Tensor, int]]
"""A bucket's parameters, and where in it their gradients begin (elements)."""


class Part:
    """A tensor of the reduction: holds this member's share of an average until it is reduced in place.

    Args:
        tensor: DDP's.
        share_of: Over how many members that average is, of which it holds a share now.
        refill: Writes the share of an average over so many members into a tensor like it.
        bucket: What a communication hook is given; it averages by itself, so that its share is the whole gradient.

    Attributes:
        tensor: As given.
        bucket: As given.
        early: Its all-reduce and where that runs, if it was started during backward.
    """

    def __init__(
        self,
        tensor: Tensor,
        share_of: int,
        refill: Callable[[Tensor, int], object],
        bucket: dist.GradBucket | None = None,
    ) -> None:
        self.tensor = tensor
        self.bucket = bucket
        self.early: tuple[InnerGroup, dist.Work] | None = None
        self._share_of = share_of
        self._refill = refill

    def prepare(self, size: int) -> None:
        """Make the tensor hold this member's share of an average over `size` members."""
        if self._share_of != size:
            self._refill(self.tensor, size)
            self._share_of = size

    def local(self) -> Tensor:
        """Return what this member's gradients were, until DDP has taken the result."""
        found = torch.empty_like(self.tensor)
        self._refill(found, 1)
        return found

    def spoil(self) -> None:
        """Say that the tensor is about to be changed."""
        self._share_of = 0

    def allreduce(self, place: Place) -> dist.Work:
        """Start to sum the tensor over the members."""
        self.spoil()
        return place.allreduce(self.tensor)


def load_gradients(tensor: Tensor, layout: Layout, factor: float) -> None:
    """Fill a bucket with the parameters' gradients times `factor`, as DDP does."""
    for parameter, offset in layout:
        view = tensor.as_strided(parameter.shape, _strides(parameter), offset)
        if parameter.grad is None:
            view.zero_()
        else:  # multiplied: dividing differs in the last bit
            torch.mul(parameter.grad.detach(), factor, out=view)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays out a gradient: as a parameter without gaps or overlaps lies itself, else contiguously."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


class GradientReduction(Operation):
    """All buckets of one backward, as one number.

    Args:
        group: WORLD.
        divisor: What DDP divides this backward's gradients by.
        hook: A user's communication hook and its state; run at the end of backward, bucket by bucket.
        is_delayed: DDP hands over all buckets at once at the end of backward, after its map: a static graph's first.

    Attributes:
        divisor, is_delayed: As given.
        num_buckets: How many were taken in.
        num_gradients: How many elements they have.
        layouts: Of the buckets, once they were asked for.
    """

    kind = Kind.REDUCTION
    name = "reduction"

    def __init__(
        self,
        group: FaultTolerantProcessGroup,
        divisor: int,
        hook: tuple[Any, CommHook] | None,
        *,
        is_delayed: bool = False,
    ) -> None:
        super().__init__()
        self.divisor = divisor
        self.is_delayed = is_delayed
        self.num_buckets = self.num_gradients = 0
        self.layouts: list[Layout] = []
        self._group = group
        self._hook = hook
        self._hook_state = _HookState(hook[0]) if hook is not None else None
        self._parts: list[Part] = []
        self._waited_for = 0  # the number before the last part that was started
        ring, place = group.ring, group.sequence.place
        is_early = hook is None and ring.starts_early and place is not None and place.size == divisor
        self._early_generation = ring.view.generation if is_early else None

    @property
    def parts(self) -> Sequence[Part]:
        """What was taken in: buckets in their order, and perhaps a map."""
        return self._parts

    def again(self) -> GradientReduction:
        """Return one that reduces the same local gradients anew; until DDP has taken the result."""
        anew = copy.copy(self)
        Operation.__init__(anew)
        anew.kind = Kind.OTHER  # the step's own is done: a recovery must not count it twice
        anew.name = "verify_reduction"
        anew._early_generation = None
        for part in self._parts:
            part.early = None
            part.spoil()
        return anew

    def add(self, part: Part) -> None:
        """Take a tensor in; start to reduce it if that may be done early."""
        self._parts.append(part)
        place, view = self._group.sequence.place, self._group.ring.view
        if place is None or place.generation != self._early_generation or view.is_severed:
            return
        self._waited_for = self._group.sequence.shown
        try:
            part.early = (place.inner, part.allreduce(place))
        except RuntimeError:  # the others may have started it: only a new view puts us in step again
            view.sever()

    def start(self, place: Place) -> Sequence[dist.Work]:
        """Take over what was started early, or issue all; a hook runs in `finish`."""
        if self._hook is not None:
            return []
        early = [part.early for part in self._parts if part.early is not None]
        if place.generation == self._early_generation:
            self._early_generation = None
            if len(early) < len(self._parts):
                raise RingBrokenError("a bucket could not be started")
            works = [work for _, work in early]
            if self._waited_for != self.number - 1:  # they don't prove that everybody has finished the number before
                works.append(acknowledge(place))
            return works
        for part in self._parts:
            part.early = None
        for inner, work in early:  # of a broken view: they fail soon, but until then they write into the buckets
            with contextlib.suppress(RingBrokenError, RuntimeError):
                inner.wait(work)
        for part in self._parts:
            part.prepare(place.size)
        return [part.allreduce(place) for part in self._parts]

    def finish(self, place: Place) -> None:
        """Run the hook, from the state that it had before the first try."""
        if self._hook is None or self._hook_state is None:
            return
        state, hook = self._hook
        self._hook_state.restore()
        with self._group.direct():
            for part in self._parts:
                part.prepare(place.size)
                if part.bucket is None:
                    place.inner.wait(part.allreduce(place))
                    continue
                part.spoil()
                result = place.inner.wait_for_future(hook(state, part.bucket))
                reduced = result[0] if isinstance(result, list) else result
                if reduced.data_ptr() != part.tensor.data_ptr():
                    part.tensor.copy_(reduced.view_as(part.tensor))

    def payload(self) -> list[Tensor]:
        """Return the tensors in place: nothing changes them before the commit is final."""
        return [part.tensor for part in self._parts]

    def receive_into(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors in place; what they held is lost even if nothing arrives."""
        own = [part.tensor.nbytes for part in self._parts]
        if list(sizes) != own:
            raise ProtocolViolationError(
                f"adopting the gradients of number {self.number} failed: expected buckets of {own} bytes, got {sizes}. "
                "The ranks' models or bucket sizes differ."
            )
        for part in self._parts:
            part.spoil()
        return [as_bytes(part.tensor) for part in self._parts]

    def adopt(self, payload: list[Tensor]) -> None:
        """The tensors were received in place."""


class Commit(Operation):
    """The control word of one step, summed over the members.

    One element where nothing is compared: with two, Gloo's ring takes half as long again (3 ranks: 0.5 against 0.8 ms).

    Args:
        word: This member's.
        digest: What it has of what all should have alike, 64 bits, signed; None on all members: nothing is compared.
    """

    kind = Kind.COMMIT
    name = "commit"

    def __init__(self, word: int, digest: int | None = None) -> None:
        super().__init__()
        self._word = word
        self._digest = digest
        self._total = torch.empty(0)

    @property
    def total(self) -> int:
        """The sum of the words, once it is final."""
        return int(self._total[0])

    @property
    def digests(self) -> list[int]:
        """What each of `final_members` has said, once it is final."""
        found: list[int] = self._total[1:].tolist()
        return found

    def start(self, place: Place) -> Sequence[dist.Work]:
        """Add this member's word; its digest goes into the slot that it has in this view."""
        slots = [] if self._digest is None else [0] * place.size
        if self._digest is not None:
            slots[place.rank] = self._digest
        self._total = torch.tensor([self._word, *slots])
        return (place.allreduce(self._total),)

    def finish(self, place: Place) -> None:
        """The word was summed in place."""

    def payload(self) -> list[Tensor]:
        """Return the sum."""
        return [self._total]

    def adopt(self, payload: list[Tensor]) -> None:
        """Take the sum from another member."""
        self._total = payload[0].view(torch.int64)


class _HookState:
    """A copy of a communication hook's state as it was before this step, so that the hook can be run again."""

    def __init__(self, state: Any) -> None:
        self._state = state
        slots = [name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ())]
        names = [*slots, *getattr(state, "__dict__", ())] if not isinstance(state, dist.ProcessGroup) else []
        self._saved = {
            name: copy.deepcopy(getattr(state, name))
            for name in names
            if hasattr(state, name) and not isinstance(getattr(state, name), dist.ProcessGroup)
        }
        self._is_used = False

    def restore(self) -> None:
        """Undo what an earlier, failed run did to the state; nothing before the first."""
        if self._is_used:
            for name, value in self._saved.items():
                setattr(self._state, name, copy.deepcopy(value))
        self._is_used = True
