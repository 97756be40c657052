"""Reads the newest checkpoint that is intact, whoever and however many wrote it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from lightning_ft.checkpoint.chain import read_contents
from lightning_ft.checkpoint.manifests import opened, published_keys, read_chain
from lightning_ft.checkpoint.records import LATEST, Key, Manifest, manifest_path
from lightning_ft.checkpoint.store import Store
from lightning_ft.checkpoint.tree import unflatten
from lightning_ft.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ReplayError,
    StoreError,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        state: What was saved; tensors in the host's memory.
        manifest: Of the checkpoint.
        damaged: The newer checkpoints that could not be read, newest first, with what is wrong with each: it is
            damaged, or a log of gradients that can't be replayed here.
    """

    state: Any
    manifest: Manifest
    damaged: tuple[tuple[Key, CheckpointError], ...]

    @property
    def num_steps_lost(self) -> int:
        """How many steps older it is than the newest checkpoint; 0 if that one's step is lower."""
        newest = max((key.step for key, _ in self.damaged), default=0)
        return max(0, newest - self.manifest.key.step)


def load(store: Store | str, *, weights_only: bool = True, **storage_options: Any) -> Any:
    """Return the state of the newest checkpoint that is intact, every byte of it checked.

    A damaged checkpoint is named in a warning, which says how many steps the older one costs.

    Args:
        store: A URL such as `s3://bucket/run`, a path, or a store.
        weights_only: Whether objects other than tensors, arrays, numbers, text and their containers may only be those
            that `torch.load(weights_only=True)` allows. False runs whatever the checkpoint's pickles say: only for
            checkpoints whose writer you trust.
        storage_options: For a URL; see `lightning_ft.checkpoint.store.open_store`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none that is intact.
        UnsupportedCheckpointError: A newer program wrote it, or it needs `weights_only=False`.
        StoreError: The storage failed; that is no reason to take an older checkpoint.
    """
    return restore(opened(store, **storage_options), weights_only=weights_only).state


def restore(store: Store, *, key: Key | None = None, weights_only: bool = True) -> Restored:
    """Read a checkpoint.

    Args:
        store: Where.
        key: Which; None: the newest that is intact.
        weights_only: As for `load`.

    Raises:
        CheckpointDamagedError: The one that was asked for is damaged or missing.
        ReplayError: It is a log of gradients that can't be replayed here.
        CheckpointNotFoundError, UnsupportedCheckpointError, StoreError: As for `load`.
    """
    if key is not None:
        return Restored(*_read(store, key, weights_only=weights_only), ())
    damaged: dict[Key, CheckpointError] = {}
    vanished: set[Key] = set()
    while candidates := [key for key in _candidates(store) if key not in damaged and key not in vanished]:
        try:
            state, manifest = _read(store, candidates[0], weights_only=weights_only)
        except (CheckpointDamagedError, ReplayError) as error:
            if _is_published(store, candidates[0]):
                damaged[candidates[0]] = error
                _log.warning("Checkpoint %s can't be used: %s", candidates[0], error)
            else:  # deleted while it was read, or never there: newer ones may be
                vanished.add(candidates[0])
            continue
        # One that was damaged and older than this has cost nothing: it was tried before this one appeared.
        newer = tuple((key, damaged[key]) for key in sorted(damaged, reverse=True) if key > manifest.key)
        found = Restored(state, manifest, newer)
        if newer:
            _log.warning("Checkpoint %s is used instead: %d steps are lost.", manifest.key, found.num_steps_lost)
        return found
    what = "; ".join(str(error) for _, error in sorted(damaged.items(), reverse=True))
    raise CheckpointNotFoundError(
        f"loading from {store.url} failed: "
        + (f"none of its {len(damaged)} checkpoints can be used: {what}" if damaged else "there is no checkpoint")
    )


def _candidates(store: Store) -> list[Key]:
    """Return which checkpoints there may be, newest first: those listed, and the hint's if a listing lags behind."""
    keys = set(published_keys(store))
    try:
        hint = Key.parse(store.read(LATEST).decode("ascii", "replace").strip())
    except (FileNotFoundError, StoreError):
        hint = None
    return sorted(keys | {hint} if hint else keys, reverse=True)


def _is_published(store: Store, key: Key) -> bool:
    try:
        store.size(manifest_path(key))
    except FileNotFoundError:
        return False
    return True


def _read(store: Store, key: Key, *, weights_only: bool) -> tuple[Any, Manifest]:
    chain = read_chain(store, key)
    contents = read_contents(store, chain)
    manifest = chain[-1]
    return unflatten(manifest.streams, contents, manifest_path(key), weights_only=weights_only), manifest
