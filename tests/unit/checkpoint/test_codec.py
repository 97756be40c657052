"""One chunk: stored in the smallest way, decoded to the same bits, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from lightning_ft.checkpoint.codec import BLOSC2, RAW, UNCHANGED, XOR_BLOSC2, Encoder, check_stored, decode
from lightning_ft.checkpoint.format import crc_of, hash_of
from lightning_ft.checkpoint.records import CHUNK_BYTES, NO_REFERENCE, Frame
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

RANDOM = np.random.default_rng(0)


def encoded(data: np.ndarray[Any, Any], reference: np.ndarray[Any, Any] | None, dtype: str) -> tuple[Frame, bytes]:
    data = data.view(np.uint8).reshape(-1)
    base = None if reference is None else reference.view(np.uint8).reshape(-1)
    base_hash = NO_REFERENCE if base is None else hash_of(base.data)
    codec, stored, decoded_hash = Encoder().encode(0, dtype, data, base, base_hash)
    needs = base_hash if codec in (XOR_BLOSC2, UNCHANGED) else NO_REFERENCE
    frame = Frame(0, 0, 0, data.size, len(stored), dtype, codec, needs, decoded_hash, crc_of(stored))
    return frame, bytes(stored)


def decoded(frame: Frame, stored: bytes, reference: np.ndarray[Any, Any] | None = None) -> bytes:
    out = np.zeros(frame.num_bytes, np.uint8) if reference is None else reference.view(np.uint8).reshape(-1).copy()
    held = NO_REFERENCE if reference is None else hash_of(out.data)
    decode(frame, stored, out, held, "a.pack")
    return out.tobytes()


arrays = hnp.arrays(np.uint8, st.integers(0, 5000), elements=st.integers(0, 255))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(arrays, st.data(), st.sampled_from(["float32", "bfloat16", "bool", "int64", "bytes", "complex64"]))
def test_any_bytes_come_back_with_and_without_a_reference(data: Any, draw: st.DataObject, dtype: str) -> None:
    """Whatever the codec chooses, decoding gives the same bits."""
    assert decoded(*encoded(data, None, dtype)) == data.tobytes()
    reference = draw.draw(hnp.arrays(np.uint8, data.size))
    frame, stored = encoded(data, reference, dtype)
    assert decoded(frame, stored, reference) == data.tobytes()
    assert len(stored) <= data.size


def test_the_smallest_way_is_chosen() -> None:
    """Noise is raw, small numbers are compressed, what is near to its reference is stored as the difference."""
    noise = RANDOM.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    normal = RANDOM.standard_normal(CHUNK_BYTES // 4).astype(np.float32)
    near = (normal * (1 + 1e-4 * RANDOM.standard_normal(normal.size))).astype(np.float32)
    assert encoded(noise, None, "uint8")[0].codec == RAW
    assert encoded(normal, None, "float32")[0].codec == BLOSC2
    assert encoded(near, normal, "float32")[0].codec == XOR_BLOSC2
    assert encoded(near, near.copy(), "float32")[0].codec == UNCHANGED
    sizes = [encoded(near, reference, "float32")[0].stored_bytes for reference in (None, normal)]
    assert sizes[1] < 0.8 * sizes[0] < 0.8 * near.nbytes
    far = RANDOM.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    assert encoded(normal, far, "float32")[0].codec == BLOSC2


def test_choice_is_reconsidered_within_a_stream() -> None:
    """Of many chunks of a stream the later ones are not stored as the first one was, if they differ."""
    encoder = Encoder()
    noise = RANDOM.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    zeros = np.zeros(CHUNK_BYTES, np.uint8)
    codecs = [encoder.encode(0, "float32", data, None, NO_REFERENCE)[0] for data in [noise] * 3 + [zeros] * 12]
    assert codecs[0] == RAW
    assert codecs[-1] == BLOSC2
    assert encoder.encode(1, "float32", zeros, None, NO_REFERENCE)[0] == BLOSC2


NORMAL = RANDOM.standard_normal(1000).astype(np.float32)
OTHER = (NORMAL * 1.0001).astype(np.float32)


@pytest.mark.parametrize(("reference", "codec"), [(None, BLOSC2), (OTHER, XOR_BLOSC2), (NORMAL.copy(), UNCHANGED)])
def test_each_changed_field_of_a_frame_is_noticed(reference: Any, codec: str) -> None:
    """A header with a right checksum of its own, but of another chunk, is refused."""
    frame, stored = encoded(NORMAL, reference, "float32")
    assert frame.codec == codec
    other_codecs = {RAW, BLOSC2, XOR_BLOSC2, UNCHANGED} - {codec}
    changes: list[dict[str, Any]] = [{"codec": other} for other in other_codecs]
    changes += [{"decoded_hash": hash_of(b"x")}, {"reference": hash_of(b"x")}, {"stored_crc": 1}, {"stored_bytes": 1}]
    for change in changes:
        with pytest.raises(CheckpointDamagedError, match=r"a\.pack is damaged"):
            decoded(dataclasses.replace(frame, **change), stored, reference)
    with pytest.raises(UnsupportedCheckpointError, match="'zip'"):
        decoded(dataclasses.replace(frame, codec="zip"), stored, reference)


def test_each_flipped_bit_of_stored_bytes_is_noticed() -> None:
    """Before they are decoded."""
    frame, stored = encoded(NORMAL[:100], OTHER[:100], "float32")
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointDamagedError, match="crc32c"):
            check_stored(frame, bytes(flipped), "a.pack")


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.data())
def test_made_up_compressed_bytes_do_no_harm(draw: st.DataObject) -> None:
    """With a right checksum, too, Blosc2 chunks that were tampered with are refused or decode to the right bits."""
    frame, stored = encoded(NORMAL, None, "float32")
    tampered = bytearray(stored)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, 63) | st.integers(0, len(tampered) - 1))
        tampered[place] = draw.draw(st.integers(0, 255))
    tampered = tampered[: draw.draw(st.integers(0, len(tampered)) | st.just(len(tampered)))]
    believed = dataclasses.replace(frame, stored_crc=crc_of(bytes(tampered)), stored_bytes=len(tampered))
    with contextlib.suppress(CheckpointDamagedError):
        assert decoded(believed, bytes(tampered)) == NORMAL.tobytes()


def test_larger_claim_of_a_compressed_chunk_is_not_believed() -> None:
    """A chunk that would decode to more than its frame says is refused before memory is taken for it."""
    frame, stored = encoded(np.zeros(CHUNK_BYTES, np.uint8), None, "uint8")
    assert frame.stored_bytes < 100
    with pytest.raises(CheckpointDamagedError, match="no Blosc2 chunk of 1000 bytes"):
        decoded(dataclasses.replace(frame, num_bytes=1000), stored)
