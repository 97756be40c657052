"""Saves, retentions, restarts and damage in any order, in each mode, against a dictionary of what was saved."""

from __future__ import annotations

import copy
import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
from checkpoint_twin import DictStore, assert_same, nothing
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lightning_ft.checkpoint
from lightning_ft.checkpoint import manifests, restore
from lightning_ft.checkpoint.gradlog import GradientLog
from lightning_ft.checkpoint.records import Key, Manifest, manifest_path, pack_path
from lightning_ft.checkpoint.snap import Snap
from lightning_ft.checkpoint.tree import FlatState
from lightning_ft.checkpoint.writer import Plan, Writer
from lightning_ft.errors import CheckpointDamagedError, CheckpointNotFoundError, StoreError


class CheckpointMachine(RuleBasedStateMachine):
    """The twin: which states were committed, and which files each needs."""

    def __init__(self) -> None:
        super().__init__()
        self.store = DictStore()
        self.step = 0
        self.state: dict[str, Any] = {"w": torch.arange(50), "note": "a", "s": [torch.tensor(0.5)]}
        self.begin(1, None)
        self.saved: dict[Key, dict[str, Any]] = {}
        self.needs: dict[Key, set[str]] = {}
        self.links: dict[Key, tuple[Manifest, ...]] = {}
        self.written: dict[str, bytes] = {}
        self.store.on_change = self.note

    # -- what modes do in their own way -----------------------------------------------------------------------------

    mode = "lossless"

    def begin(self, num_ranks: int, base_every: int | None) -> None:
        """Make writers."""
        self.writers = [
            Writer(self.store, rank=rank, num_ranks=num_ranks, mode=self.mode, base_every=base_every)
            for rank in range(num_ranks)
        ]

    def plan(self) -> Plan:
        """Plan the next save."""
        return self.writers[0].plan(self.step)

    def write(self, writer: Writer, plan: Plan) -> None:
        """Write a rank's share."""
        writer.write(plan, self.state)

    def compare(self, found: Any, saved: Any) -> None:
        """Make sure that what is restored is what the contract says."""
        assert_same(found, saved)

    # -- what the twin knows ----------------------------------------------------------------------------------------

    def note(self) -> None:
        """Remember each file as it was written: damage goes past the store."""
        for path, data in self.store.files.items():
            self.written.setdefault(path, data)

    def intact(self) -> list[Key]:
        files = self.store.files
        return [
            key for key, paths in self.needs.items() if all(files.get(path) == self.written[path] for path in paths)
        ]

    def record(self, key: Key) -> None:
        self.saved[key] = copy.deepcopy(self.state)
        try:
            self.links[key] = links = manifests.read_chain(self.store, key)
        except CheckpointDamagedError:  # its base was damaged, which nobody has noticed yet
            return
        self.needs[key] = {manifest_path(link.key) for link in links} | {
            pack_path(link.key, link.attempt, pack.rank, pack.number) for link in links for pack in link.packs
        }

    # -- what happens -----------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 49), text=st.text(max_size=3))
    def train(self, index: int, text: str) -> None:
        """Change the state a little."""
        self.state["w"][index] += 1
        self.state["note"] += text

    @rule(size=st.integers(0, 60))
    def change_tensors(self, size: int) -> None:
        """Change which tensors there are."""
        self.state["w"] = torch.arange(max(size, 50))

    @rule()
    def save(self) -> None:
        """All ranks save."""
        self.step += 1
        plan = self.plan()
        for writer in self.writers:
            self.write(writer, plan)
        self.writers[0].commit(plan)
        self.record(plan.key)

    @precondition(lambda self: len(self.writers) > 1)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """A rank dies in a save."""
        self.step += 1
        plan = self.plan()
        for writer in self.writers[: data.draw(st.integers(0, len(self.writers) - 1))]:
            self.write(writer, plan)

    @rule(number=st.integers(0, 4))
    def fail(self, number: int) -> None:
        """The storage fails from the n-th operation of a save on."""
        count = 0

        def fail(operation: str, path: str) -> None:
            nonlocal count
            count += operation == "create"
            if count > number:
                raise OSError("no space")

        self.store.before = fail
        self.step += 1
        plan = None
        try:
            plan = self.plan()
            for writer in self.writers:
                self.write(writer, plan)
            self.writers[0].commit(plan)
        except StoreError:
            pass
        self.store.before = nothing
        if plan and manifest_path(plan.key) in self.store.files:
            self.record(plan.key)

    @rule(num_ranks=st.integers(1, 3), base_every=st.sampled_from([None, 1, 2, 3]), step=st.integers(0, 5))
    def restart(self, num_ranks: int, base_every: int | None, step: int) -> None:
        """The job starts again, with other ranks, from any step."""
        self.step = step
        self.begin(num_ranks, base_every)

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), is_told=st.booleans())
    def go_back(self, data: st.DataObject, is_told: bool) -> None:
        """The run goes on from a state that it has saved, in process, perhaps below what is committed."""
        key = data.draw(st.sampled_from(sorted(self.saved)))
        self.step = key.step
        self.take(copy.deepcopy(self.saved[key]), is_told=is_told)

    def take(self, state: dict[str, Any], *, is_told: bool) -> None:
        """Go on from this state."""
        self.state = state

    @precondition(lambda self: self.writers[0]._claim is not None)
    @rule(keep_last=st.integers(1, 3))
    def retain(self, keep_last: int) -> None:
        """Old checkpoints are deleted; two intact bases are left, if there were two."""
        bases = self.intact_bases()
        writer = self.writers[0]
        writer.keep_last = keep_last
        writer._verified.clear()  # what was damaged after it was verified would be relied on
        writer.retain()
        assert self.intact_bases() <= bases
        assert len(self.intact_bases()) >= min(len(bases), 2)

    def intact_bases(self) -> set[Key]:
        return {key for key in self.intact() if len(self.links[key]) == 1}

    @precondition(lambda self: any(path.startswith(("data/", "manifests/")) for path in self.store.files))
    @rule(seed=st.integers(0, 2**32), how=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, seed: int, how: str) -> None:
        """A file is damaged."""
        source = random.Random(seed)
        path = source.choice(sorted(path for path in self.store.files if path.startswith(("data/", "manifests/"))))
        data = bytearray(self.store.files[path])
        if how == "delete":
            del self.store.files[path]
        elif how == "cut":
            self.store.files[path] = bytes(data[: source.randrange(len(data) or 1)])
        else:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            self.store.files[path] = bytes(data)

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def what_is_restored_was_saved(self) -> None:
        """Never anything else than a saved state, and never older than the newest intact one."""
        intact = self.intact()
        try:
            found = restore.restore(self.store)
        except CheckpointNotFoundError:
            assert not intact
            return
        key = found.manifest.key
        self.compare(found.state, self.saved[key])
        assert not intact or key >= max(intact)

    def teardown(self) -> None:
        for verdict in lightning_ft.checkpoint.verify(self.store):
            if verdict.key in self.intact():
                assert all("footer" in problem for problem in verdict.problems), verdict


