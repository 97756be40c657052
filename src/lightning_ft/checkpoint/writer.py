"""Writes checkpoints: each rank its share of the bytes, then one of them the manifest, which is the commit.

A rank's share is cut from the tensors' bytes, chunk by chunk; what is no tensor is rank 0's. Of the last base each rank
keeps its share in memory, since the next checkpoints are stored as the difference to it (the chain is a star): a
restore reads two checkpoints, and damage to one that is no base harms no other. In the modes `snap` and `gradlog` each
checkpoint is stored as the difference to the one before (the chain is a line).

Memory beyond the caller's state: that share (state / ranks), a few chunks, and the index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import blosc2
import torch

from lightning_ft.checkpoint.bounded import DEFAULT_ERROR, Rounding
from lightning_ft.checkpoint.claims import Claim, claim_generation
from lightning_ft.checkpoint.format import (
    document_hash,
    dump_document,
    load_footer,
    state_hash,
    tensors_hash,
)
from lightning_ft.checkpoint.manifests import check_coverage, opened, published_keys
from lightning_ft.checkpoint.records import (
    BOUNDED,
    CONTRACTS,
    GRADLOG,
    LATEST,
    LOSSLESS,
    MAX_DEPTH,
    NO_REFERENCE,
    PACK_HEADER_BYTES,
    SNAP,
    Footer,
    Frame,
    Key,
    Manifest,
    Pack,
    Ref,
    footer_path,
    manifest_path,
    pack_path,
)
from lightning_ft.checkpoint.retention import retain
from lightning_ft.checkpoint.share import Chunks, Logged, PackWriter, compared, copied, viewed
from lightning_ft.checkpoint.store import Store
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.errors import AlreadyThereError, CheckpointError, StoreError

_log = logging.getLogger(__name__)

REBASE_SHARE = 0.97
"""A checkpoint that is larger than this share of its base saves nothing worth the second read of a restore."""

SAVES_PER_BASE = 32
"""Of how many saves one is a base if nobody says. It costs each 3 % of a full checkpoint; no damage reaches further."""

LINEAR = frozenset({GRADLOG, SNAP})
"""In these modes a checkpoint depends on the one before, in the others on its base alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks must agree on before they write; rank 0 makes it, the others are told.

    Attributes:
        key: Of the checkpoint.
        attempt: How many plans of this key there were before: failed saves.
        parent: What differences are taken to; None: this becomes a base.
        parent_tensors: `tensors_hash` of the parent. A state of other tensors becomes a base.
    """

    key: Key
    attempt: int
    parent: Ref | None
    parent_tensors: bytes


@dataclasses.dataclass(slots=True)
class _Reference:
    """A rank's share of a base."""

    key: Key
    chunks: Chunks


@dataclasses.dataclass(slots=True)
class _Base:
    """The last base that was committed, and what has followed.

    `parent` and `ref` are of what the next difference is taken to: the base itself, or in a line the last checkpoint.
    """

    manifest: Manifest
    parent: Manifest
    ref: Ref
    num_saves: int = 1
    is_used_up: bool = False


