"""The callback on one device: when it saves, how a fit goes on, and what happens if it can't save."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft
from lightning_ft import lightning_progress
from lightning_ft.checkpoint import Writer, load
from lightning_ft.checkpoint.manifests import published_keys
from lightning_ft.checkpoint.store import open_store
from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.config import checkpoint_interval
from lightning_ft.errors import StaleWriterError, StoreError
from lightning_ft.lightning_checkpoints import locate
from lightning_ft.lightning_progress import WaitingBar

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's advice


class Model(L.LightningModule):
    """A linear layer with dropout before it; notes its weights before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append((self.global_step, self.net[1].weight.detach().sum().item()))
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True)))

    test_step = validation_step

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        prediction: torch.Tensor = self.net(batch[0])
        return prediction

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(40, 4, generator=generator)), batch_size=4)


def _trainer(tmp_path: pathlib.Path, *callbacks: Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": -1, **options},
    )


def _fit(tmp_path: pathlib.Path, *callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> Model:
    L.seed_everything(3, verbose=False)
    model = Model()
    _trainer(tmp_path, *callbacks, **options).fit(model, _loader(), ckpt_path=ckpt_path)
    return model


def _steps(url: pathlib.Path) -> list[int]:
    return sorted(key.step for key in published_keys(open_store(str(url))))


def test_a_fit_goes_on_bitwise(tmp_path: pathlib.Path) -> None:
    """From an epoch's end, in whatever way the checkpoint is named, with the callback or without."""
    url = tmp_path / "run"
    whole = _fit(tmp_path, max_epochs=4)
    _fit(tmp_path, lightning_ft.DeltaCheckpoint(url, every_n_epochs=1), max_epochs=2)
    (manifest,) = sorted((url / "manifests").iterdir())[-1:]
    saves = lightning_ft.DeltaCheckpoint(url, every_n_epochs=1)
    second = _fit(tmp_path, saves, ckpt_path="last", max_epochs=4)
    assert second.seen == whole.seen[20:]
    assert saves.num_saved == 2
    assert saves.last_model_path == f"{url}/manifests/{max(published_keys(open_store(str(url))))}"
    state = load(url.as_posix())
    torch.testing.assert_close(state["state_dict"], whole.state_dict(), rtol=0.0, atol=0.0)
    plugin = lightning_ft.DeltaCheckpointIO()
    assert _fit(tmp_path, plugins=[plugin], ckpt_path=str(manifest), max_epochs=3).seen[0][0] == 20


@pytest.mark.parametrize("place", ["path", "remote"])
def test_whatever_names_a_checkpoint_is_taken_wherever_one_is_asked_for(tmp_path: pathlib.Path, place: str) -> None:
    """The directory, a manifest and "last", of this machine or remote, by fit, validate, test and predict.

    With the callback, or without it by the plugin; and by a program that knows the URL alone.
    """
    url = str(tmp_path / "run") if place == "path" else "memory://runs/matrix"
    model = _fit(tmp_path, lightning_ft.DeltaCheckpoint(url, every_n_epochs=1), max_epochs=1)
    (key,) = published_keys(open_store(url))
    plugin = lightning_ft.DeltaCheckpointIO()
    for named in (url, f"{url}/manifests/{key}", "last"):
        saves = lightning_ft.DeltaCheckpoint(url, every_n_epochs=1)
        options: dict[str, Any] = {"plugins": [plugin]} if named != "last" else {}
        callbacks = [saves] if named == "last" else []
        for name in ("validate", "test", "predict"):
            fresh = Model()
            trainer = _trainer(tmp_path, *callbacks, **options)
            shown = {} if name == "predict" else {"verbose": False}
            getattr(trainer, name)(fresh, _loader(), ckpt_path=named, **shown)
            torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0.0, atol=0.0)
        resumed = _fit(tmp_path, *callbacks, ckpt_path=named, max_steps=12, **options)
        assert [step for step, _ in resumed.seen] == [10, 11]
        assert resumed.seen[0][1] == model.net[1].weight.detach().sum().item()
    assert load(url)["global_step"] in (10, 12)


