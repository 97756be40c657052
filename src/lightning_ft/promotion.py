"""A new rank 0 goes on with the logs and the progress bar as the one that died would have.

Only rank 0 of a Lightning run writes logs, and some of what it writes waits in its memory. So every rank keeps a
*shadow* of each CSVLogger and TensorBoardLogger: the calls that rank 0 turns into lines. On a new rank 0 the shadows
open the logs that are there (Lightning would delete what it finds), write the calls that the files lack, and let
Lightning go on. The values in these lines are the new rank 0's: its own, for what is logged with `sync_dist=False`.

The strategy calls `prepare` on every rank, in `Strategy.setup`, and `promote` on the new rank 0 at the next safe point:
the start of a training batch, or the end of training if that comes first. In between nothing is written, only
remembered. A member that joins later calls `prepare` again, together with all others, as soon as it can broadcast.

Private parts of Lightning that are used, as read in lightning 2.6.6 (`tests/unit/test_promotion.py` checks them):

* `_ExperimentWriter` of `fabric.loggers.csv_logs`: its constructor deletes metrics.csv in `_check_log_dir_exists`;
  `metrics_keys` is the header of the file, `_fs` its file system.
* `_version`, `_experiment`, `_prefix` of CSVLogger and TensorBoardLogger; `_kwargs` (SummaryWriter's) of the latter.
* `fabric.loggers.logger._DummyExperiment`: takes every call and does nothing.
* `fit_loop.epoch_loop.batch_progress`: where the epoch stands.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import functools
import importlib.util
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.loggers.logger import Logger, _DummyExperiment
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_only

from lightning_ft.comm.backend import confirm_membership

MAX_CALLS = 100_000
"""Calls that a shadow remembers, some 50 MB; the oldest go first. Far more than a rank 0 leaves unwritten."""

_log = logging.getLogger("lightning_ft")
_warnings = WarningCache()

_Call = tuple[dict[str, Any], int | None]


class HasLoggers(Protocol):
    """A Trainer, or a Fabric."""

    @property
    def loggers(self) -> Any:
        """Of Lightning's or Fabric's; those of the Trainer are Fabric's, with more to them."""


def prepare(owner: HasLoggers, broadcast: Callable[[Any], Any]) -> None:
    """Make all ranks agree on the log directories, and shadow the loggers. Collective; may be called again.

    Args:
        owner: On any of a job's ranks, once Lightning's `rank_zero_only.rank` is right.
        broadcast: Returns rank 0's argument on every rank.
    """
    versions = [logger.version if hasattr(logger, "_version") else None for logger in owner.loggers]
    # Not strict: a script may give rank 0 more loggers than the others.
    for logger, version in zip(owner.loggers, broadcast(versions), strict=False):
        if version is not None:
            vars(logger)["_version"] = version
        shadow = _shadow_of(logger)
        if shadow is None and isinstance(logger, CSVLogger | TensorBoardLogger):
            shadow = _CSVShadow(logger) if isinstance(logger, CSVLogger) else _TensorBoardShadow(logger)
        if shadow is not None:
            shadow.stand_by()


def forget(owner: HasLoggers) -> None:
    """Forget what a process has logged before it joined: others have written that."""
    for logger in owner.loggers:
        shadow = _shadow_of(logger)
        if shadow is not None:
            shadow.forget()


def promote(trainer: Trainer, *, has_progress: bool = True) -> None:
    """Let this process, the new rank 0, write the logs and show the progress bar. A second call changes nothing.

    Args:
        trainer: In the training thread, at a point where it has made every logging call that the dead rank had made.
        has_progress: Whether the bar has anything left to show.

    Raises:
        OSError: a log can't be read or written. What was remembered is kept: the call may be made again.
    """
    promote_logs(trainer)
    if has_progress:
        _promote_progress_bar(trainer)


def promote_logs(owner: HasLoggers) -> None:
    """As `promote`, but for the progress bar.

    Raises:
        OSError: as there.
    """
    for logger in owner.loggers:
        shadow = _shadow_of(logger)
        if shadow is not None:
            shadow.promote()
        else:
            _warnings.warn(f"Rank 0 is a new process: what {type(logger).__name__} does there is its own affair.")


