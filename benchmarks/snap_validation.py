"""Does a run learn as well if it goes on from rounded checkpoints? A small model of characters, on real text.

    python benchmarks/snap_validation.py [--steps 2000] [--seeds 3]

The text is the language reference that Python brings along (465,000 characters); every tenth piece of it is for
validation. Each seed trains the same model on the same batches without rounding, and with `mode="snap"` every 10 and
every 100 steps. Figures do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
from pydoc_data.topics import topics

import torch
from torch import nn

from lightning_ft.checkpoint.snap import Snap

CONTEXT, BATCH, WIDTH = 64, 16, 96
NUM_EVALUATIONS = 64


def texts() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the numbered characters for training and for validation, and how many kinds there are."""
    text = "".join(topics[name] for name in sorted(topics))
    kinds = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([kinds[character] for character in text])
    pieces = numbers[: numbers.numel() // 1000 * 1000].reshape(-1, 1000)
    is_held_out = torch.arange(len(pieces)) % 10 == 9
    return pieces[~is_held_out].reshape(-1), pieces[is_held_out].reshape(-1), len(kinds)


class Model(nn.Module):
    """A transformer of two layers that predicts the next character."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_kinds, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, num_kinds)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of windows of CONTEXT + 1 characters."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        hidden = self.characters(inputs) + self.places(torch.arange(CONTEXT))
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def windows_of(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a batch of windows at random places."""
    starts = torch.randint(0, text.numel() - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def train(seed: int, num_steps: int, every: int | None) -> float:
    """Train one model. Returns: Its loss on the validation text."""
    training, validation, num_kinds = texts()
    torch.manual_seed(seed)
    model = Model(num_kinds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches, snap = torch.Generator().manual_seed(seed), Snap(seed)
    snap.begin([optimizer])
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        model.loss(windows_of(training, batches)).backward()
        optimizer.step()
        if every and step % every == 0:
            snap.snap([optimizer], step)
    same = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return statistics.mean(float(model.loss(windows_of(validation, same))) for _ in range(NUM_EVALUATIONS))


def main() -> None:
    """Print a table of losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| seed | exact | snap, every 10 | snap, every 100 |\n|---|---|---|---|", flush=True)
    rows = []
    for seed in range(1, arguments.seeds + 1):
        rows.append([train(seed, arguments.steps, every) for every in (None, 10, 100)])
        print(f"| {seed} | " + " | ".join(f"{loss:.4f}" for loss in rows[-1]) + " |", flush=True)
    means = [statistics.mean(column) for column in zip(*rows, strict=True)]
    print("| mean | " + " | ".join(f"{mean:.4f} ({mean / means[0] - 1:+.2%})" for mean in means) + " |")


if __name__ == "__main__":
    main()
