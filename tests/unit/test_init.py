"""What `import lightning_ft` gives and does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_ft
from lightning_ft.registration import register_when_imported


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


def test_it_registers_with_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names are known afterwards, and Lightning's own are untouched."""
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        monkeypatch.delitem(registry, "ft_ddp")
    register_when_imported()
    assert "ft_ddp" in STRATEGY_REGISTRY
    assert "ft_ddp" in StrategyRegistry.available_strategies()
    assert StrategyRegistry["ddp"]["strategy"].__module__.startswith("lightning.pytorch")
    assert "ft" in dist.Backend.backend_list


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that has imported nothing."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)


def test_importing_it_imports_neither_torch_nor_lightning() -> None:
    """What starts without them starts fast; whoever imports torch afterwards has the backend."""
    program = (
        "import sys, lightning_ft.cli, lightning_ft.launch.agent, lightning_ft.coordinator.server\n"
        "assert not {'torch', 'lightning', 'prometheus_client'} & set(sys.modules)\n"
        "import torch\n"
        "print('ft' in torch.distributed.Backend.backend_list, lightning_ft.ft_ddp.__name__, *sys.modules)"
    )
    done = run(program)
    assert done.stdout.startswith("True ft_ddp "), done.stderr
    assert "lightning" not in done.stdout.split()


def test_plain_pytorch_needs_an_agent_but_no_lightning() -> None:
    """Without Lightning everything but the strategy is there; a process that is no member is told how to start."""
    program = (
        "import sys; sys.modules['lightning'] = None\n"
        "import torch, lightning_ft\n"
        "print('ft' in torch.distributed.Backend.backend_list, lightning_ft.ft_ddp.__name__, flush=True)\n"
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('ft', store=dist.HashStore(), rank=0, world_size=1)"
    )
    done = run(program)
    assert done.stdout == "True ft_ddp\n", done.stderr
    assert "LaunchError" in done.stderr
    assert "lightning-ft run --nproc-per-node" in done.stderr


def test_the_strategy_is_known_if_a_part_of_it_is_what_imports_lightning() -> None:
    """Lightning knows it by its name, and has it imported when a Trainer asks for it."""
    program = (
        "import lightning_ft.promotion\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(type(StrategyRegistry.get('ft_ddp')).__name__)"
    )
    done = run(program)
    assert done.stdout == "FaultTolerantDDPStrategy\n", done.stderr