class BoundedMachine(CheckpointMachine):
    """Numbers of tensors may come back changed by a thousandth of themselves, never by more, however often saved."""

    mode = "bounded"

    def __init__(self) -> None:
        super().__init__()
        self.state["x"] = {"a": torch.linspace(-3, 5, 40), "b": torch.tensor([0.0, 1e-40, float("inf"), 3e38, 7.0])}
        self.state["y"] = torch.linspace(-1e-5, 2, 30, dtype=torch.float64)

    @rule(seed=st.integers(0, 2**32), size=st.sampled_from([1e-4, 1e-3, 1.0]))
    def drift(self, seed: int, size: float) -> None:
        """All numbers change a little."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.state["x"]["a"], self.state["x"]["b"], self.state["y"]):
            tensor.mul_(1 + size * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))

    def compare(self, found: Any, saved: Any) -> None:
        saved = copy.deepcopy(saved)
        for got, tensors in ((found["x"], saved["x"]), (found, saved)):
            for name in [name for name in ("a", "b", "y") if name in tensors]:
                exact, stored = tensors[name].double(), got[name].double()
                is_near = ((stored - exact).abs() <= 1e-3 * exact.abs()) | (stored == exact) | exact.isnan()
                assert is_near.all(), (name, stored, exact)
                tensors[name] = got[name]
        assert_same(found, saved)


class TrainedMachine(CheckpointMachine):
    """A state that an optimizer makes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 700))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, foreach=False)
        self.num_steps = 0
        super().__init__()
        self.optimize(1, 1, is_clipped=False)

    @rule(seed=st.integers(0, 2**32), num_steps=st.integers(1, 3), is_clipped=st.booleans())
    def optimize(self, seed: int, num_steps: int, is_clipped: bool) -> None:
        """Take optimizer steps."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.net(torch.randn(4, 3, generator=generator)).square().mean().backward()
            self.optimizer.param_groups[0]["lr"] *= 0.9
            self.step_optimizer(is_clipped=is_clipped)
            self.num_steps += 1
        # Not deep copies: a checkpoint is made of what is trained.
        self.state |= {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    @rule()
    def interfere(self) -> None:
        """Somebody changes a weight."""
        self.net[0].weight.data[0, 0] += 0.5

    def take(self, state: dict[str, Any], *, is_told: bool) -> None:
        super().take(state, is_told=is_told)
        if "net" in state:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.state |= {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step_optimizer(self, *, is_clipped: bool) -> None:
        """Take a step."""
        if is_clipped:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()


class SnapMachine(TrainedMachine):
    """What is restored is what the run goes on with, rounded."""

    mode = "snap"

    def begin(self, num_ranks: int, base_every: int | None) -> None:
        super().begin(num_ranks, base_every)
        self.snap = Snap()

    def take(self, state: dict[str, Any], *, is_told: bool) -> None:
        super().take(state, is_told=is_told)
        if is_told:
            self.snap.forget()

    def plan(self) -> Plan:
        plan = super().plan()
        self.snap.snap([self.optimizer], self.step)
        return plan


class GradlogMachine(TrainedMachine):
    """What is restored is replayed, whatever failed and whoever interfered."""

    mode = "gradlog"

    def begin(self, num_ranks: int, base_every: int | None) -> None:
        super().begin(num_ranks, base_every)
        self.forget()

    def forget(self) -> None:
        """Begin other logs."""
        num_ranks = len(self.writers)
        self.logs = [GradientLog(self.optimizer, rank, num_ranks) for rank in range(num_ranks)]
        self.taken = (-1, 0)

    def take(self, state: dict[str, Any], *, is_told: bool) -> None:
        super().take(state, is_told=is_told)
        if is_told:
            self.forget()

    def step_optimizer(self, *, is_clipped: bool) -> None:
        for log in self.logs:
            log.stepping()
        if is_clipped:
            norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            assert all(log.clipped(norm, 0.1) for log in self.logs)
        self.optimizer.step()
        for log in self.logs:
            log.stepped()

    def plan(self) -> Plan:
        self.flats = [FlatState(self.state) for _ in self.logs]
        step, num_steps = self.taken
        reasons = [log.check(flat, self.num_steps - num_steps) for log, flat in zip(self.logs, self.flats, strict=True)]
        self.taken = self.step, self.num_steps
        return self.writers[0].plan(self.step, is_base=any(reasons) or self.writers[0].last_step != step)

    def write(self, writer: Writer, plan: Plan) -> None:
        log, flat = self.logs[writer.rank], self.flats[writer.rank]
        if plan.parent is None:
            log.rebase(flat)
            writer.write(plan, flat)
        else:
            writer.write(plan, log.logged(flat))


CheckpointMachine.TestCase.settings = hypothesis.settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
TestCheckpointMachine = CheckpointMachine.TestCase
for machine in (BoundedMachine, SnapMachine, GradlogMachine):
    machine.TestCase.settings = hypothesis.settings(
        CheckpointMachine.TestCase.settings, max_examples=12, stateful_step_count=20
    )
TestBoundedMachine = BoundedMachine.TestCase
TestSnapMachine = SnapMachine.TestCase
TestGradlogMachine = GradlogMachine.TestCase
