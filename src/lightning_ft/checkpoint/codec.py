"""One chunk: the smallest way to store it, and back, with every check. FORMAT.md, Codecs.

* `raw`: the bytes.
* `blosc2`: a Blosc2 chunk (byte shuffle, zstd level 1).
* `xor-blosc2`: the same of the exclusive or with the parent's chunk. On bits, so a NaN is like any other number and
  nothing is rounded: subtraction of floats can't be undone.
* `add-blosc2`: the same of the float32 numbers that, added to the parent's, give the chunk's; only if they do so bit
  for bit. For changes that were rounded: little is left of each number.
* `unchanged`: nothing; the parent's chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import blosc2
import numpy as np

from lightning_ft.checkpoint.format import Buffer, crc_of, hash_of
from lightning_ft.checkpoint.records import CHUNK_BYTES, NO_REFERENCE, REPLAYED, Frame
from lightning_ft.checkpoint.tensors import Bytes, element_bytes
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

RAW = "raw"
BLOSC2 = "blosc2"
XOR_BLOSC2 = "xor-blosc2"
ADD_BLOSC2 = "add-blosc2"
UNCHANGED = "unchanged"

REFERRING = frozenset({XOR_BLOSC2, ADD_BLOSC2, UNCHANGED, REPLAYED})
"""These need the parent's chunk."""

_CODECS = (REFERRING - {REPLAYED}) | {RAW, BLOSC2}

BLOSC2_LEAST_BYTES = 64
"""Half of that is a Blosc2 chunk's own header."""

_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 4
"""A chunk's compression in each way is tried on so much of it."""

_CHUNKS_PER_CHOICE = 8
"""So many neighbouring chunks are stored in the way that is best for the first of them."""

_LEAST_GAIN = 0.99
"""What a sample promises above this share of its size is stored as it is: decoding it would cost more than it saves."""


@functools.cache
def _options(typesize: int) -> dict[str, Any]:
    # Blosc2 holds the interpreter's lock unless told otherwise: training would wait for each chunk.
    blosc2.set_releasegil(True)
    return {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "typesize": typesize,
        "nthreads": 1,  # how many cores it gets is decided by who calls it
        "blocksize": 1 << 19,  # tried on Adam's deltas: a tenth faster than what Blosc2 would choose, and no larger
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
    }


class Encoder:
    """Chooses for each chunk the smallest way to store it. One thread at a time.

    Args:
        adds: Whether changes of float32 numbers may have been rounded, so that `add-blosc2` is tried.
    """

    def __init__(self, *, adds: bool = False) -> None:
        self._adds = adds
        self._scratch = np.empty(CHUNK_BYTES, np.uint8)
        self._choices: dict[int, tuple[str, int]] = {}  # stream -> codec, number of chunks for which it was chosen

    def encode(
        self, stream: int, dtype: str, data: Bytes, reference: Bytes | None, reference_hash: bytes
    ) -> tuple[str, Buffer, bytes]:
        """Encode a chunk.

        Args:
            stream: Of which it is; neighbours in a stream are alike.
            dtype: Of the stream.
            data: The chunk, at most `CHUNK_BYTES`.
            reference: The parent's chunk, of the same length; None: there is none.
            reference_hash: Its hash.

        Returns:
            Codec, stored bytes (perhaps a view of `data`) and the hash of `data`.
        """
        decoded_hash = hash_of(data.data)
        if reference is not None and decoded_hash == reference_hash and np.array_equal(data, reference):
            return UNCHANGED, b"", decoded_hash
        typesize = element_bytes(dtype)
        # Blosc2 4.14 spoils the last bytes of what is no whole number of elements.
        options = _options(1 if data.size % typesize else typesize)
        sources = {BLOSC2: data}
        if reference is not None:
            sources[XOR_BLOSC2] = np.bitwise_xor(data, reference, out=self._scratch[: data.size])
            change = _change(data, reference) if self._adds and dtype == "float32" else None
            if change is not None:
                sources[ADD_BLOSC2] = change
        codec = self._choose(stream, sources, options)
        if codec != RAW:
            stored: bytes = blosc2.compress2(sources[codec], **options)
            if len(stored) < data.size:
                return codec, stored, decoded_hash
        return RAW, data.data, decoded_hash

    def _choose(self, stream: int, sources: Mapping[str, Bytes], options: dict[str, Any]) -> str:
        codec, num_chunks = self._choices.get(stream, ("", 0))
        if num_chunks % _CHUNKS_PER_CHOICE == 0 or (codec != RAW and codec not in sources):
            estimates = {codec: _estimate(source, options) for codec, source in sources.items()}
            codec = min(estimates, key=estimates.__getitem__)
            if estimates[codec] >= _LEAST_GAIN:
                codec = RAW
            num_chunks = 0
        self._choices[stream] = codec, num_chunks + 1
        return codec


