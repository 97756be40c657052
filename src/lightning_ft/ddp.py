"""The transactional reduction: DistributedDataParallel whose step is finished by the survivors.

Each backward ends with two numbered collectives, the reduction of all gradients and the commit (PROTOCOL.md,
section 5).
Private API read in torch 2.13.0: `_execution_engine.queue_callback` and `DistributedDataParallel.
_distributed_broadcast_coalesced` (tests/unit/test_ddp.py fails clearly if they change).
"""

import contextlib
import copy
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.comm.gloo import InnerGroup, RingBrokenError
from lightning_ft.comm.operations import Broadcast, Kind, Operation, Place, Reduce, as_bytes
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.errors import ProtocolViolationError
from lightning_ft.faultpoints import reach

CommHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Any]]

_ENGINE = torch.autograd.Variable._execution_engine
_GroupBase: Any = dist.ProcessGroup  # torch's stubs know neither Python subclasses nor their methods' plain signatures


@dataclasses.dataclass(frozen=True, slots=True)
class StepCommit:
    """What all members learned at the end of one backward; the same on each of them.

    Attributes:
        step: Number of the gradient step, from 0.
        contributors: Logical ids whose gradients are in the average.
        stop_requests: How many members were asked to stop (SIGTERM).
    """

    step: int
    contributors: tuple[str, ...]
    stop_requests: int


@dataclasses.dataclass(slots=True)
class _Part:
    """A tensor of the reduction: a bucket's gradients, or DDP's map of used parameters (no bucket).

    Attributes:
        tensor: DDP's, reduced in place.
        local: This member's own values, kept for a redo.
        early: Its all-reduce and where that runs, if it was started during backward.
    """

    tensor: Tensor
    local: Tensor
    bucket: dist.GradBucket | None
    early: tuple[InnerGroup, dist.Work] | None = None

    def load(self, size: int) -> None:
        """Set the tensor to this member's share of an average over `size` members."""
        if self.bucket is None:
            self.tensor.copy_(self.local)
        else:
            torch.mul(self.local, 1.0 / size, out=self.tensor)  # as DDP: dividing differs in the last bit


