"""Directories are repaired and pruned: what is damaged is told, what is whole stays, whatever dies when."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_twin import DictStore, assert_same, nothing
from tests.unit.checkpoint.stores.disk import Recorder

from lightning_ft.checkpoint import manifests, restore
from lightning_ft.checkpoint.claims import claim_generation
from lightning_ft.checkpoint.format import hash_of
from lightning_ft.checkpoint.records import LATEST, Key, data_key, footer_path, manifest_path, pack_path
from lightning_ft.checkpoint.repair import ASIDE, Repair, carry_out, plan_repair
from lightning_ft.checkpoint.retention import retain
from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.checkpoint.stores.paths import is_temporary
from lightning_ft.checkpoint.verification import verify
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import StoreError, UnsupportedCheckpointError


def state(step: int) -> dict[str, Any]:
    weight = torch.arange(64, dtype=torch.int32)
    weight[step % 64] += 1000
    return {"weight": weight, "step": step}


def run(*steps: int, store: DictStore | None = None, **options: Any) -> tuple[DictStore, Writer]:
    """A run that has saved these steps and may go on."""
    store = DictStore() if store is None else store
    writer = Writer(store, **options)
    for step in steps:
        writer.save(step, state(step))
    return store, writer


def repaired(store: DictStore, *, claims: bool = False, keeps: bool = True) -> Repair:
    """Repair as the command line does."""
    following = 1 + max((key.generation for key in published(store)), default=-1)
    plan = plan_repair(store, verify(store), claim_generation(store, at_least=following) if claims else None)
    carry_out(store, plan, keeps=keeps)
    return plan


def published(store: DictStore) -> list[Key]:
    return manifests.published_keys(store)


def flip(store: DictStore, path: str, bit: int) -> None:
    data = bytearray(store.files[path])
    data[bit // 8] ^= 1 << bit % 8
    store.files[path] = bytes(data)


def told_by_verify(store: DictStore) -> str:
    """All that verify says, with its notes."""
    verdicts = verify(store)
    plan = plan_repair(store, verdicts, None, tries=False)
    hint = [LATEST] * plan.is_latest_wrong
    return " ".join([*(problem for verdict in verdicts for problem in verdict.problems), *hint])


@pytest.mark.parametrize("kind", ["pack", "footer", "manifests/", LATEST])
def test_flipped_bit_of_each_kind_of_file_is_told(kind: str) -> None:
    """By the file's path: each 13th bit of one file of each kind, so all bytes of each field."""
    store, _ = run(1, 2, 3)
    path = next(path for path in sorted(store.files, reverse=True) if kind in path)
    assert told_by_verify(store) == ""
    intact = store.files[path]
    for bit in range(0, 8 * len(intact), 13):
        if path == LATEST and bit // 8 == len(intact) - 1:
            continue  # the newline at its end: the key is the same whatever white space follows
        flip(store, path, bit)
        assert path in told_by_verify(store), bit
        store.files[path] = intact


def test_each_damaged_piece_is_named() -> None:
    """Not only the first: of three ranks' packs and footers two each."""
    store = DictStore()
    writers = [Writer(store, rank=rank, num_ranks=3) for rank in range(3)]
    big = {"weight": torch.arange(1_000_000, dtype=torch.float32)}
    plan = writers[0].plan(1)
    for writer in writers:
        writer.write(plan, big)
    writers[0].commit(plan)
    doomed = [pack_path(plan.key, 0, 0, 0), pack_path(plan.key, 0, 2, 0), footer_path(plan.key, 0, 1)]
    for path in doomed:
        flip(store, path, 8 * (len(store.files[path]) - 20))
    del store.files[footer_path(plan.key, 0, 2)]
    (verdict,) = verify(store)
    named = {path for path in store.files.keys() | {footer_path(plan.key, 0, 2)} if path in " ".join(verdict.problems)}
    assert named == {*doomed, footer_path(plan.key, 0, 2)}
    assert len(verdict.problems) == 4