def _change(data: Bytes, reference: Bytes) -> Bytes | None:
    """Return the float32 numbers between two chunks; None: added to the reference they don't give the data."""
    numbers = reference.view(np.float32)
    with np.errstate(all="ignore"):
        change = data.view(np.float32) - numbers
        is_exact = np.array_equal((numbers + change).view(np.uint8), data)
    return change.view(np.uint8) if is_exact else None


def _estimate(data: Bytes, options: dict[str, Any]) -> float:
    """Guess to which share of its size a chunk is compressed."""
    if data.size < BLOSC2_LEAST_BYTES:
        return 1.0
    if data.size <= 2 * _NUM_SAMPLES * _SAMPLE_BYTES:
        sample = data
    else:
        rows = np.lib.stride_tricks.as_strided(
            data, (_NUM_SAMPLES, _SAMPLE_BYTES), (data.size // _NUM_SAMPLES & ~15, 1)
        )
        sample = np.ascontiguousarray(rows).reshape(-1)
    return len(blosc2.compress2(sample, **options)) / sample.size


def decode(frame: Frame, stored: Buffer, out: Bytes, held: bytes, piece: str) -> None:
    """Check a frame's bytes and decode them.

    Args:
        frame: Its row of the index.
        stored: Its bytes in the pack.
        out: Where to, `frame.num_bytes` long. For a codec that refers to the parent it holds the parent's chunk.
        held: The hash of what it holds.
        piece: Path of the pack, for errors.

    Raises:
        CheckpointDamagedError: They are not what was written, or not for this reference; `out` may be spoilt.
        UnsupportedCheckpointError: The codec is not known.
    """
    check_stored(frame, stored, piece)
    if frame.codec not in _CODECS:
        raise UnsupportedCheckpointError(
            f"{piece} has chunks in the codec {frame.codec!r}; this program knows {', '.join(sorted(_CODECS))}. "
            "Use the version of lightning_ft that wrote it, or a newer one."
        )
    if (frame.codec in REFERRING) != (frame.reference != NO_REFERENCE) or frame.reference not in (NO_REFERENCE, held):
        raise CheckpointDamagedError(f"{_named(frame)} refers to another chunk than its parent's", piece)
    if frame.codec == RAW:
        if frame.stored_bytes != frame.num_bytes:
            raise CheckpointDamagedError(f"{_named(frame)} is raw, but of another length", piece)
        out[:] = np.frombuffer(stored, np.uint8)
    elif frame.codec == BLOSC2:
        _decompress(frame, stored, out, piece)
    elif frame.codec in (XOR_BLOSC2, ADD_BLOSC2):
        _apply_change(frame, stored, out, piece)
    elif frame.stored_bytes:
        raise CheckpointDamagedError(f"{_named(frame)} is unchanged, but has bytes", piece)
    if frame.codec != UNCHANGED and hash_of(out.data) != frame.decoded_hash:
        raise CheckpointDamagedError(f"{_named(frame)} does not match its xxh3-128", piece)
    if frame.codec == UNCHANGED and held != frame.decoded_hash:
        raise CheckpointDamagedError(f"{_named(frame)} is unchanged, but has another hash", piece)


def _apply_change(frame: Frame, stored: Buffer, out: Bytes, piece: str) -> None:
    change = np.empty(frame.num_bytes, np.uint8)
    _decompress(frame, stored, change, piece)
    if frame.codec == XOR_BLOSC2:
        np.bitwise_xor(out, change, out=out)
    elif frame.dtype != "float32" or frame.num_bytes % 4:
        raise CheckpointDamagedError(f"{_named(frame)} is added to, but has no float32 numbers", piece)
    else:
        numbers = out.view(np.float32)
        with np.errstate(all="ignore"):
            numbers += change.view(np.float32)


def check_stored(frame: Frame, stored: Buffer, piece: str) -> None:
    """Make sure that a frame's stored bytes are those that were written.

    Raises:
        CheckpointDamagedError: They are not.
    """
    if len(stored) != frame.stored_bytes or crc_of(stored) != frame.stored_crc:
        raise CheckpointDamagedError(f"{_named(frame)} does not match its crc32c", piece)


def _decompress(frame: Frame, stored: Buffer, out: Bytes, piece: str) -> None:
    try:
        # Its own header must claim what ours does, before it is believed.
        is_as_claimed = blosc2.get_cbuffer_sizes(stored)[:2] == (frame.num_bytes, len(stored))
        if is_as_claimed:
            blosc2.decompress2(stored, dst=out, nthreads=1)
    except (ValueError, RuntimeError):
        is_as_claimed = False
    if not is_as_claimed:
        raise CheckpointDamagedError(f"{_named(frame)} is no Blosc2 chunk of {frame.num_bytes} bytes", piece)


def _named(frame: Frame) -> str:
    slot = f", slot {frame.slot}" if frame.slot else ""
    return f"chunk at {frame.start} of stream {frame.stream}{slot}"
