"""Saves, retentions, restarts and damage in any order, against a dictionary of what was saved."""

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
from lightning_ft.checkpoint.records import Key, Manifest, manifest_path, pack_path
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import CheckpointDamagedError, CheckpointNotFoundError, StoreError


class CheckpointMachine(RuleBasedStateMachine):
    """The twin: which states were committed, and which files each needs."""

    def __init__(self) -> None:
        super().__init__()
        self.store = DictStore()
        self.writers = [Writer(self.store)]
        self.step = 0
        self.state: dict[str, Any] = {"w": torch.arange(50), "note": "a", "s": [torch.tensor(0.5)]}
        self.saved: dict[Key, dict[str, Any]] = {}
        self.needs: dict[Key, set[str]] = {}
        self.links: dict[Key, tuple[Manifest, ...]] = {}
        self.written: dict[str, bytes] = {}
        self.store.on_change = self.note

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
        plan = self.writers[0].plan(self.step)
        for writer in self.writers:
            writer.write(plan, self.state)
        self.writers[0].commit(plan)
        self.record(plan.key)

    @precondition(lambda self: len(self.writers) > 1)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """A rank dies in a save."""
        self.step += 1
        plan = self.writers[0].plan(self.step)
        for writer in self.writers[: data.draw(st.integers(0, len(self.writers) - 1))]:
            writer.write(plan, self.state)

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
            plan = self.writers[0].plan(self.step)
            for writer in self.writers:
                writer.write(plan, self.state)
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
        self.writers = [
            Writer(self.store, rank=rank, num_ranks=num_ranks, base_every=base_every) for rank in range(num_ranks)
        ]

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
        assert_same(found.state, self.saved[key])
        assert not intact or key >= max(intact)

    def teardown(self) -> None:
        for verdict in lightning_ft.checkpoint.verify(self.store):
            if verdict.key in self.intact():
                assert all("footer" in problem for problem in verdict.problems), verdict


CheckpointMachine.TestCase.settings = hypothesis.settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
TestCheckpointMachine = CheckpointMachine.TestCase
