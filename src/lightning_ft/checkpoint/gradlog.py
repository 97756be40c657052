"""Takes down what an optimizer does: the gradients of each step as it finds them, instead of what it makes of them.

Between two checkpoints `stepping` is called before each step, when nothing changes the gradients any more, and
`stepped` after it. What an optimizer makes of gradients depends on nothing else, so a reader can take the steps again
(`replay`). That nobody else has changed what the optimizer owns is made sure of by a `Guard`, before each step and when
a checkpoint is made: if somebody has, the next checkpoint is a base, and nothing is lost.

While training stands still for it the gradients are copied and what the optimizer has made is hashed, once each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightning_ft.checkpoint.codec import UNCHANGED
from lightning_ft.checkpoint.format import crc_of, hash_of
from lightning_ft.checkpoint.guard import Guard, Owned
from lightning_ft.checkpoint.host_memory import HostMemory, copy_in_threads
from lightning_ft.checkpoint.log import ITEM_BYTES, Clip, Log, Step, Trained, dump_log
from lightning_ft.checkpoint.records import NO_REFERENCE, REPLAYED, Frame
from lightning_ft.checkpoint.replay import OPTIMIZERS
from lightning_ft.checkpoint.share import Logged, Work, cut, share_of
from lightning_ft.checkpoint.tensors import (
    Bytes,
    flat_bytes,
    is_dense,
    is_plain_tensor,
    memory_of,
)
from lightning_ft.checkpoint.tree import FlatState

MAX_PENDING = 8
"""So many steps lie between two checkpoints at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """A step since the last checkpoint.

    Attributes:
        step: What is known of it.
        works: This rank's share of its gradients.
        memory: Where that is.
    """

    step: Step
    works: list[Work]
    memory: torch.Tensor


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make sure that an optimizer's steps can be taken again.

    Raises:
        ValueError: They can't; the message says why.
    """
    name = type(optimizer).__name__
    if type(optimizer) is not OPTIMIZERS.get(name):
        known = ", ".join(OPTIMIZERS)
        raise ValueError(
            f"a log of gradients can't be kept for {type(optimizer).__module__}.{name}: it knows torch.optim's {known}"
        )
    for option in ("fused", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"a log of gradients can't be kept for {name} with {option}=True: it rounds differently")


class GradientLog:
    """Keeps a log of one optimizer's steps, of which each rank has its share of the gradients.

    Args:
        optimizer: One that `check_optimizer` lets pass.
        rank: Of this process.
        num_ranks: How many share the log; all have the same state and the same gradients.

    Attributes:
        broken: Why the next checkpoint must be a base; None: nothing is known against a log.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> None:
        check_optimizer(optimizer)
        self.broken: str | None = "there is no checkpoint yet"
        self._optimizer = optimizer
        self._rank = rank
        self._num_ranks = num_ranks
        self._pending: list[_Pending] = []
        self._memory = HostMemory()
        self._groups: tuple[tuple[Trained, ...], ...] = ()
        self._streams: list[int] = []  # of each parameter
        self._guard = Guard({})
        self._known: dict[tuple[int, int], bytes] = {}  # of this rank's chunks of the last checkpoint

    @property
    def num_pending(self) -> int:
        """How many steps are held since the last checkpoint."""
        return len(self._pending)

    @property
    def max_held(self) -> int:
        """So many steps may be held while as many are written: together that takes no more than twice the state."""
        sizes = {index: item.tensor.numel() * item.tensor.element_size() for index, item in self._guard.owned.items()}
        gradients = sum(sizes[index] for index in self._streams if index in sizes)
        return max(1, min(MAX_PENDING, sum(sizes.values()) // max(gradients, 1)))

    # -- steps --------------------------------------------------------------------------------------------------------

    def stepping(self) -> None:
        """Take down the gradients that the optimizer is going to use, or that are going to be clipped by their norm."""
        if self.broken is not None:
            return
        if not self._guard.is_as_noted():
            self._break("parameters or their averages were changed between two optimizer steps")
            return
        if len(self._pending) >= MAX_PENDING:
            self._break(f"more than {MAX_PENDING} steps would have to be held in memory")
            return
        try:
            options = tuple(map(_options, self._optimizer.param_groups))
            gradients = list(self._gradients())
        except ValueError as error:
            self._break(str(error))
            return
        described = tuple((self._streams[number], dtype) for number, dtype, _ in gradients)
        step = Step(options, clip=None, is_skipped=True, gradients=described)
        spans = list(
            cut([(at, data.numel()) for at, (_, _, data) in enumerate(gradients)], self._rank, self._num_ranks)
        )
        is_pinned = any(data.is_cuda for _, _, data in gradients)
        memory = self._memory.take(sum(end - start for _, start, end in spans), is_pinned=is_pinned)
        works, copies, position = [], [], 0
        for at, start, end in spans:
            number, dtype, data = gradients[at]
            kept = memory[position : position + end - start]
            position += end - start
            copies.append((kept, data[start:end]))
            slot = len(self._pending) + 1
            works.append(Work(self._streams[number], start, kept.numpy(), slot=slot, dtype=dtype, is_own=True))
        copy_in_threads(copies)
        self._pending.append(_Pending(step, works, memory))

    def clipped(self, total_norm: torch.Tensor, max_norm: float) -> bool:
        """Say how the gradients of the last `stepping` were clipped since.

        Returns:
            Whether that can be repeated; else that `stepping` does not count.
        """
        if self.broken is not None:
            return True
        last = self._pending.pop()
        norm, dtypes = float(total_norm), {dtype for _, dtype in last.step.gradients}
        if not np.isfinite(norm) or total_norm.dtype is not torch.float32 or dtypes != {"float32"}:
            self._memory.give_back(last.memory)
            return False
        step = dataclasses.replace(last.step, clip=Clip(float(max_norm), norm))
        self._pending.append(dataclasses.replace(last, step=step))
        return True

    def stepped(self) -> None:
        """Note that the optimizer has taken its step: with gradients that are not finite a scaler leaves it out."""
        if self.broken is not None:
            return
        if not self._pending or not self._pending[-1].step.is_skipped:
            self._break("the optimizer took a step that Lightning did not ask for")
            return
        last = self._pending[-1]
        self._pending[-1] = dataclasses.replace(last, step=dataclasses.replace(last.step, is_skipped=False))
        self._guard.note()

    def _break(self, reason: str) -> None:
        self.broken = reason
        self._clear()

    def _clear(self) -> None:
        for pending in self._pending:
            self._memory.give_back(pending.memory)
        self._pending = []

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield the number of each parameter that has a gradient, its dtype and its bytes."""
        for number, parameter in enumerate(self._parameters()):
            gradient = parameter.grad
            if gradient is None:
                continue
            dtype = str(gradient.dtype).removeprefix("torch.")
            if not is_plain_tensor(gradient) or dtype not in ITEM_BYTES:
                raise ValueError(f"a gradient is {gradient.layout} of {gradient.dtype}")
            if gradient.stride() != parameter.stride() or not is_dense(gradient.shape, gradient.stride()):
                is_kept = is_dense(parameter.shape, parameter.stride())
                like = torch.empty_like(parameter if is_kept else parameter.contiguous(), dtype=gradient.dtype)
                gradient = like.copy_(gradient)
            yield number, dtype, flat_bytes(gradient)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def check(self, flat: FlatState, num_steps: int) -> str | None:
        """Return why a state is not what the optimizer has made of the last checkpoint's; None: it is.

        Args:
            flat: The state.
            num_steps: How many steps the optimizer has taken since.
        """
        if self.broken is None and num_steps != len(self._pending):
            self._break(f"of {num_steps} steps since the last checkpoint {len(self._pending)} are known")
        if self.broken is None and not self._is_told_by(flat):
            self._break("the optimizer has other parameters or averages than at the last checkpoint")
        if self.broken is None and not self._guard.is_as_noted():
            self._break("parameters or their averages were changed after the optimizer's step")
        return self.broken

    def _is_told_by(self, flat: FlatState) -> bool:
        """Whether what the optimizer owns is where it was, in the state and in memory; other tensors may differ."""
        try:
            if self._describe(flat) != self._groups:
                return False
        except ValueError:
            return False
        replayed = self._replayed()
        places = {
            (index, at) for index, at, _ in share_of(flat.streams, self._rank, self._num_ranks) if index in replayed
        }
        tensors = ((flat.tensor(index), item.tensor) for index, item in self._guard.owned.items())
        return places == self._guard.hashes.keys() and all(
            found is not None and memory_of(found) == memory_of(tensor) for found, tensor in tensors
        )

    def _replayed(self) -> set[int]:
        return Log("", "", "", self._groups, ()).replayed()

    def rebase(self, flat: FlatState) -> None:
        """Begin anew, with a checkpoint that holds all of a state; before `flat` lets go of it."""
        self._clear()
        self._guard = Guard({})
        try:
            self._groups = self._describe(flat)
        except ValueError as error:
            self.broken = str(error)
            return
        self._streams = [item.stream for group in self._groups for item in group]
        replayed = self._replayed()
        chunks: dict[int, list[tuple[int, int]]] = {}
        for index, start, end in share_of(flat.streams, self._rank, self._num_ranks):
            if index in replayed:
                chunks.setdefault(index, []).append((start, end))
        owned = {
            index: Owned(tensor, spans, is_parameter=index in self._streams)
            for index, spans in chunks.items()
            if (tensor := flat.tensor(index)) is not None
        }
        self._known = {place: hash_of(data.data) for place, data in _chunks(flat, self._rank, self._num_ranks)}
        self._guard = Guard(owned)
        self._guard.note({place: found for place, found in self._known.items() if place[0] in owned})
        self.broken = None

    def logged(self, flat: FlatState) -> Logged:
        """Return the share of a checkpoint that `check` lets be told by its log, and begin the next log."""
        assert self.broken is None
        known, works = [], []
        before_all, self._known = self._known, {}
        for place, data in _chunks(flat, self._rank, self._num_ranks):
            index, dtype = place[0], flat.streams[place[0]].dtype
            before = before_all.get(place, NO_REFERENCE)
            is_replayed = index in self._guard.owned
            found = self._guard.hashes[place] if is_replayed else hash_of(data.data)
            self._known[place] = found
            codec = REPLAYED if is_replayed else UNCHANGED
            if codec == UNCHANGED and found != before:
                works.append(Work(*place, data.copy(), dtype=dtype, is_own=True))
                continue
            known.append(
                Frame(
                    stream=index,
                    slot=0,
                    start=place[1],
                    num_bytes=data.size,
                    stored_bytes=0,
                    dtype=dtype,
                    codec=codec,
                    reference=before,
                    decoded_hash=found,
                    stored_crc=crc_of(b""),
                )
            )
        pending, self._pending = self._pending, []
        steps = []
        for item in pending:
            if item.step.is_skipped:
                steps.append(dataclasses.replace(item.step, clip=None, gradients=()))
            else:
                steps.append(item.step)
                works += item.works

        def written() -> None:
            for item in pending:
                self._memory.give_back(item.memory)

        optimizer, device = self._optimizer, self._parameters()[0].device
        log = Log(type(optimizer).__name__, device.type, _program(device), self._groups, tuple(steps))
        return Logged(flat.streams, known, works, dump_log(log), written)

    def _describe(self, flat: FlatState) -> tuple[tuple[Trained, ...], ...]:
        groups = []
        for group in self._optimizer.param_groups:
            items = []
            for parameter in group["params"]:
                stream = flat.index_of(parameter)
                if stream is None:
                    raise ValueError("the optimizer trains a parameter that is not in the checkpoint")
                state = {}
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if value is None:
                        continue
                    index = flat.index_of(value) if isinstance(value, torch.Tensor) else None
                    if index is None:
                        raise ValueError(f"the optimizer keeps {name!r}, which is no tensor of the checkpoint")
                    state[name] = index
                items.append(Trained(stream, state))
            groups.append(tuple(items))
        return tuple(groups)


def _chunks(flat: FlatState, rank: int, num_ranks: int) -> Iterator[tuple[tuple[int, int], Bytes]]:
    """Yield place and bytes of a rank's chunks; a tensor is brought to the host once."""
    last, data = -1, np.empty(0, np.uint8)
    for index, start, end in share_of(flat.streams, rank, num_ranks):
        if index != last:
            last, data = index, flat.data(index)
        yield (index, start), data[start:end]


def _options(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a group's options.

    Raises:
        ValueError: One can't be written down.
    """
    options = {name: value for name, value in group.items() if name != "params"}
    try:
        text = json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an option of the optimizer can't be written down: {error}") from None
    found: Mapping[str, Any] = json.loads(text)
    return found


def _program(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__} on {name}"
