"""The callback's modes on one device: what they store, how a fit goes on, and what they refuse."""

from __future__ import annotations

import datetime
import logging
import pathlib
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft
from lightning_ft.checkpoint import load, verify
from lightning_ft.checkpoint.manifests import published_keys, read_manifest
from lightning_ft.checkpoint.records import Manifest
from lightning_ft.checkpoint.store import open_store

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's advice


class Model(L.LightningModule):
    """Has buffers that no optimizer makes, dropout, and a schedule."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(0.2), torch.nn.Linear(20, 1)
        )
        self.optimizer = optimizer
        self.options = options
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append((self.global_step, sum(p.detach().double().sum().item() for p in self.parameters())))
        return torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-2, **self.options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Patience(Callback):
    """Waits for each save."""

    def __init__(self, saves: lightning_ft.DeltaCheckpoint) -> None:
        self.saves = saves

    def on_train_batch_start(self, *_: Any) -> None:
        if self.saves._saver is not None:
            self.saves._saver.wait()


def fit(
    url: pathlib.Path | str, num_steps: int, model: Model | None = None, trainer: Any = None, **options: Any
) -> Model:
    """Fit, from the last checkpoint on."""
    L.seed_everything(3, verbose=False)
    model = Model() if model is None else model
    saves = lightning_ft.DeltaCheckpoint(url, **options)
    loader = DataLoader(
        TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0))), batch_size=4, shuffle=True
    )
    L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        max_epochs=-1,
        max_steps=num_steps,
        callbacks=[saves, Patience(saves)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **(trainer or {}),
    ).fit(model, loader, ckpt_path="last")
    assert saves.num_failed == 0
    return model


def manifests(url: pathlib.Path | str) -> list[Manifest]:
    """Return all manifests, newest first."""
    store = open_store(str(url))
    return [read_manifest(store, key)[0] for key in published_keys(store)]


@pytest.mark.parametrize(
    ("options", "trainer", "num_steps"),
    [
        ({"mode": "gradlog"}, {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}, 10),
        (
            {"mode": "gradlog"},
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
            10,
        ),
        ({"mode": "snap", "every_n_train_steps": 10}, {}, 20),
        ({"mode": "snap", "train_time_interval": datetime.timedelta(microseconds=1)}, {}, 14),
    ],
)
def test_a_fit_goes_on_bitwise(
    tmp_path: pathlib.Path, options: dict[str, Any], trainer: dict[str, Any], num_steps: int
) -> None:
    """From a checkpoint that depends on others: the run is the one that was never interrupted."""
    whole = fit(tmp_path / "whole", num_steps + 10, trainer=trainer, **options)
    first = fit(tmp_path / "parts", num_steps, trainer=trainer, **options)
    found = manifests(tmp_path / "parts")
    assert found[0].mode == options["mode"]
    assert found[0].depth >= 1
    second = fit(tmp_path / "parts", num_steps + 10, trainer=trainer, **options)
    assert first.seen + second.seen == whole.seen
    state = load(str(tmp_path / "parts"))["state_dict"]
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    assert all(not verdict.problems for verdict in verify(str(tmp_path / "parts"), deep=True))


@pytest.mark.parametrize(("mode", "every"), [("lossless", 5), ("bounded", 5), ("gradlog", 5), ("snap", 15)])
def test_saves_in_an_epochs_middle_and_at_its_end_are_differences(
    tmp_path: pathlib.Path, mode: str, every: int
) -> None:
    """What tells where in an epoch the fit is changes no tensors, so only the first is a base."""
    model = Model()
    model.net[0], model.net[1], model.net[3] = torch.nn.Linear(4, 9000), torch.nn.Identity(), torch.nn.Linear(9000, 1)
    model.net[0].requires_grad_(False)  # else what has changed would be no less than all
    fit(tmp_path, 4 * every, model, mode=mode, every_n_train_steps=every)
    depths = [manifest.depth for manifest in manifests(tmp_path)]
    assert depths == ([3, 2, 1, 0] if mode in ("gradlog", "snap") else [1, 1, 1, 0])


def test_a_fit_in_half_precision_goes_on_bitwise_for_100_steps(tmp_path: pathlib.Path) -> None:
    """With all at once: a scaler that leaves steps out again and again, accumulation, clipping, a schedule."""

    def half() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)
        precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        return {"plugins": [precision], "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}

    url = f"memory://{tmp_path.name}"  # so often a disk would be waited for
    whole = fit(f"{url}/whole", 115, trainer=half(), mode="gradlog")
    first = fit(f"{url}/parts", 15, trainer=half(), mode="gradlog")
    assert manifests(f"{url}/parts")[0].depth >= 1
    second = fit(f"{url}/parts", 115, trainer=half(), mode="gradlog")
    assert first.seen + second.seen == whole.seen
    found = manifests(f"{url}/parts")
    steps = [step for manifest in found for step in manifest.extra.get("steps", ())]
    assert {step["skipped"] for step in steps} == {True, False}
    state = load(f"{url}/parts")
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state["state_dict"].items())
    assert state["MixedPrecision"]["scale"] > 0


def test_gradients_are_taken_down_before_they_are_clipped(tmp_path: pathlib.Path) -> None:
    """Of bf16-mixed they are numbers of 16 bits then; a module that clips in its own way is waited for."""

    class Clips(Model):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 0.01, "norm")
            for parameter in self.parameters():
                parameter.grad *= 0.5

    trainer = {"gradient_clip_val": 0.01}
    fit(tmp_path / "standard", 3, trainer=trainer, mode="gradlog")
    assert manifests(tmp_path / "standard")[0].extra["steps"][0]["clip"]["max_norm"] == 0.01
    own = fit(tmp_path / "own", 3, Clips(), mode="gradlog")
    found = manifests(tmp_path / "own")[0]
    assert (found.depth, found.extra["steps"][0]["clip"]) == (2, None)
    assert torch.equal(load(str(tmp_path / "own"))["state_dict"]["net.0.weight"], own.net[0].weight)


def test_weights_that_are_changed_after_the_step_are_stored(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A log would not tell it: each checkpoint is a base, which is said once, and is right."""

    class Clamps(Model):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.net[0].weight.data.clamp_(-0.2, 0.2)

    caplog.set_level(logging.WARNING, logger="lightning_ft")
    model = fit(tmp_path, 4, Clamps(), mode="gradlog")
    assert all(manifest.parent is None for manifest in manifests(tmp_path))
    assert sum("were changed after the optimizer's step" in record.message for record in caplog.records) == 1
    assert torch.equal(load(str(tmp_path))["state_dict"]["net.0.weight"], model.net[0].weight)


