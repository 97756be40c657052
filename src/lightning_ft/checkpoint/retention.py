"""Deletes checkpoints that are no longer wanted, so that no crash and no reader ever meets half of one.

What may go is decided from the manifests alone, each time anew: a run that was killed is finished by the next. A
manifest goes before the packs it names, and before the manifest of its parent. A pack goes if no manifest names it and
a checkpoint of its key or a newer one is there: then no save that could still use it is under way.

That holds for somebody who is no writer, too (`lightning-ft checkpoint prune` beside a job that runs). What a writer
may still refer to is the newest checkpoint that it has published and what that depends on, and whatever it publishes
next is newer than all that was listed: neither is deleted. Of two who delete at the same time each keeps what the
checkpoints that it keeps depend on, so what both keep is whole.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from lightning_ft.checkpoint.chain import check_stored_bytes
from lightning_ft.checkpoint.claims import Claim
from lightning_ft.checkpoint.manifests import check_coverage, published_keys, read_chain
from lightning_ft.checkpoint.records import DATA, Key, Manifest, data_key, data_paths, manifest_path
from lightning_ft.checkpoint.store import Store
from lightning_ft.errors import CheckpointDamagedError

_log = logging.getLogger(__name__)

MIN_BASES = 2
"""So many bases that were read and found intact are kept: one may still be lost with the disk it is on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Retained:
    """What a retention did.

    Attributes:
        kept: Checkpoints that are left, newest first; damaged ones as well.
        deleted: Checkpoints that were unpublished, newest first.
        damaged: Checkpoints that were found damaged by themselves.
        swept: Paths of data that were deleted: of these checkpoints, and of saves that have failed.
    """

    kept: tuple[Key, ...]
    deleted: tuple[Key, ...]
    damaged: frozenset[Key]
    swept: tuple[str, ...]


def retain(store: Store, claim: Claim | None, *, keep_last: int, verified: set[Key], is_dry: bool = False) -> Retained:
    """Keep the newest checkpoints, what they depend on, and two bases; delete the others, and what failed saves left.

    A checkpoint whose base is damaged does not count. What is newer than the oldest that counts is kept.

    Args:
        store: Where.
        claim: The right to write there; None: of somebody who is no writer.
        keep_last: How many, >= 1.
        verified: Bases whose stored bytes were read and found intact; it is added to.
        is_dry: Delete nothing, only say what would be.

    Raises:
        StaleWriterError: Another run has taken over; nothing more was deleted.
        UnsupportedCheckpointError: A newer program writes here; nothing was deleted.
        StoreError: The storage failed; the next call goes on where this one stopped.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last!r}")

    def check() -> None:
        if claim is not None:
            claim.check()

    check()
    review = _Review(store, verified)
    keep = review.choose(keep_last)
    doomed = [key for key in review.keys if key not in keep]
    if not is_dry:
        _unpublish(store, check, review, doomed)
    swept = _garbage(store, review, keep)
    if swept and not is_dry:
        check()
        store.delete(swept)
    kept = tuple(key for key in review.keys if key in keep)
    return Retained(kept, tuple(doomed), frozenset(review.damaged), tuple(swept))


class _Review:
    """The checkpoints, and what is known of each."""

    def __init__(self, store: Store, verified: set[Key]) -> None:
        self.keys = published_keys(store)
        self.chains: dict[Key, tuple[Manifest, ...]] = {}
        self.damaged: set[Key] = set()
        self._store = store
        self._verified = verified
        known: dict[Key, tuple[Manifest, bytes]] = {}
        for key in reversed(self.keys):  # parents first, so that of each only its own link is left to check
            try:
                chain = read_chain(store, key, known)
                check_coverage(chain[-2:])
            except CheckpointDamagedError as error:
                self._condemn(key, error)
                continue
            if len(chain) == 1 or chain[-2].key in self.chains:
                self.chains[key] = chain
            else:
                self._condemn(key, CheckpointDamagedError("its parent is damaged", manifest_path(key)))

    def choose(self, keep_last: int) -> set[Key]:
        """Return what must stay."""
        if len(self.keys) <= keep_last:  # nothing goes, so nothing needs to be read
            return set(self.keys)
        counted: list[Key] = []
        bases: set[Key] = set()
        keep: set[Key] = set()
        for key in self.keys:
            is_needed = len(counted) < keep_last
            base = self.chains[key][0].key if key in self.chains else None
            if is_needed:
                keep.add(key)
            if base is None or not (is_needed or (len(bases) < MIN_BASES and base == key)):
                continue
            if self._is_intact(base):
                bases.add(base)
                if is_needed:
                    counted.append(key)
                keep.add(key)
        if len(bases) < MIN_BASES:
            keep.update(chain[0].key for chain in self.chains.values())
        return keep.union(*({link.key for link in self.chains[key]} for key in keep if key in self.chains))

    def _is_intact(self, base: Key) -> bool:
        if base not in self._verified and base not in self.damaged:
            try:
                check_stored_bytes(self._store, self.chains[base][0])
                self._verified.add(base)
            except CheckpointDamagedError as error:
                self._condemn(base, error)
        return base in self._verified

    def _condemn(self, key: Key, error: CheckpointDamagedError) -> None:
        self.damaged.add(key)
        _log.warning("Checkpoint %s is damaged: %s", key, error)


def _unpublish(store: Store, check: Callable[[], None], review: _Review, doomed: list[Key]) -> None:
    """Delete manifests, each before its parent's: one whose parent is gone could not be read, but would be listed."""
    depths = {key: len(review.chains[key]) if key in review.chains else 0 for key in doomed}
    for depth in sorted(set(depths.values()), reverse=True):
        check()
        store.delete([manifest_path(key) for key in doomed if depths[key] == depth])


def _garbage(store: Store, review: _Review, keep: set[Key]) -> list[str]:
    """Return packs and footers that belong to no manifest that is kept, and to no save that may be under way."""
    if not review.keys:
        return []
    marked = {path for key in keep & review.chains.keys() for path in data_paths(review.chains[key][-1])}
    unreadable = keep - review.chains.keys()  # of these nobody knows what they name
    return [
        path
        for path in store.list(DATA)
        if path not in marked and (of := data_key(path)) is not None and of <= review.keys[0] and of not in unreadable
    ]
