"""Writes `v1/`: a base and a difference in version 1 of the format. Run once; what it wrote is never written again.

python tests/compat/make_v1.py
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from lightning_ft.checkpoint.writer import Writer

HERE = pathlib.Path(__file__).parent / "v1"


def state(step: int) -> dict[str, Any]:
    """Return what was saved at a step: 10 or 20."""
    weight = torch.arange(600, dtype=torch.float32).reshape(30, 20)
    weight[step] += step
    weights = OrderedDict(weight=weight, bias=torch.tensor([1.5, float("nan")], dtype=torch.bfloat16))
    return {
        "state_dict": weights,
        "optimizer_states": [{"state": {0: {"exp_avg": weight / 7, "step": torch.tensor(float(step))}}}],
        "conv": (torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last), weight.new_empty(0)),
        "numpy": [np.arange(3, dtype=np.uint32), np.float64(0.1)],
        "odd": [None, True, 2**70, float("inf"), -0.0, b"\0\1", "\u00e9", {1: "a", "1": "b"}],
        "set": {1, 2},
        "step": step,
    }


if __name__ == "__main__":
    assert not HERE.exists(), f"{HERE} is there: a version that was released does not change"
    writers = [Writer(str(HERE), rank=rank, num_ranks=2) for rank in range(2)]
    for number in (10, 20):
        plan = writers[0].plan(number)
        for writer in writers:
            writer.write(plan, state(number))
        writers[0].commit(plan)
    for claim in (HERE / "claims").iterdir():
        claim.write_text("{}")  # it says which machine it was
