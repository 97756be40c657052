"""`strategy="ft_ddp"` in a script that does not import lightning_ft: what `pip install` makes work."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GROUP = "torch.backends"

MAKE = "strategy = Trainer(accelerator='cpu', devices=1, strategy='ft_ddp', logger=False).strategy"


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


@pytest.mark.parametrize(
    "imports",
    [
        "from lightning import Trainer",
        "import torch; from lightning.pytorch import Trainer",
    ],
)
def test_trainer_knows_the_strategy(imports: str, installed: dict[str, str]) -> None:
    """Whatever is imported first."""
    done = run(f"{imports}\n{MAKE}\nprint(type(strategy).__name__)", installed)
    assert done.stdout.strip() == "FaultTolerantDDPStrategy", done.stderr


def test_fabric_knows_the_strategy(installed: dict[str, str]) -> None:
    """Fabric has a registry of its own."""
    make = "strategy = Fabric(accelerator='cpu', devices=1, strategy='ft_ddp').strategy"
    done = run(f"from lightning.fabric import Fabric\n{make}\nprint(type(strategy).__name__)", installed)
    assert done.stdout.strip() == "FaultTolerantFabricStrategy", done.stderr


def test_importing_torch_imports_no_more_than_the_hook(installed: dict[str, str]) -> None:
    """Who does not use Lightning pays nothing, and gets no backend that he did not ask for."""
    done = run("import torch, sys\nprint({'lightning_ft', 'lightning_ft_autoload'} & set(sys.modules))", installed)
    assert done.stdout.strip() == "{'lightning_ft_autoload'}", done.stderr


def test_broken_installation_breaks_neither_torch_nor_lightning(installed: dict[str, str], tmp_path: Path) -> None:
    """Neither without wrapt, nor with a lightning_ft that can't be imported."""
    broken = tmp_path / "broken" / "lightning_ft"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken')")
    paths = os.pathsep.join([str(broken.parent), installed["PYTHONPATH"]])
    done = run("import lightning, torch\nprint('fine')", {**installed, "PYTHONPATH": paths})
    assert done.stdout == "fine\n", done.stderr
    done = run("import sys; sys.modules['wrapt'] = None\nimport torch\nprint('fine')", installed)
    assert done.stdout == "fine\n", done.stderr


def test_torch_still_calls_entry_points() -> None:
    """If this fails, torch has given up the group: `import lightning_ft` is needed again."""
    assert callable(torch._import_device_backends)
    assert torch._import_device_backends.__module__ == "torch"
