"""The callback that saves differential checkpoints while a fit goes on."""

from __future__ import annotations

import datetime
import io
import os
import time
from collections import Counter
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_ft.checkpoint.bounded import DEFAULT_ERROR
from lightning_ft.checkpoint.export import RANKS
from lightning_ft.checkpoint.manifests import published_keys
from lightning_ft.checkpoint.records import Key, Manifest, manifest_path
from lightning_ft.checkpoint.saver import Saved, Saver
from lightning_ft.checkpoint.share import Logged
from lightning_ft.checkpoint.store import Store, open_store
from lightning_ft.checkpoint.writer import Plan, Writer
from lightning_ft.comm import backend
from lightning_ft.comm.backend import is_member
from lightning_ft.ddp import FaultTolerantDDP
from lightning_ft.delta_interval import Interval
from lightning_ft.delta_memory import Kept, Snapshot
from lightning_ft.delta_modes import mode_of
from lightning_ft.elastic import random_state, set_random_state
from lightning_ft.errors import CheckpointError, StaleWriterError, StoreError
from lightning_ft.lightning_checkpoints import DeltaCheckpointIO
from lightning_ft.lightning_epoch import EpochPlace
from lightning_ft.lightning_internals import (
    around_each_batch,
    around_epochs,
    draw_epoch_anew,
    dump_checkpoint,
    is_between_epochs,
)
from lightning_ft.lightning_progress import WaitingBar
from lightning_ft.rejoin import go_on

_DECISIONS = ("_last_step", "_seen_step", "_asks_at", "_is_owed", "_is_fenced", "_waits_for_end")

_FAREWELL_S = 30.0
"""So long a save that was given up may take to end."""


