"""What a plain loop keeps in step across processes, and what it goes back to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_ft import ElasticState, FaultToleranceError, MembershipChangedError, QuorumLostError
from lightning_ft.elastic import loading_in_place


def test_what_is_in_place_is_not_copied_onto_itself() -> None:
    """It is given as the parameter itself, which torch does not copy; the rest is loaded."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
    state = {name: value.detach() for name, value in module.state_dict().items()}
    state["0.weight"] = torch.ones(4, 3)
    first, (inner,) = module
    loaded: dict[str, Any] = {}
    for part in (first, inner):
        part.register_load_state_dict_pre_hook(lambda _, found, *__: loaded.update(found))
    before = inner.weight.detach().clone()
    with loading_in_place(module):
        module.load_state_dict(state)
    assert torch.equal(first.weight, torch.ones(4, 3))
    assert torch.equal(inner.weight, before)
    own = {name for name, parameter in module.named_parameters() if loaded[name] is parameter}
    assert own == {"0.bias", "1.0.weight", "1.0.bias"}
    assert not any(isinstance(value, torch.nn.Parameter) for value in state.values()), "the caller's stays as it is"
    loaded.clear()
    module.load_state_dict(state)
    assert not any(isinstance(value, torch.nn.Parameter) for value in loaded.values())


def make() -> ElasticState:
    """Return the state of a small loop with momentum, buffers and plain values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    return ElasticState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        losses=[],
        step=0,
    )


def train(state: ElasticState, num_steps: int) -> list[float]:
    """Train, and return all of it."""
    for _ in range(num_steps):
        state.optimizer.zero_grad()
        loss = state.model(torch.randn(8, 2)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.losses.append(loss.item())
        state.step += 1
    return [*state.losses, *(value.double().sum().item() for value in state.model.state_dict().values())]


def test_what_follows_a_restore_is_what_followed_keep() -> None:
    """Bit for bit: weights, buffers, the optimizer, plain values also if changed in place, and random numbers."""
    state = make()
    train(state, 3)
    state.keep()
    expected = train(state, 3)
    for _ in range(3):
        train(state, 1)
        state.restore(MembershipChangedError("a rank died"))
        assert (state.step, len(state.losses)) == (3, 3)
        assert train(state, 3) == expected


def test_who_joins_is_handed_what_was_kept() -> None:
    """It can go back with the others, to before it was there."""
    state, joiner = make(), make()
    state.keep()
    expected = train(state, 2)
    joiner._take(state._give())
    joiner.restore(MembershipChangedError("a rank died"))
    assert train(joiner, 2) == expected


@pytest.mark.parametrize("error", [QuorumLostError("too few"), MembershipChangedError("a rank died")])
def test_what_going_back_can_not_mend_is_raised_again(error: FaultToleranceError) -> None:
    """The end of the job is none that a loop could go on after; nor is it one that has nothing to go back to."""
    state = make()
    if isinstance(error, QuorumLostError):
        state.keep()
    with pytest.raises(type(error)) as raised:
        state.restore(error)
    assert raised.value is error


def test_going_back_again_and_again_ends() -> None:
    """An error that comes back each time is raised in the end, unless the loop has come farther."""
    state, error = make(), FaultToleranceError("the gradient is not finite")
    state.keep()
    for _ in range(3):
        state.restore(error)
    with pytest.raises(FaultToleranceError):
        state.restore(error)
    state.keep()
    state.restore(error)