def test_loading_needs_neither_lightning_nor_a_gpu(tmp_path: pathlib.Path) -> None:
    """In a process that has none of them, and no group: all modes' checkpoints of a fit, as ordinary tensors."""
    url = str(tmp_path / "run")
    model = _fit(tmp_path, lightning_ft.DeltaCheckpoint(url, mode="gradlog", base_every=50), max_steps=3)
    program = """
import sys
class NoLightning:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "torchmetrics"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoLightning())
from lightning_ft.checkpoint import load
state = load(sys.argv[1])
import torch
assert not torch.cuda.is_available() and "lightning" not in sys.modules and state["global_step"] == 3
torch.save(state["state_dict"], sys.argv[2])
"""
    target = tmp_path / "weights.pt"
    subprocess.run(
        [sys.executable, "-c", program, url, str(target)], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    torch.testing.assert_close(torch.load(target), dict(model.state_dict()), rtol=0.0, atol=0.0)


def test_long_waits_are_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restore with how much of it is done; nothing is, as long as it is quick. Each sign of it counts as progress."""
    url = tmp_path / "run"
    said: list[str] = []
    monkeypatch.setattr(lightning_progress, "progress", said.append)
    _fit(tmp_path, lightning_ft.DeltaCheckpoint(url, every_n_epochs=1), max_epochs=1)
    for after_s in (60.0, 0.0):
        monkeypatch.setattr(lightning_progress, "AFTER_S", after_s)
        _fit(tmp_path, lightning_ft.DeltaCheckpoint(url, every_n_epochs=1), ckpt_path="last", max_epochs=2)
        assert (f"Restoring from {url}: 100%" in capsys.readouterr().err) == (after_s == 0.0)
        assert f"Restoring from {url}" in said
        said.clear()
    with WaitingBar("Waiting") as bar:
        bar.done()
    assert "Waiting: 00:00" in capsys.readouterr().err


def test_last_of_nothing_starts_anew(tmp_path: pathlib.Path) -> None:
    """So that a script can always say it, and be started again."""
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_train_steps=3)
    with pytest.warns(UserWarning, match="no last checkpoint"):
        model = _fit(tmp_path, saves, ckpt_path="last", max_steps=4)
    assert model.seen[0][0] == 0


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ({"every_n_train_steps": 4}, 5),
        ({"train_time_interval": datetime.timedelta(microseconds=1)}, 20),
        ({"every_n_epochs": 2}, 1),
        ({}, 2),
    ],
)
def test_the_interval_is_one_of_three(tmp_path: pathlib.Path, interval: dict[str, Any], expected: int) -> None:
    """What is due is saved, or counted as left out; a last one that was left out is made up for."""
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", keep_last=100, **interval)
    _fit(tmp_path, saves, max_epochs=2)
    made_up_for = saves.num_saved + saves.num_skipped - expected
    assert made_up_for in (0, 1)
    assert saves.num_saved == len(_steps(tmp_path / "run"))
    assert _steps(tmp_path / "run")[-1] == 20
    assert saves.num_failed == 0


def test_the_interval_may_be_an_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """An argument goes before it; what can't be read is named."""
    monkeypatch.setenv("LIGHTNING_FT_CHECKPOINT_INTERVAL", "7")
    assert lightning_ft.DeltaCheckpoint(tmp_path / "run")._interval.steps == 7
    assert lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_epochs=2)._interval.steps == 0
    assert [
        checkpoint_interval({"LIGHTNING_FT_CHECKPOINT_INTERVAL": text}) for text in ("9", "30s", "10m", "2h", "")
    ] == [
        (9, 0.0),
        (0, 30.0),
        (0, 600.0),
        (0, 7200.0),
        None,
    ]
    monkeypatch.setenv("LIGHTNING_FT_CHECKPOINT_INTERVAL", "often")
    with pytest.raises(
        ValueError,
        match=r"LIGHTNING_FT_CHECKPOINT_INTERVAL='often' can't be read: expected .* like 100, 30s, 10m or 2h",
    ):
        lightning_ft.DeltaCheckpoint(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_train_steps": 1, "every_n_epochs": 1}, "every_n_train_steps and every_n_epochs exclude each other"),
        ({"every_n_train_steps": 0}, "every_n_train_steps must be above 0"),
        ({"mode": "min"}, "mode must be one of 'lossless'"),
        ({"save_last": True}, "save_last is for the ordinary checkpoints of monitor"),
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"base_every": 0}, "base_every must be at least 1"),
        ({"storage_options": {"key": "x"}}, "storage options"),
    ],
)
def test_a_wrong_argument_is_told_at_once(tmp_path: pathlib.Path, arguments: dict[str, Any], message: str) -> None:
    """Before a fit has begun."""
    with pytest.raises(ValueError, match=message):
        lightning_ft.DeltaCheckpoint(tmp_path / "run", **arguments)


