"""Train a small GPT on real text, on several ranks that may die, with checkpoints and fault tolerance's own figures.

    python examples/language_model.py --devices 4

The text is Python's own reference manual, which comes with every Python (`pydoc_data.topics`). Kill any of the
processes and the others go on; kill all of them, start the script again, and it goes on with the last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import lightning_ft

TEXT = "\n".join(topics[name] for name in sorted(topics))[:200_000]
CHARACTERS = sorted(set(TEXT))
BLOCK = 64
BITS = 1.442695  # in a nat


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the character that follows each of its own.

    Args:
        text: The whole.
    """

    def __init__(self, text: str) -> None:
        number = {character: index for index, character in enumerate(CHARACTERS)}
        self.tokens = torch.tensor([number[character] for character in text])

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index * BLOCK : (index + 1) * BLOCK + 1]
        return piece[:-1], piece[1:]


class GPT(L.LightningModule):
    """A causal transformer over characters.

    Args:
        width: Of its residual stream.
        num_layers: Blocks of attention and feed-forward network.
    """

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next characters, shape [batch, length, characters], for tokens [batch, length]."""
        length = tokens.shape[1]
        hidden = self.characters(tokens) + self.places(torch.arange(length, device=self.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=self.device)
        return self.head(self.blocks(hidden, mask, is_causal=True))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy of a batch, in nats per character."""
        tokens, following = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one batch."""
        loss = self.loss(batch)
        self.log("train_bits", loss * BITS, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Average over all of the text that is held back."""
        self.log("val_bits", self.loss(batch) * BITS, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def bits_by_frequency(text: str) -> float:
    """Return how many bits a character takes for who knows how frequent each is, and nothing else."""
    shares = torch.tensor([text.count(character) / len(text) for character in sorted(set(text))])
    return -(shares * shares.log2()).sum().item()


def main() -> None:
    """Train, then say how well the model predicts what it has not read."""
    parser = argparse.ArgumentParser(description="Train a small GPT on ranks that may die.")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--log-dir", default="runs/language_model")
    arguments = parser.parse_args()

    L.seed_everything(1, workers=True, verbose=False)
    held_back = len(TEXT) // 10
    trainer = L.Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=arguments.devices,
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        callbacks=[
            lightning_ft.DeltaCheckpoint(f"{arguments.log_dir}/checkpoints", every_n_train_steps=50),
            lightning_ft.FaultToleranceMonitor(),  # recoveries, checkpoints and goodput, beside the loss
        ],
        logger=CSVLogger(arguments.log_dir, name=None),
        log_every_n_steps=10,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    model = GPT()
    training, validation = Windows(TEXT[:-held_back]), Windows(TEXT[-held_back:])
    trainer.fit(model, DataLoader(training, batch_size=16, shuffle=True), ckpt_path="last")
    (found,) = trainer.validate(model, DataLoader(validation, batch_size=64), verbose=False)
    if trainer.is_global_zero:
        simple = bits_by_frequency(TEXT)
        print(f"{found['val_bits']:.2f} bits per character; by their frequencies alone {simple:.2f}", flush=True)


if __name__ == "__main__":
    main()
