"""The private parts of torch that the reduction stands on; the reduction itself is tested in real jobs."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.ddp import FaultTolerantDDP, _HookState


def test_a_callback_queued_from_a_callback_runs_last() -> None:
    """The engine runs callbacks in order of queueing, those too that a callback queues, before backward returns."""
    order: list[str] = []
    engine = torch.autograd.Variable._execution_engine

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        engine.queue_callback(lambda: engine.queue_callback(lambda: order.append("ours")))
        engine.queue_callback(lambda: order.append("DDP's"))
        return gradient

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    (leaf * 2).sum().backward()
    assert order == ["DDP's", "ours"]


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
