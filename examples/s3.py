"""Checkpoints on S3, or on any store that speaks its language: a fit that goes on there after the loss of everything.

    python examples/s3.py s3://bucket/digits

It needs `pip install 'lightning-ft[s3]'`, and finds credentials as every AWS program does (`~/.aws`, AWS_ACCESS_KEY_ID,
a role); `AWS_ENDPOINT_URL=http://...` is another server than Amazon's. Kill it, start it again on any machine: it goes
on there.
"""

from __future__ import annotations

import argparse
import sys

import lightning as L
from digits import DigitsModel, load
from torch.utils.data import DataLoader

import lightning_ft


def main() -> None:
    """Train, from the last checkpoint on if there is one."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, with checkpoints on S3.")
    parser.add_argument("url", help="where the checkpoints are: s3://bucket/directory")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--max-epochs", type=int, default=20)
    arguments = parser.parse_args()

    L.seed_everything(1, workers=True, verbose=False)
    train, val, _ = load(1)
    trainer = L.Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.max_epochs,
        callbacks=[lightning_ft.DeltaCheckpoint(arguments.url, every_n_train_steps=20, keep_last=3)],
        logger=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    loaders = DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=64)
    trainer.fit(DigitsModel(), *loaders, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps; the checkpoints are at {arguments.url}", flush=True)


if __name__ == "__main__":
    main()
