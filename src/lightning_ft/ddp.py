"""The transactional reduction: DistributedDataParallel whose step is finished by the survivors.

Each backward ends with two numbered collectives, the reduction of all gradients and the commit (PROTOCOL.md,
section 5).
Private API read in torch 2.13.0: `_execution_engine.queue_callback`, `DistributedDataParallel.
_distributed_broadcast_coalesced` and `_build_params_for_reducer`, `Reducer._get_zeros_like_grad_buckets` and
`_reset_state`; that the reducer hands its buckets to its group's `allreduce`, divided by the size that the group tells,
and only then queues what copies them back (tests/unit/test_ddp.py fails clearly if they change).
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.comm.compiling import report_compilations
from lightning_ft.comm.operations import Broadcast
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.works import DoneWork, completed
from lightning_ft.coordinator.fingerprint import Fingerprint, first_difference
from lightning_ft.errors import LaunchError, ProtocolViolationError
from lightning_ft.facts import facts_of_module, facts_of_verification
from lightning_ft.faultpoints import reach
from lightning_ft.reduction import CommHook, Commit, GradientReduction, Layout, Part, load_gradients
from lightning_ft.verification import Verifier

_STOPS, _LEAVES, _CLOSED, _ROLLBACKS, _JOINS = (1 << shift for shift in (0, 15, 30, 45, 60))
"""What a commit's word counts for a member that asks all to stop; that was asked to leave; that a joiner could not take
everything over from; that wants all to go back to an earlier state; for the first member, if it knows of a joiner."""

_MOST = 1 << 15
"""So many members are too many to be counted."""

_ENGINE = torch.autograd.Variable._execution_engine
_GroupBase: Any = dist.ProcessGroup  # torch's stubs know neither Python subclasses nor their methods' plain signatures


@dataclasses.dataclass(frozen=True, slots=True)
class StepCommit:
    """What all members learned at the end of one backward; the same on each of them.

    Attributes:
        step: Number of the gradient step, from 0.
        contributors: Logical ids whose gradients are in the average.
        stop_requests: How many members ask all to stop.
        leave_requests: How many members were asked to leave, without the others.
        rollback_requests: How many members want all to go back to an earlier state.
    """

    step: int
    contributors: tuple[str, ...]
    stop_requests: int
    leave_requests: int
    rollback_requests: int = 0


class _ReducerGroup(_GroupBase):  # type: ignore[misc]
    """What DDP's reducer sees of WORLD: all that it reduces joins one reduction, and broadcasts have any root.

    Attributes:
        divisor: What DDP was last told as the group's size, and divides gradients by.
        agreed: What the reducers have agreed on about their buckets, as they broadcast it.
        answers: The same of a job that this process joins: answered instead of a broadcast.
    """

    def __init__(self, world: FaultTolerantProcessGroup, reduce: Callable[[Tensor], dist.Work]) -> None:
        super().__init__(world.rank(), world.size())
        self.divisor = world.size()
        self.agreed: list[Tensor] = []
        self.answers: list[Tensor] = []
        self._world = world
        self._reduce = reduce

    def rank(self) -> int:
        return self._world.rank()

    def size(self) -> int:
        self.divisor = self._world.size()
        return self.divisor

    getRank, getSize = rank, size  # noqa: N815 - what C++ calls

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        return "ft"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._reduce(tensors[0])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Called for the order of the buckets and their sizes, when they are rebuilt after the first backward."""
        if self.answers:
            tensors[0].copy_(self.answers.pop(0))
        else:
            self._world.broadcast_any_root(tensors).wait()
        self.agreed.append(tensors[0].clone())
        return DoneWork(tensors[:1])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._world.allgather(outputs, inputs, opts)


