"""A small job in any mode, as `DeltaCheckpoint` leads one: some ranks with one state, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from checkpoint_twin import assert_same

from lightning_ft.checkpoint.gradlog import GradientLog
from lightning_ft.checkpoint.records import Manifest
from lightning_ft.checkpoint.restore import Restored, restore
from lightning_ft.checkpoint.snap import Snap
from lightning_ft.checkpoint.store import Store
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Plan, Writer

MODES = ("lossless", "gradlog", "snap", "bounded")

BOUND = 1e-2
"""Of the mode `bounded`."""


class Job:
    """Trains a net: what a step makes of a state depends on nothing but its number.

    Args:
        stores: The storage as each rank sees it.
        mode: Of its checkpoints.
        options: For the writers.

    Attributes:
        reason: Why the last checkpoint could not be a log.
    """

    def __init__(self, stores: Iterable[Store], mode: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.options = {"base_every": 3, "error": BOUND, **options}
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 70))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=False)
        self.step = 0
        self.reason: str | None = None
        self.snap = Snap()
        self.set_ranks(stores)
        self.snap.begin([self.optimizer])

    def set_ranks(self, stores: Iterable[Store]) -> None:
        """Go on with these ranks: they know nothing of the last save."""
        stores = list(stores)
        num_ranks = len(stores)
        self.writers = [
            Writer(store, rank=rank, num_ranks=num_ranks, mode=self.mode, **self.options)
            for rank, store in enumerate(stores)
        ]
        self.forget()

    def forget(self) -> None:
        """What is there now is not what the last save has left."""
        self.snap.forget()
        num_ranks = len(self.writers)
        self.logs = [GradientLog(self.optimizer, rank, num_ranks) for rank in range(num_ranks)]
        self.saved_at = -1

    def state(self) -> dict[str, Any]:
        """Return what is saved; tensors are those that are trained."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        state = copy.deepcopy(state)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.forget()
        self.snap.begin([self.optimizer])

    def resume(self) -> Restored:
        """Go on from the newest checkpoint."""
        found = restore(self.writers[0].store)
        self.take(found.state)
        return found

    def train(self, max_norm: float | None = None) -> None:
        """Take a step; with `max_norm` gradients are clipped."""
        self.step += 1
        self.optimizer.zero_grad()
        self.net(torch.randn(4, 3, generator=torch.Generator().manual_seed(self.step))).square().sum().backward()
        for log in self.logs:
            log.stepping()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
            assert all(log.clipped(norm, max_norm) for log in self.logs)
        self.optimizer.step()
        for log in self.logs:
            log.stepped()

    def plan(self) -> Plan:
        """Plan a save, as rank 0 does, and round if the mode does so."""
        self.flats = [FlatState(self.state()) for _ in self.writers]
        reasons = [log.check(flat, self.step - self.saved_at) for log, flat in zip(self.logs, self.flats, strict=True)]
        self.reason = next(filter(None, reasons), None)
        is_base = self.mode == "gradlog" and (self.reason is not None or self.writers[0].last_step != self.saved_at)
        plan = self.writers[0].plan(self.step, is_base=is_base)
        self.saved_at = self.step
        if self.mode == "snap":
            self.snap.snap([self.optimizer], self.step)
        return plan

    def write(self, plan: Plan, rank: int) -> None:
        """Write a rank's share."""
        log, flat = self.logs[rank], self.flats[rank]
        if self.mode == "gradlog" and plan.parent is not None:
            self.writers[rank].write(plan, log.logged(flat))
            return
        if self.mode == "gradlog":
            log.rebase(flat)
        self.writers[rank].write(plan, flat)

    def save(self) -> Manifest:
        """Save."""
        plan = self.plan()
        for rank in range(len(self.writers)):
            self.write(plan, rank)
        return self.writers[0].conclude(plan)


def assert_restored(mode: str, found: Any, saved: Any) -> None:
    """Compare a state with the one that was saved, as the mode's contract says."""
    if mode != "bounded":
        assert_same(found, saved)
        return
    flat, other = FlatState(found), FlatState(saved)
    assert len(flat.streams) == len(other.streams)
    for index in range(len(flat.streams)):
        got, exact = flat.tensor(index), other.tensor(index)
        if got is not None and exact is not None and got.dtype is torch.float32 and got.numel() > 1:
            assert ((got - exact).abs() <= BOUND * exact.abs()).all()
        else:
            assert flat.data(index).tobytes() == other.data(index).tobytes()