def test_checkpoint_that_a_job_deletes_meanwhile_is_no_damage() -> None:
    """Verified at whichever moment: what is gone by then is left out, not damaged."""
    for number in range(40):
        store, writer = run(1, 2, 3, base_every=1, keep_last=1)
        countdown = number

        def save(operation: str, path: str) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown == -1:
                for step in (4, 5, 6, 7):
                    writer.save(step, state(step))  # noqa: B023 - called within this round

        store.before = save
        assert not any(verdict.problems for verdict in verify(store)), number
        store.before = nothing
        if countdown >= 0:
            break
    assert number > 10


def test_healthy_directory_needs_no_repair() -> None:
    """Nothing is planned, and nothing changed."""
    store, _ = run(1, 2, 3)
    files = dict(store.files)
    plan = plan_repair(store, verify(store), None)
    assert not plan.is_needed
    carry_out(store, plan)
    assert store.files == files


def damaged_run() -> DictStore:
    """Run 0 with a damaged base 1 and its child 2; run 1 with 3; run 2 with 4 and 5, which has not finished 6."""
    store, _ = run(1, 2, base_every=2)
    run(3, store=store)
    store, writer = run(4, 5, store=store)
    flip(store, pack_path(Key(0, 1), 0, 0, 0), 8 * 60)
    writer.write(writer.plan(6), state(6))
    store.files["data/0000000001-000000000003/a7.r0.0.pack"] = b"of an attempt that has failed"
    store.files[LATEST] = b"0000000000-000000000002\n"
    store.files["notes.txt"] = b"of a person"
    return store


def check_damaged_run(store: DictStore) -> None:
    """What can be restored is as it was, and the rest is not in the way."""
    assert published(store) == [Key(2, 5), Key(2, 4), Key(1, 3)]
    for key in published(store):
        assert_same(restore.restore(store, key=key).state, state(key.step))
    assert not any(verdict.problems for verdict in verify(store))
    assert store.files[LATEST] == b"0000000002-000000000005\n"
    assert store.files["notes.txt"] == b"of a person"


def test_repair_sets_aside_what_is_damaged_and_deletes_what_was_never_finished() -> None:
    """The set-aside files are as they were; what a job may be saving right now stays; nobody else's file is touched."""
    store = damaged_run()
    before = dict(store.files)
    plan = repaired(store)
    check_damaged_run(store)
    assert [key.step for key, _ in plan.damaged] == [2, 1]
    aside = {path.removeprefix(ASIDE): data for path, data in store.files.items() if path.startswith(ASIDE)}
    assert aside == {path: before[path] for path in before if data_key(path) in (Key(0, 1), Key(0, 2))} | {
        manifest_path(key): before[manifest_path(key)] for key in (Key(0, 1), Key(0, 2))
    }
    assert plan.orphans == ("data/0000000001-000000000003/a7.r0.0.pack",)
    assert [finding.what for finding in plan.left] == ["notes.txt"]
    assert any("-000000000006/" in path for path in store.files), "a job may be about to commit it"
    assert not plan_repair(store, verify(store), None).is_needed
    repaired(store, claims=True)
    assert not any("-000000000006/" in path for path in store.files), "whoever was saving it has lost the right to"


def test_what_is_not_wanted_is_deleted() -> None:
    """Without a copy."""
    store = damaged_run()
    repaired(store, keeps=False)
    check_damaged_run(store)
    assert not any(path.startswith(ASIDE) for path in store.files)


def test_repair_that_is_killed_anywhere_is_finished_by_the_next() -> None:
    """After each change all that could be restored still can, and the next repair ends where this one would."""
    store = damaged_run()
    prefixes: list[dict[str, bytes]] = [dict(store.files)]
    store.on_change = lambda: prefixes.append(dict(store.files))
    repaired(store)
    assert len(prefixes) > 8
    for files in prefixes:
        left = DictStore(files)
        for step in (3, 4, 5):
            (key,) = (key for key in published(left) if key.step == step)
            assert_same(restore.restore(left, key=key).state, state(step))
        repaired(left)
        check_damaged_run(left)
        assert left.files == store.files