def test_storage_that_fails_does_not_stop_a_fit(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and told once; `strict` raises; when it is mended, saving goes on."""
    (tmp_path / "file").touch()
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "file" / "run", every_n_epochs=1)
    with caplog.at_level(logging.DEBUG, "lightning_ft"):
        model = _fit(tmp_path, saves, max_epochs=3)
    assert len(model.seen) == 30
    assert (saves.num_saved, saves.num_failed) == (0, 3)
    told = [(record.levelno, record.message) for record in caplog.records if record.name == "lightning_ft"]
    assert [level for level, text in told] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    assert "step 30 could not be saved: " in told[2][1]
    assert "cause=create ENOTDIR, count=3" in told[2][1]
    (tmp_path / "file").unlink()
    caplog.clear()
    with caplog.at_level(logging.INFO, "lightning_ft"):
        _fit(tmp_path, saves, max_epochs=1)
    assert saves.num_saved == 1
    (saved,) = [record.message for record in caplog.records if record.name == "lightning_ft"]
    assert saved.startswith("step 10 is saved (base): ")
    (tmp_path / "other").touch()
    with pytest.raises(StoreError):
        _fit(tmp_path, lightning_ft.DeltaCheckpoint(tmp_path / "other" / "run", strict=True), max_epochs=1)


def test_each_cause_is_told_once_and_each_save_tried_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, no permission, a network that fails, at whatever is written; the first save after that succeeds."""
    causes = [
        ("pack", OSError(errno.ENOSPC, "no space left")),
        ("footer", PermissionError(errno.EACCES, "denied")),
        ("manifests/", ConnectionResetError(errno.ECONNRESET, "reset")),
        ("manifests/", ConnectionResetError(errno.ECONNRESET, "reset")),
    ]
    create = LocalStore._create

    def fail(self: LocalStore, path: str, attempt: Any) -> None:
        if causes and causes[0][0] in path:
            raise causes.pop(0)[1]
        create(self, path, attempt)

    monkeypatch.setattr(LocalStore, "_create", fail)
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_train_steps=2, keep_last=20)

    class Patience(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if saves._saver is not None:
                saves._saver.wait()

    with caplog.at_level(logging.WARNING, "lightning_ft"):
        _fit(tmp_path, saves, Patience(), max_steps=14)
    assert not causes
    assert (saves.num_failed, saves.num_saved) == (4, 3)
    assert _steps(tmp_path / "run") == [10, 12, 14]
    told = [record.message for record in caplog.records if "could not be saved" in record.message]
    assert [text.partition("cause=")[2].split(",")[0] for text in told] == [
        "create ENOSPC",
        "create EACCES",
        "create ECONNRESET",
    ]


def test_an_exception_saves_what_was_done(tmp_path: pathlib.Path) -> None:
    """Not only Ctrl-C: on one device all ranks are together."""

    class Fails(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        _fit(tmp_path, lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_train_steps=5), Fails(), max_steps=20)
    assert _steps(tmp_path / "run")[-1] == 7


def test_a_run_that_another_has_taken_over_saves_no_more(tmp_path: pathlib.Path) -> None:
    """Two in one directory: the older one says so, and leaves the newer one's checkpoints alone."""
    url = str(tmp_path / "run")

    class Other(Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 2:
                assert all_saved[-1]._saver is not None
                all_saved[-1]._saver.wait()
                Writer(url).save(1000, {"x": torch.zeros(1)})

    saves = lightning_ft.DeltaCheckpoint(url, every_n_epochs=1)
    all_saved = [saves]
    _fit(tmp_path, saves, Other(), max_epochs=5)
    assert saves.num_saved in (1, 2)
    assert saves.num_failed == 1
    assert _steps(tmp_path / "run")[-1] == 1000
    strict = lightning_ft.DeltaCheckpoint(url, every_n_epochs=1, strict=True)
    all_saved.append(strict)
    with pytest.raises(StaleWriterError):
        _fit(tmp_path, strict, Other(), max_epochs=5)


def test_the_best_are_kept_as_ordinary_checkpoints(tmp_path: pathlib.Path) -> None:
    """Beside the others; any Lightning loads them."""
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", monitor="loss", save_top_k=2, save_last=True)
    model = Model()
    _trainer(tmp_path, saves, max_epochs=3).fit(model, _loader(), _loader())
    best = pathlib.Path(saves.best_model_path)
    assert best.parent == tmp_path / "run" / "best"
    assert len(list(best.parent.iterdir())) == 3
    assert saves.last_model_path == str(best.parent / "last.ckpt")
    assert torch.load(best.parent / "last.ckpt", weights_only=True)["global_step"] == 30
    assert torch.load(best, weights_only=True)["global_step"] in (10, 20, 30)
    assert saves.num_saved + saves.num_skipped >= 3


def test_ctrl_c_saves(tmp_path: pathlib.Path) -> None:
    """What was done since the last save is not lost."""

    class Interrupt(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                raise KeyboardInterrupt

    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_train_steps=5)
    with pytest.raises(SystemExit):
        _fit(tmp_path, saves, Interrupt(), max_steps=20)
    assert _steps(tmp_path / "run")[-1] == 7


def test_a_path_is_told_from_that_of_an_ordinary_checkpoint(tmp_path: pathlib.Path) -> None:
    """By what is there, or by the form of a manifest's path."""
    Writer(str(tmp_path / "run")).save(3, {"x": torch.zeros(1)})
    (key,) = published_keys(open_store(str(tmp_path / "run")))
    assert locate(str(tmp_path / "run")) == (str(tmp_path / "run"), None)
    assert locate(f"{tmp_path}/run/manifests/{key}") == (f"{tmp_path}/run", key)
    assert locate(f"manifests/{key}") == (".", key)
    assert locate(f"s3://bucket/run/manifests/{key}") == ("s3://bucket/run", key)
    assert locate(str(tmp_path)) is None
    assert locate(str(tmp_path / "model.ckpt")) is None
    assert locate("memory://nothing/here") is None