class FaultTolerantDDP(DistributedDataParallel):
    """DistributedDataParallel on backend `ft`: `backward` returns with the average over the members that survived it.

    All communication of the step is final when `backward` returns, so that what follows (clipping, the optimizer) is
    done by every survivor with bitwise the same gradients.

    Args:
        module: As for DistributedDataParallel.
        **kwargs: As for DistributedDataParallel, but: `mixed_precision`, `delay_all_reduce_named_params`,
            `skip_all_reduce_unused_params`, sparse gradients and a `process_group` other than WORLD are refused, and
            `gradient_as_bucket_view` saves no memory, since a copy of the local gradients is then kept.

    Attributes:
        verifier: Compares what all ranks should have alike.
        on_commit: Called with the StepCommit at the end of each backward that reduces.
        commit_followers: The same, called before; for what is not the loop's own.
        is_stop_requested: Set to ask all members, with the next commit, to stop.
        is_leave_requested: Set to tell all members, with the next commit, that this one was asked to leave.
        num_leave_requests: How many commits in a row have said so.
        is_rollback_requested: Set to ask all members, with the next commit, to go back to an earlier state.

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
        _check_supported(module, kwargs)
        is_synced = kwargs.pop("init_sync", True)
        self.on_commit: Callable[[StepCommit], None] | None = None
        self.commit_followers: list[Callable[[StepCommit], None]] = []
        self.is_stop_requested = self.is_leave_requested = False
        self.num_leave_requests = 0
        self.is_rollback_requested = False
        self._world = world
        self._user_hook: tuple[Any, CommHook] | None = None
        self._reduction: GradientReduction | None = None
        self._locals: dict[int, Tensor] = {}
        self._reducer_group = _ReducerGroup(world, self._take)
        self.verifier = Verifier(world, self._compared_parameters, self._layout)
        super().__init__(module, process_group=self._reducer_group, init_sync=False, **kwargs)
        report_compilations()
        if is_synced:
            self._sync_initial_state()
        self._reducer_group.agreed.clear()  # what it broadcasts from here on are the reducers' agreements
        self._buckets: Any = _Buckets(self)  # carried for as long as this lives
        world.ring.carry(self._buckets)
        if kwargs.get("static_graph"):
            world.ring.close_to_joiners("DDP has a static graph")

    def watch_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Say whose state is compared with the parameters (`verify_state_every_n_steps`); the same on all ranks."""
        self.verifier.optimizers = optimizers

    def _compared_parameters(self) -> list[tuple[str, Tensor]]:
        ignored = self.parameters_to_ignore
        return [(name, part) for name, part in self.module.named_parameters() if name not in ignored]

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce each bucket by a hook (fp16 or bf16 compression, PowerSGD).

        It runs at the end of backward, one bucket after the other: its collectives would otherwise meet those of other
        buckets in an order of their own. If the step is redone, so is the hook, from the state it had before.
        """
        if not (state is None or isinstance(state, dist.ProcessGroup)):
            self._world.ring.close_to_joiners("DDP has a communication hook with a state")
        super().register_comm_hook(None, self._on_bucket)
        self._user_hook = (state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        raise ValueError(
            "FaultTolerantDDP doesn't support builtin hooks; use register_comm_hook with fp16_compress_hook"
        )

    def join(self, *args: object, **kwargs: object) -> Any:
        """Not supported: a member that has no more batches can't take part in a step.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("FaultTolerantDDP doesn't support join(); give all ranks equally many batches")

    def _sync_initial_state(self) -> None:
        model = Fingerprint([*facts_of_module(self.module), *facts_of_verification(self._world.ring.settings)])
        found = self._world.gather_bytes(model.digest.encode())
        if len(set(found)) > 1:
            described = [entry.decode() for entry in self._world.gather_bytes(model.description.encode())]
            self._world.gather_bytes(b".")  # whoever raises goes: not before all have the descriptions
            rank = next(rank for rank, digest in enumerate(found) if digest != found[0])
            where = first_difference(described[0], described[rank]) if len(described) == len(found) else ""
            raise ProtocolViolationError(
                f"FaultTolerantDDP failed: the model of rank {rank} (here) has other parameter names, shapes, dtypes "
                f"or verify_* settings than rank 0's (there): {where or 'too many to say which'}. Build the same model "
                "on every rank."
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

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._num_gradients = sum(parameter.numel() for parameter in parameters)
        return parameters, expect_sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DistributedDataParallel.

        Raises:
            LaunchError: This process was started while the job ran, and has not joined it.
            EvictedError: In its last step this rank differed from the others, and `verify_policy` is `evict`.
        """
        if self.verifier.eviction is not None and torch.is_grad_enabled():
            raise self.verifier.eviction
        if self._world.ring.is_outside and torch.is_grad_enabled() and self.require_backward_grad_sync:
            raise LaunchError(
                "a step of training failed: this process was started while the job ran, and has not joined it. Call "
                "lightning_ft.ElasticState.boundary() before each step, or set respawn=False.",
                member=self._world.ring.member,
            )
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._forget_unfinished()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def hand_over_no_more(self) -> None:
        """Say, on all members alike, that this is not trained any more."""
        self._world.ring.forget(self._buckets)

    def _forget_unfinished(self) -> None:
        if self._reduction is not None:  # an earlier backward raised, or ended before all gradients were there
            self._reduction = None
            self.reducer._reset_state()

    def _on_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls instead of the group's all-reduce if there is a communication hook."""
        self._take(bucket.buffer(), bucket)
        return completed(bucket.buffer())

    def _take(self, tensor: Tensor, bucket: dist.GradBucket | None = None) -> dist.Work:
        """Take in what DDP reduces: a bucket, or its map of used parameters. Called under the reducer's lock."""
        reach("bucket.ready")
        is_map = tensor.dtype is torch.int32
        reduction = self._reduction
        if reduction is None:
            # A map that comes first comes before DDP has asked what to divide by.
            divisor = self._reducer_group.size() if is_map else self._reducer_group.divisor
            reduction = GradientReduction(self._world, divisor, self._user_hook, is_delayed=is_map)
            self._reduction = reduction
        reduction.add(self._part(reduction, tensor.detach(), bucket, is_map=is_map))
        if not is_map:
            reduction.num_buckets += 1
            reduction.num_gradients += tensor.numel()
            if reduction.num_gradients == self._num_gradients:
                self._finish_at_the_end(reduction)
        reach("bucket.started")
        return DoneWork([tensor])  # DDP waits for nothing: the step is finished when it asks

    def _finish_at_the_end(self, reduction: GradientReduction) -> None:
        """Finish the reduction when backward has ended, but before DDP takes the result."""
        if reduction.is_delayed:  # DDP does not wait for the end of backward: it is there
            self._finish_commit(*self._finish_reduction(reduction))
        else:  # DDP queues its own callback right after its last bucket was taken, for the same (sub-)backward
            _ENGINE.queue_callback(functools.partial(self._reduce_then_commit, reduction))

    def _part(
        self, reduction: GradientReduction, tensor: Tensor, bucket: dist.GradBucket | None, *, is_map: bool
    ) -> Part:
        # What refills a part must not hold the reduction: the buckets would live on until the garbage is collected.
        divisor, index, layouts = reduction.divisor, reduction.num_buckets, reduction.layouts
        is_whole = is_map or bucket is not None
        if not (is_map or reduction.is_delayed or self.gradient_as_bucket_view):
            # The parameters' `grad` is what DDP has copied from, and stays as it is until DDP copies back.
            return Part(
                tensor,
                divisor,
                lambda target, size: load_gradients(
                    target, self._layout(layouts, index), 1.0 if is_whole else 1.0 / size
                ),
                bucket,
            )
        local = torch.empty_like(tensor) if reduction.is_delayed else self._local_for(-1 if is_map else index, tensor)
        local.copy_(tensor)
        return Part(
            tensor,
            divisor,
            lambda target, size: target.copy_(local) if is_whole else torch.mul(local, divisor / size, out=target),
            bucket,
        )

    def _local_for(self, index: int, tensor: Tensor) -> Tensor:
        """Return memory of the tensor's size, the same in each step: fresh pages cost more than the copy."""
        local = self._locals.get(index)
        if local is None or local.shape != tensor.shape or local.dtype != tensor.dtype:
            self._locals.pop(index, None)  # freed before its successor is allocated
            local = self._locals[index] = torch.empty_like(tensor)
        return local

    def _layout(self, layouts: list[Layout], index: int) -> Layout:
        """Ask DDP where the gradients are in a bucket. For a moment that takes the memory of all buckets once more."""
        if not layouts:  # all or none, should memory not suffice
            buckets = self.reducer._get_zeros_like_grad_buckets()
            offsets = [[int(part.storage_offset()) for part in bucket.gradients()] for bucket in buckets]
            parameters = [bucket.parameters() for bucket in buckets]
            layouts.extend(list(zip(*pair, strict=True)) for pair in zip(parameters, offsets, strict=True))
        return layouts[index]

    def _reduce_then_commit(self, reduction: GradientReduction) -> None:
        """Have DDP copy the result back while the commit is under way: whoever has the result needs no gradients."""
        reduction, commit = self._finish_reduction(reduction)
        _ENGINE.queue_callback(functools.partial(self._finish_commit, reduction, commit))  # after DDP's own

    def _finish_reduction(self, reduction: GradientReduction) -> tuple[GradientReduction, Commit]:
        """Finish the reduction and start the commit; if the step is verified, do not return before all have compared.

        Returns: The reduction that has made the result, which may be another one then, and the commit.
        """
        reach("reduction.wait")
        ring, sequence = self._world.ring, self._world.sequence
        ring.run(sequence, reduction)
        check = self.verifier.begin(reduction)
        is_leaving = self.is_leave_requested
        self.num_leave_requests = self.num_leave_requests + 1 if is_leaving else 0
        commit = Commit(
            _STOPS * self.is_stop_requested
            + _LEAVES * is_leaving
            + _JOINS * (self._world.rank() == 0 and ring.is_join_pending)
            + _CLOSED * ring.is_closed_to_joiners
            + _ROLLBACKS * self.is_rollback_requested,
            None if check is None else check.word,
        )
        self.is_rollback_requested = False
        ring.submit(sequence, commit)
        if check is not None:
            ring.finish(sequence, commit)
            self.verifier.conclude(check, commit)
            reduction = check.reduction
        return reduction, commit

    def _finish_commit(self, reduction: GradientReduction, commit: Commit) -> None:
        ring = self._world.ring
        ring.finish(self._world.sequence, commit)
        stops, leaves, closed, rollbacks = (
            commit.total // unit % _MOST for unit in (_STOPS, _LEAVES, _CLOSED, _ROLLBACKS)
        )
        ring.is_admission_due |= commit.total >= _JOINS and not closed
        self._reduction = None
        contributors = ring.members_of(reduction.final_generation)
        told = StepCommit(ring.step - 1, contributors, stops, leaves, rollbacks)
        for follower in (*self.commit_followers, *([] if self.on_commit is None else [self.on_commit])):
            follower(told)

    @property
    def bucket_order(self) -> list[Tensor]:
        """How gradients have been cut into buckets since the first backward; empty before it.

        It decides in which order three ranks or more are added up, so on the last bit of an average.
        """
        return [] if self.static_graph else self._buckets.give()

    def load_bucket_order(self, order: list[Tensor]) -> None:
        """Cut gradients so from the first backward on; for all ranks, before it, of the same model."""
        self._buckets.take(order)


class _Buckets:
    """How DDP has cut its gradients into buckets, for a member that joins: its own first backward is not the job's."""

    def __init__(self, ddp: FaultTolerantDDP) -> None:
        self._ddp = weakref.ref(ddp)
        self._group, self._reducer = ddp._reducer_group, ddp.reducer

    def prepare(self) -> None:
        """Have all members' next forward do the same.

        The buckets are rebuilt now if they are to be, which DDP would do then. The buffers are broadcast, whether the
        last forward was one without gradients, after which DDP does not, or the first of a new process.
        """
        ddp = self._ddp()
        if ddp is not None:
            ddp._forget_unfinished()
            ddp.require_forward_param_sync = True
        self._reducer._rebuild_buckets()

    def give(self) -> list[Tensor]:
        return list(self._group.agreed)

    def take(self, part: list[Tensor]) -> None:
        if not part:  # nobody has had a backward
            return
        self._group.answers = list(part)
        self._reducer._push_all_rebuilt_params()
        self._reducer._rebuild_buckets()


def _check_supported(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("mixed_precision") is not None:
        raise ValueError("FaultTolerantDDP doesn't support mixed_precision; use autocast or a communication hook")
    for name in ("delay_all_reduce_named_params", "skip_all_reduce_unused_params"):
        if kwargs.get(name):
            raise ValueError(f"FaultTolerantDDP doesn't support {name}: all members must reduce all gradients together")
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"FaultTolerantDDP doesn't support sparse gradients, but {name or 'the module'} is an "
                f"{type(part).__name__} with sparse=True. Set sparse=False."
            )


def ft_ddp(module: torch.nn.Module, **kwargs: Any) -> FaultTolerantDDP:
    """Wrap a module for a hand-written loop, after `dist.init_process_group("ft")`; see FaultTolerantDDP."""
    return FaultTolerantDDP(module, **kwargs)