@pytest.mark.parametrize("operation", ["create", "delete", "replace", "read"])
def test_repair_whose_storage_fails_can_be_called_again(operation: str) -> None:
    """At each operation of each kind: what can be restored stays, and the next call ends it."""
    for number in range(12):
        store, count = damaged_run(), 0

        def fail(what: str, path: str) -> None:
            nonlocal count
            if what == operation and not path.startswith("claims/"):
                count += 1
                if count > number:  # noqa: B023 - called within this round
                    raise OSError(errno.EIO, "broken")

        store.before = fail
        try:
            repaired(store)
        except StoreError:
            store.before = nothing
            assert_same(restore.restore(store).state, state(5))
            repaired(store)
        store.before = nothing
        check_damaged_run(store)


def test_what_can_be_restored_in_spite_of_damage_stays() -> None:
    """A child that has replaced the damaged chunk, with the base that it needs; one whose footer is damaged."""
    store = DictStore()
    writer = Writer(store)
    weights = torch.randint(0, 2**31, (3 * 2**18,), dtype=torch.int32)
    writer.save(1, {"weight": weights})
    weights[: 2**18] = torch.arange(2**18)  # another first MiB, which is stored by itself since it is so simple
    writer.save(2, {"weight": weights})
    run(3, store=store)
    flip(store, pack_path(Key(0, 1), 0, 0, 0), 8 * 5000)
    flip(store, footer_path(Key(1, 3), 0, 0), 80)
    files = {path: data for path, data in store.files.items() if path.startswith(("data/", "manifests/"))}
    plan = repaired(store, claims=True)
    assert {path: store.files[path] for path in files} == files
    assert {finding.what: finding.reason.rpartition(". ")[2] for finding in plan.left} == {
        str(Key(0, 1)): "Left: one that can be restored depends on it.",
        str(Key(0, 2)): "It can be restored all the same.",
        str(Key(1, 3)): "It can be restored all the same.",
    }
    assert_same(restore.restore(store, key=Key(0, 2)).state, {"weight": weights})


def test_repair_leaves_alone_what_a_running_job_may_build_on() -> None:
    """A job goes on saving and every save of it loads, though its base is damaged: it may not need that part of it."""
    store, writer = run(1, 2, base_every=4)
    flip(store, pack_path(Key(0, 1), 0, 0, 0), 8 * 60)
    plan = plan_repair(store, verify(store), None)
    assert not plan.damaged
    assert {finding.what for finding in plan.left} == {str(Key(0, 1)), str(Key(0, 2))}
    carry_out(store, plan)
    for step in (3, 4, 5, 6):
        writer.save(step, state(step))
    assert_same(restore.restore(store).state, state(6))
    # Now there is a newer base, 5, so that nothing will refer to 1 any more.
    carry_out(store, plan_repair(store, verify(store), None))
    assert [key.step for key in published(store)] == [6, 5]
    writer.save(7, state(7))
    assert_same(restore.restore(store).state, state(7))


def test_job_may_save_at_any_moment_of_a_repair() -> None:
    """Between any two operations of the repair a save may come: it loads afterwards, and is never unpublished."""
    number = 0
    while True:
        store = damaged_run()
        _, writer = run(11, store=store)
        countdown, is_saving = number, False

        def save(operation: str, path: str) -> None:
            nonlocal countdown, is_saving
            if is_saving or countdown < 0:
                return
            if countdown == 0:
                is_saving = True
                writer.save(12, state(12))  # noqa: B023 - called within this round
                is_saving = False
            countdown -= 1

        store.before = save
        carry_out(store, plan_repair(store, verify(store), None))
        store.before = nothing
        if countdown >= 0:
            break  # the repair has fewer operations
        assert_same(restore.restore(store).state, state(12))
        writer.save(13, state(13))
        assert_same(restore.restore(store).state, state(13))
        assert not any(verdict.problems for verdict in verify(store))
        number += 1
    assert number > 30


