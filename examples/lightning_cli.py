"""Everything from a YAML file: LightningCLI makes model, data and Trainer of it, and `ft_ddp` with its settings.

    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --trainer.max_epochs 3

It needs `pip install 'lightning-ft[cli]'`. A wrong name or value in the file is told before anything is started.
"""

from __future__ import annotations

import lightning as L
from digits import DigitsModel, load
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_ft  # noqa: F401 - registers the strategy ft_ddp


class Digits(L.LightningDataModule):
    """The handwritten digits.

    Args:
        batch_size: Of each rank.
        seed: By which they are divided.
    """

    def __init__(self, batch_size: int = 16, seed: int = 1) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.parts = load(seed)

    def train_dataloader(self) -> DataLoader[tuple[object, ...]]:
        """Return the batches to train on."""
        return DataLoader(self.parts[0], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[object, ...]]:
        """Return the batches to validate with."""
        return DataLoader(self.parts[1], batch_size=64)


if __name__ == "__main__":
    LightningCLI(DigitsModel, Digits, save_config_kwargs={"overwrite": True})
