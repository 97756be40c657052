"""The bytes of a checkpoint's pieces: packs, footers, manifests. Pure: bytes from and to frozen dataclasses.

FORMAT.md is the specification; this module is its first reader and writer. What is read here may be damaged or made to
do harm, so each length is checked against what is there before it is used, each checksum before what it covers is
believed, and every refusal is a `CheckpointDamagedError` or an `UnsupportedCheckpointError`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import crc32c
import xxhash

from lightning_ft.checkpoint.records import (
    CHUNK_BYTES,
    FRAME_BYTES,
    HASH_BYTES,
    MAX_DEPTH,
    MAX_INT,
    MAX_PACK_BYTES,
    NO_REFERENCE,
    PACK_HEADER_BYTES,
    VERSION,
    Footer,
    Frame,
    Key,
    Manifest,
    Pack,
    Ref,
    Stream,
    located,
)
from lightning_ft.data.cursor import read_fields
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError
from lightning_ft.membership.wire_fields import read_name, read_natural, read_text, short

Buffer: TypeAlias = bytes | memoryview

MAX_DIMENSIONS = 64
"""As many as torch allows."""

_PACK_MAGIC = b"LFTPACK1"
_DOCUMENT = struct.Struct("<8sIIQ")  # magic, version, bytes of JSON, number of frames
_FRAME = struct.Struct("<IIQII24s20s16s16sI")
_MOST_PER_BYTE = 1032
"""What deflate makes of a byte at most."""


def hash_of(data: Buffer) -> bytes:
    """Return xxh3-128 of some bytes, in its canonical (big-endian) form: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def crc_of(data: Buffer) -> int:
    """Return crc32c (Castagnoli) of some bytes."""
    return crc32c.crc32c(data)


# -- frames and packs ------------------------------------------------------------------------------------------------


def dump_frame(frame: Frame) -> bytes:
    """Return a frame's row of the index, `FRAME_BYTES` bytes.

    Raises:
        ValueError: A name or a number does not fit.
    """
    dtype, codec = frame.dtype.encode("ascii"), frame.codec.encode("ascii")
    if not 0 < len(dtype) <= 24 or not 0 < len(codec) <= 20:
        raise ValueError(f"frame: expected a dtype of 1 to 24 and a codec of 1 to 20 characters, got {frame!r}")
    try:
        return _FRAME.pack(
            frame.stream,
            frame.slot,
            frame.start,
            frame.num_bytes,
            frame.stored_bytes,
            dtype,
            codec,
            frame.reference,
            frame.decoded_hash,
            frame.stored_crc,
        )
    except struct.error as error:
        raise ValueError(f"frame: {error}: {frame!r}") from None


def load_frame(data: Buffer, piece: str) -> Frame:
    """Read a row.

    Args:
        data: `FRAME_BYTES` bytes.
        piece: What it is part of, for the error.

    Raises:
        CheckpointDamagedError: It makes no sense.
    """
    stream, slot, start, num_bytes, stored, *names, reference, decoded, crc = _FRAME.unpack(data)
    names = [name.rstrip(b"\0") for name in names]
    if any(not re.fullmatch(rb"[!-~]+", name) for name in names):
        raise CheckpointDamagedError(f"a frame's dtype or codec is not a name: {names}", piece)
    if num_bytes > CHUNK_BYTES or start + num_bytes > MAX_INT:
        raise CheckpointDamagedError(f"a frame claims {num_bytes} bytes at {start}; at most {CHUNK_BYTES} fit", piece)
    dtype, codec = (name.decode("ascii") for name in names)
    return Frame(stream, slot, start, num_bytes, stored, dtype, codec, reference, decoded, crc)


def pack_header() -> bytes:
    """Return the bytes that each pack begins with; frames follow, without gaps, to its end."""
    return _PACK_MAGIC


