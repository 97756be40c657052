"""Finds out which checkpoints are intact, and names every piece that is damaged or missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lightning_ft.checkpoint.chain import read_contents, read_frames
from lightning_ft.checkpoint.codec import check_stored
from lightning_ft.checkpoint.format import load_footer
from lightning_ft.checkpoint.manifests import (
    check_coverage,
    check_size,
    check_sizes,
    missing_is_damage,
    opened,
    published_keys,
    read_chain,
)
from lightning_ft.checkpoint.records import Key, Manifest, footer_path, pack_path
from lightning_ft.checkpoint.store import Store
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a checkpoint: nothing if it is intact.

    Attributes:
        key: Of the checkpoint.
        problems: Each with the path of the piece; damage of a checkpoint that it depends on counts as its own.
        obstacle: Why it can't be read here though nothing is damaged: by this program, or with this machine's
            optimizers; None: it can, as far as was looked.
    """

    key: Key
    problems: tuple[str, ...]
    obstacle: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether nothing keeps it from being restored here."""
        return not self.problems and self.obstacle is None


def verify(store: Store | str, *, deep: bool = False, **storage_options: Any) -> list[Verdict]:
    """Check all checkpoints. One that a job deletes meanwhile is left out.

    Args:
        store: A URL, a path, or a store.
        deep: Decode everything and compare with what was saved, instead of checking what is stored: it takes as long
            as loading each.
        storage_options: For a URL.

    Returns:
        One verdict for each, newest first.

    Raises:
        StoreError: The storage failed.
    """
    store = opened(store, **storage_options)
    own: dict[Key, tuple[str, ...]] = {}
    verdicts = [_judge(store, key, own, deep=deep) for key in published_keys(store)]
    if not any(verdict.problems for verdict in verdicts):
        return verdicts
    still_there = set(published_keys(store))
    return [verdict for verdict in verdicts if not verdict.problems or verdict.key in still_there]


def is_usable(store: Store, key: Key) -> bool:
    """Whether a checkpoint can be restored, bit for bit: what is damaged of it or its parents may not be needed.

    Nothing is decoded, so the answer is the same on each machine, also for what only an equal optimizer can replay.

    Raises:
        UnsupportedCheckpointError: A newer program wrote it.
        StoreError: The storage failed.
    """
    try:
        chain = read_chain(store, key)
        for manifest, places in zip(chain, check_coverage(chain), strict=True):
            check_sizes(store, manifest)
            for piece, frame, stored in read_frames(store, manifest, places):
                check_stored(frame, stored, piece)
    except CheckpointDamagedError:
        return False
    return True


def _judge(store: Store, key: Key, own: dict[Key, tuple[str, ...]], *, deep: bool) -> Verdict:
    """Find out what is wrong with a checkpoint and its parents; `own` remembers what was found of each."""
    try:
        chain = read_chain(store, key)
        check_coverage(chain)
        for manifest in chain:
            if manifest.key not in own:
                own[manifest.key] = tuple(str(error) for error in _own_problems(store, manifest))
        problems = tuple(problem for manifest in chain for problem in own[manifest.key])
        if deep and not problems:
            read_contents(store, chain)
    except UnsupportedCheckpointError as error:
        return Verdict(key, (), str(error))
    except CheckpointDamagedError as error:
        return Verdict(key, (str(error),))
    return Verdict(key, problems)


def _own_problems(store: Store, manifest: Manifest) -> Iterator[CheckpointDamagedError]:
    """Check each byte of each of a checkpoint's own packs and footers, without decoding; yield what is damaged."""
    places: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
    for pack, _, frame in manifest.located():
        places.setdefault((pack.rank, pack.number), set()).add(frame.place)
    for pack in manifest.packs:
        try:
            check_size(store, pack_path(manifest.key, manifest.attempt, pack.rank, pack.number), pack)
            for piece, frame, stored in read_frames(store, manifest, places.get((pack.rank, pack.number), set())):
                check_stored(frame, stored, piece)
        except CheckpointDamagedError as error:
            yield error
    for rank in range(manifest.num_ranks):
        piece = footer_path(manifest.key, manifest.attempt, rank)
        try:
            with missing_is_damage(piece):
                load_footer(store.read(piece), piece)
        except CheckpointDamagedError as error:
            yield error
