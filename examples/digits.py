"""Train a small convolutional network on handwritten digits, on several ranks that may die.

    python examples/digits.py --devices 4

The digits are 1797 images of 8 x 8 pixels (`digits.npz`, see README.md beside it). Kill any of the processes, rank 0
too, and the others go on; `--strategy ddp` is stock Lightning, for comparison. At the end rank 0 prints the accuracy on
the whole test set.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_ft  # noqa: F401 - registers the strategy ft_ddp

NUM_CLASSES = 10
MAX_PIXEL = 16.0


class DigitsModel(L.LightningModule):
    """Two convolutions and a linear layer.

    Args:
        learning_rate: Of AdamW.
    """

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, NUM_CLASSES),
        )
        self.accuracy = MulticlassAccuracy(num_classes=NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape [batch, 10], of images of shape [batch, 1, 8, 8]."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Count what is right; torchmetrics adds up over the ranks."""
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def load(seed: int) -> tuple[Dataset[tuple[Tensor, ...]], ...]:
    """Return the digits in three parts, always the same for a seed: training, validation, test."""
    digits = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    images = torch.tensor(digits["images"], dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
    data = TensorDataset(images, torch.tensor(digits["labels"], dtype=torch.int64))
    return tuple(random_split(data, [0.6, 0.2, 0.2], torch.Generator().manual_seed(seed)))


@torch.no_grad()
def test_accuracy(model: DigitsModel, data: Dataset[tuple[Tensor, ...]]) -> float:
    """Return the share of a data set that the model gets right, computed by this process alone."""
    model.eval()
    hits = [model(images).argmax(dim=1) == labels for images, labels in DataLoader(data, batch_size=256)]
    return torch.cat(hits).double().mean().item()


def main() -> None:
    """Train, then say how good the model is."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on ranks that may die.")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--strategy", default="ft_ddp", help="ft_ddp, or ddp for stock Lightning")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", default="runs/digits")
    arguments = parser.parse_args()

    L.seed_everything(arguments.seed, workers=True, verbose=False)
    train, val, test = load(arguments.seed)
    model = DigitsModel()
    trainer = L.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.max_epochs,
        logger=CSVLogger(arguments.log_dir, name=None, flush_logs_every_n_steps=10),
        log_every_n_steps=10,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val, batch_size=64),
    )
    if trainer.is_global_zero:
        print(f"test accuracy: {test_accuracy(model, test):.2%} of {len(test)} digits", flush=True)


if __name__ == "__main__":
    main()
