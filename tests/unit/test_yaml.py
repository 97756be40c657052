"""Strategy and callback in a LightningCLI file: what is right is taken, what is wrong is named. No job is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ft

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's own, of jsonargparse and of a Trainer without a seed

STRATEGY = "lightning_ft.FaultTolerantDDPStrategy"
CALLBACK = "lightning_ft.DeltaCheckpoint"


def trainer(place: Path, **options: Any) -> Trainer:
    """What LightningCLI makes of a file."""
    config = place / "config.yaml"
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    config.write_text(yaml.safe_dump({"trainer": {**quiet, **options}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", "--config", str(config)])
        return LightningCLI(BoringModel, run=False, save_config_callback=None).trainer


def strategy(**arguments: Any) -> dict[str, Any]:
    return {"strategy": {"class_path": STRATEGY, "init_args": arguments}}


def callback(place: Path, **arguments: Any) -> dict[str, Any]:
    return {"callbacks": [{"class_path": CALLBACK, "init_args": {"dirpath": str(place / "run"), **arguments}}]}


def test_name_alone_is_enough(tmp_path: Path) -> None:
    """`strategy: ft_ddp`."""
    found = trainer(tmp_path, strategy="ft_ddp").strategy
    assert isinstance(found, lightning_ft.FaultTolerantDDPStrategy)
    assert found.settings == lightning_ft.Settings()


def test_everything_can_be_configured(tmp_path: Path) -> None:
    """Settings, DDP's own arguments, and those of the callback."""
    settings = {"min_world_size": 2, "timeout": "auto", "evict_stragglers": True, "on_resize": "scale_lr"}
    found = trainer(
        tmp_path,
        **strategy(**settings, bucket_cap_mb=10),
        **callback(tmp_path, every_n_train_steps=5, storage_options={}),
    )
    assert isinstance(found.strategy, lightning_ft.FaultTolerantDDPStrategy)
    assert {name: getattr(found.strategy.settings, name) for name in settings} == settings
    assert found.strategy._ddp_kwargs["bucket_cap_mb"] == 10
    (saves,) = (one for one in found.callbacks if isinstance(one, lightning_ft.DeltaCheckpoint))
    assert saves.url == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (strategy(min_world=2), "'min_world' is not accepted"),
        (strategy(min_world_size="two"), 'key "min_world_size"'),
        (strategy(min_world_size=0), "min_world_size must be at least 1, got 0"),
        (strategy(timeout="soon"), 'key "timeout"'),
        (strategy(on_resize="grow"), 'key "on_resize"'),
        (strategy(heartbeat_timeout=0.5), "heartbeat_interval < heartbeat_timeout < timeout must hold"),
        ({"strategy": {"class_path": "lightning_ft.FaultTolerantStrategy"}}, "no attribute 'FaultTolerantStrategy'"),
        (callback(Path(), every_n_steps=5), "'every_n_steps' is not accepted"),
        (callback(Path(), every_n_train_steps="five"), 'key "every_n_train_steps"'),
        (callback(Path(), every_n_train_steps=0), "every_n_train_steps must be above 0, got 0"),
        (callback(Path(), keep_last=0), "keep_last must be at least 1"),
        (callback(Path(), mode="lossmore"), 'key "mode"'),
    ],
    ids=str,
)
def test_wrong_key_or_value_is_named(
    wrong: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the parser's own error, or in ours."""
    with pytest.raises((SystemExit, ValueError)) as caught:
        trainer(tmp_path, **wrong)
    assert told in capsys.readouterr().err + str(caught.value)
