"""A new rank 0's logs and progress bar. Rank 0 is a real process here, killed in the middle of its writing."""

from __future__ import annotations

import contextlib
import copy
import csv
import inspect
import io
import os
import pathlib
import pickle
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsspec.implementations.local
import lightning.fabric.loggers.csv_logs as fabric_csv
import pytest
import torch
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_ft import promotion

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
    "ignore:The `srun` command",
    "ignore:.*TensorBoard support",
    "ignore:.*LeafSpec.*deprecated:FutureWarning",
)

ROOT = pathlib.Path(__file__).parents[2]
Call = tuple[dict[str, Any], int | None]
Write = Callable[[Logger], object]

# Training and validation under one step, keys that come late (each rewrites the file under a new header, and `a_late`
# moves the columns), a text with quotes, line ends and a comma, numbers that are cut to other numbers.
CALLS: list[Call] = [
    ({"loss": 1.0, "epoch": 0}, 0),
    ({"loss": 0.515625, "epoch": 0}, 1),
    ({"loss": 123456.75, "epoch": 0}, 2),
    ({"val_loss": 0.75, "epoch": 0}, 2),
    ({"loss": 12.5, "note": 'a "quoted",\r\n\r\nlong\nnote', "epoch": 0}, 3),
    ({"loss": 125.0, "epoch": 1}, 4),
    ({"loss": -0.0625, "a_late": 7, "epoch": 1}, 5),
    ({"epoch": 1}, 5),
    ({"val_loss": 0.5, "epoch": 1}, 5),
    ({"loss": float("nan"), "mühe": 3, "epoch": 1}, 6),
    ({"loss": 0.03125, "epoch": 1}, 7),
]
MORE_CALLS: list[Call] = [({"loss": 8.0, "epoch": 2}, 8), ({"loss": 9.0, "new": 1, "epoch": 2}, 9)]


# ---- ranks and processes ----


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    before = rank_zero_only.rank
    rank_zero_only.rank = rank
    try:
        yield
    finally:
        rank_zero_only.rank = before


@pytest.fixture(autouse=True)
def _ranks_as_before() -> Iterator[None]:
    with as_rank(0):
        yield


