"""What a plain loop keeps in step across processes."""

from __future__ import annotations

from typing import Any

import torch

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
