"""What optimizers change: sent piece by piece while they go on, and kept up to date by gradients (PROTOCOL.md#M3c).

A piece is a part of a parameter and what its optimizer keeps for it. What was sent is stepped at the joiner by its own
optimizer, a few parameters at a time, with the gradients that the members' are about to use. That holds bit for bit for
optimizers that treat each element by itself, and for those that treat each parameter by itself, if it is sent as one
piece. Nothing relies on it, since `transfer` compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ft.comm.pace import shares
from lightning_ft.comm.stream import Frame

PIECE_ELEMENTS = 1024 * 1024
"""Of a parameter: 12 MB with what AdamW keeps for it."""

_STEP_BYTES = 8 * 1024 * 1024
"""Of gradients: with so many the joiner steps while it receives the next."""

_PLAIN = (bool, int, float, str)


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The part of a process's state that optimizers change, in the same order on all of them.

    Attributes:
        parameters: Of all that is trained.
        optimizers: Which step them.
        replicated: Returns what `State.replicated` is of this process, as it is now.
    """

    parameters: Sequence[Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    replicated: Callable[[], Any]


def optimizer_of(trained: Trained) -> dict[int, int]:
    """Return for each parameter that can be replayed which optimizer steps it: one alone, and in flat memory."""
    position = {id(parameter): index for index, parameter in enumerate(trained.parameters)}
    found: dict[int, list[int]] = {}
    for number, optimizer in enumerate(trained.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in position:
                    found.setdefault(position[id(parameter)], []).append(number)
    return {
        index: numbers[0]
        for index, numbers in sorted(found.items())
        if len(numbers) == 1 and trained.parameters[index].is_contiguous()
    }


def num_bytes(trained: Trained) -> int:
    """Bytes of all that optimizers change."""
    total = sum(parameter.nbytes for parameter in trained.parameters)
    for optimizer in trained.optimizers:
        for state in optimizer.state.values():
            total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total


class Recorder:
    """A donor's share, and how far it was sent.

    Args:
        trained: Here.
        donor: Which of the donors this is.
        num_donors: How many there are.
    """

    def __init__(self, trained: Trained, donor: int, num_donors: int) -> None:
        self._trained = trained
        self._optimizer_of = optimizer_of(trained)
        able = list(self._optimizer_of)
        dealt = shares([trained.parameters[index].numel() for index in able], num_donors)[donor]
        self._left = [able[position] for position in dealt]
        self._sent: dict[int, int] = {}
        self._step_bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of the share was sent once."""
        return not self._left

    @property
    def gradient_bytes(self) -> int:
        """What a step must send for what was sent."""
        return self._step_bytes

    def piece(self) -> Frame:
        """Take the next piece; a copy, as of now. There must be one left."""
        index = self._left[0]
        parameter = self._trained.parameters[index]
        start, size = self._sent.get(index, 0), parameter.numel()
        state = self._trained.optimizers[self._optimizer_of[index]].state.get(parameter, {})
        kinds = {name: _kind(value, parameter) for name, value in state.items()}
        end = size if "tensor" in kinds.values() else min(size, start + PIECE_ELEMENTS)
        tensors, described = [_copy(_flat(parameter)[start:end])], []
        for name, value in state.items():
            kind = kinds[name]
            if kind == "value":
                described.append([name, kind, _plain(value), "", [], False])
                continue
            tensors.append(_copy(_flat(value)[start:end] if kind == "piece" else value))
            dtype = str(value.dtype).removeprefix("torch.")
            described.append([name, kind, None, dtype, list(value.shape), value.device == parameter.device])
        self._sent[index] = end
        self._step_bytes += (end - start) * parameter.element_size()
        if end == size:
            self._left.pop(0)
        return Frame({"type": "piece", "parameter": index, "start": start, "end": end, "state": described}, tensors)

    def gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[Frame]:
        """Take the gradients that an optimizer is about to step with, of what was sent; copies."""
        number = next(index for index, known in enumerate(self._trained.optimizers) if known is optimizer)
        header = {"type": "step", "optimizer": number, "groups": _groups(optimizer)}
        tensors: list[Tensor] = []
        entries: list[list[Any]] = []
        room_bytes = _STEP_BYTES
        for index, end in self._sent.items():
            gradient = self._trained.parameters[index].grad
            if self._optimizer_of[index] == number and gradient is not None:
                entries.append([index, end, str(gradient.dtype).removeprefix("torch.")])
                tensors.append(_copy(_flat(gradient)[:end]))
                room_bytes -= tensors[-1].nbytes
                if room_bytes <= 0:
                    yield Frame({**header, "gradients": entries}, tensors)
                    tensors, entries, room_bytes = [], [], _STEP_BYTES
        if entries:
            yield Frame({**header, "gradients": entries}, tensors)

    def rest(self) -> Frame:
        """Take what belongs to no parameter, as of now: rates, which a schedule changes between steps, and an order."""
        position = {id(parameter): index for index, parameter in enumerate(self._trained.parameters)}
        optimizers = [
            [_groups(optimizer), [position[id(key)] for key in optimizer.state if id(key) in position]]
            for optimizer in self._trained.optimizers
        ]
        return Frame({"type": "rest", "optimizers": optimizers})


class Replayer:
    """The joiner's half: makes what it has what the donors have.

    Args:
        trained: Here; changed by what arrives.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._optimizer_of = optimizer_of(trained)
        self._gradients: dict[int, Tensor] = {}
        self._orders: list[list[int]] = []

    def take(self, header: dict[str, Any], data: Tensor) -> None:
        """Take a frame in.

        Raises:
            Exception: It does not fit what is here; what was sent so far is good for nothing then.
        """
        reader = _Reader(data)
        if header["type"] == "piece":
            self._take_piece(header, reader)
        elif header["type"] == "step":
            self._step(header, reader)
        else:
            self._orders = [order for _, order in header["optimizers"]]
            for optimizer, (groups, _) in zip(self._trained.optimizers, header["optimizers"], strict=True):
                _set_groups(optimizer, groups)

    def settle(self) -> None:
        """Put what optimizers keep into the order in which the members have it."""
        for optimizer, order in zip(self._trained.optimizers, self._orders, strict=False):
            first = [self._trained.parameters[index] for index in order]
            ordered = {key: optimizer.state[key] for key in [*first, *optimizer.state] if key in optimizer.state}
            optimizer.state.clear()
            optimizer.state.update(ordered)
        self._gradients.clear()

    @torch.no_grad()
    def _take_piece(self, header: dict[str, Any], reader: _Reader) -> None:
        index, start, end = header["parameter"], header["start"], header["end"]
        parameter = self._trained.parameters[index]
        optimizer = self._trained.optimizers[self._optimizer_of[index]]
        _flat(parameter)[start:end] = reader.next(parameter.dtype, (end - start,)).to(parameter.device)
        before = {} if start == 0 else optimizer.state[parameter]
        after: dict[str, Any] = {}
        for name, kind, value, dtype_name, shape, is_beside in header["state"]:
            dtype = getattr(torch, dtype_name or "uint8")
            if kind == "value":
                after[name] = value
            elif kind in ("scalar", "tensor"):
                after[name] = reader.next(dtype, shape).clone().to(parameter.device if is_beside else "cpu")
            else:
                kept = before.get(name)
                after[name] = torch.zeros_like(parameter, dtype=dtype) if kept is None else kept
                _flat(after[name])[start:end] = reader.next(dtype, (end - start,)).to(parameter.device)
        optimizer.state[parameter] = after

    def _step(self, header: dict[str, Any], reader: _Reader) -> None:
        optimizer = self._trained.optimizers[header["optimizer"]]
        _set_groups(optimizer, header["groups"])
        known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in known:
            parameter.grad = None
        for index, end, dtype_name in header["gradients"]:
            parameter = self._trained.parameters[index]
            sent = reader.next(getattr(torch, dtype_name), (end,)).to(parameter.device)
            parameter.grad = self._whole(index, sent)
        optimizer.step()
        for parameter in known:
            parameter.grad = None

    def _whole(self, index: int, sent: Tensor) -> Tensor:
        """Return a parameter's gradient, of which the beginning was sent: what else there is of it is sent anew."""
        parameter = self._trained.parameters[index]
        if sent.numel() == parameter.numel():
            self._gradients.pop(index, None)
            return sent.view(parameter.shape)
        gradient = self._gradients.get(index)
        if gradient is None:
            gradient = self._gradients[index] = torch.zeros_like(parameter, dtype=sent.dtype)
        _flat(gradient)[: sent.numel()] = sent
        return gradient


class _Reader:
    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._start = 0

    def next(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        end = self._start + dtype.itemsize * int(torch.Size(shape).numel())
        part = self._data[self._start : end]
        self._start = end
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(shape)


def _groups(optimizer: torch.optim.Optimizer) -> list[list[list[Any]]]:
    return [
        [[name, _plain(value)] for name, value in group.items() if name != "params"] for group in optimizer.param_groups
    ]


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Sequence[Any]]]) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for name, value in values:
            group[name] = tuple(value) if isinstance(value, list) else value


def _flat(tensor: Tensor) -> Tensor:
    """Its elements; the very ones, if they lie without gaps."""
    return tensor.detach().reshape(-1)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _kind(value: object, parameter: Tensor) -> str:
    if not isinstance(value, Tensor):
        return "value"
    if value.shape == parameter.shape and value.is_contiguous() and value.numel() > 1:
        return "piece"
    return "scalar" if value.numel() == 1 else "tensor"


def _plain(value: object) -> Any:
    """What JSON keeps as it is.

    Raises:
        TypeError: It is nothing of the kind: such an optimizer can't be replayed.
    """
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, _PLAIN):
        return value
    raise TypeError(f"{type(value).__name__} in what an optimizer keeps")
