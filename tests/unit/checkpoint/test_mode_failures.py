"""In each mode: who dies when, what is damaged, who goes back, and whether a checkpoint is for this machine at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from checkpoint_twin import DictStore
from mode_job import MODES, Job, assert_restored

from lightning_ft.checkpoint import verify
from lightning_ft.checkpoint.manifests import published_keys, read_chain
from lightning_ft.checkpoint.records import Key, data_paths, manifest_path
from lightning_ft.checkpoint.replay import OPTIMIZERS
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.stores.base import Attempt, Store
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import ReplayError, StaleWriterError, StoreError, UnsupportedCheckpointError

# -- who dies ---------------------------------------------------------------------------------------------------------


class _Dead(BaseException):
    """The process is no more: nothing in it catches that."""


class _World:
    """A storage, and some processes that die together, before the n-th change of it by anybody.

    With `is_late`, what the first of them has just asked for still happens, when somebody else has taken over.
    """

    def __init__(self, doomed: set[int], num_changes: int, *, is_late: bool) -> None:
        self.files: dict[str, bytes] = {}
        self.doomed = doomed
        self.num_left = num_changes
        self.is_late = is_late
        self.late: list[Callable[[], None]] = []

    def store(self, rank: int) -> Store:
        """Return the storage as a rank sees it."""
        return _Seen(self, rank)

    def change(self, rank: int, effect: Callable[[], None]) -> None:
        """Change something, or die."""
        if self.num_left <= 0 and rank in self.doomed:
            if self.is_late and not self.late:
                self.late.append(effect)
            raise _Dead
        self.num_left -= 1
        effect()


class _Seen(DictStore):
    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(world.files)
        self.world = world
        self.rank = rank

    def _create(self, path: str, attempt: Attempt) -> None:
        data = b"".join(attempt.source)
        if path in self.files:
            raise FileExistsError(path)
        self.world.change(self.rank, lambda: self.files.__setitem__(path, self.files.get(path, data)))

    def _replace(self, path: str, data: bytes) -> None:
        self.world.change(self.rank, lambda: self.files.__setitem__(path, data))

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.world.change(self.rank, lambda path=path: self.files.pop(path, None))  # type: ignore[misc]


def _run(mode: str, world: _World, saved: dict[Key, Any]) -> int:
    """Train and save until somebody dies, and go on with who is left.

    Returns: The step of the last checkpoint that somebody was told of before.
    """
    job = Job([world.store(0), world.store(1)], mode, keep_last=1, base_every=2)
    told, died = 0, False
    for _ in range(3):
        job.train()
        plan = None
        try:
            plan = job.plan()
            for rank in range(len(job.writers)):
                try:
                    job.write(plan, rank)
                except _Dead:
                    died = True
            saved[plan.key] = copy.deepcopy(job.state())
            if not died:
                told = job.writers[0].conclude(plan).key.step
        except _Dead:
            died = True
            if plan is not None:
                saved[plan.key] = copy.deepcopy(job.state())
        if died:
            break
    if died and len(world.doomed) == 1:
        (rank,) = {0, 1} - world.doomed
        world.doomed = set()
        _check(mode, world, saved, told)
        job.set_ranks([world.store(rank)])
        _go_on(mode, job, world, saved)
    return told


def _check(mode: str, world: _World, saved: dict[Key, Any], told: int) -> None:
    if not told and not published_keys(DictStore(world.files)):
        return
    found = restore(DictStore(world.files))
    assert_restored(mode, found.state, saved[found.manifest.key])
    assert found.manifest.key.step >= told, "what somebody was told of is lost"
    assert not found.damaged


def _go_on(mode: str, job: Job, world: _World, saved: dict[Key, Any]) -> None:
    for number in range(2):
        job.train()
        manifest = job.save()
        saved[manifest.key] = copy.deepcopy(job.state())
        if number == 0:
            for effect in world.late:
                effect()
    _check(mode, world, saved, job.step)
    # A manifest that came so late that its packs were deleted is older than all that is used.
    verdicts = verify(DictStore(world.files))
    assert all(verdict.is_usable for verdict in verdicts if verdict.key.generation == manifest.key.generation)


@pytest.mark.parametrize(
    ("mode", "doomed", "is_late"),
    [(mode, {0, 1}, False) for mode in ("lossless", "gradlog", "snap")]
    + [("lossless", {0}, True), ("lossless", {1}, False), ("gradlog", {0}, False)],
)
def test_ranks_may_die_between_any_two_changes_of_the_storage(mode: str, doomed: set[int], is_late: bool) -> None:
    """What was told to be saved is there, bit for bit; the survivors, or who starts again, go on to save.

    The mode `bounded` writes and commits as `lossless` does.
    """
    num_changes = 0
    while True:
        world, saved = _World(set(doomed), num_changes, is_late=is_late), dict[Key, Any]()
        told = _run(mode, world, saved)
        if world.num_left > 0:
            break
        world.doomed = set()
        _check(mode, world, saved, told)
        if doomed == {0, 1}:
            job = Job([world.store(0), world.store(1)], mode, keep_last=1, base_every=2)
            if published_keys(DictStore(world.files)):
                job.resume()
            _go_on(mode, job, world, saved)
        num_changes += 1
    assert num_changes > 20


# -- what is damaged --------------------------------------------------------------------------------------------------


def _saved_run(mode: str, num_saves: int = 4, optimizer: Any = None) -> tuple[DictStore, dict[int, Any]]:
    """Save at the steps 2, 4, ... by two ranks: two bases, each with what follows."""
    store = DictStore()
    job = Job([store, store], mode)
    states = {}
    for _ in range(num_saves):
        job.train()
        job.train()
        job.save()
        states[job.step] = copy.deepcopy(job.state())
    return store, states


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("mode", MODES)
def test_each_damaged_piece_is_named_and_costs_what_the_log_says(
    mode: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any file of any checkpoint: verify names it, the newest that does not need it is used."""
    intact, states = _saved_run(mode)
    chains = {key: read_chain(intact, key) for key in published_keys(intact)}
    newest = max(chains)
    for path in [path for path in intact.files if path.startswith(("data/", "manifests/"))]:
        data = intact.files[path]
        middle = len(data) // 2
        damaged = {"flipped": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], "cut": data[:-1]}
        store = DictStore({name: content for name, content in intact.files.items() if name != path})
        store.files |= {path: damaged[how]} if how in damaged else {}
        needed = {
            key: {manifest_path(link.key) for link in chain} | {name for link in chain for name in data_paths(link)}
            for key, chain in chains.items()
        }
        told = {verdict.key: verdict for verdict in verify(store, deep=True)}
        is_gone = how == "missing" and path.startswith("manifests/")
        for key, paths in needed.items():
            if path in paths and not (is_gone and path == manifest_path(key)):
                assert any(path in problem for problem in told[key].problems), (path, key)
            elif path not in paths:
                assert told[key].is_usable, (path, key)
        expected = max(key for key, paths in needed.items() if path not in paths or path.endswith("footer"))
        caplog.clear()
        found = restore(store)
        assert_restored(mode, found.state, states[found.manifest.key.step])
        assert found.manifest.key >= expected
        if found.manifest.key != newest and not (is_gone and path == manifest_path(newest)):
            assert found.manifest.key == expected
            num_lost = newest.step - expected.step
            if is_gone and not [key for key, _ in found.damaged if key == newest]:
                continue
            assert path in caplog.text
            assert f"Checkpoint {expected} is used instead: {num_lost} steps are lost." in caplog.text


