"""Differential checkpoints on any fsspec store: immutable, checked to the last bit, tensors without pickle.

FORMAT.md has the bytes. What is behind a name is imported when it is first used: who lists checkpoints needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ft.checkpoint.restore import load
    from lightning_ft.checkpoint.verification import verify
    from lightning_ft.checkpoint.writer import Writer

__all__ = ["Writer", "load", "verify"]

_HOME_OF = {"Writer": "writer", "load": "restore", "verify": "verification"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
