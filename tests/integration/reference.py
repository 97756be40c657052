"""What a single process would have computed, given who contributed to each step."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from types import ModuleType

import torch


def _program() -> ModuleType:
    path = pathlib.Path(__file__).parent / "programs" / "plain_loop.py"
    spec = importlib.util.spec_from_file_location("plain_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def final_weights(
    contributors: Mapping[int, tuple[str, ...]],
    *,
    model: str,
    optimizer: str = "sgd",
    accumulate: int = 1,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Train alone: each step's gradient is the average over exactly the batches of its contributors.

    Args:
        contributors: For each step from 0, the logical ids.
        model: As for plain_loop.py.
        optimizer: As for plain_loop.py.
        accumulate: As for plain_loop.py.
        width: As for plain_loop.py.
        dtype: Of weights and data; 64 bits for `--double`.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return _train(contributors, model, optimizer, accumulate, width)
    finally:
        torch.set_default_dtype(before)


def _train(
    contributors: Mapping[int, tuple[str, ...]], model: str, optimizer: str, accumulate: int, width: int
) -> dict[str, torch.Tensor]:
    program = _program()
    torch.manual_seed(0)
    net = program.Net(model, width)
    steps = program.make_optimizer(optimizer, net.parameters())
    for step in range(len(contributors)):
        gradients: dict[str, torch.Tensor] = {}
        for member in contributors[step]:
            net.zero_grad()
            for part in range(accumulate):
                x, y = program.batch(member, step, part)
                logits = net(x, program.is_side_used(model, member, step))
                (torch.nn.functional.cross_entropy(logits, y) / accumulate).backward()
            for name, parameter in net.named_parameters():
                if parameter.grad is not None:
                    share = parameter.grad / len(contributors[step])
                    gradients[name] = gradients[name] + share if name in gradients else share
        for name, parameter in net.named_parameters():
            parameter.grad = gradients.get(name)
        steps.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}
