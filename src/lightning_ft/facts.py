"""What must be the same in all processes of a job, said so that a person recognizes it (see `Fingerprint`)."""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ft.config import Settings
from lightning_ft.coordinator.fingerprint import Fact


def facts_of_module(module: torch.nn.Module, of: str = "") -> Iterator[Fact]:
    """Names, shapes and types of the parameters.

    Args:
        module: Wrapped in DistributedDataParallel or not.
        of: Which module of several, for a person: ` of generator`.
    """
    while isinstance(module, DistributedDataParallel):
        module = module.module
    for index, (name, parameter) in enumerate(module.named_parameters()):
        kind = str(parameter.dtype).removeprefix("torch.")
        yield f"parameter {index}{of}", name, f"{list(parameter.shape)} {kind}"


def facts_of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Fact]:
    """Which class it is of; its settings may follow schedules."""
    yield f"optimizer {name}", "it", name_of_class(optimizer)


def facts_of_verification(settings: Settings) -> Iterator[Fact]:
    """What decides when ranks compare what, for which all must come."""
    for name in ("verify_every_n_steps", "verify_state_every_n_steps", "verify_chunk_bytes", "verify_policy"):
        yield f"setting {name}", "it", str(getattr(settings, name))


def facts_of_script() -> Iterator[Fact]:
    """Name and contents of the program, if it is a file."""
    path = pathlib.Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if path.is_file():
        yield "the script", path.name, f"SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def name_of_class(part: object) -> str:
    """Module and name of an object's class."""
    return f"{type(part).__module__}.{type(part).__qualname__}"
