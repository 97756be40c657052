"""Chunks of tensors that all ranks should have alike: their digests, who differs by majority, and by how much.

Everything here is of one process, or a function of what all have told each other.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

FARTHEST = 1e9
"""The relative difference from what is NaN or infinite: far, but a number that JSON and Prometheus can hold."""

GRADIENTS, PARAMETERS, OPTIMIZER_STATE = "gradients", "parameters", "optimizer state"
"""Kinds of subjects."""

Piece = tuple[int, int, str]
"""Where in a tensor something begins and ends (elements), and what it is called."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A tensor that all ranks should have alike.

    Attributes:
        kind: One of the above.
        name: Which one, for a person.
        tensor: Never a copy: what is healed is written into it.
        pieces: Says what is where in it.
    """

    kind: str
    name: str
    tensor: Tensor
    pieces: Callable[[], Sequence[Piece]]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a subject: the bytes `start` to `end` of its elements in order."""

    subject: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A chunk that not all ranks have alike.

    Attributes:
        chunk: Its position in the list of all.
        holders: Ranks that have what most have; if several values are held by as many, that of the lowest rank.
        others: All other ranks.
        is_majority: Whether the holders are more than half.
    """

    chunk: int
    holders: tuple[int, ...]
    others: tuple[int, ...]
    is_majority: bool


def chunks_of(subjects: Sequence[Subject], chunk_bytes: int) -> list[Chunk]:
    """Cut subjects into chunks of whole elements; the same on all ranks, for subjects of the same sizes."""
    found = []
    for index, subject in enumerate(subjects):
        size, step = subject.tensor.nbytes, _whole(chunk_bytes, subject.tensor)
        found += [Chunk(index, start, min(start + step, size)) for start in range(0, size, step)]
    return found


def digests_of(subjects: Sequence[Subject], chunk_bytes: int) -> tuple[list[int], bool]:
    """Return the digest of each chunk, 64 bits, and whether all gradients are finite.

    On the CPU a digest is XXH3 of the bytes. On another device it is made of sums there, of the elements' bit patterns
    and of these times their positions: a single wrong element is always found, and several unless they cancel out.
    """
    digests: list[int] = []
    is_finite = True
    for subject in subjects:
        tensor = subject.tensor.detach()
        flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)
        step = _whole(chunk_bytes, flat)
        looks = subject.kind is GRADIENTS and flat.is_floating_point()
        found, is_subject_finite = (_look_here if flat.device.type == "cpu" else _look_there)(flat, step, looks=looks)
        digests += found
        is_finite = is_finite and is_subject_finite
    return digests, is_finite


def fold(digests: Sequence[int]) -> int:
    """Return one digest of many, 64 bits."""
    return xxhash.xxh3_64_intdigest(b"".join(digest.to_bytes(8, "little") for digest in digests))


def differences(rows: Sequence[Sequence[int]]) -> list[Difference]:
    """Compare the ranks' digests, one row for each rank, chunk by chunk."""
    found = []
    for index, column in enumerate(zip(*rows, strict=True)):
        counts = collections.Counter(column)
        if len(counts) == 1:
            continue
        most = max(counts.values())
        value = next(digest for digest in column if counts[digest] == most)
        found.append(
            Difference(
                index,
                tuple(rank for rank, digest in enumerate(column) if digest == value),
                tuple(rank for rank, digest in enumerate(column) if digest != value),
                2 * most > len(column),
            )
        )
    return found


def read(subject: Subject, chunk: Chunk) -> Tensor:
    """Return a copy of a chunk: flat, on the CPU, of the subject's type."""
    size = subject.tensor.element_size()
    flat = subject.tensor.detach().reshape(-1)
    return flat[chunk.start // size : chunk.end // size].cpu().clone()


def write(subject: Subject, chunk: Chunk, value: Tensor) -> None:
    """Give a chunk the value of another rank; the reverse of `read`."""
    size = subject.tensor.element_size()
    tensor = subject.tensor.data  # autograd need not know: whoever else uses it should have had this value
    flat = tensor.reshape(-1)
    flat[chunk.start // size : chunk.end // size].copy_(value)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def compare(subject: Subject, chunk: Chunk, value: Tensor) -> tuple[float, list[str]]:
    """Return how far a chunk is from another rank's, and in what it differs.

    Returns: The largest |a - b| / max(|a|, |b|) of its elements, at most FARTHEST; names of the pieces that differ.
    """
    own = read(subject, chunk)
    unlike = (own.view(torch.uint8) != value.view(torch.uint8)).view(-1, own.element_size()).any(1)
    positions = unlike.nonzero().view(-1)
    first = chunk.start // own.element_size()
    touched = positions + first
    names = [name for start, end, name in subject.pieces() if bool(((touched >= start) & (touched < end)).any())]
    wide = torch.complex128 if own.is_complex() else torch.float64
    here, there = own[positions].to(wide), value[positions].to(wide)
    farther = (here - there).abs() / torch.maximum(here.abs(), there.abs())
    farther[here == there] = 0.0  # 0 and -0
    return min(FARTHEST, float(torch.nan_to_num(farther, nan=FARTHEST, posinf=FARTHEST).max())), names


def digest_there(flat: Tensor, step: int) -> list[int]:
    """As `digests_of` on another device than the CPU: one transfer for all chunks, of `step` bytes each."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    patterns = flat.view(kinds[flat.element_size()])
    sums = []
    for part in patterns.split(step // patterns.element_size()):
        wide = part.to(torch.int64)
        positions = torch.arange(1, 1 + wide.numel(), device=wide.device)
        sums.append(torch.stack([wide.sum(), (wide * positions).sum()]))
    if not flat.numel():
        return []
    return [fold([value % (1 << 64) for value in pair]) for pair in torch.stack(sums).tolist()]


def _look_here(flat: Tensor, step: int, *, looks: bool) -> tuple[list[int], bool]:
    """Both in one pass: each chunk is read from memory once, and added up in the processor's cache."""
    view = flat.view(torch.uint8).numpy().data
    kind, is_finite = _sum_kind(flat), True
    digests = []
    for index, part in enumerate(flat.split(step // flat.element_size()) if flat.numel() else ()):
        digests.append(xxhash.xxh3_64_intdigest(view[index * step : (index + 1) * step]))
        if looks and not math.isfinite(part.sum(dtype=kind)):  # finite ones may add up to infinity
            is_finite = is_finite and bool(part.isfinite().all())
    return digests, is_finite


def _look_there(flat: Tensor, step: int, *, looks: bool) -> tuple[list[int], bool]:
    is_finite = not looks or bool(flat.sum(dtype=_sum_kind(flat)).isfinite())
    return digest_there(flat, step), is_finite or bool(flat.isfinite().all())


def _sum_kind(flat: Tensor) -> torch.dtype:
    return torch.float64 if flat.dtype is torch.float64 else torch.float32


def _whole(chunk_bytes: int, tensor: Tensor) -> int:
    """Whole elements, one at least."""
    return max(1, chunk_bytes // tensor.element_size()) * tensor.element_size()