def check_pack_header(data: Buffer, piece: str) -> None:
    """Make sure that a pack begins as it must.

    Raises:
        CheckpointDamagedError: It does not.
    """
    if bytes(data) != _PACK_MAGIC:
        raise CheckpointDamagedError(f"a pack begins with {bytes(data)!r}", piece)


# -- hashes of descriptions ------------------------------------------------------------------------------------------


def describe(stream: Stream) -> bytes:
    """Return the canonical description of a stream, of which hashes are taken."""
    return dump_json(_dump_stream(stream))


def tensors_hash(streams: Iterable[Stream]) -> bytes:
    """Hash which tensors and arrays there are: two states can be compared chunk by chunk if it is equal."""
    return hash_of(b"\n".join(describe(stream) for stream in streams if stream.kind in ("tensor", "array")))


def state_hash(streams: Iterable[Stream], decoded_hashes: Mapping[tuple[int, int], bytes]) -> bytes:
    """Hash the whole state: for each stream its description, then the hashes of its chunks in order.

    Args:
        streams: In order.
        decoded_hashes: By index of the stream and start of the chunk, for all chunks.
    """
    whole = xxhash.xxh3_128()
    for index, stream in enumerate(streams):
        whole.update(describe(stream))
        for start in range(0, stream.num_bytes, CHUNK_BYTES):
            whole.update(decoded_hashes[index, start])
    return whole.digest()


# -- documents ------------------------------------------------------------------------------------------------------


def dump_document(document: Footer | Manifest) -> bytes:
    """Return the bytes of a footer or a manifest: head, compressed JSON and index, xxh3-128 of all that.

    Raises:
        ValueError: A frame's name or number does not fit.
    """
    values = {
        field.name: _DUMPERS.get(field.name, _same)(getattr(document, field.name))
        for field in dataclasses.fields(document)
        if field.name != "frames"
    }
    if isinstance(document, Footer) and not document.extra:
        del values["extra"]
    fields = dump_json(values)
    head = _DOCUMENT.pack(document.magic, VERSION, len(fields), len(document.frames))
    body = head + zlib.compress(b"".join([fields, *map(dump_frame, document.frames)]))
    return body + hash_of(body)


def document_hash(data: Buffer) -> bytes:
    """Return the hash at the end of a document, by which a `Ref` names it."""
    return bytes(data[-HASH_BYTES:])


def load_footer(data: bytes, piece: str) -> Footer:
    """Read a footer.

    Args:
        data: The whole file.
        piece: Its path, for the error.

    Raises:
        CheckpointDamagedError: It is not what was written.
        UnsupportedCheckpointError: It is of a newer version.
    """
    fields, frames = _load_document(data, piece, Footer.magic, _FOOTER_READERS)
    footer = Footer(**fields, frames=frames)
    if footer.rank >= footer.num_ranks or any(pack.rank != footer.rank for pack in footer.packs):
        raise CheckpointDamagedError(f"rank {footer.rank} of {footer.num_ranks} has packs of another", piece)
    _check_packs(footer, piece)
    return footer


def load_manifest(data: bytes, piece: str) -> Manifest:
    """Read a manifest; arguments and errors as for `load_footer`."""
    fields, frames = _load_document(data, piece, Manifest.magic, _MANIFEST_READERS)
    manifest = Manifest(**fields, frames=frames)
    parent = manifest.parent
    if (parent is None) != (manifest.depth == 0) or (parent is None) != (manifest.base == manifest.key):
        raise CheckpointDamagedError("parent, base and depth contradict each other", piece)
    if parent is not None and not manifest.base <= parent.key < manifest.key:
        raise CheckpointDamagedError(f"the parent {parent.key} is not older than {manifest.key}", piece)
    if manifest.depth > MAX_DEPTH:
        raise CheckpointDamagedError(f"the base is {manifest.depth} > {MAX_DEPTH} checkpoints away", piece)
    if any(pack.rank >= manifest.num_ranks for pack in manifest.packs):
        raise CheckpointDamagedError(f"a pack is of a rank that is none of the {manifest.num_ranks}", piece)
    _check_packs(manifest, piece)
    return manifest


