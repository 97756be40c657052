"""One checkpoint with the ones that it depends on: read, checked, decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from lightning_ft.checkpoint.codec import check_stored, decode
from lightning_ft.checkpoint.format import check_pack_header, hash_of
from lightning_ft.checkpoint.log import Log, gradient_bytes
from lightning_ft.checkpoint.manifests import Place, check_coverage, check_sizes, missing_is_damage, read_log
from lightning_ft.checkpoint.records import (
    NO_REFERENCE,
    PACK_HEADER_BYTES,
    REPLAYED,
    Frame,
    Manifest,
    manifest_path,
    pack_path,
)
from lightning_ft.checkpoint.replay import replay
from lightning_ft.checkpoint.store import Store
from lightning_ft.checkpoint.tensors import Bytes
from lightning_ft.errors import CheckpointDamagedError, ReplayError

WINDOW_BYTES = 16 << 20
"""So much of a pack is read at once: enough that the way to the storage does not count, little beside the state."""

_GAP_BYTES = 128 << 10
"""What is not needed is read along if it is no more than this: cheaper than another request."""


def read_contents(store: Store, chain: Sequence[Manifest]) -> list[torch.Tensor]:
    """Return the bytes of each stream of the last manifest: uint8, one dimension. Every byte was checked.

    Raises:
        CheckpointDamagedError: A piece is missing or damaged.
        UnsupportedCheckpointError: A codec is not known; or, as a `ReplayError`, an optimizer works otherwise here.
        StoreError: The storage failed.
    """
    needed = check_coverage(chain)
    for manifest in chain:
        check_sizes(store, manifest)
    streams = chain[-1].streams
    contents = [torch.empty(stream.num_bytes, dtype=torch.uint8) for stream in streams]
    views = [content.numpy() for content in contents]
    held: dict[Place, bytes] = {}
    for manifest, places in zip(chain, needed, strict=True):
        log = read_log(manifest)
        replayed = []
        gradients: dict[tuple[int, int], torch.Tensor] = {}
        for piece, frame, stored in read_frames(store, manifest, places):
            if frame.codec == REPLAYED:
                replayed.append(frame)
            elif frame.slot:
                assert log is not None, "of a manifest without a log no gradients are needed"
                whole = _gradient(gradients, manifest, log, frame)
                decode(frame, stored, whole.numpy()[frame.start :][: frame.num_bytes], NO_REFERENCE, piece)
            else:
                out = views[frame.stream][frame.start : frame.start + frame.num_bytes]
                decode(frame, stored, out, held.get(frame.place, NO_REFERENCE), piece)
                held[frame.place] = frame.decoded_hash
        if log is not None and replayed:
            replay(log, manifest.streams, contents, gradients, manifest_path(manifest.key))
            for frame in replayed:
                _check_replayed(frame, log, views, manifest_path(manifest.key))
                held[frame.place] = frame.decoded_hash
    return contents


def _check_replayed(frame: Frame, log: Log, views: Sequence[Bytes], piece: str) -> None:
    out = views[frame.stream][frame.start : frame.start + frame.num_bytes]
    if frame.stored_bytes:
        raise CheckpointDamagedError(
            f"chunk at {frame.start} of stream {frame.stream} is replayed, but has bytes", piece
        )
    if hash_of(out.data) != frame.decoded_hash:
        raise ReplayError(
            f"{piece} is intact, but {log.optimizer} does not make of its gradients here what it made of them with "
            f"{log.program}, or something else had changed averages. Load it on such a machine, or an older one."
        )


def _gradient(
    gradients: dict[tuple[int, int], torch.Tensor], manifest: Manifest, log: Log, frame: Frame
) -> torch.Tensor:
    """Return the memory for a gradient, by step and stream."""
    place = frame.slot - 1, frame.stream
    if place not in gradients:
        dtype = dict(log.steps[place[0]].gradients)[frame.stream]
        gradients[place] = torch.empty(gradient_bytes(manifest.streams[frame.stream], dtype), dtype=torch.uint8)
    return gradients[place]


def read_frames(
    store: Store, manifest: Manifest, places: set[Place] | None = None
) -> Iterator[tuple[str, Frame, memoryview]]:
    """Yield frames from the packs: path, row of the index, and the stored bytes, which are still to be checked.

    Args:
        store: Where.
        manifest: Of the checkpoint whose packs are read.
        places: Which frames are wanted; None: all.

    Raises:
        CheckpointDamagedError: A pack is missing, cut short, or none.
        StoreError: The storage failed.
    """
    for piece, frames in _wanted(manifest, places).items():
        with missing_is_damage(piece):
            check_pack_header(store.read(piece, 0, PACK_HEADER_BYTES), piece)
        for window in _windows(frames):
            start, end = window[0][0], _end(*window[-1])
            with missing_is_damage(piece):
                data = memoryview(store.read(piece, start, end) if start < end else b"")
            for offset, frame in window:
                at = offset - start
                yield piece, frame, data[at : at + frame.stored_bytes]


def check_stored_bytes(store: Store, manifest: Manifest) -> None:
    """Check each byte of a checkpoint's own packs, without decoding them; errors as for `read_contents`."""
    check_sizes(store, manifest)
    for piece, frame, stored in read_frames(store, manifest):
        check_stored(frame, stored, piece)


def _wanted(manifest: Manifest, places: set[Place] | None) -> Mapping[str, list[tuple[int, Frame]]]:
    found: dict[str, list[tuple[int, Frame]]] = {}
    for pack, offset, frame in manifest.located():
        if places is None or frame.place in places:
            piece = pack_path(manifest.key, manifest.attempt, pack.rank, pack.number)
            found.setdefault(piece, []).append((offset, frame))
    return found


def _windows(frames: Iterable[tuple[int, Frame]]) -> Iterator[list[tuple[int, Frame]]]:
    """Cut a pack's frames into groups that are read at once; a frame is never larger than a few chunks."""
    window: list[tuple[int, Frame]] = []
    for offset, frame in frames:
        if window and (offset - _end(*window[-1]) > _GAP_BYTES or _end(offset, frame) - window[0][0] > WINDOW_BYTES):
            yield window
            window = []
        window.append((offset, frame))
    if window:
        yield window


def _end(offset: int, frame: Frame) -> int:
    return offset + frame.stored_bytes
