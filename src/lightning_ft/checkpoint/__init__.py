"""Differential checkpoints on any fsspec store: immutable, checked to the last bit, tensors without pickle.

FORMAT.md has the bytes.
"""

from lightning_ft.checkpoint.restore import load, verify
from lightning_ft.checkpoint.writer import Writer

__all__ = ["Writer", "load", "verify"]
