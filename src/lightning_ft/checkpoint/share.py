"""One rank's share of a state: which chunks it is, and their way into packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lightning_ft.checkpoint.bounded import Rounding
from lightning_ft.checkpoint.codec import REFERRING, Encoder
from lightning_ft.checkpoint.format import Buffer, crc_of, pack_header
from lightning_ft.checkpoint.records import (
    CHUNK_BYTES,
    MAX_PACK_BYTES,
    NO_REFERENCE,
    PACK_HEADER_BYTES,
    Frame,
    Stream,
)
from lightning_ft.checkpoint.tensors import Bytes
from lightning_ft.checkpoint.tree import FlatState

Chunks: TypeAlias = dict[tuple[int, int], tuple[Bytes, bytes]]
"""By stream and start: the bytes and their hash."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A chunk to encode.

    Attributes:
        stream: Index of its stream.
        start: Where it begins.
        data: Its bytes.
        reference: The parent's chunk; None: there is none.
        reference_hash: Its hash.
        slot: Of the frame.
        dtype: Of the frame.
        is_own: Whether the bytes are in memory that nobody else changes.
    """

    stream: int
    start: int
    data: Bytes
    reference: Bytes | None = None
    reference_hash: bytes = NO_REFERENCE
    slot: int = 0
    dtype: str = "bytes"
    is_own: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Logged:
    """A rank's share of a state that the optimizer makes of the last one.

    Attributes:
        streams: Of the state.
        known: Frames without stored bytes.
        works: Chunks to encode.
        extra: What is to be put into the manifest.
        written: To be called when all is written; the memory of `works` is used again then. Threads: any.
    """

    streams: tuple[Stream, ...]
    known: Sequence[Frame]
    works: Iterable[Work]
    extra: Mapping[str, Any]
    written: Callable[[], None]


class PackWriter:
    """Encodes chunks one after the other, into as many packs as they need.

    Args:
        works: What to encode.
        copies: Takes up the chunks with their hashes, for who needs them as references; None: nobody does. A chunk
            takes the place of its own reference.
        adds: See `Encoder`.
        known: Frames without stored bytes, which come first.
    """

    def __init__(
        self, works: Iterator[Work], copies: Chunks | None, *, adds: bool = False, known: Iterable[Frame] = ()
    ) -> None:
        self._works = works
        self._copies = copies
        self._encoder = Encoder(adds=adds)
        self._known = iter(known)
        self._next: tuple[Frame, Buffer] | None = self._encode_next()

    def has_more(self) -> bool:
        """Whether another pack is needed."""
        return self._next is not None

    def pack(self, frames: list[Frame]) -> Iterator[Buffer]:
        """Yield a pack's bytes, and append its frames."""
        yield pack_header()
        size = PACK_HEADER_BYTES
        while self._next is not None:
            frame, stored = self._next
            size += frame.stored_bytes
            if size > MAX_PACK_BYTES:
                return
            frames.append(frame)
            if stored:
                yield stored
            self._next = self._encode_next()

    def _encode_next(self) -> tuple[Frame, Buffer] | None:
        for frame in self._known:
            return frame, b""
        for work in self._works:
            data, reference, reference_hash = work.data, work.reference, work.reference_hash
            # Slots are apart: neighbours in a stream are alike, a parameter and its gradient are not.
            place = work.stream << 16 | work.slot
            codec, stored, decoded_hash = self._encoder.encode(place, work.dtype, data, reference, reference_hash)
            if self._copies is not None:
                self._copies[work.stream, work.start] = _kept(work), decoded_hash
            frame = Frame(
                stream=work.stream,
                slot=work.slot,
                start=work.start,
                num_bytes=work.data.size,
                stored_bytes=len(stored),
                dtype=work.dtype,
                codec=codec,
                reference=reference_hash if codec in REFERRING else NO_REFERENCE,
                decoded_hash=decoded_hash,
                stored_crc=crc_of(stored),
            )
            return frame, stored
        return None


def _kept(work: Work) -> Bytes:
    """Return a chunk in memory that stays."""
    if work.is_own:
        return work.data
    if work.reference is None:
        return work.data.copy()
    np.copyto(work.reference, work.data)
    return work.reference


def cut(sizes: Iterable[tuple[int, int]], rank: int, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield index, start and end of a rank's chunks of several strings of bytes; together a rank's are contiguous.

    Args:
        sizes: Index and length of each.
        rank: Whose chunks.
        num_ranks: Among how many they are shared.
    """
    sizes = list(sizes)
    total = sum(num_bytes for _, num_bytes in sizes)
    position = 0
    for index, num_bytes in sizes:
        for start in range(0, num_bytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, num_bytes)
            if position * num_ranks // total == rank:
                yield index, start, end
            position += end - start


def share_of(streams: Sequence[Stream], rank: int, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield stream, start and end of a rank's chunks: a rank's tensors' bytes are contiguous, all else is rank 0's.

    What is no tensor may have other bytes on another rank (a pickle of equal objects), so it has one writer.
    """
    sizes = [(index, stream.num_bytes, stream.kind in ("tensor", "array")) for index, stream in enumerate(streams)]
    yield from cut(((index, size) for index, size, is_shared in sizes if is_shared), rank, num_ranks)
    if rank == 0:
        yield from cut(((index, size) for index, size, is_shared in sizes if not is_shared), 0, 1)


def compared(
    flat: FlatState, rank: int, num_ranks: int, known: Chunks, rounding: Rounding | None = None
) -> Iterator[Work]:
    """Yield each of a rank's chunks with the reference, if there is one."""
    for index, start, data in _chunks(flat, rank, num_ranks):
        reference, reference_hash = known.get((index, start), (None, NO_REFERENCE))
        if reference is None or reference.size != data.size:
            reference, reference_hash = None, NO_REFERENCE
        stream = flat.streams[index]
        kept = rounding.round(stream.dtype, data, reference) if rounding and rounding.applies(stream) else data
        yield Work(index, start, kept, reference, reference_hash, dtype=stream.dtype)


def copied(
    flat: FlatState, rank: int, num_ranks: int, kept: Chunks, rounding: Rounding | None = None
) -> Iterator[Work]:
    """Yield the same without references; the bytes are copies, in the memory of the last base where it fits."""
    for index, start, data in _chunks(flat, rank, num_ranks):
        stream = flat.streams[index]
        copy, _ = kept.pop((index, start), (None, b""))
        if rounding and rounding.applies(stream):
            copy = rounding.round(stream.dtype, data, None)
        else:
            if copy is None or copy.size != data.size:
                copy = np.empty(data.size, np.uint8)
            np.copyto(copy, data)
        yield Work(index, start, copy, dtype=stream.dtype, is_own=True)


def viewed(flat: FlatState, rank: int, num_ranks: int) -> Iterator[Work]:
    """Yield the same without references and without copies."""
    for index, start, data in _chunks(flat, rank, num_ranks):
        yield Work(index, start, data, dtype=flat.streams[index].dtype)


def _chunks(flat: FlatState, rank: int, num_ranks: int) -> Iterator[tuple[int, int, Bytes]]:
    for index, start, end in share_of(flat.streams, rank, num_ranks):
        yield index, start, flat.data(index, start, end)