class Writer:
    """Saves states of one job under one URL.

    With one rank, `save` does all. With several each has a writer. For each checkpoint rank 0 calls `plan` and hands
    the plan to all; all call `write` with the same state; when all have returned, rank 0 calls `commit`. A rank that
    dies in between leaves no checkpoint, and the next plan may be made at once.

    Args:
        store: Where, or its URL.
        rank: Of this process.
        num_ranks: How many share the work.
        mode: "lossless" or "bounded"; "snap" and "gradlog" need to know the optimizer, by `Snap` and `GradientLog`.
        base_every: Every so many saves one does not depend on others, >= 1; None: as is reasonable.
        keep_last: How many checkpoints to keep, >= 1, besides what they depend on and two bases; None: all.
        error: Of the mode "bounded": by how much of itself a float32 or float64 number of a tensor may be changed. A
            tensor of one number, and all that is no tensor, is exact.
        lossy: Of the mode "bounded": in which entries of the state (at its top) tensors may be changed; None: in all.
        storage_options: For a URL; see `open_store`.

    Threads: one at a time. The state must not change during `write`; it may when that has returned.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        mode: str = LOSSLESS,
        base_every: int | None = None,
        keep_last: int | None = None,
        error: float = DEFAULT_ERROR,
        lossy: Collection[str] | None = None,
        **storage_options: Any,
    ) -> None:
        if mode not in CONTRACTS:
            raise ValueError(f"mode must be one of {', '.join(map(repr, CONTRACTS))}, got {mode!r}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must be from 0 to num_ranks - 1, got rank={rank!r}, num_ranks={num_ranks!r}")
        for name, value in (("base_every", base_every), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value!r}")
        if mode in LINEAR and base_every is not None and base_every > MAX_DEPTH + 1:
            raise ValueError(f"base_every must be at most {MAX_DEPTH + 1} in the mode {mode!r}, got {base_every!r}")
        self.store = opened(store, **storage_options)
        self.rank = rank
        self.num_ranks = num_ranks
        self.mode = mode
        self._rounding = Rounding(error, lossy) if mode == BOUNDED else None
        self.keep_last = keep_last
        self._saves_per_base = base_every or SAVES_PER_BASE
        self._claim: Claim | None = None
        self._goes_back = False
        self._last: Plan | None = None
        self._committed: Key | None = None
        self._base: _Base | None = None
        self._reference: _Reference | None = None
        self._doubtful: tuple[Manifest, bytes] | None = None
        self._verified: set[Key] = set()

    def save(self, step: int, state: Mapping[Any, Any]) -> Manifest:
        """Write a checkpoint, commit it, and delete what `keep_last` does not keep. For one rank.

        Args:
            step: Number of optimizer steps done. If it is not above that of this writer's last checkpoint, the job has
                gone back: that begins a new generation, whose checkpoints count as newer than all before.
            state: Tensors and whatever else, nested in dictionaries, lists and tuples.

        Raises:
            ValueError: There are several ranks, or the state can't be stored.
            StaleWriterError: Another run has taken over.
            StoreError: The storage failed. There is no such checkpoint, unless `is_in_doubt`. The next call may follow.
        """
        if self.num_ranks != 1:
            raise ValueError(f"save is for one rank, there are {self.num_ranks}: use plan, write and commit")
        plan = self.plan(step)
        self.write(plan, state)
        return self.conclude(plan)

    # -- the plan -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int | None:
        """The step of the checkpoint that the next one may be a difference to, as rank 0 knows it."""
        return None if self._base is None else self._base.ref.key.step

    def plan(self, step: int, *, is_base: bool = False) -> Plan:
        """Decide what the next checkpoint is; rank 0 only.

        The first call claims a generation, which fences others. So does one with a step that is not above that of the
        last checkpoint: the job has gone back, and what follows is newer than what it has left behind.

        Args:
            step: Number of optimizer steps done.
            is_base: Whether it must not depend on others.

        Raises:
            ValueError: The step is negative.
            StaleWriterError: Another run has taken over.
            StoreError: The storage failed.
        """
        claim = self._claimed()
        self._resolve_doubt()
        key = Key(claim.generation, step)
        if self._goes_back or (self._committed is not None and key <= self._committed):
            self._goes_back = True  # until it is done: the new claim may be there though its answer was lost
            self._claim = claim.follow()
            self._committed = self._base = None  # no generation refers to another
            self._goes_back = False
            key = Key(self._claim.generation, step)
        attempt = self._last.attempt + 1 if self._last and self._last.key == key else 0
        base = self._base
        if base and (
            is_base
            or base.is_used_up
            or base.num_saves >= self._saves_per_base
            or not (self.mode == GRADLOG or self._remembers(base.ref.key))
        ):
            base = None
        self._last = Plan(
            key,
            attempt,
            base.ref if base else None,
            tensors_hash(base.parent.streams) if base else NO_REFERENCE,
        )
        return self._last

    def _claimed(self) -> Claim:
        if self._claim is None:
            keys = published_keys(self.store)
            self._claim = claim_generation(self.store, at_least=keys[0].generation + 1 if keys else 0)
        return self._claim

    def _remembers(self, key: Key) -> bool:
        return self._reference is not None and self._reference.key == key

    # -- one rank's share ---------------------------------------------------------------------------------------------

    def write(self, plan: Plan, state: Mapping[Any, Any] | FlatState | Logged) -> Footer:
        """Write this rank's share of a state: its packs, then its footer. It is no checkpoint before `commit`.

        Args:
            plan: Rank 0's.
            state: The same on all ranks; or what `Snapshots.take` or `GradientLog.logged` made of it.

        Raises:
            ValueError: The state can't be stored.
            StoreError: The storage failed; make a new plan.
        """
        flat = state if isinstance(state, FlatState | Logged) else FlatState(state)
        tensors = tensors_hash(flat.streams)
        # A log says by itself which streams it goes on with.
        parent = plan.parent if isinstance(flat, Logged) or tensors == plan.parent_tensors else None
        frames: list[Frame] = []
        packs: list[Pack] = []
        copies: Chunks | None = None
        if isinstance(flat, Logged):
            if parent is None:
                raise ValueError("expected a whole state for a checkpoint without a parent, got a log of gradients")
            encoded = PackWriter(iter(flat.works), None, known=flat.known)
        elif self.mode == GRADLOG:
            parent = None
            encoded = PackWriter(viewed(flat, self.rank, self.num_ranks), None)
        else:
            known = {} if parent is None else self._chunks_of(parent.key)
            if parent is None or self.mode in LINEAR:
                copies = {}
                kept, self._reference = self._reference, None  # not whole until all is written
            works = (
                copied(flat, self.rank, self.num_ranks, kept.chunks if kept else {}, self._rounding)
                if parent is None
                else compared(flat, self.rank, self.num_ranks, known, self._rounding)
            )
            encoded = PackWriter(works, copies, adds=self.mode == SNAP)
        while encoded.has_more():
            path = pack_path(plan.key, plan.attempt, self.rank, len(packs))
            first = len(frames)
            self.store.create(path, encoded.pack(frames))
            num_bytes = PACK_HEADER_BYTES + sum(frame.stored_bytes for frame in frames[first:])
            packs.append(Pack(self.rank, len(packs), len(frames) - first, num_bytes))
        footer = Footer(
            key=plan.key,
            attempt=plan.attempt,
            rank=self.rank,
            num_ranks=self.num_ranks,
            mode=self.mode,
            parent=parent,
            tensors_hash=tensors,
            streams=flat.streams if self.rank == 0 else (),
            packs=tuple(packs),
            frames=tuple(frames),
            extra=self._extra(flat),
        )
        self.store.create(footer_path(plan.key, plan.attempt, self.rank), [dump_document(footer)])
        if copies is not None:
            self._reference = _Reference(plan.key, copies)
        if isinstance(flat, Logged):
            flat.written()
        return footer

    def _extra(self, flat: FlatState | Logged) -> Mapping[str, Any]:
        if isinstance(flat, Logged):
            return flat.extra if self.rank == 0 else {}
        if self._rounding is None:
            return {}
        measured, self._rounding.measured = self._rounding.measured, 0.0
        return {"error": {"bound": self._rounding.bound, "measured": measured}}

    def _chunks_of(self, key: Key) -> Chunks:
        """Return what this rank has of a base: nothing, if it came later; then its share is stored by itself."""
        return self._reference.chunks if self._reference is not None and self._reference.key == key else {}

    # -- the commit ---------------------------------------------------------------------------------------------------

    def missing_ranks(self, plan: Plan) -> list[int]:
        """Return which ranks have not finished their `write`, as the storage shows it.

        Raises:
            StoreError: The storage failed.
        """
        there = set(self.store.list(footer_path(plan.key, plan.attempt, 0).rpartition("/")[0] + "/"))
        return [rank for rank in range(self.num_ranks) if footer_path(plan.key, plan.attempt, rank) not in there]

    def commit(self, plan: Plan) -> Manifest:
        """Make a checkpoint of what all ranks have written; rank 0 only, with the plan that it made last.

        Raises:
            CheckpointError: A rank has not finished, or what they wrote does not fit together; nothing was committed.
            StaleWriterError: Another run has taken over; nothing was committed.
            StoreError: The storage failed. If `is_in_doubt` the checkpoint may be there, which the next plan finds out.
        """
        assert plan == self._last, "commit the last plan"
        assert self._claim is not None
        footers = [self._read_footer(plan, rank) for rank in range(self.num_ranks)]
        manifest = self._merge(plan, footers)
        data = dump_document(manifest)
        try:
            self._claim.publish(manifest_path(plan.key), [data])
        except StoreError as error:
            if error.is_in_doubt:
                self._doubtful = manifest, data
            raise
        self._record(manifest, data)
        return manifest

    def conclude(self, plan: Plan) -> Manifest:
        """Commit a checkpoint, and delete what `keep_last` does not keep; if that fails it is only told.

        Raises:
            CheckpointError, StaleWriterError, StoreError: As `commit`.
        """
        manifest = self.commit(plan)
        if self.mode in LINEAR and manifest.parent is not None:
            return manifest  # all that it depends on stays: nothing goes before the next base
        try:
            self.retain()
        except CheckpointError as error:  # if another run has taken over, the next commit raises it
            _log.warning("The checkpoint %s is saved, but older ones could not be deleted: %s", manifest.key, error)
        return manifest

    def _resolve_doubt(self) -> None:
        """Find out whether a manifest exists whose creation had no answer: make it, or raise as before."""
        if self._doubtful is not None and self._claim is not None:
            manifest, data = self._doubtful
            try:
                self._claim.publish(manifest_path(manifest.key), [data])
            except AlreadyThereError:  # another writer was faster: ours was not made, and never will be
                self._doubtful = None
                return
            self._doubtful = None
            self._record(manifest, data)

    def _read_footer(self, plan: Plan, rank: int) -> Footer:
        path = footer_path(plan.key, plan.attempt, rank)
        try:
            footer = load_footer(self.store.read(path), path)
        except FileNotFoundError:
            raise CheckpointError(
                f"commit of checkpoint {plan.key} failed: rank {rank} has not finished its share. Wait until "
                "missing_ranks is empty, or make a new plan."
            ) from None
        for pack in footer.packs:
            piece = pack_path(plan.key, plan.attempt, rank, pack.number)
            if self.store.size(piece) != pack.num_bytes:
                raise CheckpointError(f"commit of checkpoint {plan.key} failed: {piece} has not {pack.num_bytes} bytes")
        return footer

    def _merge(self, plan: Plan, footers: Sequence[Footer]) -> Manifest:
        first = footers[0]
        for footer in footers:
            expected = (plan.key, plan.attempt, self.num_ranks, first.parent, first.tensors_hash, first.mode)
            got = (footer.key, footer.attempt, footer.num_ranks, footer.parent, footer.tensors_hash, footer.mode)
            if got != expected or footer.parent not in (None, plan.parent):
                raise CheckpointError(
                    f"commit of checkpoint {plan.key} failed: ranks 0 and {footer.rank} wrote different states. "
                    "Hand the same plan and the same state to all."
                )
        frames = tuple(frame for footer in footers for frame in footer.frames)
        is_base = all(frame.reference == NO_REFERENCE for frame in frames)
        parent = None if is_base or self._base is None else first.parent
        manifest = Manifest(
            key=plan.key,
            attempt=plan.attempt,
            mode=first.mode,
            contract=CONTRACTS[first.mode],
            parent=parent,
            base=plan.key if parent is None or self._base is None else self._base.parent.base,
            depth=0 if parent is None or self._base is None else self._base.parent.depth + 1,
            num_ranks=self.num_ranks,
            state_hash=state_hash(
                first.streams, {(frame.stream, frame.start): frame.decoded_hash for frame in frames if not frame.slot}
            ),
            versions=_versions(),
            extra=_merged(footers),
            streams=first.streams,
            packs=tuple(pack for footer in footers for pack in footer.packs),
            frames=frames,
        )
        parents = [self._base.parent] if parent is not None and self._base is not None else []
        check_coverage([*parents, manifest])
        return manifest

    def _record(self, manifest: Manifest, data: bytes) -> None:
        self._committed = manifest.key
        ref = Ref(manifest.key, document_hash(data))
        if manifest.parent is None if self.mode in LINEAR else self._remembers(manifest.key):
            self._base = _Base(manifest, manifest, ref)
        elif self._base is not None:
            self._base.num_saves += 1
            self._base.is_used_up = _stored(manifest) > REBASE_SHARE * _stored(self._base.manifest)
            if self.mode in LINEAR:
                self._base.parent, self._base.ref = manifest, ref
        try:
            self.store.replace(LATEST, f"{manifest.key}\n".encode("ascii"))
        except StoreError as error:
            _log.warning("The checkpoint %s is saved, but the hint %s is not: %s", manifest.key, LATEST, error)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def retain(self) -> None:
        """Delete what `keep_last` does not keep; rank 0 only, after a commit.

        Raises:
            StaleWriterError: Another run has taken over; nothing more was deleted.
            StoreError: The storage failed; the next call goes on.
        """
        if self.keep_last is None or self._claim is None:
            return
        report = retain(self.store, self._claim, keep_last=self.keep_last, verified=self._verified)
        if self._base is not None and {self._base.manifest.key, self._base.ref.key} & report.damaged:
            self._base.is_used_up = True


def _merged(footers: Sequence[Footer]) -> Mapping[str, Any]:
    """Return what modes have to say of a checkpoint: rank 0's word, and the largest error of all."""
    extra = dict(footers[0].extra)
    if "error" in extra:
        measured = max(footer.extra["error"]["measured"] for footer in footers)
        extra["error"] = {**extra["error"], "measured": measured}
    return extra


def _stored(manifest: Manifest) -> int:
    return sum(pack.num_bytes for pack in manifest.packs)


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "blosc2": blosc2.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from its sources
        found["lightning-ft"] = metadata.version("lightning-ft")
    return found
