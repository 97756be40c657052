"""Writes `v1_modes/`: in each other mode a base and two checkpoints that depend on others, by two ranks. Run once.

Learning rate, momentum and gradients are numbers of few bits, so a log of gradients is replayed alike on each machine.

python tests/compat/make_v1_modes.py
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from lightning_ft.checkpoint.gradlog import GradientLog
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Writer

HERE = pathlib.Path(__file__).parent / "v1_modes"
MODES = ("snap", "bounded", "gradlog")
BOUND = 2.0**-8
NUM_ELEMENTS = 700


def weight(step: int) -> torch.Tensor:
    """Return a weight that does not look regular, and changes by numbers of few bits every ten steps."""
    found = (torch.arange(NUM_ELEMENTS) * 2654435761 % (1 << 32)).to(torch.float32) / (1 << 32) + 1
    for _ in range(10, step + 1, 10):
        found += (torch.arange(NUM_ELEMENTS) % 5).to(torch.float32) / 4096
    return found


def state(step: int) -> dict[str, Any]:
    """Return what was saved in the modes `snap` and `bounded` at a step: 10, 20 or 30."""
    return {"state_dict": {"weight": weight(step)}, "counts": torch.arange(10), "rate": 0.1 * step, "step": step}


class Training:
    """Of the mode `gradlog`: SGD with momentum, by halves and quarters."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(weight(0))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5, momentum=0.5, foreach=False)
        self.step = 0

    def gradient(self) -> torch.Tensor:
        """Return that of the next step."""
        return (torch.arange(NUM_ELEMENTS) * (self.step + 3) % 17).to(torch.float32) / 64

    def take(self, log: list[GradientLog]) -> None:
        """Take a step."""
        self.weight.grad = self.gradient()
        for own in log:
            own.stepping()
        self.optimizer.step()
        for own in log:
            own.stepped()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"weight": self.weight.detach(), "optimizer": self.optimizer.state_dict(), "step": self.step}


def main() -> None:
    """Write them."""
    assert not HERE.exists(), f"{HERE} is there: a version that was released does not change"
    for mode in MODES:
        writers = [Writer(str(HERE / mode), rank=rank, num_ranks=2, mode=mode, error=BOUND) for rank in range(2)]
        training = Training()
        logs = [GradientLog(training.optimizer, rank, 2) for rank in range(2)]
        training.take(logs)
        for number in (10, 20, 30):
            if mode == "gradlog" and number > 10:
                training.take(logs)
                training.take(logs)
            flats = [FlatState(training.state() if mode == "gradlog" else state(number)) for _ in writers]
            if mode == "gradlog":
                assert number == 10 or not any(log.check(flat, 2) for log, flat in zip(logs, flats, strict=True))
            plan = writers[0].plan(number)
            for writer, log, flat in zip(writers, logs, flats, strict=True):
                if mode == "gradlog" and plan.parent is None:
                    log.rebase(flat)
                is_log = mode == "gradlog" and plan.parent is not None
                writer.write(plan, log.logged(flat) if is_log else flat)
            writers[0].commit(plan)
        for claim in (HERE / mode / "claims").iterdir():
            claim.write_text("{}")  # it says which machine it was


if __name__ == "__main__":
    main()
