"""`strategy="ft_ddp"` in a script that does not import lightning_ft: what `pip install` makes work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import lightning_ft_autoload

ROOT = Path(__file__).parents[2]
GROUP = "torch.backends"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment with this package's entry points, as its installation writes them."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    place = tmp_path / "lightning_ft_of_the_test-1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-ft-of-the-test\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (place / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])}


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_trainer_and_fabric_know_the_strategy(installed: dict[str, str]) -> None:
    """Each has a registry of its own. Here it is Lightning that imports torch."""
    program = (
        "from lightning import Trainer, Fabric\n"
        "print(type(Trainer(accelerator='cpu', devices=1, strategy='ft_ddp', logger=False).strategy).__name__)\n"
        "print(type(Fabric(accelerator='cpu', devices=1, strategy='ft_ddp').strategy).__name__)"
    )
    done = run(program, installed)
    assert done.stdout.split() == ["FaultTolerantDDPStrategy", "FaultTolerantFabricStrategy"], done.stderr


def test_importing_torch_imports_no_more_than_the_hook(installed: dict[str, str]) -> None:
    """Who does not use Lightning pays nothing, and gets no backend that he did not ask for; Lightning comes later."""
    program = (
        "import torch, sys\n"
        "print({'lightning_ft', 'lightning_ft_autoload'} & set(sys.modules))\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print('ft_ddp' in StrategyRegistry)"
    )
    done = run(program, installed)
    assert done.stdout.splitlines() == ["{'lightning_ft_autoload'}", "True"], done.stderr


def test_broken_installation_breaks_neither_torch_nor_lightning(installed: dict[str, str], tmp_path: Path) -> None:
    """A lightning_ft that can't be imported is no error of theirs; a package of its name stands for Lightning."""
    broken = tmp_path / "broken"
    for name, text in {
        "lightning_ft": "raise RuntimeError('broken')",
        "lightning": "",
        "lightning/pytorch": "",
    }.items():
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(broken), installed["PYTHONPATH"]])
    program = (
        "import logging; logging.basicConfig(level='DEBUG', format='%(message)s')\n"
        "import lightning, torch, lightning.pytorch\n"
        "print(lightning.__file__)"
    )
    done = run(program, {**installed, "PYTHONPATH": paths})
    assert done.stdout.strip() == str(broken / "lightning" / "__init__.py"), done.stderr
    assert "strategy='ft_ddp' is not known before `import lightning_ft`: RuntimeError('broken')" in done.stderr


def test_without_wrapt_torch_is_as_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What torch calls at the end of its import never raises."""
    monkeypatch.setitem(sys.modules, "wrapt", None)
    with caplog.at_level(logging.DEBUG, "lightning_ft"):
        lightning_ft_autoload.register_when_lightning_is_imported()
    assert "is not known before `import lightning_ft`: ModuleNotFoundError" in caplog.text


def test_torch_still_calls_entry_points() -> None:
    """If this fails, torch has given up the group: `import lightning_ft` is needed again."""
    assert callable(torch._import_device_backends)
    assert torch._import_device_backends.__module__ == "torch"
