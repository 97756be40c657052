"""What `import lightning_ft` gives and does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry

import lightning_ft


def test_the_public_names_are_these() -> None:
    """A name that comes or goes is a decision."""
    assert lightning_ft.__all__ == [
        "CheckpointDamagedError",
        "CheckpointDuration",
        "CheckpointError",
        "CheckpointNotFoundError",
        "CoordinatorLostError",
        "DeltaCheckpoint",
        "DeltaCheckpointIO",
        "ElasticDistributedSampler",
        "ElasticState",
        "EvictedError",
        "FaultToleranceError",
        "FaultToleranceMonitor",
        "FaultTolerantDDP",
        "FaultTolerantDDPStrategy",
        "FaultTolerantFabricStrategy",
        "FaultTolerantProcessGroup",
        "Goodput",
        "GradientDivergence",
        "LaunchError",
        "MembershipChangedError",
        "ProtocolViolationError",
        "QuorumLostError",
        "RecoveryLatency",
        "RepeatedFailureError",
        "Settings",
        "StaleWriterError",
        "StepCommit",
        "StopRequested",
        "StoreError",
        "UnsupportedCheckpointError",
        "ft_ddp",
        "progress",
    ]
    assert all(hasattr(lightning_ft, name) for name in lightning_ft.__all__)
    assert set(lightning_ft.__all__) <= set(dir(lightning_ft))
    assert not hasattr(lightning_ft, "misspelt")


def test_it_registers_the_strategy_and_the_backend() -> None:
    """Both names are known afterwards, and Lightning's own are untouched."""
    assert "ft_ddp" in StrategyRegistry.available_strategies()
    assert StrategyRegistry["ddp"]["strategy"].__module__.startswith("lightning.pytorch")
    assert "ft" in dist.Backend.backend_list


@pytest.mark.parametrize("program", ["import torch, lightning_ft", "import lightning_ft, torch"])
def test_importing_it_imports_neither_torch_nor_lightning(program: str) -> None:
    """What starts without them starts fast; whoever imports torch, before or after, has the backend."""
    program = (
        "import sys, lightning_ft.cli, lightning_ft.launch.agent, lightning_ft.coordinator.server\n"
        "assert not {'torch', 'lightning', 'prometheus_client'} & set(sys.modules)\n"
        f"{program}\n"
        "assert 'lightning' not in sys.modules\n"
        "print('ft' in torch.distributed.Backend.backend_list, lightning_ft.ft_ddp.__name__, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("True ft_ddp "), done.stderr
    assert "lightning" not in done.stdout.split()


@pytest.mark.parametrize(
    "program", ["import lightning_ft, lightning", "import lightning, lightning_ft", "import lightning_ft.promotion"]
)
def test_the_strategy_is_known_in_any_order_of_imports(program: str) -> None:
    """Lightning knows it by its name, and has it imported when a Trainer asks for it."""
    program = (
        f"{program}\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(type(StrategyRegistry.get('ft_ddp')).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "FaultTolerantDDPStrategy\n", done.stderr


def test_plain_pytorch_needs_no_lightning() -> None:
    """Without Lightning everything but the strategy is there."""
    program = "import sys; sys.modules['lightning'] = None; import lightning_ft; print(lightning_ft.ft_ddp.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "ft_ddp\n", done.stderr


def test_starting_without_an_agent_says_how_to_start() -> None:
    """A process that is no member gets an error with the command to use."""
    program = (
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"
        "import lightning_ft, torch.distributed as dist; dist.init_process_group('ft', store=dist.HashStore(), rank=0, "
        "world_size=1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "LaunchError" in done.stderr
    assert "lightning-ft run --nproc-per-node" in done.stderr