class GradientReduction(Operation):
    """All buckets of one backward, as one number.

    Args:
        group: WORLD.
        hook: A user's communication hook and its state; run at the end of backward, bucket by bucket.
    """

    kind = Kind.REDUCTION
    name = "reduction"

    def __init__(self, group: FaultTolerantProcessGroup, hook: tuple[Any, CommHook] | None) -> None:
        super().__init__()
        self._group = group
        self._hook = hook
        self._hook_state = _HookState(hook[0]) if hook is not None else None
        self._parts: list[_Part] = []
        self._early_generation = group.ring.view.generation if hook is None and group.ring.starts_early else None

    def add(self, tensor: Tensor, local: Tensor, bucket: dist.GradBucket | None) -> None:
        """Take a tensor in, whose values were copied to `local`; start to reduce it if that may be done early."""
        part = _Part(tensor, local, bucket)
        self._parts.append(part)
        place = self._group.sequence.place
        if place is None or place.generation != self._early_generation or self._group.ring.view.is_severed:
            return
        part.load(place.size)
        with contextlib.suppress(RuntimeError):  # found again, and repaired, at the end of backward
            part.early = (place.inner, place.group.allreduce([tensor]))

    def start(self, place: Place) -> Sequence[dist.Work]:
        """Take over what was started early, or issue all; a hook runs in `finish`."""
        if self._hook is not None:
            return []
        early = [part.early for part in self._parts if part.early is not None]
        if place.generation == self._early_generation:
            self._early_generation = None
            if len(early) < len(self._parts):  # the others may have started all: only a new view puts us in step again
                raise RingBrokenError("a bucket could not be started")
            return [work for _, work in early]
        for part in self._parts:
            part.early = None
        for inner, work in early:  # of a broken view: they fail soon, but until then they write into the buckets
            with contextlib.suppress(RingBrokenError, RuntimeError):
                inner.wait(work)
        for part in self._parts:
            part.load(place.size)
        return [place.group.allreduce([part.tensor]) for part in self._parts]

    def finish(self, place: Place) -> None:
        """Run the hook, from the state that it had before the first try."""
        if self._hook is None or self._hook_state is None:
            return
        state, hook = self._hook
        self._hook_state.restore()
        with self._group.direct():
            for part in self._parts:
                part.tensor.copy_(part.local)
                if part.bucket is None:
                    place.inner.wait(place.group.allreduce([part.tensor]))
                    continue
                result = place.inner.wait_for_future(hook(state, part.bucket))
                reduced = result[0] if isinstance(result, list) else result
                if reduced.data_ptr() != part.tensor.data_ptr():
                    part.tensor.copy_(reduced.view_as(part.tensor))

    def payload(self) -> list[Tensor]:
        """Return the tensors in place: nothing changes them before the commit is final."""
        return [part.tensor for part in self._parts]

    def receive_into(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors in place."""
        own = [part.tensor.nbytes for part in self._parts]
        if list(sizes) != own:
            raise ProtocolViolationError(
                f"adopting the gradients of number {self.number} failed: expected buckets of {own} bytes, got {sizes}. "
                "The ranks' models or bucket sizes differ."
            )
        return [as_bytes(part.tensor) for part in self._parts]

    def adopt(self, payload: list[Tensor]) -> None:
        """The tensors were received in place."""


class Commit(Reduce):
    """The control words of one step, summed over the members."""

    kind = Kind.COMMIT
    name = "commit"


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


class _ReducerGroup(_GroupBase):  # type: ignore[misc]
    """What DDP's reducer sees of WORLD: its map of used parameters joins the reduction, broadcasts have any root."""

    def __init__(self, world: FaultTolerantProcessGroup, add_map: Callable[[Tensor], dist.Work]) -> None:
        super().__init__(world.rank(), world.size())
        self._world = world
        self._add_map = add_map

    def rank(self) -> int:
        return self._world.rank()

    def size(self) -> int:
        return self._world.size()

    getRank, getSize = rank, size  # noqa: N815 - what C++ calls

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        return "ft"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._add_map(tensors[0])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._world.broadcast_any_root(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._world.allgather(outputs, inputs, opts)


class _MapWork(dist.Work):
    """DDP asks for the map before the end of backward: the whole step is finished then."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True


class FaultTolerantDDP(DistributedDataParallel):
    """DistributedDataParallel on backend `ft`: `backward` returns with the average over the members that survived it.

    All communication of the step is final when `backward` returns, so that what follows (clipping, the optimizer) is
    done by every survivor with bitwise the same gradients.

    Args:
        module: As for DistributedDataParallel.
        **kwargs: As for DistributedDataParallel, but: `gradient_as_bucket_view` is always on (with the local copy,
            as much memory as DDP takes by default); `mixed_precision` and a `process_group` other than WORLD are
            refused.

    Attributes:
        on_commit: Called with the StepCommit at the end of each backward that reduces.
        is_stop_requested: Set to tell all members, with the next commit, that this one was asked to stop.

    Raises:
        ValueError: An argument is not supported, or WORLD is not an `ft` group.
        FaultToleranceError: The initial state could not be made the same on all members.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        world = dist.group.WORLD
        if not isinstance(world, FaultTolerantProcessGroup):
            raise ValueError(  # noqa: TRY004 - the caller's order of calls is wrong, not a type
                "FaultTolerantDDP needs torch.distributed.init_process_group('ft') first"
            )
        if kwargs.pop("process_group", None) not in (None, world):
            raise ValueError("FaultTolerantDDP reduces over WORLD; process_group must be None")
        if kwargs.get("mixed_precision") is not None:
            raise ValueError("FaultTolerantDDP doesn't support mixed_precision; use autocast or a communication hook")
        is_synced = kwargs.pop("init_sync", True)
        kwargs["gradient_as_bucket_view"] = True
        self.on_commit: Callable[[StepCommit], None] | None = None
        self.is_stop_requested = False
        self._world = world
        self._user_hook: tuple[Any, CommHook] | None = None
        self._reduction: GradientReduction | None = None
        self._local: dict[int, Tensor] = {}
        super().__init__(module, process_group=_ReducerGroup(world, self._add_map), init_sync=False, **kwargs)
        super().register_comm_hook(None, self._on_bucket)
        if is_synced:
            self._sync_initial_state()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce each bucket by a hook (fp16 or bf16 compression, PowerSGD).

        It runs at the end of backward, one bucket after the other: its collectives would otherwise meet those of other
        buckets in an order of their own. If the step is redone, so is the hook, from the state it had before.
        """
        self._user_hook = (state, hook)

    def _sync_initial_state(self) -> None:
        parameters = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            parameters.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        found = self._world.gather_bytes(parameters.digest())
        if len(set(found)) > 1:
            ranks = [rank for rank, digest in enumerate(found) if digest != found[0]]
            raise ProtocolViolationError(
                f"FaultTolerantDDP failed: the model of rank {ranks[0]} has other parameter names, shapes or dtypes "
                "than rank 0's. Build the same model on every rank."
            )
        _sync_module_states(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore=self.parameters_to_ignore,
            broadcast_buffers=self.broadcast_buffers,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Synchronise the buffers, as one number whatever their types."""
        self._world.ring.run(self._world.sequence, Broadcast(tensors, authoritative_rank, is_any_root=True))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DistributedDataParallel."""
        self._reduction = None  # left behind if an earlier backward raised
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _open(self) -> GradientReduction:
        if self._reduction is None:
            self._reduction = GradientReduction(self._world, self._user_hook)
            # DDP's own callback at the end of backward was or will be queued by then; ours must come after it.
            _ENGINE.queue_callback(lambda: _ENGINE.queue_callback(self._finish_step))
        return self._reduction

    def _on_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reach("bucket.ready")
        reduction, tensor = self._open(), bucket.buffer()
        reduction.add(tensor, self._keep_local(bucket.index(), tensor), bucket)
        reach("bucket.started")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    def _add_map(self, tensor: Tensor) -> dist.Work:
        self._open().add(tensor, self._keep_local(-1, tensor), None)
        return _MapWork(self._finish_step)

    def _keep_local(self, index: int, tensor: Tensor) -> Tensor:
        local = self._local.get(index)
        if local is None or local.shape != tensor.shape or local.dtype != tensor.dtype:
            self._local.pop(index, None)  # freed before its successor is allocated
            local = self._local[index] = torch.empty_like(tensor)
        return local.copy_(tensor)

    def _finish_step(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is None:  # the map's wait has done it
            return
        reach("reduction.wait")
        ring, sequence = self._world.ring, self._world.sequence
        ring.run(sequence, reduction)
        words = torch.tensor([1, int(self.is_stop_requested)])
        ring.run(sequence, Commit([words]))
        if self.on_commit is not None:
            contributors = ring.members_of(reduction.final_generation)
            self.on_commit(StepCommit(ring.step - 1, contributors, int(words[1])))


def ft_ddp(module: torch.nn.Module, **kwargs: Any) -> FaultTolerantDDP:
    """Wrap a module for a hand-written loop, after `dist.init_process_group("ft")`; see FaultTolerantDDP."""
    return FaultTolerantDDP(module, **kwargs)
