"""Takes optimizer steps again from their gradients: the state comes out bit for bit, by the same implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_ft.checkpoint.log import Log, Step
from lightning_ft.checkpoint.records import Stream
from lightning_ft.checkpoint.tensors import tensor_from
from lightning_ft.errors import ReplayError, UnsupportedCheckpointError

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}
"""Those that are replayed: a step of theirs depends on nothing but the state, the gradients and the options."""


def replay(
    log: Log,
    streams: Sequence[Stream],
    contents: Sequence[torch.Tensor],
    gradients: Mapping[tuple[int, int], torch.Tensor],
    piece: str,
) -> None:
    """Take the steps of a log.

    Args:
        log: Checked.
        streams: Of the checkpoint.
        contents: The bytes of each; those that the log names are changed, from the parent's to the checkpoint's.
        gradients: By number of the step and stream: the bytes.
        piece: The manifest's path, for errors.

    Raises:
        ReplayError: The optimizer here can't do anything with that.
        UnsupportedCheckpointError: It is not known, or needs another device.
    """
    if log.optimizer not in OPTIMIZERS:
        raise UnsupportedCheckpointError(
            f"{piece} was made by the optimizer {log.optimizer!r}; this program knows {', '.join(OPTIMIZERS)}. "
            "Use the version of lightning_ft that wrote it, or a newer one."
        )
    if log.device != "cpu" and not (log.device == "cuda" and torch.cuda.is_available()):
        raise UnsupportedCheckpointError(
            f"{piece} was trained on {log.device}, which this machine does not have: another device rounds "
            "differently. Load it on such a machine, or load its base."
        )
    if all(step.is_skipped for step in log.steps):
        return
    try:
        _replay(log, streams, contents, gradients)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ReplayError(
            f"the gradients of {piece}, logged with {log.program}, can't be replayed by {log.optimizer} here: {error!r}"
        ) from error


def _replay(
    log: Log,
    streams: Sequence[Stream],
    contents: Sequence[torch.Tensor],
    gradients: Mapping[tuple[int, int], torch.Tensor],
) -> None:
    tensors = {index: tensor_from(contents[index], streams[index]) for index in log.replayed()}
    parameters: dict[int, torch.nn.Parameter] = {}
    groups: list[dict[str, Any]] = []
    for group in log.groups:
        own = [torch.nn.Parameter(tensors[item.stream].to(log.device), requires_grad=False) for item in group]
        parameters.update(zip((item.stream for item in group), own, strict=True))
        groups.append({"params": own})
    optimizer = OPTIMIZERS[log.optimizer](groups)  # type: ignore[call-arg]
    optimizer.state.clear()
    for group, options in zip(log.groups, log.steps[0].options, strict=True):
        for item in group:
            optimizer.state[parameters[item.stream]] = {
                # Numbers of steps are kept on the host, unless the optimizer is capturable.
                name: tensors[index].to("cpu" if _is_counter(tensors[index], options) else log.device)
                for name, index in item.state.items()
            }
    for number, step in enumerate(log.steps):
        if not step.is_skipped:
            _take(
                optimizer, step, parameters, {at[1]: data for at, data in gradients.items() if at[0] == number}, streams
            )
    for group in log.groups:
        for item in group:
            tensors[item.stream].copy_(parameters[item.stream].detach())
            for name, index in item.state.items():
                tensors[index].copy_(optimizer.state[parameters[item.stream]][name])


def _is_counter(tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
    return tensor.dim() == 0 and not options.get("capturable")


def _take(
    optimizer: torch.optim.Optimizer,
    step: Step,
    parameters: Mapping[int, torch.nn.Parameter],
    gradients: Mapping[int, torch.Tensor],
    streams: Sequence[Stream],
) -> None:
    for group, options in zip(optimizer.param_groups, step.options, strict=True):
        group.update({name: _plain(value) for name, value in options.items()})
    for parameter in parameters.values():
        parameter.grad = None
    for stream, dtype in step.gradients:
        described = Stream(
            "tensor", "", dtype, streams[stream].shape, streams[stream].stride, gradients[stream].numel()
        )
        parameters[stream].grad = tensor_from(gradients[stream], described).to(parameters[stream].device)
    if step.clip is not None:
        first = next(iter(parameters.values()))
        total = torch.tensor(step.clip.total_norm, dtype=torch.float32, device=first.device)
        torch.nn.utils.clip_grads_with_norm_(list(parameters.values()), step.clip.max_norm, total)
    optimizer.step()


def _plain(value: object) -> object:
    """Return an option as optimizers have it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
