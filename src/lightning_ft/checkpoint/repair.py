"""Makes a directory of checkpoints clean again: sets aside what is damaged, deletes what no save will ever finish.

What can be restored, bit for bit, is never touched, nor anything it depends on. Beside a job that may run, nothing is
touched either that its next checkpoint may refer to: its newest base and what came after. Claiming a generation first
makes sure that there is no such job any more, or that it publishes nothing.

Killed anywhere, it leaves what the next one finishes: what is damaged is copied aside before it is unpublished, and
unpublished before it is deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lightning_ft.checkpoint.claims import Claim, claimed_generations
from lightning_ft.checkpoint.manifests import published_keys, read_manifest
from lightning_ft.checkpoint.records import (
    DATA,
    LATEST,
    Key,
    Manifest,
    data_key,
    data_paths,
    manifest_key,
    manifest_path,
)
from lightning_ft.checkpoint.store import Store
from lightning_ft.checkpoint.verification import Verdict, is_usable
from lightning_ft.errors import AlreadyThereError, CheckpointDamagedError

ASIDE = "aside/"
"""Where what is damaged is kept, under its old path, for a person to look at; no reader does."""

_COPY_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        what: A checkpoint's key, or a path.
        reason: What is wrong with it; for what is left alone, also why it is.
    """

    what: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Repair:
    """What there is to do, in this order.

    Attributes:
        damaged: Checkpoints to unpublish: children first.
        paths: Their own files, to be set aside, without their manifests.
        orphans: Files of saves that were never finished, to be deleted.
        left: What is wrong, but is left alone.
        unusable: All checkpoints that can't be restored.
        latest: The newest that can; None: there is none.
        is_latest_wrong: Whether LATEST has to be written.
    """

    damaged: tuple[tuple[Key, Finding], ...]
    paths: tuple[str, ...]
    orphans: tuple[str, ...]
    left: tuple[Finding, ...]
    unusable: frozenset[Key]
    latest: Key | None
    is_latest_wrong: bool

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.damaged or self.orphans or self.is_latest_wrong)


def plan_repair(store: Store, verdicts: Sequence[Verdict], claim: Claim | None, *, tries: bool = True) -> Repair:
    """Find out what there is to do; nothing is changed.

    Args:
        store: Where.
        verdicts: What `verify` says now.
        claim: Of a generation that was claimed for this; None: a job may be running.
        tries: Whether a checkpoint at which something is wrong is read as a whole, to see if it can be restored all the
            same; else it counts as one that can't.

    Raises:
        UnsupportedCheckpointError: A newer program writes here: nobody repairs what he can't read.
        StoreError: The storage failed.
    """
    published = set(published_keys(store))  # what was deleted since `verify` looked is no damage
    problems = {verdict.key: verdict.problems for verdict in verdicts if verdict.key in published}
    manifests = dict(_manifests(store, problems))
    usable = {key for key in problems if not problems[key] or (tries and key in manifests and is_usable(store, key))}
    needed = {link for key in usable for link in _links(key, manifests)}
    guarded = set() if claim is not None else _guarded(store, manifests, problems)
    damaged: list[tuple[Key, Finding]] = []
    left: list[Finding] = []
    for key in sorted(problems, key=lambda key: -manifests[key].depth if key in manifests else -1):
        reason = "; ".join(problems[key])
        if not reason:
            continue
        if key in usable:
            left.append(Finding(str(key), f"{reason}. It can be restored all the same."))
        elif key in needed:
            left.append(Finding(str(key), f"{reason}. Left: one that can be restored depends on it."))
        elif key in guarded:
            left.append(Finding(str(key), f"{reason}. Left: the next checkpoint of a job that runs may depend on it."))
        else:
            damaged.append((key, Finding(str(key), reason)))
    doomed = {key for key, _ in damaged}
    paths, orphans = _sort_data(store, manifests, problems, doomed, claim)
    left += [Finding(path, "it belongs to no checkpoint") for path in _strays(store)]
    latest = max(usable, default=None)
    unusable = frozenset(problems.keys() - usable)
    is_wrong = _is_hint_wrong(store, latest, published - problems.keys())
    return Repair(tuple(damaged), paths, orphans, tuple(left), unusable, latest, is_wrong)


