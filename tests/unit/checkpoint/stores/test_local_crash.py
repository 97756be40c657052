"""A local store whose machine loses power, or whose process is killed, after any system call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.checkpoint.stores.disk import PowerLossError, Recorder

from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.checkpoint.stores.paths import is_temporary

RUN = "jobs/run/"

CONTENTS = {
    "data/1-2/r0.pack": [b"first pack, ", b"in two pieces"],
    "data/1-9/r0.pack": [b"second pack"],
    "manifests/1-2": [b"refers to the first pack"],
    "manifests/1-9": [b"refers to the second pack"],
}
HINTS = {b"1-2", b"1-9"}


class Life:
    """Two checkpoints are written, then the first is deleted; who has been told what so far is noted."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.surely: set[str] = set()
        self.surely_not: set[str] = set(CONTENTS)
        self.hints = {None, *HINTS}

    def steps(self) -> list[Callable[[], None]]:
        return [
            lambda: self._create("data/1-2/r0.pack"),
            lambda: self._create("manifests/1-2"),
            lambda: self._hint(b"1-2", {b"1-2", b"1-9"}),
            lambda: self._create("data/1-9/r0.pack"),
            lambda: self._create("manifests/1-9"),
            lambda: self._hint(b"1-9", {b"1-9"}),
            lambda: self._delete("manifests/1-2"),
            lambda: self._delete("data/1-2/r0.pack"),
        ]

    def _create(self, path: str) -> None:
        self.surely_not.discard(path)
        self._store.create(path, CONTENTS[path])
        self.surely.add(path)

    def _hint(self, data: bytes, afterwards: set[bytes]) -> None:
        self._store.replace("LATEST", data)
        self.hints = set(afterwards)

    def _delete(self, path: str) -> None:
        self.surely.discard(path)
        self._store.delete([path])
        self.surely_not.add(path)

    def check(self, tree: dict[str, bytes]) -> None:
        """Hold a tree that may be found on the disk against what was promised."""
        found = {path.removeprefix(RUN): data for path, data in tree.items() if not is_temporary(path)}
        hint = found.pop("LATEST", None)
        assert hint in self.hints
        assert self.surely <= set(found), "an object is gone that was durable"
        assert not self.surely_not & set(found), "an object is back that was deleted"
        for path, data in found.items():
            assert data == b"".join(CONTENTS[path]), f"{path} is damaged"
            assert path.replace("manifests/", "data/").removesuffix("/r0.pack") + "/r0.pack" in found, "pack is missing"


def _live(tmp_path: Path, kernel: Recorder) -> None:
    """Live through it all; check after each step what a loss of power in it, after any call, would leave."""
    life = Life(LocalStore(str(tmp_path / RUN), kernel=kernel))
    for step in life.steps():
        before, hints = (set(life.surely), set(life.surely_not)), set(life.hints)
        begin = len(kernel.trees)
        step()
        after = life.surely, life.surely_not
        # Within a step what it is about is neither surely there nor surely not.
        life.surely, life.surely_not = before[0] & after[0], before[1] & after[1]
        allowed, life.hints = life.hints, life.hints | hints
        for trees in kernel.trees[begin:]:
            for tree in trees:
                life.check(tree)
        (life.surely, life.surely_not), life.hints = after, allowed
        for tree in kernel.possible_trees():
            life.check(tree)


@pytest.mark.parametrize("has_links", [True, False], ids=["link", "rename"])
def test_power_may_be_lost_after_any_call(tmp_path: Path, has_links: bool) -> None:
    """Each object is absent or whole, and there for good once its creation returned; no manifest lacks its pack."""
    kernel = Recorder(tmp_path, has_links=has_links)
    _live(tmp_path, kernel)
    assert len(kernel.trees) >= 40
    assert max(len(trees) for trees in kernel.trees) >= 5


@pytest.mark.parametrize("forgotten", ["fsync", "fsync_directory"])
def test_a_store_that_forgets_to_sync_is_found_out(tmp_path: Path, forgotten: str) -> None:
    """The disk of these tests is cruel enough to show what each of the two is for."""
    with pytest.raises(AssertionError, match=r"damaged|gone"):
        _live(tmp_path, Recorder(tmp_path, forgets=frozenset({forgotten})))


def test_what_a_new_writer_finds_stays(tmp_path: Path) -> None:
    """A process is killed after any call; once the next has recovered, no loss of power changes what that one sees."""
    for number in range(1000):
        base = tmp_path / str(number)
        base.mkdir()
        kernel = Recorder(base)
        kernel.dies_at, kernel.records_trees = number, False
        life = Life(LocalStore(str(base / RUN), kernel=kernel))
        is_over = False
        with contextlib.suppress(PowerLossError):
            for step in life.steps():
                step()
            is_over = True
        kernel.dies_at = None
        successor = LocalStore(str(base / RUN), kernel=kernel)
        successor.recover()
        visible = {RUN + path: successor.read(path) for path in successor.list("")}
        for tree in kernel.possible_trees():
            assert tree == visible, "neither a temporary file, nor anything else but what was visible"
        for path in set(CONTENTS) - set(successor.list("")):
            successor.create(path, CONTENTS[path])
        successor.replace("LATEST", b"1-9")
        assert successor.list("") == ["LATEST", *sorted(CONTENTS)]
        if is_over:
            assert number >= 40
            return
    raise AssertionError("it never came to its end")
