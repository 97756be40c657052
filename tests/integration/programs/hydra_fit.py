"""A program that Hydra starts: the children must run in its original directory with its overrides."""

from __future__ import annotations

import pathlib

import hydra
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig

import lightning_ft  # noqa: F401 - registers ft_ddp


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    """Fit, and leave a file for each rank."""
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="ft_ddp",
        devices=2,
        accelerator="cpu",
        max_steps=int(config.steps),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    pathlib.Path(config.out, f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {pathlib.Path.cwd()}")


if __name__ == "__main__":
    main()
