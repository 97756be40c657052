"""Which checkpoints there are, and what their manifests say: all that needs neither tensors nor codecs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from lightning_ft.checkpoint.format import document_hash, load_manifest, state_hash
from lightning_ft.checkpoint.log import Log, check_gradients, load_log
from lightning_ft.checkpoint.records import (
    CHUNK_BYTES,
    CONTRACTS,
    MANIFESTS,
    NO_REFERENCE,
    REPLAYED,
    Key,
    Manifest,
    Pack,
    manifest_key,
    manifest_path,
    pack_path,
)
from lightning_ft.checkpoint.store import Store, open_store
from lightning_ft.errors import CheckpointDamagedError, StoreError, UnsupportedCheckpointError

Place: TypeAlias = tuple[int, int, int]

_MAX_MANIFEST_BYTES = 1 << 30
"""The index of 9 TB. A file that is larger is none."""


def opened(store: Store | str, **storage_options: Any) -> Store:
    """Return a store as it is, or the one at a URL; errors as for `open_store`."""
    return open_store(store, **storage_options) if isinstance(store, str) else store


def published_keys(store: Store) -> list[Key]:
    """Return which checkpoints there are, newest first.

    Raises:
        StoreError: The listing failed.
    """
    found = (manifest_key(path) for path in store.list(MANIFESTS))
    return sorted((key for key in found if key is not None), reverse=True)


@contextlib.contextmanager
def missing_is_damage(piece: str) -> Iterator[None]:
    """Turn what a store says of a file that is missing or too short into damage."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointDamagedError("it is missing", piece) from error
    except StoreError as error:
        if error.reason != "short read":
            raise
        raise CheckpointDamagedError("it is cut short", piece) from error


def read_manifest(store: Store, key: Key) -> tuple[Manifest, bytes]:
    """Return a checkpoint's manifest and the hash by which others refer to it.

    Raises:
        CheckpointDamagedError: It is missing or damaged.
        UnsupportedCheckpointError: It is of a newer version, or of a mode that is not known.
        StoreError: The storage failed.
    """
    piece = manifest_path(key)
    with missing_is_damage(piece):
        if (size := store.size(piece)) > _MAX_MANIFEST_BYTES:
            raise CheckpointDamagedError(f"no manifest has {size} bytes", piece)
        data = store.read(piece)
    manifest = load_manifest(data, piece)
    if manifest.key != key:
        raise CheckpointDamagedError(f"it is the manifest of {manifest.key}", piece)
    if manifest.mode not in CONTRACTS:
        raise UnsupportedCheckpointError(f"{piece} is of the mode {manifest.mode!r}, which this program does not know")
    return manifest, document_hash(data)


def read_chain(store: Store, key: Key, known: dict[Key, tuple[Manifest, bytes]] | None = None) -> tuple[Manifest, ...]:
    """Return a checkpoint's manifest and those of its parents, base first.

    Args:
        store: Where.
        key: Of the checkpoint.
        known: Those that were read before, as `read_manifest` returned them; it is added to.

    Raises:
        CheckpointDamagedError: One of them is missing, damaged, or not the one that is referred to.
        UnsupportedCheckpointError: One is of a newer version, or of a mode that is not known.
        StoreError: The storage failed.
    """
    known = {} if known is None else known

    def read(key: Key) -> tuple[Manifest, bytes]:
        if key not in known:
            known[key] = read_manifest(store, key)
        return known[key]

    chain = [read(key)[0]]
    while (parent := chain[-1].parent) is not None:
        manifest, found = read(parent.key)
        child = chain[-1]
        if found != parent.hash or manifest.depth != child.depth - 1 or manifest.base != child.base:
            raise CheckpointDamagedError(f"it is not the parent of {child.key}", manifest_path(parent.key))
        chain.append(manifest)
    return tuple(reversed(chain))