def _check_packs(document: Footer | Manifest, piece: str) -> None:
    packs, frames = document.packs, document.frames
    rank = number = -1
    for pack in packs:
        is_next = pack.number == number + 1 if pack.rank == rank else pack.rank > rank and pack.number == 0
        if not is_next:
            raise CheckpointDamagedError(f"pack {pack.number} of rank {pack.rank} is out of order", piece)
        rank, number = pack.rank, pack.number
    if sum(pack.num_frames for pack in packs) != len(frames):
        raise CheckpointDamagedError(f"the packs do not have the {len(frames)} frames of the index", piece)
    sizes = {(pack.rank, pack.number): PACK_HEADER_BYTES for pack in packs}
    for pack, _, frame in located(packs, frames):
        sizes[pack.rank, pack.number] += frame.stored_bytes
    for pack in packs:
        if pack.num_bytes != sizes[pack.rank, pack.number] or pack.num_bytes > MAX_PACK_BYTES:
            raise CheckpointDamagedError(f"{pack} does not have the bytes of its frames", piece)
    if document.parent is None and any(frame.reference != NO_REFERENCE for frame in frames):
        raise CheckpointDamagedError("a frame refers to a parent, but there is none", piece)


def _check_version(version: int, piece: str) -> None:
    if version != VERSION:
        raise UnsupportedCheckpointError(
            f"{piece} has version {version} of the format; this program reads version {VERSION}. Use the version of "
            "lightning_ft that wrote it, or a newer one."
        )


def _load_document(
    data: bytes, piece: str, magic: bytes, readers: Mapping[str, Callable[[object], Any]]
) -> tuple[dict[str, Any], tuple[Frame, ...]]:
    if len(data) < _DOCUMENT.size + HASH_BYTES:
        raise CheckpointDamagedError(f"it has only {len(data)} bytes", piece)
    if hash_of(memoryview(data)[:-HASH_BYTES]) != data[-HASH_BYTES:]:
        raise CheckpointDamagedError("it does not match its checksum", piece)
    found, version, json_bytes, num_frames = _DOCUMENT.unpack_from(data)
    if found != magic:
        raise CheckpointDamagedError(f"it begins with {found!r} instead of {magic!r}", piece)
    _check_version(version, piece)
    contents = _inflate(data[_DOCUMENT.size : -HASH_BYTES], json_bytes + num_frames * FRAME_BYTES, piece)
    try:
        values = parse_json(contents[:json_bytes])
        if magic == Footer.magic and isinstance(values, dict):
            values.setdefault("extra", {})
        fields = read_fields("document", values, readers)
    except ValueError as error:
        raise CheckpointDamagedError(str(error), piece) from None
    rows = range(json_bytes, len(contents), FRAME_BYTES)
    return fields, tuple(load_frame(contents[at : at + FRAME_BYTES], piece) for at in rows)


def _inflate(data: bytes, num_bytes: int, piece: str) -> memoryview:
    """Decompress what claims to be so long, if it is."""
    if num_bytes > _MOST_PER_BYTE * len(data):
        raise CheckpointDamagedError(f"{len(data)} bytes can't be the {num_bytes} that its head says", piece)
    inflater = zlib.decompressobj()
    try:
        contents = inflater.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise CheckpointDamagedError(f"it can't be decompressed: {error}", piece) from None
    if len(contents) != num_bytes or not inflater.eof or inflater.unused_data:
        raise CheckpointDamagedError(f"its contents are not the {num_bytes} bytes that its head says", piece)
    return memoryview(contents)


# -- JSON -----------------------------------------------------------------------------------------------------------


