"""A compilation (torch.compile) is progress: it may take minutes where a step takes milliseconds.

Private API read in torch 2.13.0: `torch._dynamo.callback.callback_handler` and its `start_callbacks` and
`end_callbacks`, which are called in the thread that compiles (tests/unit/comm/test_compiling.py fails clearly if they
change).
"""

from __future__ import annotations

from typing import Any

from lightning_ft.comm.backend import progress
from lightning_ft.coordinator.patience import AFTER

_COMPILING = "compiling a graph"


def report_compilations() -> None:
    """Have each compilation of this process count as progress when it begins and when it ends; idempotent."""
    from torch._dynamo.callback import callback_handler  # takes a second, which agents needn't spend

    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def _begin(_: Any) -> None:
    progress(_COMPILING)


def _end(_: Any) -> None:
    progress(AFTER + _COMPILING)