def check_coverage(chain: Sequence[Manifest]) -> list[set[Place]]:
    """Make sure that the frames make a whole state.

    Args:
        chain: Manifests, base first.

    Returns:
        For each manifest, which of its frames are needed for the last one's state.

    Raises:
        CheckpointDamagedError: Chunks are missing, twice there, of a wrong size, or refer to what is not there.
    """
    for manifest in chain:
        _check_tiles(manifest)
    last = chain[-1]
    needed = [{frame.place for frame in last.frames if not frame.slot}]
    for child, parent in zip(reversed(chain), reversed(chain[:-1]), strict=False):
        there = {frame.place: frame for frame in parent.frames}
        referred = {}
        for frame in child.frames:
            if frame.place in needed[-1] and frame.reference != NO_REFERENCE:
                reference = there.get(frame.place)
                if (
                    reference is None
                    or reference.num_bytes != frame.num_bytes
                    or reference.decoded_hash != frame.reference
                ):
                    raise CheckpointDamagedError(
                        f"chunk at {frame.start} of stream {frame.stream} refers to one that is not in {parent.key}",
                        manifest_path(child.key),
                    )
                referred[frame.place] = reference
        needed.append(set(referred))
    needed.reverse()
    for manifest, places in zip(chain, needed, strict=True):
        if any(frame.codec == REPLAYED and frame.place in places for frame in manifest.frames):
            places.update(frame.place for frame in manifest.frames if frame.slot)
    return needed


def read_log(manifest: Manifest) -> Log | None:
    """Return the optimizer steps between a checkpoint and its parent; None: it has no such log.

    Raises:
        CheckpointDamagedError: What it has is none.
    """
    try:
        return load_log(manifest)
    except ValueError as error:
        raise CheckpointDamagedError(str(error), manifest_path(manifest.key)) from None


def _check_tiles(manifest: Manifest) -> None:
    """Make sure that each chunk of each stream is there once, with the hash of the whole as stated."""
    piece = manifest_path(manifest.key)
    log = read_log(manifest)
    replayed = log.replayed() if log else set()
    frames = [frame for frame in manifest.frames if not frame.slot]
    try:
        check_gradients(log, manifest.streams, [frame for frame in manifest.frames if frame.slot])
    except ValueError as error:
        raise CheckpointDamagedError(str(error), piece) from None
    hashes = {}
    for frame in frames:
        stream = manifest.streams[frame.stream] if frame.stream < len(manifest.streams) else None
        if (
            stream is None
            or (frame.codec == REPLAYED) != (frame.stream in replayed)
            or frame.start % CHUNK_BYTES
            or frame.start >= stream.num_bytes
            or frame.num_bytes != min(CHUNK_BYTES, stream.num_bytes - frame.start)
            or frame.dtype != stream.dtype
        ):
            raise CheckpointDamagedError(f"{frame} is of no stream", piece)
        hashes[frame.stream, frame.start] = frame.decoded_hash
    num_chunks = sum(-(-stream.num_bytes // CHUNK_BYTES) for stream in manifest.streams)
    if not len(hashes) == len(frames) == num_chunks:
        raise CheckpointDamagedError(f"it has {len(frames)} chunks instead of {num_chunks} different ones", piece)
    if state_hash(manifest.streams, hashes) != manifest.state_hash:
        raise CheckpointDamagedError("its chunks do not match the hash of the whole state", piece)


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Make sure that a checkpoint's own packs are there and have the size they should.

    Raises:
        CheckpointDamagedError: One is missing or has another size.
        StoreError: The storage failed.
    """
    for pack in manifest.packs:
        check_size(store, pack_path(manifest.key, manifest.attempt, pack.rank, pack.number), pack)


def check_size(store: Store, piece: str, pack: Pack) -> None:
    """Make sure that one pack, at a path, is there and has the size it should; errors as for `check_sizes`."""
    with missing_is_damage(piece):
        if (size := store.size(piece)) != pack.num_bytes:
            raise CheckpointDamagedError(f"it has {size} instead of {pack.num_bytes} bytes", piece)
