"""A LightningCLI program, as a user would write it."""

from __future__ import annotations

import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_ft  # noqa: F401 - registers ft_ddp

if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(BoringModel, BoringDataModule, save_config_kwargs={"overwrite": True})
