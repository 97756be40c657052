"""Loads differential checkpoints wherever Lightning loads one: `fit(ckpt_path=...)`, `validate`, `test`, `predict`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import CheckpointIO
from typing_extensions import override

from lightning_ft.checkpoint.manifests import published_keys, read_chain
from lightning_ft.checkpoint.records import MANIFESTS, Key, manifest_path
from lightning_ft.checkpoint.store import Store, open_store
from lightning_ft.checkpoint.watched import WatchedStore
from lightning_ft.comm import backend
from lightning_ft.errors import CheckpointError
from lightning_ft.lightning_internals import rank_zero_rank
from lightning_ft.lightning_progress import WaitingBar


class DeltaCheckpointIO(CheckpointIO):
    """Loads the checkpoints of `DeltaCheckpoint`; whatever else is loaded, saved or removed, another plugin does.

    `ft_ddp` and every Trainer with a `DeltaCheckpoint` have it; others are given it:
    `Trainer(plugins=[lightning_ft.DeltaCheckpointIO()])`. A path is a differential checkpoint if it is a directory with
    checkpoints in it (the newest intact one is meant) or one of the manifests in it (`.../manifests/<name>`).

    Args:
        other: None: Lightning's own.
        storage_options: For the storage; see `lightning_ft.checkpoint.store.open_store`.
    """

    def __init__(self, other: CheckpointIO | None = None, **storage_options: Any) -> None:
        self._other = TorchCheckpointIO() if other is None else other
        self._storage_options = storage_options

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; tensors of a differential one come to the host's memory, whatever `map_location` says.

        Raises:
            CheckpointError: It is a differential one that can't be loaded; the message says why.
        """
        found = locate(os.fspath(path), **self._storage_options)
        if found is None:
            loaded: dict[str, Any] = self._other.load_checkpoint(path, map_location, weights_only)
            return loaded
        from lightning_ft.checkpoint.restore import restore  # with Blosc2, half a second: most fits load none

        url, key = found
        started_s = time.monotonic()
        store = open_store(url, **self._storage_options)
        with WaitingBar(f"Restoring from {url}", _num_stored(store, key)) as bar:
            watched = WatchedStore(store, bar.done)
            restored = restore(watched, key=key, weights_only=weights_only is not False)
        if not rank_zero_rank():
            backend.report(
                "checkpoint_restored",
                step=restored.manifest.key.step,
                source="storage",
                steps_lost=restored.num_steps_lost,
                duration_s=round(time.monotonic() - started_s, 6),
                path=f"{store.url}/{manifest_path(restored.manifest.key)}",
            )
        state: dict[str, Any] = restored.state
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """As the other plugin."""
        self._other.save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """As the other plugin."""
        self._other.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        """As the other plugin."""
        self._other.teardown()


def _num_stored(store: Store, key: Key | None) -> int | None:
    """Return how many bytes a checkpoint, and what it depends on, has; None: it can't be told."""
    try:
        chain = read_chain(store, key or published_keys(store)[0])
    except (CheckpointError, IndexError):  # whoever reads it says what is wrong
        return None
    return sum(pack.num_bytes for manifest in chain for pack in manifest.packs)


def locate(path: str, **storage_options: Any) -> tuple[str, Key | None] | None:
    """Return the directory, and the checkpoint in it if one is named; None: it is no differential checkpoint's path."""
    directory, _, name = path.rstrip("/").rpartition("/")
    root, slash, folder = directory.rpartition("/")
    key = Key.parse(name)
    if key is not None and f"{folder}/" == MANIFESTS:
        return root or slash or ".", key
    protocol, local = split_protocol(path)
    is_local = protocol in {None, "file", "local"}
    if name.endswith(".ckpt") or (is_local and not (Path(local) / MANIFESTS).is_dir()):
        return None
    return (path, None) if is_local or published_keys(open_store(path, **storage_options)) else None