def test_nobody_repairs_what_a_newer_program_wrote() -> None:
    """Nothing is changed."""
    store = damaged_run()
    path = manifest_path(Key(2, 5))
    body = store.files[path][:-16].replace(b"\1\0\0\0", b"\2\0\0\0", 1)
    store.files[path] = body + hash_of(body)
    with pytest.raises(UnsupportedCheckpointError):
        plan_repair(store, verify(store), None)


# -- prune ------------------------------------------------------------------------------------------------------------


def test_dry_prune_says_what_a_prune_does() -> None:
    """And changes nothing."""
    store, _ = run(*range(1, 9), base_every=3)
    files = dict(store.files)
    told = retain(store, None, keep_last=1, verified=set(), is_dry=True)
    assert store.files == files
    done = retain(store, None, keep_last=1, verified=set())
    assert (done.kept, done.deleted, done.swept) == (told.kept, told.deleted, told.swept)
    assert [key.step for key in done.kept] == [8, 7, 4]
    assert files.keys() - store.files.keys() == set(done.swept) | {manifest_path(key) for key in done.deleted}


def test_prune_that_is_killed_anywhere_leaves_whole_checkpoints() -> None:
    """Whatever is listed after any of its changes loads, and the next prune ends the work."""
    store, _ = run(*range(1, 9), base_every=3)
    prefixes: list[dict[str, bytes]] = []
    store.on_change = lambda: prefixes.append(dict(store.files))
    retain(store, None, keep_last=1, verified=set())
    assert len(prefixes) > 10
    for files in prefixes:
        left = DictStore(files)
        for key in published(left):
            assert_same(restore.restore(left, key=key).state, state(key.step))
        retain(left, None, keep_last=1, verified=set())
        assert left.files == store.files


def test_job_may_save_and_prune_at_any_moment_of_a_prune() -> None:
    """Between any two of its operations a job saves, with its own retention: each checkpoint that is left loads."""
    number = 0
    while True:
        store, writer = run(*range(1, 8), base_every=3, keep_last=4)
        countdown, is_saving = number, False

        def save(operation: str, path: str) -> None:
            nonlocal countdown, is_saving
            if is_saving or countdown < 0:
                return
            if countdown == 0:
                is_saving = True
                for step in (8, 9, 10, 11):
                    writer.save(step, state(step))  # noqa: B023 - called within this round
                is_saving = False
            countdown -= 1

        store.before = save
        retain(store, None, keep_last=1, verified=set())
        store.before = nothing
        for key in published(store):
            assert_same(restore.restore(store, key=key).state, state(key.step))
        assert published(store)[0].step == (11 if countdown < 0 else 7)
        writer.save(12, state(12))
        assert_same(restore.restore(store).state, state(12))
        if countdown >= 0:
            break
        number += 1
    assert number > 15


def test_power_may_fail_anywhere_in_a_repair(tmp_path: Path) -> None:
    """Whatever the disk holds then: what could be restored still can, nothing is lost, and the next repair ends it."""
    kernel = Recorder(tmp_path)
    place = LocalStore(str(tmp_path / "run"), timeout_s=None, kernel=kernel)
    before = damaged_run().files
    for path, data in before.items():
        place.create(path, [data])
    begin = len(kernel.trees)
    carry_out(place, plan_repair(place, verify(place), None))
    doomed = [path for path in before if data_key(path) in (Key(0, 1), Key(0, 2))]
    found = {
        frozenset((path.removeprefix("run/"), data) for path, data in tree.items() if not is_temporary(path))
        for tree in itertools.chain.from_iterable(kernel.trees[begin:])
    }
    assert len(found) > 20
    for files in found:
        left = DictStore(dict(files))
        for step in (3, 4, 5):
            (key,) = (key for key in published(left) if key.step == step)
            assert_same(restore.restore(left, key=key).state, state(step))
        for path in doomed:
            assert before[path] in (left.files.get(path), left.files.get(f"{ASIDE}{path}")), path
        repaired(left)
        check_damaged_run(left)