@contextlib.contextmanager
def child(body: Callable[[], object]) -> Iterator[int]:
    """Run `body` in another process; its id is given, and it does not outlive the block."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def is_killed(body: Callable[[], object]) -> bool:
    """Run `body` in another process to its end; whether it was killed (an error in it fails the test)."""
    with child(body) as pid:
        status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


class Fate:
    """Lets a process live for a number of written bytes and file operations; the next one kills it.

    What it wrote before is in the file, as for any process that is killed in a `write` or between two.
    """

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.spent = 0

    def spend(self, wanted: int) -> int:
        allowed = min(wanted, self.left)
        self.left -= allowed
        self.spent += allowed
        return allowed

    def operation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*args: Any, **kwargs: Any) -> Any:
            if self.spend(1) < 1:
                die()
            return function(*args, **kwargs)

        return mortal

    def install(self) -> None:
        """Put all file operations of fsspec's local file system under this fate."""
        fate = self

        class MortalFile(io.FileIO):
            def write(self, data: Any) -> int:
                allowed = fate.spend(len(data))
                super().write(bytes(data)[:allowed])
                if allowed < len(data):
                    die()
                return len(data)

        def open_unbuffered(path: str, mode: str) -> MortalFile:
            if mode[0] != "r" and fate.spend(1) < 1:
                die()
            return MortalFile(path, mode.replace("b", ""))

        local = fsspec.implementations.local
        vars(local)["open"] = open_unbuffered
        shutil.move = self.operation(shutil.move)
        os.remove = self.operation(os.remove)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trainer_with(*loggers: Logger) -> Trainer:
    return Trainer(logger=list(loggers), enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")


def standby(logger: Logger) -> Trainer:
    """Return the trainer of a rank that is not 0, prepared. The caller sets the rank."""
    trainer = trainer_with(logger)
    promotion.prepare(trainer, lambda versions: versions)
    return trainer


def log(logger: Logger, calls: Sequence[Call], saves: Sequence[int] = ()) -> None:
    for index, (metrics, step) in enumerate(calls):
        logger.log_metrics(metrics=metrics, step=step)
        if index in saves:
            logger.save()


def take_over(logger: Logger, calls: Sequence[Call], more: Sequence[Call] = MORE_CALLS) -> None:
    """Be a rank 1 that made all calls, become rank 0, and go on."""
    with as_rank(1):
        trainer = standby(logger)
        log(logger, calls, saves=range(0, len(calls), 2))
    promotion.promote(trainer)
    log(logger, more)
    logger.finalize("success")


# ---- CSVLogger ----


def csv_logger(path: pathlib.Path, flush_every: int = 100, **options: Any) -> CSVLogger:
    return CSVLogger(path, name="run", version=3, flush_logs_every_n_steps=flush_every, **options)


def csv_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without their empty cells; each must have all columns."""
    with (path / "run" / "version_3" / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames is not None
    assert reader.fieldnames == sorted(set(reader.fieldnames))
    assert all(None not in row and None not in row.values() for row in rows)
    return [{key: cell for key, cell in row.items() if cell} for row in rows]


def as_rows(calls: Sequence[Call]) -> list[dict[str, str]]:
    return [{key: str(value) for key, value in {**metrics, "step": step}.items()} for metrics, step in calls]


def write_csv(
    path: pathlib.Path, calls: Sequence[Call] = CALLS, flush_every: int = 2, fate: Fate | None = None
) -> None:
    """Be rank 0."""
    logger = csv_logger(path, flush_every)
    if fate is not None:
        fate.install()
    log(logger, calls, saves=(3, 7))
    logger.save()


def count_budget(path: pathlib.Path, write: Callable[[Fate], None]) -> int:
    """Return what an undisturbed run spends of its fate; it writes to `path`."""
    report = path / "spent"

    def body() -> None:
        fate = Fate(sys.maxsize)
        write(fate)
        os.write(descriptor, str(fate.spent).encode())

    path.mkdir()
    descriptor = os.open(report, os.O_CREAT | os.O_WRONLY)
    assert not is_killed(body)
    os.close(descriptor)
    return int(report.read_text())


def check_csv_killed_at(path: pathlib.Path, budget: int) -> None:
    path.mkdir()
    assert is_killed(lambda: write_csv(path, fate=Fate(budget)))
    take_over(csv_logger(path), CALLS)
    assert csv_rows(path) == as_rows([*CALLS, *MORE_CALLS]), f"killed after {budget}"
    assert not list(path.rglob("*.part"))
    shutil.rmtree(path)


def test_csv_row_is_neither_lost_nor_doubled_wherever_the_kill_falls(tmp_path: pathlib.Path) -> None:
    """Killed at every 11th byte or operation of its writing, rank 0 leaves a file that is completed."""
    total = count_budget(tmp_path / "whole", lambda fate: write_csv(tmp_path / "whole", fate=fate))
    assert total > 500
    for budget in range(0, total, 11):
        check_csv_killed_at(tmp_path / "run", budget)


@pytest.mark.slow
@pytest.mark.skipif("EVERY_BYTE" not in os.environ, reason="set EVERY_BYTE for the same at each byte: a minute")
@pytest.mark.timeout(900)
def test_csv_row_is_neither_lost_nor_doubled_at_any_byte(tmp_path: pathlib.Path) -> None:
    """The same at each single byte and operation."""
    total = count_budget(tmp_path / "whole", lambda fate: write_csv(tmp_path / "whole", fate=fate))
    for budget in range(total):
        check_csv_killed_at(tmp_path / "run", budget)


def test_csv_new_rank_0_may_die_in_its_promotion(tmp_path: pathlib.Path) -> None:
    """Killed at random points, rank 0 and then its successor leave a file that the next successor completes."""
    draw = random.Random(20_26)
    total = count_budget(tmp_path / "whole", lambda fate: write_csv(tmp_path / "whole", fate=fate))
    num_killed = 0
    for _ in range(60):
        path = tmp_path / "run"
        path.mkdir()
        assert is_killed(lambda path=path: write_csv(path, fate=Fate(draw.randrange(total))))  # type: ignore[misc]
        fate = Fate(draw.randrange(200))

        def be_rank_1(path: pathlib.Path = path, fate: Fate = fate) -> None:
            logger = csv_logger(path)
            with as_rank(1):
                trainer = standby(logger)
                log(logger, CALLS)
            fate.install()
            promotion.promote(trainer)

        num_killed += is_killed(be_rank_1)
        take_over(csv_logger(path), CALLS)
        assert csv_rows(path) == as_rows([*CALLS, *MORE_CALLS])
        shutil.rmtree(path)
    assert num_killed > 20


@pytest.mark.parametrize("flush_every", [1, 3, 100])
def test_csv_survives_kills_from_outside(tmp_path: pathlib.Path, flush_every: int) -> None:
    """SIGKILL from another process, after a random number of calls, loses and doubles nothing."""
    draw = random.Random(flush_every)
    calls: list[Call] = [({"loss": i / 8, "epoch": i // 50, f"key{i // 40}": i}, i) for i in range(200)]
    for attempt in range(8):
        path = tmp_path / str(attempt)
        kill_after(lambda path=path: csv_logger(path, flush_every), calls, draw.randrange(1, 200))  # type: ignore[misc]
        take_over(csv_logger(path, flush_every), calls, more=[])
        assert csv_rows(path) == as_rows(calls)


def kill_after(make_logger: Callable[[], Logger], calls: Sequence[Call], num_calls: int) -> None:
    """Let a process log, and kill it from here when it has told that it made this number of calls."""
    reading, writing = os.pipe()

    def be_rank_0() -> None:
        logger = make_logger()
        for metrics, step in calls:
            logger.log_metrics(metrics=metrics, step=step)
            os.write(writing, b".")
        signal.pause()

    with child(be_rank_0) as pid:
        for _ in range(num_calls):
            assert os.read(reading, 1) == b"."
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("num_logged", range(len(CALLS) + 1))
def test_csv_rows_that_waited_in_memory_are_written(tmp_path: pathlib.Path, num_logged: int) -> None:
    """What a rank 0 that flushes rarely had only in memory when it was killed is replayed."""
    kill_after(lambda: csv_logger(tmp_path, 4), CALLS[:num_logged], num_logged)
    take_over(csv_logger(tmp_path, 4), CALLS)
    assert csv_rows(tmp_path) == as_rows([*CALLS, *MORE_CALLS])


@pytest.mark.parametrize("where", ["before", "truncated", "rewritten"])
def test_csv_rows_lost_in_a_header_rewrite_are_replayed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A kill before, in and after the rewrite of the file for a new column costs no row."""
    rewrite = ExperimentWriter._rewrite_with_new_header

    def stop(writer: ExperimentWriter, fieldnames: list[str]) -> None:
        if where == "truncated":
            pathlib.Path(writer.metrics_file_path).write_bytes(b"")
        elif where == "rewritten":
            rewrite(writer, fieldnames)
        die()

    def be_rank_0() -> None:
        monkeypatch.setattr(ExperimentWriter, "_rewrite_with_new_header", stop)
        write_csv(tmp_path)

    assert is_killed(be_rank_0)
    take_over(csv_logger(tmp_path), CALLS)
    assert csv_rows(tmp_path) == as_rows([*CALLS, *MORE_CALLS])


def test_csv_is_the_same_text_as_without_a_failure(tmp_path: pathlib.Path) -> None:
    """The promoted rank's file equals, byte for byte, what one process would have written."""
    calls: list[Call] = [({"loss": i / 3, "epoch": 0}, i) for i in range(20)]
    write_csv(tmp_path / "whole", calls, flush_every=5)
    kill_after(lambda: csv_logger(tmp_path / "split", 5), calls, 13)
    take_over(csv_logger(tmp_path / "split", 5), calls, more=[])
    whole, split = (tmp_path / name / "run" / "version_3" / "metrics.csv" for name in ("whole", "split"))
    assert split.read_bytes() == whole.read_bytes()


def test_csv_calls_without_a_step_are_numbered_as_lightning_does(tmp_path: pathlib.Path) -> None:
    """Calls without a step are replayed from the last flush on, with the numbers they would have had."""
    calls: list[Call] = [({"loss": i}, None) for i in range(10)]
    kill_after(lambda: csv_logger(tmp_path, 4), calls, 10)
    take_over(csv_logger(tmp_path, 4), calls, more=[])
    assert [(row["loss"], row["step"]) for row in csv_rows(tmp_path)] == [(str(i), str(i % 4)) for i in range(10)]


def test_csv_order_of_calls_with_and_without_a_step_is_kept(tmp_path: pathlib.Path) -> None:
    """Replayed rows stand in the order of their calls, whatever their steps."""
    calls: list[Call] = [({"by_hand": i}, None) if i % 3 == 1 else ({"loss": i}, i % 4) for i in range(12)]
    for num_logged in range(len(calls) + 1):
        path = tmp_path / str(num_logged)
        write_csv(path, calls[:num_logged])
        take_over(csv_logger(path), calls, more=[])
        assert [row.get("loss") or row["by_hand"] for row in csv_rows(path)] == [str(i) for i in range(12)]


def test_csv_member_that_joined_late_completes_the_file(tmp_path: pathlib.Path) -> None:
    """A shadow that knows only the last calls (validation, not training, at its first step) adds what is missing."""
    for num_unknown in range(1, len(CALLS)):
        for num_logged in range(num_unknown, len(CALLS) + 1):
            path = tmp_path / f"{num_unknown}-{num_logged}"
            write_csv(path, CALLS[:num_logged])
            take_over(csv_logger(path), CALLS[num_unknown:])
            assert csv_rows(path) == as_rows([*CALLS, *MORE_CALLS])


def test_csv_rows_of_rank_0_alone_stay(tmp_path: pathlib.Path) -> None:
    """Rows and columns that only rank 0 wrote neither hide a missing row nor make one appear twice."""
    extra: list[Call] = [({**metrics, "gpu": 1}, step) for metrics, step in CALLS[:6]]
    written = [({"start": 1, "epoch": 0}, 0), *extra[:3], ({"only": 5, "epoch": 0}, 2), *extra[3:]]
    write_csv(tmp_path, written)
    take_over(csv_logger(tmp_path), CALLS)
    assert csv_rows(tmp_path) == as_rows([*written, *CALLS[6:], *MORE_CALLS])


def test_csv_prefix_and_tensors(tmp_path: pathlib.Path) -> None:
    """Rows are recognized under the logger's prefix; tensors are remembered by their value."""
    loss = torch.tensor(0.5)
    logger = csv_logger(tmp_path, prefix="p")
    with as_rank(1):
        trainer = standby(logger)
        logger.log_metrics({"loss": loss, "epoch": 0}, 0)
        logger.log_metrics({"loss": loss, "epoch": 0}, 1)
        loss.fill_(9)
    log(first := csv_logger(tmp_path, prefix="p"), [({"loss": 0.5, "epoch": 0}, 0)])
    first.save()
    promotion.promote(trainer)
    assert csv_rows(tmp_path) == [{"p-loss": "0.5", "p-epoch": "0", "step": step} for step in "01"]


def test_csv_without_the_old_directory_is_written_from_memory(tmp_path: pathlib.Path) -> None:
    """On a machine that does not share rank 0's disk, the log is complete all the same."""
    take_over(csv_logger(tmp_path), CALLS)
    assert csv_rows(tmp_path) == as_rows([*CALLS, *MORE_CALLS])


def test_nothing_is_written_between_the_change_of_rank_and_promote(tmp_path: pathlib.Path) -> None:
    """Calls in between leave the old files alone and are written by `promote`, which is idempotent."""
    write_csv(tmp_path, CALLS[:5])
    before = csv_rows(tmp_path)
    logger = csv_logger(tmp_path)
    with as_rank(1):
        trainer = standby(logger)
        log(logger, CALLS[:8])
    log(logger, CALLS[8:], saves=[0, 1])
    assert csv_rows(tmp_path) == before
    promotion.promote(trainer)
    promotion.promote(trainer)
    promotion.prepare(trainer, lambda versions: versions)
    log(logger, MORE_CALLS)
    logger.finalize("success")
    assert csv_rows(tmp_path) == as_rows([*CALLS, *MORE_CALLS])


@pytest.mark.parametrize("obstacle", ["run", "run/version_3/metrics.csv"])
def test_failed_promotion_can_be_repeated(tmp_path: pathlib.Path, obstacle: str) -> None:
    """If the disk refuses, at the start or at the end, nothing that was remembered is forgotten."""
    logger = csv_logger(tmp_path)
    with as_rank(1):
        trainer = standby(logger)
        log(logger, CALLS)
    # A file where a directory belongs, or a directory where the file belongs.
    if obstacle == "run":
        (tmp_path / obstacle).write_text("")
    else:
        (tmp_path / obstacle).mkdir(parents=True)
    with pytest.raises(OSError, match="run"):
        promotion.promote(trainer)
    shutil.rmtree(tmp_path / obstacle) if obstacle != "run" else (tmp_path / obstacle).unlink()
    promotion.promote(trainer)
    assert csv_rows(tmp_path) == as_rows(CALLS)


@pytest.mark.parametrize("torn", [None, 0, 9, 14])
def test_csv_hyperparameters_are_kept(tmp_path: pathlib.Path, torn: int | None) -> None:
    """hparams.yaml keeps what is in it, or is written again if the kill tore it; later ones are added."""
    first = csv_logger(tmp_path)
    first.log_hyperparams({"lr": 0.125, "width": 64})
    path = tmp_path / "run" / "version_3" / "hparams.yaml"
    if torn is not None:
        path.write_bytes(path.read_bytes()[:torn])
    logger = csv_logger(tmp_path)
    with as_rank(1):
        trainer = standby(logger)
        if torn is not None:
            logger.log_hyperparams({"lr": 0.125, "width": 64})
    promotion.promote(trainer)
    assert load_hparams_from_yaml(path) == {"lr": 0.125, "width": 64}
    logger.log_hyperparams({"depth": 2})
    assert load_hparams_from_yaml(path) == {"lr": 0.125, "width": 64, "depth": 2}


# ---- TensorBoardLogger ----

TB_CALLS: list[Call] = [
    ({"loss": 1.0, "epoch": 0}, 0),
    ({"loss": 0.5, "epoch": 0}, 1),
    ({"val/loss": 0.75, "epoch": 0}, 1),  # "epoch" a second time under one step, as Lightning does
    ({"pair": {"a": 1.0, "b": 2.0}, "epoch": 0}, 2),
    ({"loss": 0.25, "epoch": 1}, 3),
    ({"pair": {"a": 3.0, "b": 4.0}, "loss": 0.125}, 4),
]
TB_MORE: list[Call] = [({"loss": 0.0625, "pair": {"a": 5.0}, "epoch": 2}, 5)]
Event = tuple[str, int, str, float]


@pytest.fixture(name="tensorboard")
def _tensorboard() -> None:
    pytest.importorskip("tensorboard")


def tb_logger(path: pathlib.Path, **options: Any) -> TensorBoardLogger:
    return TensorBoardLogger(path, name="run", version=3, default_hp_metric=False, **options)


def tb_events(path: pathlib.Path) -> list[Event]:
    """Return (tag, step, directory, value) of all scalars in all event files, sorted."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    root = path / "run" / "version_3"
    return sorted(
        (value.tag, event.step, str(file.parent.relative_to(root)), value.simple_value)
        for file in root.rglob("events.out.*")
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.HasField("simple_value")
    )


def as_events(calls: Sequence[Call]) -> list[Event]:
    events: list[Event] = []
    for metrics, step in calls:
        for tag, value in metrics.items():
            curves = value.items() if isinstance(value, dict) else [(None, value)]
            events += [(tag, step or 0, "." if key is None else f"{tag}_{key}", float(y)) for key, y in curves]
    return sorted(events)


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize("seed", range(12))
def test_tensorboard_survives_kills_from_outside(tmp_path: pathlib.Path, seed: int) -> None:
    """SIGKILL from another process, after a random number of calls, loses and doubles no point."""
    kill_after(lambda: tb_logger(tmp_path), TB_CALLS, random.Random(seed).randrange(1, len(TB_CALLS) + 1))
    take_over(tb_logger(tmp_path), TB_CALLS, TB_MORE)
    assert tb_events(tmp_path) == as_events([*TB_CALLS, *TB_MORE])


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_point_is_neither_lost_nor_doubled_wherever_the_file_is_torn(tmp_path: pathlib.Path) -> None:
    """From an event file that ends at any 11th byte, all points are completed, and TensorBoard shows each once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def be_rank_0() -> None:
        logger = tb_logger(tmp_path / "whole")
        log(logger, TB_CALLS)
        logger.save()
        die()

    assert is_killed(be_rank_0)
    (source,) = (tmp_path / "whole" / "run" / "version_3").glob("events.out.*")
    data = source.read_bytes()
    for length in range(0, len(data) + 1, 11):
        path = tmp_path / str(length)
        shutil.copytree(tmp_path / "whole", path)
        torn = path / source.relative_to(tmp_path / "whole")
        torn.write_bytes(data[:length])
        take_over(tb_logger(path), TB_CALLS, TB_MORE)
        assert tb_events(path) == as_events([*TB_CALLS, *TB_MORE]), f"torn after {length}"
        shown = EventAccumulator(str(torn.parent)).Reload().Scalars("loss")
        assert sorted(event.step for event in shown) == [0, 1, 3, 4, 5]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_new_rank_0_may_die_in_its_promotion(tmp_path: pathlib.Path) -> None:
    """Several promotions one after another, each killed, leave one point of each."""
    kill_after(lambda: tb_logger(tmp_path), TB_CALLS[:2], 2)

    def be_rank_1() -> None:
        logger = tb_logger(tmp_path)
        with as_rank(1):
            trainer = standby(logger)
            log(logger, TB_CALLS[:4])
        promotion.promote(trainer)
        die()

    assert is_killed(be_rank_1)
    assert is_killed(be_rank_1)
    assert tb_events(tmp_path) == as_events(TB_CALLS[:4])
    take_over(tb_logger(tmp_path), TB_CALLS, TB_MORE)
    assert tb_events(tmp_path) == as_events([*TB_CALLS, *TB_MORE])


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_purge_step_does_not_purge_the_dead_ranks_points(tmp_path: pathlib.Path) -> None:
    """`purge_step`, which is for the start of a run, is not repeated by a promotion."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kill_after(lambda: tb_logger(tmp_path, purge_step=1), TB_CALLS[:4], 4)
    (old,) = (tmp_path / "run" / "version_3").glob("events.out.*")
    # TensorBoard reads the files in the order of their names, which begin with the second of their start.
    old.rename(old.with_name("events.out.tfevents.1000000000.host.1.0"))
    take_over(tb_logger(tmp_path, purge_step=1), TB_CALLS, TB_MORE)
    shown = EventAccumulator(str(tmp_path / "run" / "version_3")).Reload().Scalars("loss")
    assert sorted(event.step for event in shown) == [0, 1, 3, 4, 5]


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.parametrize("is_written", [True, False])
def test_tensorboard_hyperparameters_are_written_once(tmp_path: pathlib.Path, *, is_written: bool) -> None:
    """A new rank 0 writes the hyperparameters exactly if the files lack them."""
    if is_written:
        first = tb_logger(tmp_path)
        first.log_hyperparams({"lr": 0.5}, {"hp": 1.0})
        first.finalize("success")
    logger = tb_logger(tmp_path)
    with as_rank(1):
        trainer = standby(logger)
        logger.log_hyperparams({"lr": 0.5}, {"hp": 1.0})
    promotion.promote(trainer)
    logger.finalize("success")
    assert tb_events(tmp_path) == [("hp", 0, ".", 1.0)]
    assert load_hparams_from_yaml(tmp_path / "run" / "version_3" / "hparams.yaml") == {"lr": 0.5}


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_subclass_keeps_its_own_log_metrics(tmp_path: pathlib.Path) -> None:
    """Replayed calls go through a subclass's `log_metrics`, here one that drops the epoch; prefixes are known."""

    class WithoutEpoch(TensorBoardLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics({key: value for key, value in metrics.items() if key != "epoch"}, step)

    def make() -> WithoutEpoch:
        return WithoutEpoch(tmp_path, name="run", version=3, prefix="p")

    calls: list[Call] = [({"loss": i, "epoch": 0}, i) for i in range(6)]
    kill_after(make, calls, 3)
    take_over(make(), calls, more=[])
    assert tb_events(tmp_path) == [("p-loss", i, ".", float(i)) for i in range(6)]


def test_tensorboardx_alone_goes_on_and_warns(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorboard nothing can be compared: the log goes on, and a warning says what may be missing."""
    pytest.importorskip("tensorboard")
    logger = tb_logger(tmp_path)
    with as_rank(1):
        trainer = standby(logger)
        log(logger, TB_CALLS)
    monkeypatch.setattr(promotion.importlib.util, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match="Only tensorboard can read"):
        promotion.promote(trainer)
    log(logger, TB_MORE)
    logger.finalize("success")
    assert tb_events(tmp_path) == as_events(TB_MORE)


# ---- versions, other loggers ----


def test_prepare_makes_the_ranks_agree_on_the_versions(tmp_path: pathlib.Path) -> None:
    """All ranks take rank 0's versions, also where they had seen another one; a second call keeps the shadows."""
    pytest.importorskip("tensorboard")

    def make() -> list[Logger]:
        return [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]

    zero = make()
    promotion.prepare(trainer_with(*zero), lambda versions: versions)
    log(zero[0], CALLS)
    log(zero[1], TB_CALLS)
    with as_rank(1):
        one = make()
        trainer = trainer_with(*one)
        assert [logger.version for logger in one] == [1, 1]
        promotion.prepare(trainer, lambda _: [0, 0])
        recorders = [logger.log_metrics for logger in one]
        promotion.prepare(trainer, lambda _: [0, 0])
        assert [logger.log_metrics for logger in one] == recorders
    assert [logger.log_dir for logger in one] == [logger.log_dir for logger in zero]


def test_what_was_logged_before_a_join_is_forgotten(tmp_path: pathlib.Path) -> None:
    """The others have logged what that process repeated, with other values."""
    zero, one = CSVLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)
    promotion.prepare(trainer_with(zero), lambda versions: versions)
    log(zero, CALLS)
    zero.save()
    with as_rank(1):
        trainer = trainer_with(one)
        promotion.prepare(trainer, lambda versions: versions)
        one.log_metrics({"phantom": 1.0}, step=0)
        promotion.forget(trainer)
    promotion.promote(trainer)
    log(one, MORE_CALLS)
    one.save()
    with pathlib.Path(one.experiment.metrics_file_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(CALLS) + len(MORE_CALLS)
    assert "phantom" not in rows[0]


def test_rank_0_itself_logs_as_ever(tmp_path: pathlib.Path) -> None:
    """The shadow of rank 0 changes nothing, and promoting it neither."""
    logger = csv_logger(tmp_path)
    trainer = standby(logger)
    log(logger, CALLS)
    promotion.promote(trainer)
    logger.finalize("success")
    assert csv_rows(tmp_path) == as_rows(CALLS)


class ForeignLogger(Logger):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "foreign"

    @property
    def version(self) -> str:
        raise AssertionError("only Lightning's file loggers are asked")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log_hyperparams(self, params: Any) -> None:
        raise NotImplementedError


def test_other_loggers_are_left_alone_and_named_once(recwarn: pytest.WarningsRecorder) -> None:
    """A logger of another kind is not touched; one warning names its class."""
    logger = ForeignLogger()
    before = dict(vars(logger))
    with as_rank(1):
        trainer = standby(logger)
    promotion.promote(trainer)
    promotion.promote(trainer)
    assert vars(logger) == before
    assert [str(warning.message).count("ForeignLogger") for warning in recwarn] == [1]


def test_number_of_remembered_calls_is_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest calls are forgotten; what is left completes the file."""
    monkeypatch.setattr(promotion, "MAX_CALLS", 4)
    write_csv(tmp_path, CALLS[:9])
    take_over(csv_logger(tmp_path), CALLS)
    assert csv_rows(tmp_path) == as_rows([*CALLS, *MORE_CALLS])


def test_shadowed_logger_can_be_copied(tmp_path: pathlib.Path) -> None:
    """Copies by `copy.deepcopy` and `pickle` log, each to itself."""
    logger = csv_logger(tmp_path)
    standby(logger)
    for other in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):  # noqa: S301 - our own bytes
        other.log_metrics({"loss": 1.0}, 0)
        assert len(other.experiment.metrics) == 1
    assert len(logger.experiment.metrics) == 0


# ---- progress bars, in real fits ----

NUM_BATCHES = 8
PROMOTED_AT = (1, 3)  # epoch, batch


class Promotion(Callback):
    """Makes the process a rank 1 whose bar is off, and promotes it at the start of a batch in the second epoch."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.seen: list[tuple[int, float, float | None]] = []
        self.shown: Callable[[], tuple[float, float | None]] | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.bar.disable()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == PROMOTED_AT:
            promotion.promote(trainer)
            self.record(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) >= PROMOTED_AT:
            self.record(trainer)

    def record(self, trainer: Trainer) -> None:
        assert self.shown is not None
        self.seen.append((trainer.current_epoch, *self.shown()))


def fit(bar: ProgressBar, *callbacks: Callback, logger: Any = False, **options: Any) -> Trainer:
    torch.manual_seed(5)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=NUM_BATCHES,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[bar, *callbacks],
        **options,
    )
    trainer.fit(BoringModel())
    return trainer


EXPECTED = [(1, n, NUM_BATCHES) for n in range(3, 9)] + [(2, n, NUM_BATCHES) for n in range(1, 9)]


@pytest.mark.parametrize("leave", [False, True])
def test_tqdm_bar_goes_on_at_its_position(capsys: pytest.CaptureFixture[str], *, leave: bool) -> None:
    """The bar appears at the number of batches done, goes on from there, and starts the next epoch at 0."""
    bar = TQDMProgressBar(leave=leave)
    callback = Promotion(bar)
    callback.shown = lambda: (bar.train_progress_bar.n, bar.train_progress_bar.total)
    fit(bar, callback)
    assert callback.seen == EXPECTED
    assert bar.train_progress_bar.initial == 0
    out = capsys.readouterr().out
    assert "Epoch 0" not in out
    assert all(f"{n}/{NUM_BATCHES}" in out for n in range(3, NUM_BATCHES + 1))
    assert "Epoch 1:" in out
    assert "Epoch 2:" in out
    assert "Validation" in out


def test_rich_bar_goes_on_at_its_position(capsys: pytest.CaptureFixture[str]) -> None:
    """The same for Rich."""
    pytest.importorskip("rich")
    bar = RichProgressBar(console_kwargs={"force_terminal": True, "width": 120})
    callback = Promotion(bar)
    callback.shown = lambda: (bar.train_progress_bar.completed, bar.train_progress_bar.total)
    fit(bar, callback)
    assert callback.seen == EXPECTED
    out = capsys.readouterr().out
    assert "Epoch 0" not in out
    assert "Epoch 2/2" in out


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bar_that_the_user_turned_off_stays_off(kind: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With a refresh rate of 0 a promotion shows nothing and breaks nothing."""
    if kind is RichProgressBar:
        pytest.importorskip("rich")
    callback = Promotion(bar := kind(refresh_rate=0))
    callback.shown = lambda: (0, None)
    fit(bar, callback)
    assert "Epoch" not in capsys.readouterr().out


def test_bar_that_is_shown_is_left_alone() -> None:
    """A second promotion does not start the bar again."""
    bar = TQDMProgressBar()
    displays: list[Any] = []

    class Twice(Promotion):
        def record(self, trainer: Trainer) -> None:
            promotion.promote(trainer)
            displays.append(bar.train_progress_bar)

    fit(bar, Twice(bar))
    assert len({id(display) for display in displays}) == 1


def test_failing_bar_is_turned_off_and_the_training_goes_on() -> None:
    """A bar that raises when it is shown costs a warning, not the fit."""

    class BrokenBar(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            if self.is_enabled:
                raise RuntimeError("no terminal")
            return super().init_train_tqdm()

    callback = Promotion(bar := BrokenBar())
    callback.shown = lambda: (0, None)
    with pytest.warns(UserWarning, match="BrokenBar fails .*no terminal"):
        trainer = fit(bar, callback)
    assert trainer.current_epoch == 3
    assert not bar.is_enabled


def test_bar_of_another_kind_is_enabled_through_its_hooks() -> None:
    """A bar of the user's own sees its start before its first batch."""

    class OwnBar(ProgressBar):
        events: list[str]
        is_on = True

        def disable(self) -> None:
            self.is_on, self.events = False, []

        def enable(self) -> None:
            self.is_on = True

        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.events += ["start"] if self.is_on else []

        def on_train_batch_end(self, *args: Any) -> None:
            self.events += ["batch"] if self.is_on else []

    callback = Promotion(bar := OwnBar())
    callback.shown = lambda: (0, None)
    fit(bar, callback)
    assert bar.events == ["start", *["batch"] * (2 * NUM_BATCHES - 3)]


# ---- a whole fit ----


class Loud(BoringModel):
    """Logs in training, in validation and, without a step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"])
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)
        self.log("val_loss", output["x"])
        return output


class Moment(Callback):
    """Prepares where the strategy would, and does something at the start of a batch."""

    def __init__(self, step: int, action: Callable[[Trainer], None]) -> None:
        self.step, self.action = step, action

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        promotion.prepare(trainer, lambda versions: versions)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action(trainer)


def loud_fit(path: pathlib.Path, step: int, action: Callable[[Trainer], None]) -> None:
    torch.manual_seed(5)
    Trainer(
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=NUM_BATCHES,
        limit_val_batches=2,
        log_every_n_steps=1,
        logger=[csv_logger(path / "csv"), tb_logger(path / "tb")],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[Moment(step, action)],
    ).fit(Loud())


def test_logs_of_a_fit_whose_rank_0_dies_equal_an_undisturbed_ones(tmp_path: pathlib.Path) -> None:
    """A real fit killed in its second epoch and gone on with by another has the same files as one without a failure."""
    pytest.importorskip("tensorboard")
    program = (
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('loud', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['loud'] = module\n"
        "spec.loader.exec_module(module)\n"
        "module.loud_fit(pathlib.Path(sys.argv[2]), 11, lambda trainer: module.die())\n"
    )
    arguments = [sys.executable, "-c", program, __file__, str(tmp_path / "split")]
    dead = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert len(csv_rows(tmp_path / "split" / "csv")) == 12

    def become_rank_0(trainer: Trainer) -> None:
        rank_zero_only.rank = 0
        promotion.promote(trainer)

    with as_rank(1):
        loud_fit(tmp_path / "split", 12, become_rank_0)
    loud_fit(tmp_path / "whole", 0, lambda _: None)
    whole, split = (tmp_path / name / "csv" / "run" / "version_3" for name in ("whole", "split"))
    for name in ("metrics.csv", "hparams.yaml"):
        assert (split / name).read_text() == (whole / name).read_text()
    assert tb_events(tmp_path / "split" / "tb") == tb_events(tmp_path / "whole" / "tb")


# ---- what is used of Lightning ----


def test_private_parts_of_lightning_are_as_they_were_read(tmp_path: pathlib.Path) -> None:
    """If this fails, Lightning has changed: read it again and adapt lightning_ft.promotion and its docstring."""
    pytest.importorskip("tensorboard")
    logger, board = csv_logger(tmp_path), tb_logger(tmp_path, purge_step=4)
    assert logger._experiment is None
    assert board._experiment is None
    assert logger._version == board._version == 3
    assert logger._prefix == board._prefix == ""
    assert board._kwargs == {"purge_step": 4}
    assert logger.LOGGER_JOIN_CHAR == board.LOGGER_JOIN_CHAR == "-"

    logger._experiment = sentinel = _DummyExperiment()  # type: ignore[assignment]
    assert logger.experiment is sentinel, "`experiment` no longer returns `_experiment`"
    assert sentinel.anything(1, key=2) is None
    logger.save()

    assert issubclass(ExperimentWriter, fabric_csv._ExperimentWriter)
    source = inspect.getsource(fabric_csv._ExperimentWriter.__init__)
    assert "self._check_log_dir_exists()" in source, "the constructor deletes metrics.csv somewhere else now"
    writer = ExperimentWriter(str(tmp_path))
    assert (writer.metrics, writer.metrics_keys, writer.hparams) == ([], [], {})
    assert writer.metrics_file_path == str(tmp_path / "metrics.csv")
    assert (writer.NAME_HPARAMS_FILE, writer.NAME_METRICS_FILE) == ("hparams.yaml", "metrics.csv")
    writer.log_metrics({"b": 1}, 7)
    writer.save()
    assert writer.metrics_keys == ["b", "step"], "`metrics_keys` is no longer the header"
    assert (tmp_path / "metrics.csv").read_bytes() == b"b,step\r\n1,7\r\n"
    with pytest.warns(UserWarning, match="exists and is not empty"):
        ExperimentWriter(str(tmp_path))
    assert not (tmp_path / "metrics.csv").exists(), (
        "the constructor keeps metrics.csv: `_AppendingWriter` is not needed"
    )

    trainer = trainer_with()
    assert trainer.progress_bar_callback is None
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 0