class _Shadow(abc.ABC):
    """Remembers what a logger was told and, on a new rank 0, writes what the files lack.

    Args:
        logger: Its `log_metrics` and `log_hyperparams` are replaced, on the instance, by the shadow's.

    Threads: the training thread.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
        self._log_metrics = logger.log_metrics
        self._log_hyperparams = logger.log_hyperparams
        self._calls: deque[_Call] = deque(maxlen=MAX_CALLS)
        self._hyperparams: list[Callable[[], None]] = []
        logger.log_metrics = self.log_metrics
        logger.log_hyperparams = self.log_hyperparams

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Remember a copy with numbers for tensors, then log."""
        self._calls.append((convert_tensors_to_scalars(dict(metrics)), step))
        if not (self._is_standing_by and _is_rank_zero()):
            if _is_rank_zero():
                confirm_membership(waits_for_coordinator=False)
            self._log_metrics(metrics=metrics, step=step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Remember, then log."""
        self._hyperparams.append(functools.partial(self._log_hyperparams, *args, **kwargs))
        if not (self._is_standing_by and _is_rank_zero()):
            self._log_hyperparams(*args, **kwargs)

    def forget(self) -> None:
        """Begin anew, but for the hyperparameters."""
        self._calls.clear()

    def stand_by(self) -> None:
        """On a rank that writes nothing: keep Lightning from opening the log when the rank changes, until `promote`."""
        if not _is_rank_zero() and self._logger._experiment is None:
            self._logger._experiment = _DummyExperiment()

    def promote(self) -> None:
        """Open the log and write what it lacks, unless this process writes it already."""
        if not self._is_standing_by:
            return
        try:
            missing = self._resume(self._logger)
            for metrics, step in missing:
                self._log_metrics(metrics=metrics, step=step)
            self._logger.save()
        except BaseException:
            self._logger._experiment = _DummyExperiment()
            raise
        _log.info("rank 0 goes on with the log in %s; %d rows were missing", self._logger.log_dir, len(missing))

    @abc.abstractmethod
    def _resume(self, logger: Any) -> list[_Call]:
        """Set an experiment that appends, log missing hyperparameters; returns the calls that the files lack."""

    @property
    def _is_standing_by(self) -> bool:
        return isinstance(self._logger._experiment, _DummyExperiment)


class _CSVShadow(_Shadow):
    """Goes on with metrics.csv and hparams.yaml."""

    def _resume(self, logger: Any) -> list[_Call]:
        writer = _AppendingWriter(logger.log_dir)
        missing = _missing_calls(self._calls, writer.take_over(), self._prefix)
        logger._experiment = writer
        for log in self._hyperparams:
            log()
        return missing


class _AppendingWriter(ExperimentWriter):
    """Lightning's writer, for a directory that is in use."""

    def _check_log_dir_exists(self) -> None:
        """Keep what is there; Lightning's deletes it."""

    def take_over(self) -> list[dict[str, str]]:
        """Go on with the header and the hyperparameters; returns the rows, after removing a torn last one."""
        hparams_path = f"{self.log_dir}/{self.NAME_HPARAMS_FILE}"
        if self._fs.isfile(hparams_path):
            with contextlib.suppress(Exception):  # torn by the kill, in any way; what is remembered replaces it
                self.hparams.update(load_hparams_from_yaml(hparams_path, use_omegaconf=False))
        if not self._fs.isfile(self.metrics_file_path):
            return []
        self._cut_torn_line()
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            reader = csv.DictReader(file)
            self.metrics_keys = list(reader.fieldnames or ())
            return list(reader)

    def _cut_torn_line(self) -> None:
        found = self._fs.cat_file(self.metrics_file_path)
        whole, end, _ = found.rpartition(b"\r\n")
        while whole.count(b'"') % 2:  # a line that ends inside quotes, which come in pairs, ends no row
            whole, end, _ = whole.rpartition(b"\r\n")
        if whole + end != found:
            self._fs.pipe_file(f"{self.metrics_file_path}.part", whole + end)
            self._fs.mv(f"{self.metrics_file_path}.part", self.metrics_file_path)


def _missing_calls(calls: Iterable[_Call], rows: Iterable[dict[str, str]], prefix: str) -> list[_Call]:
    """Return the calls that no row holds, in order.

    A row holds one call: the first of its step with which it shares a column (training and validation log under one
    step; all rows have an epoch). It isn't simply the k-th row that holds the k-th call: a member that joined later
    remembers only the end, and rank 0 may write rows that the others don't know (`self.log(rank_zero_only=True)`).
    """
    common = {"step", f"{prefix}epoch"}
    waiting: defaultdict[str | None, deque[tuple[int, _Call, set[str]]]] = defaultdict(deque)
    for index, (metrics, step) in enumerate(calls):
        names = {prefix + name for name in metrics} - common or common
        waiting[None if step is None else str(step)].append((index, (metrics, step), names))
    # Without a step Lightning numbers the rows of each flush from 0: such calls are matched by their order alone.
    stepless = waiting[None]
    for row in rows:
        columns = {name for name, cell in row.items() if cell} - common or common
        candidates = waiting[row["step"]]
        for position, (_, _, names) in enumerate(candidates):
            if names & columns:
                del candidates[position]
                break
        else:
            if stepless and stepless[0][2] & columns:
                stepless.popleft()
    missing = sorted((index, call) for queue in waiting.values() for index, call, _ in queue)
    return [call for _, call in missing]


class _TensorBoardShadow(_Shadow):
    """Goes on with a run's directory in one more event file."""

    def _resume(self, logger: Any) -> list[_Call]:
        logger._kwargs.pop("purge_step", None)  # meant for the run's start; here it would hide what the dead rank wrote
        logger._experiment = None
        if importlib.util.find_spec("tensorboard") is None:
            _warnings.warn("Only tensorboard can read event files: what the dead rank 0 had not flushed stays missing.")
            return []
        held = _EventCounts()
        parts = [(self._missing_part(metrics, int(step or 0), held), step) for metrics, step in self._calls]
        if not any(tag.startswith("_hparams_/") for tag, _ in held[logger.log_dir]):
            for log in self._hyperparams:
                log()
        return [(metrics, step) for metrics, step in parts if metrics]

    def _missing_part(self, metrics: dict[str, Any], step: int, held: _EventCounts) -> dict[str, Any]:
        missing: dict[str, Any] = {}
        for name, value in metrics.items():
            tag, directory = self._prefix + name, self._logger.log_dir
            if isinstance(value, dict):
                # SummaryWriter.add_scalars gives each of these curves a directory of its own.
                curves = f"{directory}/{tag.replace('/', '_')}_"
                part = {key: number for key, number in value.items() if not held.take(f"{curves}{key}", tag, step)}
                if part:
                    missing[name] = part
            elif not held.take(directory, tag, step):
                missing[name] = value
        return missing


class _EventCounts(dict[str, Counter[tuple[str, int]]]):
    """How often (tag, step) occurs in the event files of a directory, counted when it is first asked for."""

    def __missing__(self, directory: str) -> Counter[tuple[str, int]]:
        from tensorboard.backend.event_processing import event_file_loader, io_wrapper  # type: ignore[import-untyped]

        self[directory] = counts = Counter[tuple[str, int]]()
        if io_wrapper.tf.io.gfile.isdir(directory):
            for path in filter(io_wrapper.IsSummaryEventsFile, io_wrapper.ListDirectoryAbsolute(directory)):
                for event in event_file_loader.LegacyEventFileLoader(path).Load():  # ends at a torn record
                    counts.update((value.tag, event.step) for value in event.summary.value)
        return counts

    def take(self, directory: str, tag: str, step: int) -> bool:
        """Whether there is such an event that was not taken yet; takes it."""
        counts = self[directory]
        counts[tag, step] -= 1
        return counts[tag, step] >= 0


def _promote_progress_bar(trainer: Trainer) -> None:
    """Let the bar start its display through its own hooks, then set where the epoch stands. Never raises."""
    bar = trainer.progress_bar_callback
    if bar is None or getattr(bar, "is_enabled", False):
        return
    try:
        bar.enable()
        bar.on_train_start(trainer, trainer.lightning_module)
        bar.on_train_epoch_start(trainer, trainer.lightning_module)
        num_done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if isinstance(bar, TQDMProgressBar):
            display = bar.train_progress_bar
            display.n = display.initial = display.last_print_n = num_done  # `initial`: what the speed does not count
            display.refresh()
        elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, completed=num_done)
            bar.refresh()
    except Exception as error:  # noqa: BLE001 - whatever a bar does, the training goes on
        _warnings.warn(f"{type(bar).__name__} fails on the new rank 0 and stays off: {error!r}")
        with contextlib.suppress(Exception):
            bar.disable()


def _shadow_of(logger: Logger) -> _Shadow | None:
    owner = getattr(logger.log_metrics, "__self__", None)
    return owner if isinstance(owner, _Shadow) else None


def _is_rank_zero() -> bool:
    return getattr(rank_zero_only, "rank", None) == 0
