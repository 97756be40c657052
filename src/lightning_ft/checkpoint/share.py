"""One rank's share of a state: which chunks it is, and their way into packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from lightning_ft.checkpoint.codec import REFERRING, Encoder
from lightning_ft.checkpoint.format import Buffer, crc_of, dump_frame, pack_header
from lightning_ft.checkpoint.records import (
    CHUNK_BYTES,
    FRAME_BYTES,
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

Work: TypeAlias = tuple[int, int, Bytes, Bytes | None, bytes]
"""A chunk to encode: stream, start, bytes, the reference's bytes if there is one, and their hash."""


class PackWriter:
    """Encodes chunks one after the other, into as many packs as they need.

    Args:
        streams: Of the state.
        chunks: What to encode.
        copies: Takes up the chunks with their hashes, for who needs them as references; None: nobody does.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        chunks: Iterator[Work],
        copies: Chunks | None,
    ) -> None:
        self._streams = streams
        self._chunks = chunks
        self._copies = copies
        self._encoder = Encoder()
        self._next: tuple[Frame, Buffer] | None = self._encode_next()

    def has_more(self) -> bool:
        """Whether another pack is needed."""
        return self._next is not None

    def pack(self, frames: list[Frame]) -> Iterator[Buffer]:
        """Yield a pack's bytes, and append its frames' headers."""
        yield pack_header()
        size = PACK_HEADER_BYTES
        while self._next is not None:
            frame, stored = self._next
            size += FRAME_BYTES + frame.stored_bytes
            if size > MAX_PACK_BYTES:
                return
            frames.append(frame)
            yield dump_frame(frame)
            if stored:
                yield stored
            self._next = self._encode_next()

    def _encode_next(self) -> tuple[Frame, Buffer] | None:
        for index, start, data, reference, reference_hash in self._chunks:
            dtype = self._streams[index].dtype
            codec, stored, decoded_hash = self._encoder.encode(index, dtype, data, reference, reference_hash)
            if self._copies is not None:
                self._copies[index, start] = data, decoded_hash
            needs = reference_hash if codec in REFERRING else NO_REFERENCE
            frame = Frame(
                stream=index,
                slot=0,
                start=start,
                num_bytes=data.size,
                stored_bytes=len(stored),
                dtype=dtype,
                codec=codec,
                reference=needs,
                decoded_hash=decoded_hash,
                stored_crc=crc_of(stored),
            )
            return frame, stored
        return None


def share_of(streams: Sequence[Stream], rank: int, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield stream, start and end of a rank's chunks: a rank's tensors' bytes are contiguous, all else is rank 0's.

    What is no tensor may have other bytes on another rank (a pickle of equal objects), so it has one writer.
    """
    total = sum(stream.num_bytes for stream in streams if stream.kind in ("tensor", "array"))
    position = 0
    for index, stream in enumerate(streams):
        is_shared = stream.kind in ("tensor", "array")
        for start in range(0, stream.num_bytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, stream.num_bytes)
            if (position * num_ranks // total if is_shared else 0) == rank:
                yield index, start, end
            position += end - start


def compared(flat: FlatState, rank: int, num_ranks: int, known: Chunks) -> Iterator[Work]:
    """Yield stream, start, bytes, the reference's bytes and their hash, for each of a rank's chunks."""
    for index, start, data in _chunks(flat, rank, num_ranks):
        reference, reference_hash = known.get((index, start), (None, NO_REFERENCE))
        if reference is None or reference.size != data.size:
            yield index, start, data, None, NO_REFERENCE
        else:
            yield index, start, data, reference, reference_hash


def copied(flat: FlatState, rank: int, num_ranks: int, kept: Chunks) -> Iterator[Work]:
    """Yield the same without references; the bytes are copies, in the memory of the last base where it fits."""
    for index, start, data in _chunks(flat, rank, num_ranks):
        copy, _ = kept.pop((index, start), (None, b""))
        if copy is None or copy.size != data.size:
            copy = np.empty(data.size, np.uint8)
        np.copyto(copy, data)
        yield index, start, copy, None, NO_REFERENCE


def _chunks(flat: FlatState, rank: int, num_ranks: int) -> Iterator[tuple[int, int, Bytes]]:
    for index, start, end in share_of(flat.streams, rank, num_ranks):
        yield index, start, flat.data(index, start, end)