class DeltaCheckpoint(ModelCheckpoint):
    """Saves the state of a fit again and again, each time only what has changed, while training goes on.

    Each rank writes its part of the state; a save that loses a rank is given up, and the next one follows at the next
    interval. A save that is due while the last one is still being written is left out and counted. Storage that fails
    never stops training, unless `strict`: it is told once for each cause.

    Resume with `trainer.fit(model, ckpt_path=dirpath)`, or `ckpt_path="last"`, which starts anew if nothing is there.

    Args:
        dirpath: Directory or URL: whatever fsspec knows. Of this run alone.
        every_n_train_steps: Optimizer steps between two saves.
        train_time_interval: Time between two saves.
        every_n_epochs: Epochs between two saves. Of these three one may be given; if none is,
            `LIGHTNING_FT_CHECKPOINT_INTERVAL` counts (`100`: steps; `30s`, `10m`, `2h`: time), else it is each epoch.
        mode: What is stored. `"lossless"`: the state, bit for bit. `"gradlog"`: the gradients of each optimizer step,
            from which it is made again, bit for bit. `"snap"`: the state, which is rounded at each save and gone on
            with; bit for bit. `"bounded"`: the state, rounded in the checkpoint alone, as near as `error` says.
        error: Of `"bounded"`: the largest change of a number of the weights or the optimizer's state, as a part of it.
        keep_last: How many checkpoints are kept, besides those that they depend on and two that depend on none.
        base_every: Every so many saves, one does not depend on others; `"auto"`: as is reasonable.
        monitor: Name of a logged value, by which the best `save_top_k` are also kept, as ordinary full checkpoints, in
            `dirpath/best`.
        monitor_mode: Whether less (`"min"`) or more (`"max"`) of it is better.
        save_top_k: How many of these.
        save_last: Whether the last of them is there as well, as `last.ckpt`. `ckpt_path="last"` does not need it.
        strict: Whether a save that fails raises.
        max_rollbacks: Under `ft_ddp`, how often a fit goes back to the same saved state, which its ranks have in
            memory, when a `FaultToleranceError` is raised in `training_step`; 0: such an error ends the rank.
        storage_options: For the storage, as fsspec takes them: credentials, `endpoint_url`.

    Attributes:
        num_saved: Checkpoints that were committed; known on rank 0.
        num_skipped: Saves that were left out since the one before was not done.
        kept: The states that were saved last, as far as this rank can go back to them.
        is_rolling_back: The state of the fit is not to be saved: all ranks are about to go back to an earlier one.
        num_failed: Saves that failed; on rank 0 also those that were given up since a rank was lost.

    Raises:
        ValueError: An argument is wrong.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        train_time_interval: datetime.timedelta | None = None,
        every_n_epochs: int | None = None,
        mode: Literal["lossless", "gradlog", "snap", "bounded"] = "lossless",
        error: float = DEFAULT_ERROR,
        keep_last: int = 3,
        base_every: int | Literal["auto"] = "auto",
        monitor: str | None = None,
        monitor_mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        strict: bool = False,
        max_rollbacks: int = 3,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.url = os.fspath(dirpath)
        self._mode_name = mode
        self._mode = mode_of(mode)
        self._interval = Interval.of(every_n_train_steps, train_time_interval, every_n_epochs, self._mode.default_steps)
        self._mode.check_interval(self._interval.steps)
        self._error = error
        self._base_every = None if base_every == "auto" else base_every
        self._keep_last = keep_last
        self._storage_options = storage_options or {}
        self._writer(0, 1)  # whatever is wrong is told now
        if max_rollbacks < 0:
            raise ValueError(f"max_rollbacks must be at least 0, got {max_rollbacks!r}")
        self._strict = strict
        self.max_rollbacks = max_rollbacks
        self.kept = Kept()
        self.is_rolling_back = False
        self.num_saved = self.num_skipped = self.num_failed = 0
        self._causes: Counter[str] = Counter()
        self._trainer: Trainer | None = None
        self._saver: Saver | None = None
        self._last: Manifest | None = None
        self._begun: Key | None = None
        self._uncertain: list[Key] = []
        self._members: tuple[str, ...] | None = None
        self._last_step = self._seen_step = 0
        self._last_s = self._asked_s = time.monotonic()
        self._asks_at = self._asked_at = 0
        self._is_owed = self._waits_for_end = False
        self._is_fenced = False
        self._begins_epoch = False
        self._ranks: dict[str, Any] | None = None
        self._place: EpochPlace | None = None
        if save_last and not monitor:
            raise ValueError(
                'save_last is for the ordinary checkpoints of monitor; ckpt_path="last" needs none of them'
            )
        super().__init__(
            f"{self.url.rstrip('/')}/best",
            monitor=monitor,
            mode=monitor_mode,
            save_top_k=save_top_k if monitor else 0,
            save_last=save_last or None,
        )

    def open_store(self) -> Store:
        """Return the storage of the checkpoints."""
        return open_store(self.url, **self._storage_options)

    # -- when ---------------------------------------------------------------------------------------------------------

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{{'url': {self.url!r}}}"

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks decide by, so that one that joins decides alike."""
        best = super().state_dict() if self.monitor is not None else {}
        decisions = {name: getattr(self, name) for name in _DECISIONS}
        return {"best": best, "decisions": decisions, "mode": self._mode.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.monitor is not None and state_dict["best"]:
            super().load_state_dict(state_dict["best"])
        vars(self).update(state_dict["decisions"])
        self._mode.load(state_dict["mode"])
        self._mode.forget()  # of one that joins or goes back: what it has trained with is another state

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        loader = trainer.strategy.checkpoint_io
        if not isinstance(loader, DeltaCheckpointIO):
            trainer.strategy.checkpoint_io = DeltaCheckpointIO(loader, **self._storage_options)
        if self.monitor is not None:
            super().setup(trainer, pl_module, stage)
        if self._trainer is not trainer:
            self._trainer = trainer
            self._place = EpochPlace(trainer)
            around_each_batch(trainer, self._before_batch, lambda: None)
            around_epochs(trainer, self._before_first_epoch, self._after_epoch)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = self._seen_step = trainer.global_step
        self._last_s, self._asks_at = time.monotonic(), 0
        self._is_owed = self._is_fenced = self._waits_for_end = False
        self._mode.begin(trainer)
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, seen = trainer.global_step, self._seen_step
        self._seen_step = step
        if (
            step == seen or self.is_rolling_back
        ):  # in the middle of an accumulation there are gradients, which no checkpoint holds
            return
        interval = self._interval
        is_due = (interval.steps and step // interval.steps > self._last_step // interval.steps) or (
            interval.seconds and self._is_time(trainer, interval.seconds)
        )
        # What was left out is made up for now: when a fit has ended, its loops say that it has ended its epoch, too.
        is_last = trainer.should_stop or 0 <= trainer.max_steps <= step
        if is_due or self._waits_for_end or (is_last and self._is_owed):
            # What ends an epoch belongs to its last batch: a fit that goes on does not do it.
            self._waits_for_end = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if not self._waits_for_end:
                self._save(trainer, waits=is_last)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            super().on_train_epoch_end(trainer, pl_module)

    def _after_epoch(self) -> None:
        trainer, epochs = self._trainer, self._interval.epochs
        assert trainer is not None
        is_due = epochs and trainer.current_epoch % epochs == 0 and trainer.global_step > self._last_step
        is_last = (
            trainer.should_stop
            or trainer.current_epoch == trainer.max_epochs
            or 0 <= trainer.max_steps <= trainer.global_step
        )
        if is_due or self._waits_for_end or (is_last and self._is_owed):
            self._waits_for_end = False
            self._save(trainer, waits=is_last)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            super().on_validation_end(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what there is, if there is one rank, or all stop between the same two batches."""
        stops = (SIGTERMException, KeyboardInterrupt)[: 1 + isinstance(trainer.strategy.model, FaultTolerantDDP)]
        are_together = trainer.world_size == 1 or isinstance(exception, stops)
        if trainer.state.fn == TrainerFn.FITTING and are_together and is_member():
            if trainer.global_step > self._last_step or self._is_owed:
                self._save(trainer, waits=True)
            self._settle(trainer, waits=True)
            self._find_out()
        self._mode.end()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer, waits=True)
        self._find_out()
        self._mode.end()

    def on_membership_change(
        self, trainer: Trainer, pl_module: LightningModule, old_view: tuple[str, ...], new_view: tuple[str, ...]
    ) -> None:
        """Share the state among the ranks that there are now; called on all of them before the next batch."""
        if self._saver is None or self._members != new_view:  # else it began after the change, in the same step
            self._drop_saver()

    def _is_time(self, trainer: Trainer, seconds: float) -> bool:
        """Whether rank 0's clock says so. All ranks ask it at the same batches: half as far away each time."""
        num_batches = trainer.fit_loop.epoch_loop.total_batch_idx
        if num_batches < self._asks_at:
            return False
        now_s = time.monotonic()
        left_s = seconds - (now_s - self._last_s)
        per_batch_s = (now_s - self._asked_s) / max(1, num_batches - self._asked_at)
        num_left = 0 if left_s <= 0 else max(1, int(left_s / 2 / max(per_batch_s, 1e-6)))
        num_left = trainer.strategy.broadcast(num_left)
        self._asks_at, self._asked_at, self._asked_s = num_batches + max(1, num_left), num_batches, now_s
        if num_left == 0:
            self._last_s = now_s
        return num_left == 0

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, *, waits: bool = False) -> None:
        """Begin to save; all ranks."""
        known: Any = trainer
        if known.fast_dev_run or self._is_fenced or not is_member():
            return
        due_s = time.monotonic()
        self._last_step = trainer.global_step
        may_begin = self._settle(trainer, waits=waits or self._mode.must_wait(trainer))
        if may_begin is None:  # another run has taken over
            return
        if not may_begin:
            self._skipped(trainer)
            return
        self._is_owed = False
        place = trainer.global_rank, trainer.world_size
        if self._saver is not None and (self._saver.writer.rank, self._saver.writer.num_ranks) != place:
            self._drop_saver()  # the ranks have changed in this very step
        if self._saver is None:
            self._saver = Saver(self._writer(trainer.global_rank, trainer.world_size), self._saved)
            group: Any = getattr(trainer.strategy, "group", None)
            self._members = None if group is None else group.members
        state = {**dump_checkpoint(trainer), RANKS: self._of_ranks(trainer)}
        is_base = self._mode.needs_base(trainer, state, self._saver.writer)
        plan, error = self._plan(trainer.global_step, is_base=is_base) if trainer.is_global_zero else (None, None)
        plan, is_fenced = trainer.strategy.broadcast((plan, isinstance(error, StaleWriterError)))
        self._is_fenced |= is_fenced
        if plan is None:
            self._failed(error, self._last_step, is_teller=trainer.is_global_zero)
            return
        self._begun = plan.key
        prepared = self._mode.prepared(trainer, plan, state)
        if not isinstance(prepared, Logged):
            self.kept.let_go()
        self._saver.start(plan, prepared, due_s)
        self.kept.add(Snapshot(plan.key, trainer.world_size, self._saver.share))

    def _writer(self, rank: int, num_ranks: int) -> Writer:
        return Writer(
            self.open_store(),
            rank=rank,
            num_ranks=num_ranks,
            mode=self._mode_name,
            base_every=self._base_every,
            keep_last=self._keep_last,
            error=self._error,
            lossy=("state_dict", "optimizer_states"),
        )

    def _plan(self, step: int, *, is_base: bool) -> tuple[Plan | None, CheckpointError | None]:
        assert self._saver is not None
        try:
            plan = self._saver.writer.plan(step, is_base=is_base)
        except CheckpointError as error:
            return None, error
        self._find_out()
        return plan, None

    def _settle(self, trainer: Trainer, *, waits: bool) -> bool | None:
        """Find out together how the last save stands. Returns: Whether the next may begin; None: never again."""
        saver = self._saver
        with WaitingBar("Waiting for the last checkpoint to be written") as bar:
            while waits and saver is not None and not saver.wait_written(1.0):
                bar.done()
        error = None if saver is None else saver.take_error()
        is_busy, first, is_torn = self._agree(trainer, error)
        if is_torn:
            self._drop_saver()
            return None if self._is_fenced else True
        has_failed = first is not None
        if has_failed and saver is not None:
            saver.abandon()
        # After a failure there is nothing left to commit; but what this rank itself still writes is not waited for.
        with WaitingBar("Waiting for the last checkpoint to be complete") as bar:
            while saver is not None and (waits or (has_failed and saver.is_committing)) and not saver.wait(1.0):
                bar.done()
        if waits or has_failed:  # what came of it, only the rank that commits knows
            late = None if saver is None else saver.take_error()
            if not has_failed:
                error = late
            is_stale = isinstance(late, StaleWriterError)
            is_busy, late_first, _ = self._agree(trainer, late if is_stale or not has_failed else None)
            first = late_first if first is None else first
        if saver is not None:
            self._count_saved(saver)
        begun = self._begun
        if not is_busy:
            self._begun = None
        if first is not None:  # now that all know of it
            self._failed(error, begun.step if begun else self._last_step, is_teller=trainer.global_rank == first)
        return None if self._is_fenced else not is_busy

    def _agree(self, trainer: Trainer, error: Exception | None) -> tuple[bool, int | None, bool]:
        """Put together what the ranks know.

        Returns:
            Whether the last save goes on; the first rank where it failed; whether some know nothing of it: they have
            come in the place of others.
        """
        is_busy = self._saver is not None and self._saver.is_busy
        own = [is_busy, error is not None, isinstance(error, StaleWriterError), self._begun is not None]
        device = trainer.strategy.root_device
        told: Tensor = trainer.strategy.reduce(torch.tensor(own, dtype=torch.float32, device=device), reduce_op="sum")
        num_busy, num_failed, num_fenced, num_begun = map(int, told.tolist())
        self._is_fenced |= num_fenced > 0
        is_torn = 0 < num_begun < trainer.world_size
        if not num_failed:
            return num_busy > 0, None, is_torn
        place = torch.tensor(float(trainer.world_size - trainer.global_rank if error is not None else 0), device=device)
        first = trainer.world_size - int(trainer.strategy.reduce(place, reduce_op="max").item())
        return num_busy > 0, first, is_torn

    def finish(self, trainer: Trainer, *, is_whole: bool) -> None:
        """Wait until nothing is being saved any more; all ranks.

        Args:
            trainer: Of the fit.
            is_whole: Whether all ranks are there that take part in the last save; else it is given up.
        """
        if is_whole:
            self._settle(trainer, waits=True)
        else:
            self._drop_saver()

    def _drop_saver(self) -> None:
        """Give up what is being saved: the ranks have changed."""
        saver, self._saver = self._saver, None
        self._mode.forget()
        begun, self._begun = self._begun, None
        if saver is None:
            return
        saver.abandon()
        saver.wait(_FAREWELL_S)
        error = saver.take_error()
        self._count_saved(saver)
        is_done = saver.last is not None and saver.last.key == begun
        if begun is None or is_done or self._trainer is None or not self._trainer.is_global_zero:
            return
        # If the rank that was to commit is gone, or waits for an answer, only the storage knows whether it has.
        is_certain = saver.writer.rank == 0 and error is not None and not getattr(error, "is_in_doubt", False)
        if is_certain:
            self._tell_given_up(begun)
        else:
            self._uncertain.append(begun)

    def _find_out(self) -> None:
        """Tell what became of the saves of which nobody knows. Who might still commit one was fenced meanwhile."""
        while self._uncertain and self._trainer is not None and self._trainer.is_global_zero:
            try:
                self.open_store().size(manifest_path(self._uncertain[0]))
            except FileNotFoundError:
                self._tell_given_up(self._uncertain[0])
            except StoreError:
                return  # the next save, or the fit's end, looks again
            self._uncertain.pop(0)

    def _tell_given_up(self, key: Key) -> None:
        self.num_failed += 1
        self._tell_failed(key.step, "ranks changed", "a rank that took part in it is gone, or another came")

    def _count_saved(self, saver: Saver) -> None:
        if saver.last is not None:
            self.num_saved += saver.last is not self._last
            self._last = saver.last
            if not self.save_last:  # else it is that of `last.ckpt`, which Lightning replaces by it
                self.last_model_path = f"{self.url.rstrip('/')}/{manifest_path(saver.last.key)}"

    # -- telling ------------------------------------------------------------------------------------------------------

    def _saved(self, saved: Saved) -> None:
        manifest = saved.manifest
        backend.report(
            "checkpoint_saved",
            step=manifest.key.step,
            kind="base" if manifest.parent is None else "delta",
            mode=manifest.mode,
            bytes=sum(pack.num_bytes for pack in manifest.packs),
            state_bytes=sum(stream.num_bytes for stream in manifest.streams),
            duration_s=round(saved.duration_s, 6),
            blocked_s=round(saved.blocked_s, 6),
            path=f"{self.url.rstrip('/')}/{manifest_path(manifest.key)}",
        )

    def _skipped(self, trainer: Trainer) -> None:
        self.num_skipped += 1
        self._is_owed = True
        if trainer.is_global_zero:
            reason = "the last is not done yet"
            backend.report("checkpoint_skipped", step=trainer.global_step, reason=reason, count=self.num_skipped)

    def _failed(self, error: Exception | None, step: int, *, is_teller: bool) -> None:
        self.num_failed += 1
        error = error or CheckpointError(f"saving a checkpoint to {self.url} failed on another rank")
        if is_teller:
            cause = f"{error.operation} {error.reason}" if isinstance(error, StoreError) else type(error).__name__
            self._tell_failed(step, cause, str(error))
        if self._strict:
            raise error

    def _tell_failed(self, step: int, cause: str, detail: str) -> None:
        self._causes[cause] += 1
        backend.report("checkpoint_failed", step=step, cause=cause, detail=detail, count=self._causes[cause])

    # -- what only as many ranks can go on with -----------------------------------------------------------------------

    def _of_ranks(self, trainer: Trainer) -> dict[str, Any]:
        """Return all ranks' random numbers and places in the epoch, and the order in which gradients are added up."""
        buffer = io.BytesIO()
        place = None if self._place is None else self._place.state()
        torch.save({"random": random_state(), "place": place}, buffer)
        own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        device = trainer.strategy.root_device
        num_bytes = torch.tensor(float(own.numel()), device=device)
        longest = int(trainer.strategy.reduce(num_bytes, reduce_op="max").item())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        rows = trainer.strategy.all_gather(padded.to(device)).reshape(-1, longest)
        model = trainer.strategy.model
        buckets = model.bucket_order if isinstance(model, FaultTolerantDDP) else []
        # What comes from the ranks of this job may be any pickle; a checkpoint should need none.
        own_of_each = [torch.load(io.BytesIO(row.cpu().numpy().tobytes()), weights_only=False) for row in rows]
        return {"own": own_of_each, "buckets": buckets, "is_epoch_over": is_between_epochs(trainer)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ranks = checkpoint.get(RANKS)
        self._begins_epoch = ranks is not None and ranks["is_epoch_over"]
        self._ranks = ranks if ranks is not None and len(ranks["own"]) == trainer.world_size else None
        if self._ranks is not None and self._place is not None:
            self._place.take(self._ranks["own"][trainer.global_rank]["place"])

    def _before_first_epoch(self) -> None:
        if self._begins_epoch and self._trainer is not None:
            go_on(self._trainer.fit_loop)  # Lightning would take the end of an epoch for a part of it
        self._begins_epoch = False

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ranks is not None and self._ranks["is_epoch_over"]:
            set_random_state(self._ranks["own"][trainer.global_rank]["random"])

    def _before_batch(self) -> None:
        """Go on as the ranks that wrote the checkpoint, unless they were more or fewer."""
        ranks, self._ranks = self._ranks, None
        trainer = self._trainer
        if ranks is None or trainer is None or len(ranks["own"]) != trainer.world_size:
            return
        if isinstance(trainer.strategy.model, FaultTolerantDDP):
            trainer.strategy.model.load_bucket_order(ranks["buckets"])
        if not ranks["is_epoch_over"]:
            set_random_state(ranks["own"][trainer.global_rank]["random"])
            draw_epoch_anew(trainer)

    # -- what Lightning asks of a ModelCheckpoint ---------------------------------------------------------------------

    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        keys = published_keys(self.open_store())
        return {f"{self.url.rstrip('/')}/{manifest_path(keys[0])}"} if keys else set()
