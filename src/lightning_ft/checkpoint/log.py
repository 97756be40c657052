"""What a checkpoint of the mode `gradlog` says of the optimizer steps since its parent. Pure; FORMAT.md, Gradient log.

The gradients are frames in slots from 1 on, one slot for each step: with both a reader takes the steps again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_ft.checkpoint.records import CHUNK_BYTES, GRADLOG, Frame, Manifest, Stream
from lightning_ft.data.cursor import read_fields
from lightning_ft.membership.wire_fields import read_name, read_natural, read_text, short

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""What gradients may be made of."""

MAX_STEPS = 1000
"""In one checkpoint; slots are 16 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Clip:
    """How gradients were made smaller before the step: `max_norm / (total_norm + 1e-6)`, at most 1, times each."""

    max_norm: float
    total_norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        options: Of each group of parameters: learning rate and so on, as the step found them.
        clip: None: the gradients are as the step found them.
        is_skipped: Whether the step was left out, since a gradient was not finite: then there are no gradients.
        gradients: For each parameter that had one: its stream, and the gradient's dtype.
    """

    options: tuple[Mapping[str, Any], ...]
    clip: Clip | None
    is_skipped: bool
    gradients: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """A parameter's stream, and those of what the optimizer keeps for it, by name."""

    stream: int
    state: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """The steps between a checkpoint and its parent.

    Attributes:
        optimizer: Name of its class in `torch.optim`.
        device: Type of the device that it ran on: elsewhere other bits may come out.
        program: What else the bits depend on, for people.
        groups: Its groups of parameters.
        steps: In order.
    """

    optimizer: str
    device: str
    program: str
    groups: tuple[tuple[Trained, ...], ...]
    steps: tuple[Step, ...]

    def replayed(self) -> set[int]:
        """Return the streams that are not stored, since the optimizer makes them."""
        trained = [item for group in self.groups for item in group]
        return {item.stream for item in trained} | {stream for item in trained for stream in item.state.values()}


def dump_log(log: Log) -> Mapping[str, Any]:
    """Return what is put into a manifest's `extra`."""
    return {
        "optimizer": log.optimizer,
        "device": log.device,
        "program": log.program,
        "groups": [[[item.stream, dict(item.state)] for item in group] for group in log.groups],
        "steps": [
            {
                "options": [dict(options) for options in step.options],
                "clip": None if step.clip is None else dataclasses.asdict(step.clip),
                "skipped": step.is_skipped,
                "gradients": [list(gradient) for gradient in step.gradients],
            }
            for step in log.steps
        ],
    }


def load_log(manifest: Manifest) -> Log | None:
    """Read the log of a manifest; None: it has none, since it is a base or of another mode.

    Raises:
        ValueError: It is none.
    """
    if manifest.mode != GRADLOG or manifest.parent is None:
        return None
    readers: Mapping[str, Callable[[object], Any]] = {
        "optimizer": read_name,
        "device": read_name,
        "program": read_text,
        "groups": _read_groups,
        "steps": _read_steps,
    }
    log = Log(**read_fields("log", manifest.extra, readers))
    num_streams = len(manifest.streams)
    trained = {item.stream for group in log.groups for item in group}
    if any(stream >= num_streams or manifest.streams[stream].kind != "tensor" for stream in log.replayed()):
        raise ValueError("the log names a stream that is no tensor's")
    for step in log.steps:
        if len(step.options) != len(log.groups):
            raise ValueError(f"expected options of {len(log.groups)} groups, got {len(step.options)}")
        if not {stream for stream, _ in step.gradients} <= trained or (step.is_skipped and step.gradients):
            raise ValueError("the log has gradients of what is not trained")
    return log


def gradient_bytes(stream: Stream, dtype: str) -> int:
    """Return how long a parameter's gradient is."""
    return math.prod(stream.shape) * ITEM_BYTES[dtype]


def expected_chunks(log: Log, streams: tuple[Stream, ...]) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """Yield place, length and dtype of each chunk of gradients that there must be."""
    for slot, step in enumerate(log.steps, 1):
        for stream, dtype in step.gradients:
            num_bytes = gradient_bytes(streams[stream], dtype)
            for start in range(0, num_bytes, CHUNK_BYTES):
                yield (stream, slot, start), min(CHUNK_BYTES, num_bytes - start), dtype


def check_gradients(log: Log | None, streams: tuple[Stream, ...], frames: list[Frame]) -> None:
    """Make sure that all gradients are there, once.

    Args:
        log: None: there must be none.
        streams: Of the manifest.
        frames: Those that are in slots from 1 on.

    Raises:
        ValueError: Some are missing, twice there, or too many.
    """
    there = {frame.place: (frame.num_bytes, frame.dtype) for frame in frames}
    expected = {place: (size, dtype) for place, size, dtype in expected_chunks(log, streams)} if log else {}
    if there != expected or len(frames) != len(expected):
        raise ValueError(f"it has {len(frames)} chunks of gradients, not the {len(expected)} of its log")


def _read_array(value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) != (len(value) if length is None else length):
        raise ValueError(f"expected a list, got {short(value)}")
    return value


def _read_groups(value: object) -> tuple[tuple[Trained, ...], ...]:
    return tuple(tuple(map(_read_trained, _read_array(group))) for group in _read_array(value))


def _read_trained(value: object) -> Trained:
    stream, state = _read_array(value, 2)
    if not isinstance(state, dict):
        raise ValueError(f"expected an object, got {short(state)}")  # noqa: TRY004 - it is data, not an argument
    return Trained(read_natural(stream), {name: read_natural(index) for name, index in state.items()})


def _read_steps(value: object) -> tuple[Step, ...]:
    steps = tuple(map(_read_step, _read_array(value)))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"expected at most {MAX_STEPS} steps, got {len(steps)}")
    return steps


def _read_step(value: object) -> Step:
    readers: Mapping[str, Callable[[object], Any]] = {
        "options": lambda options: tuple(map(_read_options, _read_array(options))),
        "clip": _read_clip,
        "skipped": _read_flag,
        "gradients": lambda gradients: tuple(map(_read_gradient, _read_array(gradients))),
    }
    fields = read_fields("step", value, readers)
    return Step(fields["options"], fields["clip"], fields["skipped"], fields["gradients"])


def _read_options(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return value


def _read_clip(value: object) -> Clip | None:
    return (
        None
        if value is None
        else Clip(**read_fields("clip", value, {"max_norm": _read_float, "total_norm": _read_float}))
    )


def _read_float(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {short(value)}")
    return value


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return value


def _read_gradient(value: object) -> tuple[int, str]:
    stream, dtype = _read_array(value, 2)
    if dtype not in ITEM_BYTES:
        raise ValueError(f"expected a dtype of gradients, got {short(dtype)}")
    return read_natural(stream), dtype