def test_snap_changes_the_run_and_bounded_does_not(tmp_path: pathlib.Path) -> None:
    """The one stores exactly what the run goes on with; the other something near it, and says how near."""
    exact = fit(tmp_path / "exact", 20, every_n_train_steps=10)
    snapped = fit(tmp_path / "snap", 20, mode="snap", every_n_train_steps=10)
    bounded = fit(tmp_path / "bounded", 20, mode="bounded", error=1e-2, every_n_train_steps=10)
    assert exact.seen == bounded.seen
    assert exact.seen[:10] == snapped.seen[:10]
    assert exact.seen[10] != snapped.seen[10]
    assert torch.equal(load(str(tmp_path / "snap"))["state_dict"]["net.0.weight"], snapped.net[0].weight)
    newest = manifests(tmp_path / "bounded")[0]
    assert newest.contract == "bounded"
    assert 0 < newest.extra["error"]["measured"] <= newest.extra["error"]["bound"] == 1e-2
    found = load(str(tmp_path / "bounded"))
    weight = bounded.net[0].weight.detach()
    assert not torch.equal(found["state_dict"]["net.0.weight"], weight)
    assert ((found["state_dict"]["net.0.weight"] - weight).abs() <= 1e-2 * weight.abs()).all()
    assert found["global_step"] == 20


class Manual(Model):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Manual, "1 and manual optimization"),
        (lambda: Model("LBFGS"), "torch.optim.lbfgs.LBFGS"),
        (lambda: Model(fused=True), "AdamW with fused=True"),
    ],
)
def test_what_can_not_be_logged_is_refused(tmp_path: pathlib.Path, make: Any, message: str) -> None:
    """By name, when the fit begins."""
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, 2, make(), mode="gradlog")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "'lossless', 'gradlog', 'snap', 'bounded'"),
        ({"mode": "snap", "every_n_train_steps": 9}, "at least 10"),
        ({"mode": "gradlog", "every_n_train_steps": 9}, "from 1 to 8"),
        ({"mode": "gradlog", "every_n_epochs": 1}, "got another interval"),
        ({"mode": "gradlog", "base_every": 66}, "at most 65"),
        ({"mode": "bounded", "error": 2}, "error must be"),
    ],
)
def test_a_wrong_setting_of_a_mode_is_told_at_once(
    tmp_path: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    """The error names the argument and what is allowed."""
    with pytest.raises(ValueError, match=message):
        lightning_ft.DeltaCheckpoint(tmp_path, **options)
