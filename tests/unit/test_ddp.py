"""The private parts of torch that the reduction stands on; the reduction itself is tested in real jobs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.ddp import FaultTolerantDDP, _check_supported
from lightning_ft.reduction import _HookState, load_gradients


class _ToldGroup(dist.ProcessGroup):
    """Tells DDP that it has `told` members, and keeps what it is asked to reduce."""

    def __init__(self) -> None:
        super().__init__(0, 3)
        self.told = 3
        self.reduced: list[torch.Tensor] = []
        self.at_the_end: list[str] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.told

    getRank, getSize = rank, size  # noqa: N815 - what C++ calls

    def getBackendName(self) -> str:  # noqa: N802 - what C++ calls
        return "told"

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        if not self.reduced:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.at_the_end.append("ours"))
        self.reduced.append(tensors[0])
        return _DoneWork(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        return _DoneWork(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> dist.Work:
        for slot in outputs[0]:
            slot.copy_(inputs[0])
        return _DoneWork(outputs[0])


class _DoneWork(dist.Work):
    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: object = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


@pytest.fixture
def told_group() -> Iterator[_ToldGroup]:
    """A group for DDP; DDP's constructor needs WORLD too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield _ToldGroup()
    dist.destroy_process_group()


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    transposed = torch.nn.Linear(32, 2)
    transposed.weight = torch.nn.Parameter(torch.randn(32, 2).t())
    gaps = torch.nn.Linear(2, 3)
    gaps.weight = torch.nn.Parameter(torch.randn(2, 6)[:, ::2].t())
    return torch.nn.Sequential(convolution, torch.nn.Flatten(), transposed, gaps)


def test_ddp_divides_by_the_size_told_at_each_backward(told_group: _ToldGroup) -> None:
    """The buckets that the group is given hold the gradients over the size that the group told last."""
    model = DistributedDataParallel(_net(), process_group=told_group, init_sync=False)
    for told in (3, 2):
        told_group.told = told
        told_group.reduced.clear()
        model.zero_grad()
        model(torch.ones(1, 3, 4, 4)).sum().backward()
        (bucket,) = told_group.reduced
        bias = model.module[3].bias.grad
        assert torch.equal(bias, torch.full((3,), 1.0) * (1.0 / told))
        assert (bucket == 1.0 / told).any()


def test_what_is_queued_with_the_first_bucket_runs_before_ddp_takes_the_result(told_group: _ToldGroup) -> None:
    """Whatever our callback writes into the buckets is what DDP copies into the gradients."""
    model = DistributedDataParallel(_net(), process_group=told_group, init_sync=False)
    assert len(model._build_params_for_reducer()[0]) == len(list(model.parameters()))
    engine = torch.autograd.Variable._execution_engine
    allreduce = told_group.allreduce

    def watched(tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        engine.queue_callback(lambda: tensors[0].fill_(7.0))
        return allreduce(tensors)

    told_group.allreduce = watched  # type: ignore[method-assign]
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    assert all(bool((parameter.grad == 7.0).all()) for parameter in model.parameters())
    assert told_group.at_the_end == ["ours"]


def test_ddp_goes_on_after_a_backward_that_failed(told_group: _ToldGroup) -> None:
    """`_reset_state` lets DDP forget a step whose end it never saw."""
    model = DistributedDataParallel(_net(), process_group=told_group, init_sync=False)
    allreduce = told_group.allreduce

    def fail() -> None:
        raise LookupError("the step failed")

    def failing(tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        torch.autograd.Variable._execution_engine.queue_callback(fail)
        return allreduce(tensors)

    told_group.allreduce = failing  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="the step failed"):
        model(torch.ones(1, 3, 4, 4)).sum().backward()
    told_group.allreduce = allreduce  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"reducer\.cpp"):  # what would happen without
        model(torch.ones(1, 3, 4, 4))
    model.reducer._reset_state()
    model.zero_grad()
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    assert torch.equal(model.module[3].bias.grad, torch.full((3,), 1.0) * (1.0 / 3))


def test_a_bucket_is_loaded_again_exactly_as_ddp_has_loaded_it(told_group: _ToldGroup) -> None:
    """Whatever the parameters' strides, and after DDP has rebuilt its buckets: bit for bit, at each size."""
    model = DistributedDataParallel(_net(), process_group=told_group, init_sync=False, bucket_cap_mb=0.0002)
    kept: list[torch.Tensor] = []
    checked: list[int] = []

    def check() -> None:
        for tensor, bucket in zip(told_group.reduced, model.reducer._get_zeros_like_grad_buckets(), strict=True):
            layout = [
                (parameter, int(part.storage_offset()))
                for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True)
            ]
            again = torch.full_like(tensor, torch.nan)
            load_gradients(again, layout, 1.0 / 3)
            assert torch.equal(again, tensor)
            checked.append(len(told_group.reduced))

    allreduce = told_group.allreduce

    def watched(tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        if not told_group.reduced:
            torch.autograd.Variable._execution_engine.queue_callback(check)
        kept.append(tensors[0])
        return allreduce(tensors)

    told_group.allreduce = watched  # type: ignore[method-assign]
    for _ in range(3):
        told_group.reduced.clear()
        model.zero_grad()
        model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    assert checked == [1, 3, 3, 3, 3, 3, 3]  # one bucket at first, three after the rebuilding


def test_what_is_not_supported_is_refused_with_its_name() -> None:
    """Before anything is built."""
    with pytest.raises(ValueError, match="0 is an Embedding with sparse=True"):
        _check_supported(torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)), {})
    with pytest.raises(ValueError, match="mixed_precision"):
        _check_supported(torch.nn.Linear(1, 1), {"mixed_precision": object()})
    for name, value in (("delay_all_reduce_named_params", [()]), ("skip_all_reduce_unused_params", True)):
        with pytest.raises(ValueError, match=name):
            _check_supported(torch.nn.Linear(1, 1), {name: value})


def test_ddp_synchronises_buffers_through_the_method_that_is_replaced() -> None:
    """All of DDP's buffer broadcasts go through `_distributed_broadcast_coalesced`."""
    source = inspect.getsource(DistributedDataParallel._default_broadcast_coalesced)
    assert "self._distributed_broadcast_coalesced(" in source
    parameters = list(inspect.signature(DistributedDataParallel._distributed_broadcast_coalesced).parameters)
    assert parameters == list(inspect.signature(FaultTolerantDDP._distributed_broadcast_coalesced).parameters)


def test_without_the_ft_group_it_says_what_is_missing() -> None:
    """The order of the calls is told."""
    with pytest.raises(ValueError, match=r"init_process_group\('ft'\) first"):
        FaultTolerantDDP(torch.nn.Linear(1, 1))


def test_a_hooks_state_is_restored_for_each_further_run() -> None:
    """What a failed run changed is undone, each time; the first run finds it as it was."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1)
    state.iter = 5
    state.error_dict[0] = torch.ones(3)
    saved = _HookState(state)
    saved.restore()
    for _ in range(2):
        assert state.iter == 5
        assert torch.equal(state.error_dict[0], torch.ones(3))
        state.iter = 9
        state.error_dict[0].zero_()
        saved.restore()


@pytest.mark.parametrize("state", [None, 3, "text"])
def test_a_hook_may_have_no_state(state: object) -> None:
    """Plain hooks are given None or a value."""
    _HookState(state).restore()