def dump_json(value: object) -> bytes:
    """Return JSON in the format's canonical form: ASCII, sorted names, no spaces.

    Raises:
        ValueError: A float is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(data: Buffer) -> object:
    """Parse JSON as the format has it: ASCII, no NaN, no endless nesting.

    Raises:
        ValueError: It is not that.
    """
    try:
        return json.loads(bytes(data).decode("ascii"), parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _reject_constant(name: str) -> object:
    raise ValueError(f"JSON has no {name}")


def _same(value: object) -> object:
    return value


def _dump_key(key: Key) -> str:
    return str(key)


def _read_key(value: object) -> Key:
    key = Key.parse(read_text(value))
    if key is None:
        raise ValueError(f"expected generation and step, got {short(value)}")
    return key


def _dump_hash(value: bytes) -> str:
    return value.hex()


def _read_hash(value: object) -> bytes:
    if not re.fullmatch("[0-9a-f]{32}", read_text(value)):
        raise ValueError(f"expected 32 hexadecimal digits, got {short(value)}")
    return bytes.fromhex(read_text(value))


def _dump_ref(ref: Ref | None) -> object:
    return None if ref is None else {"key": str(ref.key), "hash": ref.hash.hex()}


def _read_ref(value: object) -> Ref | None:
    return None if value is None else Ref(**read_fields("reference", value, {"key": _read_key, "hash": _read_hash}))


def _dump_stream(stream: Stream) -> list[object]:
    stride = None if stream.stride is None else list(stream.stride)
    return [stream.kind, stream.name, stream.dtype, list(stream.shape), stride, stream.num_bytes]


def _dump_streams(streams: Iterable[Stream]) -> object:
    return [_dump_stream(stream) for stream in streams]


def _dump_packs(packs: Iterable[Pack]) -> object:
    return [list(dataclasses.astuple(pack)) for pack in packs]


def _read_row(value: object, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"expected {length} values, got {short(value)}")
    return value


def _read_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return value


def _read_sizes(value: object) -> tuple[int, ...]:
    sizes = tuple(map(read_natural, _read_list(value)))
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(sizes)}")
    return sizes


def _read_stream(value: object) -> Stream:
    kind, name, dtype, shape, stride, num_bytes = _read_row(value, 6)
    if kind not in ("tensor", "array", "tree", "pickle"):
        raise ValueError(f"expected tensor, array, tree or pickle, got {short(kind)}")
    sizes = _read_sizes(shape)
    strides = None if stride is None else _read_sizes(stride)
    if strides is not None and len(strides) != len(sizes):
        raise ValueError(f"expected as many strides as dimensions, got {short(stride)}")
    return Stream(kind, read_text(name), read_name(dtype), sizes, strides, read_natural(num_bytes))


def _read_streams(value: object) -> tuple[Stream, ...]:
    return tuple(map(_read_stream, _read_list(value)))


def _read_packs(value: object) -> tuple[Pack, ...]:
    return tuple(Pack(*map(read_natural, _read_row(row, 4))) for row in _read_list(value))


def _read_texts(value: object) -> Mapping[str, str]:
    return {name: read_text(text) for name, text in _read_object(value).items()}


def _read_object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return value


_DUMPERS: Mapping[str, Callable[[Any], object]] = {
    "key": _dump_key,
    "base": _dump_key,
    "parent": _dump_ref,
    "state_hash": _dump_hash,
    "tensors_hash": _dump_hash,
    "streams": _dump_streams,
    "packs": _dump_packs,
}

_READERS: Mapping[str, Callable[[object], Any]] = {
    "key": _read_key,
    "attempt": read_natural,
    "extra": _read_object,
    "mode": read_name,
    "parent": _read_ref,
    "num_ranks": read_natural,
    "streams": _read_streams,
    "packs": _read_packs,
}

_FOOTER_READERS = {**_READERS, "rank": read_natural, "tensors_hash": _read_hash}

_MANIFEST_READERS = {
    **_READERS,
    "contract": read_name,
    "base": _read_key,
    "depth": read_natural,
    "state_hash": _read_hash,
    "versions": _read_texts,
}