def carry_out(store: Store, repair: Repair, *, keeps: bool = True) -> None:
    """Do what a plan says.

    Args:
        store: Where; `recover` was called, or a generation claimed, before the plan was made.
        repair: The plan.
        keeps: Whether what is damaged is kept under `aside/`.

    Raises:
        StoreError: The storage failed; plan again, and go on.
    """
    if keeps:
        for path in [*(manifest_path(key) for key, _ in repair.damaged), *repair.paths]:
            _copy_aside(store, path)
    for key, _ in repair.damaged:  # children first, so one call for each
        store.delete([manifest_path(key)])
    store.delete([*repair.paths, *repair.orphans])
    if repair.is_latest_wrong:
        _write_latest(store, repair)


def _manifests(store: Store, keys: Iterable[Key]) -> Iterator[tuple[Key, Manifest]]:
    for key in keys:
        with contextlib.suppress(CheckpointDamagedError):
            yield key, read_manifest(store, key)[0]


def _links(key: Key, manifests: dict[Key, Manifest]) -> Iterator[Key]:
    """Yield a checkpoint and what it depends on, as far as that is known."""
    following: Key | None = key
    while following is not None and following in manifests:
        yield following
        parent = manifests[following].parent
        following = None if parent is None else parent.key


def _guarded(store: Store, manifests: dict[Key, Manifest], keys: Iterable[Key]) -> set[Key]:
    """Return what a job's next checkpoint may refer to: its own generation's newest base, or what followed."""
    generation = max([*claimed_generations(store), *(key.generation for key in keys)], default=0)
    current = [key for key in keys if key.generation == generation]
    bases = [key for key in current if key in manifests and manifests[key].parent is None]
    return {key for key in current if not bases or key >= max(bases)}


def _sort_data(
    store: Store, manifests: dict[Key, Manifest], keys: Iterable[Key], doomed: set[Key], claim: Claim | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of the checkpoints that are to be set aside, and those of saves that were never finished."""
    published = set(keys)
    marked = {path for key in published & manifests.keys() for path in data_paths(manifests[key])}
    newest = max(published, default=None)
    own: list[str] = []
    orphans: list[str] = []
    for path in store.list(DATA):
        of = data_key(path)
        if of is None:
            continue
        if of in doomed:
            own.append(path)
        elif path not in marked and (
            of not in published or of in manifests
        ):  # of one that is unreadable all may be its
            is_over = of.generation < claim.generation if claim is not None else newest is not None and of <= newest
            if is_over:
                orphans.append(path)
    return tuple(own), tuple(orphans)


def _strays(store: Store) -> list[str]:
    """Return files that the format knows nothing of."""
    return [
        path
        for path in store.list("")
        if path != LATEST
        and not path.startswith(("claims/", ASIDE))
        and manifest_key(path) is None
        and data_key(path) is None
    ]


def _is_hint_wrong(store: Store, latest: Key | None, unseen: set[Key]) -> bool:
    """Whether LATEST is not the newest that can be restored, nor one that a job has saved meanwhile."""
    try:
        hint = Key.parse(store.read(LATEST).decode("ascii", "replace").strip())
    except FileNotFoundError:
        return latest is not None
    return hint is None or (hint != latest and hint not in unseen)


def _write_latest(store: Store, repair: Repair) -> None:
    now = [key for key in published_keys(store) if key not in repair.unusable]  # a job may have saved another
    if now:
        store.replace(LATEST, f"{max(now)}\n".encode("ascii"))
    else:
        store.delete([LATEST])


def _copy_aside(store: Store, path: str) -> None:
    """Copy a file as it is. What a repair that was killed has copied is there already: nobody else writes that path."""

    def pieces(size: int) -> Iterator[bytes]:
        for start in range(0, size, _COPY_BYTES):
            yield store.read(path, start, min(start + _COPY_BYTES, size))

    with contextlib.suppress(AlreadyThereError, FileNotFoundError):
        store.create(f"{ASIDE}{path}", pieces(store.size(path)))