# -- what is not for this machine -------------------------------------------------------------------------------------


def test_an_optimizer_that_works_otherwise_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The base before it is used, which the log says with its cost; verify finds no damage, and nothing is repaired."""
    store, states = _saved_run("gradlog", 3)

    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(1 + 1e-6)

    monkeypatch.setitem(OPTIMIZERS, "AdamW", Other)  # type: ignore[arg-type]
    found = restore(store)
    assert found.manifest.key.step == 2
    assert_restored("gradlog", found.state, states[2])
    assert "Checkpoint 0000000000-000000000002 is used instead: 4 steps are lost." in caplog.text
    assert "damaged" not in caplog.text
    assert "is intact, but AdamW does not make of its gradients here" in caplog.text
    assert [verdict.is_usable for verdict in verify(store)] == [True, True, True]
    deep = verify(store, deep=True)
    assert [(verdict.problems, verdict.is_usable) for verdict in deep] == [((), False), ((), False), ((), True)]
    with pytest.raises(ReplayError, match="is intact, but AdamW"):
        restore(store, key=published_keys(store)[0])

    class Broken(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            raise KeyError("amsgrad")

    monkeypatch.setitem(OPTIMIZERS, "AdamW", Broken)  # type: ignore[arg-type]
    assert restore(store).manifest.key.step == 2
    monkeypatch.delitem(OPTIMIZERS, "AdamW")  # type: ignore[misc]
    with pytest.raises(UnsupportedCheckpointError, match="this program knows"):
        restore(store)
    assert verify(store, deep=True)[0].obstacle is not None


# -- who goes back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_what_follows_after_going_back_is_newer(mode: str) -> None:
    """Also if its steps are below those that were saved before: it is another generation, which begins with a base."""
    store = DictStore()
    job = Job([store, store], mode)
    states = []
    for _ in range(4):
        job.train()
        job.save()
        states.append(copy.deepcopy(job.state()))
    job.take(states[1])
    for step in (3, 4, 5):
        job.train()
        manifest = job.save()
        assert manifest.key == Key(1, step)
        assert (manifest.parent is None) == (step == 3)
        found = restore(store)
        assert found.manifest.key == manifest.key
        assert_restored(mode, found.state, job.state())
    assert all(verdict.is_usable for verdict in verify(store, deep=True))


def test_who_goes_back_fences_nobody_that_has_taken_over() -> None:
    """The directory belongs to the newer run."""
    store = DictStore()
    job = Job([store], "lossless")
    job.train()
    job.train()
    job.save()
    other = Writer(store)
    other.save(9, {})
    job.step = 1
    with pytest.raises(StaleWriterError, match="generation 1 has been claimed"):
        job.save()
    other.save(10, {})


def test_a_claim_whose_answer_was_lost_is_found_again() -> None:
    """Whatever the step of the next save is by then."""
    store = DictStore()

    class Lost(DictStore):
        def _create(self, path: str, attempt: Attempt) -> None:
            super()._create(path, attempt)
            if path == "claims/00000001" and not attempt.was_in_doubt:
                attempt.is_in_doubt = True
                raise TimeoutError

    store = Lost()
    job = Job([store], "lossless")
    job.train()
    job.train()
    job.save()
    job.step = 1
    with pytest.raises(StoreError):
        job.save()
    job.step = 5
    assert job.save().key == Key(1, 5)
