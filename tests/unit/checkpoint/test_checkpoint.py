"""Whole checkpoints: saved, restored, damaged, cut off, deleted, by one rank and by several."""

from __future__ import annotations

import errno
import logging
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_twin import DictStore, assert_same, nothing

import lightning_ft.checkpoint
from lightning_ft.checkpoint import chain, manifests, restore, writer
from lightning_ft.checkpoint import format as fmt
from lightning_ft.checkpoint.records import CHUNK_BYTES, LATEST, Key, Manifest, manifest_path
from lightning_ft.checkpoint.stores.base import Attempt
from lightning_ft.checkpoint.writer import Writer
from lightning_ft.errors import (
    AlreadyThereError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    StaleWriterError,
    StoreError,
    UnsupportedCheckpointError,
)


def tiny(step: int) -> dict[str, Any]:
    weight = torch.arange(64, dtype=torch.int32)
    weight[step % 64] += 1000
    return {"weight": weight, "step": step}


def large(step: int, num: int = 1_000_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num, generator=generator)
    weight[: num // 3] *= 1 + step / 1000
    return {"weight": weight, "frozen": torch.ones(num // 2), "moments": [torch.full((5,), float(step))], "step": step}


def restored(store: DictStore) -> tuple[int, Any]:
    found = restore.restore(store)
    return found.manifest.key.step, found.state


def three_checkpoints(state: Callable[[int], dict[str, Any]] = tiny) -> DictStore:
    """Two independent bases, 1 and 2, and 3, which depends on 2."""
    store = DictStore()
    for step in (1, 2):
        Writer(store).save(step, state(step))
    files = dict(store.files)
    saver = Writer(store)
    saver.save(2, state(2))
    saver.save(3, state(3))
    for path in [path for path in files if "-000000000002" in path]:  # that base again, of the last writer's generation
        del store.files[path]
    return store


def test_state_comes_back_from_a_base_and_from_a_difference() -> None:
    """Several saves, each loads as it was saved; only the first holds everything."""
    store = DictStore()
    saver = Writer(store)
    sizes = []
    for step in range(1, 5):
        manifest = saver.save(step, large(step))
        assert manifest.depth == (step > 1)
        sizes.append(sum(pack.num_bytes for pack in manifest.packs))
        assert_same(lightning_ft.checkpoint.load(store), large(step))
    assert max(sizes[1:]) < 0.4 * sizes[0]
    for step in range(1, 5):
        assert_same(restore.restore(store, key=Key(0, step)).state, large(step))
    assert all(not verdict.problems for verdict in lightning_ft.checkpoint.verify(store, deep=True))


def test_load_takes_a_url() -> None:
    """Writer and load open what a URL names."""
    Writer("memory://run-of-a-test").save(7, tiny(7))
    assert_same(lightning_ft.checkpoint.load("memory://run-of-a-test"), tiny(7))


def test_empty_store_has_no_checkpoint() -> None:
    """That there is none is said, with the place."""
    with pytest.raises(CheckpointNotFoundError, match=r"dict:.*there is no checkpoint"):
        lightning_ft.checkpoint.load(DictStore())
    with pytest.raises(CheckpointDamagedError, match="missing"):
        restore.restore(DictStore(), key=Key(0, 1))


def test_state_may_change_after_save() -> None:
    """The reference is a copy: training in place does not spoil the next difference."""
    store = DictStore()
    saver = Writer(store)
    state = large(1)
    saver.save(1, state)
    state["weight"] += 1
    saver.save(2, state)
    assert_same(restore.restore(store, key=Key(0, 1)).state, large(1))
    assert_same(lightning_ft.checkpoint.load(store), state)


def test_memory_for_references_is_the_share_of_the_state() -> None:
    """Host memory: a rank keeps its own share once, whatever is saved."""
    store, num_ranks = DictStore(), 4
    writers = [Writer(store, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    total = sum(tensor.nbytes for tensor in (large(1)["weight"], large(1)["frozen"]))
    for step in range(1, 4):
        save_together(writers, step, large(step))
        for saver in writers:
            assert saver._reference is not None
            held = sum(data.nbytes for data, _ in saver._reference.chunks.values())
            assert held <= total / num_ranks + 2 * CHUNK_BYTES


# -- when a checkpoint is a base ------------------------------------------------------------------------------------


def depths(saver: Writer, states: list[dict[str, Any]]) -> list[int]:
    return [saver.save(step, state).depth for step, state in enumerate(states, 1)]


def test_base_every_so_many_saves() -> None:
    """The number is counted from base to base, and has a default, so that there are always several bases in time."""
    assert depths(Writer(DictStore(), base_every=3), [tiny(step) for step in range(7)]) == [0, 1, 1, 0, 1, 1, 0]
    assert depths(Writer(DictStore(), base_every=1), [tiny(step) for step in range(3)]) == [0, 0, 0]
    assert depths(Writer(DictStore()), [tiny(step) for step in range(33)]) == [0] + [1] * 31 + [0]


def test_base_after_a_difference_that_saves_nothing() -> None:
    """What has nothing in common with its base is stored by itself, and the next begins anew."""
    states = [{"w": torch.randn(200_000, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    assert depths(Writer(DictStore()), [*states, states[2]]) == [0, 1, 0, 1]


def test_base_when_the_tensors_change() -> None:
    """Another shape, dtype or name is another set; another text in the tree is not."""
    base = {"a": torch.zeros(300), "epoch": 9}
    others = [{"a": torch.zeros(301)}, {"a": torch.zeros(300, dtype=torch.int32)}, {"b": torch.zeros(300)}]
    for other in others:
        assert depths(Writer(DictStore()), [base, base, other, other]) == [0, 1, 0, 1]
    assert depths(Writer(DictStore()), [base, {**base, "epoch": 10}, {**base, "more": "x" * 1000}]) == [0, 1, 1]


def test_base_after_a_base_that_failed() -> None:
    """References that belong to no checkpoint are not used."""
    store = DictStore()
    saver = Writer(store, base_every=2)
    saver.save(1, tiny(1))
    saver.save(2, tiny(2))
    saver.write(saver.plan(3), tiny(3))  # a base, never committed
    assert saver.save(4, tiny(4)).depth == 0
    assert_same(lightning_ft.checkpoint.load(store), tiny(4))


@pytest.mark.parametrize("arguments", [{"rank": 1}, {"rank": -1}, {"base_every": 0}, {"keep_last": 0}])
def test_wrong_arguments_are_refused(arguments: dict[str, int]) -> None:
    """Before anything is claimed or written."""
    store = DictStore()
    with pytest.raises(ValueError, match="must be"):
        Writer(store, **arguments)
    assert not store.files


def test_step_that_was_saved_may_be_saved_again() -> None:
    """The job has gone back: it is newer than all before. A step that is none is refused, and claims nothing."""
    store = DictStore()
    saver = Writer(store)
    for step, generation in ((5, 0), (5, 1), (4, 2), (6, 2)):
        assert saver.save(step, tiny(step + generation)).key == Key(generation, step)
        assert_same(restored(store), (step, tiny(step + generation)))
    before = dict(store.files)
    with pytest.raises(ValueError, match="step"):
        saver.save(-1, tiny(1))
    assert store.files == before


# -- damage ---------------------------------------------------------------------------------------------------------


def test_each_flipped_bit_and_each_truncation_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens to a file of a tiny checkpoint, it is named, and an intact checkpoint is used if it mattered."""
    caplog.set_level(logging.ERROR)
    store = three_checkpoints()
    intact = dict(store.files)
    expected = {"0000000002-000000000003": 2, "0000000002-000000000002": 1}
    num_files = 0
    for path, data in intact.items():
        expected_key = next((key for key in expected if key in path), None)
        if expected_key is None or path.endswith("footer"):
            continue
        num_files += 1
        manifest = manifests.read_manifest(store, Key(2, int(expected_key[-1])))[0]
        for bit in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            store.files[path] = bytes(damaged)
            with pytest.raises(CheckpointDamagedError, match=path):
                check_own_bytes(store, manifest)
            if bit % 41 == 0:
                check_fallback(store, path, bytes(damaged), expected[expected_key])
        for length in range(0, len(data), 10):
            check_fallback(store, path, data[:length], expected[expected_key])
        check_fallback(store, path, data + b"\0", expected[expected_key])
        check_fallback(store, path, None, expected[expected_key])
        store.files[path] = data
    assert num_files == 4


def check_own_bytes(store: DictStore, manifest: Manifest) -> None:
    manifests.read_manifest(store, manifest.key)
    chain.check_stored_bytes(store, manifest)


def check_fallback(store: DictStore, path: str, data: bytes | None, expected_step: int) -> None:
    if data is None:
        del store.files[path]
    else:
        store.files[path] = data
    found = restore.restore(store)
    step = found.manifest.key.step
    assert_same(found.state, tiny(step))
    if step == 3:  # a chunk of the base that the newest has replaced: nobody has read it
        assert expected_step == 1
        assert any(
            path in problem for verdict in lightning_ft.checkpoint.verify(store) for problem in verdict.problems
        ), path
        return
    assert step == expected_step, path
    if data is not None or path.endswith("pack"):
        assert any(path in str(error) for _, error in found.damaged), path
        assert found.num_steps_lost == 3 - expected_step


def test_fallback_is_said_with_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the damaged piece, what is used instead, and how many steps that costs."""
    store = three_checkpoints()
    path = next(path for path in store.files if "0000000002-000000000002/" in path and path.endswith("pack"))
    del store.files[path]
    assert restored(store)[0] == 1
    assert f"{path} is damaged: it is missing" in caplog.text
    assert "Checkpoint 0000000000-000000000001 is used instead: 2 steps are lost." in caplog.text


def test_damaged_footer_or_hint_harms_no_restore_but_is_found() -> None:
    """Neither is needed for a restore; verify names the footer."""
    store = three_checkpoints()
    footer = next(path for path in store.files if "000000000003/" in path and path.endswith("footer"))
    store.files[footer] = store.files[footer][:-1] + b"\xff"
    store.files[LATEST] = b"\xff\x00"
    assert_same(restored(store), (3, tiny(3)))
    verdicts = {verdict.key.step: verdict.problems for verdict in lightning_ft.checkpoint.verify(store)}
    assert [bool(verdicts[step]) for step in (3, 2, 1)] == [True, False, False]
    assert footer in verdicts[3][0]


def flip_randomly(store: DictStore, num_flips: int, seed: int) -> None:
    """Flip single bits of a checkpoint's pieces; each must be found on verification, and no restore believe it."""
    source = random.Random(seed)
    intact = dict(store.files)
    paths = [path for path in intact if path.startswith(("data/", "manifests/")) and not path.endswith("footer")]
    sizes = [len(intact[path]) for path in paths]
    states = {step: large(step, 60_000) for step in (1, 2, 3)}
    for _ in range(num_flips):
        (path,) = source.choices(paths, sizes)
        bit = source.randrange(8 * len(intact[path]))
        damaged = bytearray(intact[path])
        damaged[bit // 8] ^= 1 << bit % 8
        store.files[path] = bytes(damaged)
        verdicts = lightning_ft.checkpoint.verify(store)
        assert any(path in problem for verdict in verdicts for problem in verdict.problems), (path, bit)
        step, state = restored(store)
        assert_same(state, states[step])
        store.files[path] = intact[path]
    assert restored(store)[0] == 3


def test_random_flips_in_a_larger_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """Each of some hundred single flipped bits is found, and none reaches a restored state."""
    caplog.set_level(logging.ERROR)
    flip_randomly(three_checkpoints(lambda step: large(step, 60_000)), 200, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("EVERY_BYTE" not in os.environ, reason="set EVERY_BYTE for so many: a minute")
def test_ten_thousand_random_flips(caplog: pytest.LogCaptureFixture) -> None:
    """All are found."""
    caplog.set_level(logging.ERROR)
    flip_randomly(three_checkpoints(lambda step: large(step, 60_000)), 10_000, seed=1)


def test_verify_names_the_checkpoint_that_others_depend_on() -> None:
    """A damaged base is the problem of each checkpoint that refers to it, shallow and deep."""
    store = three_checkpoints()
    base = next(path for path in store.files if "0000000002-000000000002/" in path and path.endswith("pack"))
    store.files[base] = store.files[base][:-1] + b"\x55"
    for deep in (False, True):
        verdicts = lightning_ft.checkpoint.verify(store, deep=deep)
        assert [bool(verdict.problems) for verdict in verdicts] == [True, True, False]
        assert all(base in verdict.problems[0] for verdict in verdicts[:2])


def test_none_intact_is_said_with_each_cause() -> None:
    """The error names what is wrong with every checkpoint."""
    store = three_checkpoints()
    for path in store.files:
        if path.startswith("manifests/"):
            store.files[path] = b"nothing"
    with pytest.raises(CheckpointNotFoundError, match=r"none of its 3 checkpoints.*000000000003.*000000000001"):
        restore.restore(store)


def test_storage_that_fails_is_no_reason_for_an_older_checkpoint() -> None:
    """Only what is damaged or missing is passed over: an error of the network would cost steps in silence."""
    store = three_checkpoints()

    def fail(operation: str, path: str) -> None:
        if operation == "read" and "000000000003/" in path:
            raise OSError(errno.EIO, "no answer")

    store.before = fail
    with pytest.raises(StoreError):
        restore.restore(store)


def test_newer_format_is_refused_rather_than_passed_over() -> None:
    """What a newer program wrote is no damage: an older checkpoint would lose its steps in silence."""
    store = three_checkpoints()
    path = manifest_path(Key(2, 3))
    head, contents = store.files[path][:24], zlib.decompress(store.files[path][24:-16])
    for body in (
        head.replace(b"\1\0\0\0", b"\2\0\0\0", 1) + zlib.compress(contents),
        head + zlib.compress(contents.replace(b'"mode":"lossless"', b'"mode":"lossmore"', 1)),
    ):
        newer = DictStore({**store.files, path: body + fmt.hash_of(body)})
        with pytest.raises(UnsupportedCheckpointError, match=path):
            restore.restore(newer)
        verdict = lightning_ft.checkpoint.verify(newer)[0]
        assert (verdict.problems, verdict.is_usable) == ((), False)


def test_manifest_under_another_name_is_damage() -> None:
    """A file that was copied or renamed is not the checkpoint that its name says."""
    store = three_checkpoints()
    store.files[manifest_path(Key(5, 1))] = store.files[manifest_path(Key(2, 3))]
    assert restored(store)[0] == 3
    found = restore.restore(store)
    assert "manifest of 0000000002" in str(found.damaged[0][1])


def test_parent_that_was_replaced_is_noticed() -> None:
    """A checkpoint refers to one manifest by its hash, not by its name."""
    store = three_checkpoints()
    other = DictStore()
    saver = Writer(other)
    saver._claim = writer.Claim(other, 2)
    saver.save(2, tiny(40))
    store.files.update({path: data for path, data in other.files.items() if "-000000000002" in path})
    found = restore.restore(store)
    assert (found.manifest.key, found.state["step"]) == (Key(2, 2), 40)
    assert "not the parent" in str(found.damaged[0][1])


def test_listing_that_lags_behind_is_made_up_for_by_the_hint() -> None:
    """A checkpoint that LATEST names is tried, though it is not listed."""
    store = three_checkpoints()
    store._list = lambda prefix: [  # type: ignore[method-assign]
        path for path in store.files if path.startswith(prefix) and path != manifest_path(Key(2, 3))
    ]
    assert restored(store)[0] == 3
    store.files[LATEST] = b"0000000009-000000000009\n"
    assert restored(store)[0] == 2


# -- several ranks --------------------------------------------------------------------------------------------------


def save_together(writers: list[Writer], step: int, state: dict[str, Any]) -> None:
    plan = writers[0].plan(step)
    for saver in reversed(writers):
        saver.write(plan, state)
    writers[0].commit(plan)


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_any_number_of_ranks_writes_what_one_reads(num_ranks: int) -> None:
    """Each rank writes its share of the bytes; the next run has another number of ranks."""
    store = DictStore()
    writers = [Writer(store, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for step in (1, 2):
        save_together(writers, step, large(step))
        assert_same(lightning_ft.checkpoint.load(store), large(step))
    manifest = manifests.read_manifest(store, Key(0, 1))[0]
    shares = [
        sum(frame.num_bytes for pack, _, frame in manifest.located() if pack.rank == rank) for rank in range(num_ranks)
    ]
    assert max(shares) <= sum(shares) / num_ranks + 2 * CHUNK_BYTES
    others = [Writer(store, rank=rank, num_ranks=2) for rank in range(2)]
    for step in (3, 4):
        save_together(others, step, large(step))
        assert_same(restored(store), (step, large(step)))
    assert [manifests.read_manifest(store, Key(1, step))[0].depth for step in (3, 4)] == [0, 1]


def test_rank_that_is_new_writes_its_share_by_itself() -> None:
    """A process that came back has no reference; the others' differences are not given up for it."""
    store = DictStore()
    writers = [Writer(store, rank=rank, num_ranks=2) for rank in range(2)]
    save_together(writers, 1, large(1))
    writers[1] = Writer(store, rank=1, num_ranks=2)
    save_together(writers, 2, large(2))
    assert_same(lightning_ft.checkpoint.load(store), large(2))
    manifest = manifests.read_manifest(store, Key(0, 2))[0]
    codecs = {rank: {f.codec for pack, _, f in manifest.located() if pack.rank == rank} for rank in range(2)}
    assert codecs[0] & {"unchanged", "xor-blosc2"}
    assert not codecs[1] & {"unchanged", "xor-blosc2"}


def test_checkpoint_is_not_committed_before_all_ranks_have_written() -> None:
    """A rank that died in a save leaves no checkpoint, and the others may plan the same step again."""
    store = DictStore()
    writers = [Writer(store, rank=rank, num_ranks=2) for rank in range(2)]
    plan = writers[0].plan(1)
    writers[0].write(plan, tiny(1))
    assert writers[0].missing_ranks(plan) == [1]
    with pytest.raises(CheckpointError, match="rank 1 has not finished"):
        writers[0].commit(plan)
    with pytest.raises(CheckpointNotFoundError):
        restore.restore(store)
    with pytest.raises(ValueError, match="plan, write and commit"):
        writers[0].save(1, tiny(1))
    save_together(writers, 1, tiny(1))
    assert_same(restored(store), (1, tiny(1)))
    assert any("a0.r0" in path for path in store.files)
    assert manifests.read_manifest(store, Key(0, 1))[0].attempt == 1


def test_ranks_with_different_states_are_not_committed() -> None:
    """Tensors of other names or shapes on one rank are noticed before anything is published."""
    store = DictStore()
    writers = [Writer(store, rank=rank, num_ranks=2) for rank in range(2)]
    plan = writers[0].plan(1)
    writers[0].write(plan, tiny(1))
    writers[1].write(plan, {"other": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="ranks 0 and 1 wrote different states"):
        writers[0].commit(plan)
    assert not manifests.published_keys(store)


def test_pack_that_vanished_is_not_committed() -> None:
    """What a footer names must be there when the checkpoint is made."""
    store = DictStore()
    saver = Writer(store)
    plan = saver.plan(1)
    saver.write(plan, tiny(1))
    pack = next(path for path in store.files if path.endswith("pack"))
    store.files[pack] = store.files[pack][:-1]
    with pytest.raises(CheckpointError, match=pack):
        saver.commit(plan)


def test_packs_are_cut_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that is larger than a pack may be becomes several, each read on its own."""
    monkeypatch.setattr("lightning_ft.checkpoint.share.MAX_PACK_BYTES", 3_000_000)
    monkeypatch.setattr(chain, "WINDOW_BYTES", 2_000_000)
    store = DictStore()
    saver = Writer(store)
    manifest = saver.save(1, large(1, 3_000_000))
    assert len(manifest.packs) > 3
    assert all(pack.num_bytes <= 3_000_000 for pack in manifest.packs)
    saver.save(2, large(2, 3_000_000))
    assert_same(lightning_ft.checkpoint.load(store), large(2, 3_000_000))


# -- several writers ------------------------------------------------------------------------------------------------


def test_two_writers_of_the_same_checkpoint() -> None:
    """One commits, the other is told; what is there is whole and is that of the first."""
    store = DictStore()
    one, other = Writer(store), Writer(store)
    one.plan(0)
    other._claim = one._claim
    plans = one.plan(1), other.plan(1)
    one.write(plans[0], tiny(1))
    with pytest.raises(AlreadyThereError):
        other.write(plans[1], tiny(2))
    one.commit(plans[0])
    assert_same(restored(store), (1, tiny(1)))
    late = Writer(store)
    late._claim = one._claim
    late.plan(1)
    late.plan(1)
    with pytest.raises(AlreadyThereError):
        late.save(1, tiny(3))
    assert_same(restored(store), (1, tiny(1)))


def test_writer_that_was_replaced_publishes_and_deletes_nothing() -> None:
    """A process that wakes up after the job was started again harms nothing."""
    store = DictStore()
    stale = Writer(store, keep_last=1)
    stale.save(10, tiny(10))
    new = Writer(store, keep_last=1)
    new.save(4, tiny(4))
    before = {path for path in store.files if path.startswith("manifests/")}
    with pytest.raises(StaleWriterError):
        stale.save(20, tiny(20))
    with pytest.raises(StaleWriterError):
        stale.retain()
    assert {path for path in store.files if path.startswith("manifests/")} == before
    assert_same(restored(store), (4, tiny(4)))  # order is by generation first
    new.save(5, tiny(5))
    assert not [path for path in store.files if "-000000000020" in path]


class LosesAnswers(DictStore):
    """The next manifest is made, but the answer is lost; if `hidden`, it is not even made."""

    is_losing = False
    is_hidden = False

    def _create(self, path: str, attempt: Attempt) -> None:
        if self.is_losing and path.startswith("manifests/"):
            attempt.is_in_doubt = True
            if not self.is_hidden:
                super()._create(path, attempt)
            else:
                attempt.source.digest()
            raise TimeoutError("no answer")
        super()._create(path, attempt)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_commit_whose_answer_was_lost_is_finished_by_the_next_plan(is_hidden: bool) -> None:
    """Whether or not it had been made: it is there afterwards, and nothing it names was deleted."""
    store = LosesAnswers()
    saver = Writer(store, keep_last=2)
    saver.save(1, tiny(1))
    store.is_losing, store.is_hidden = True, is_hidden
    with pytest.raises(StoreError) as caught:
        saver.save(2, tiny(2))
    assert caught.value.is_in_doubt
    if is_hidden:
        with pytest.raises(StoreError):  # it can't be made
            saver.save(2, tiny(2))
    store.is_losing = False
    saver.save(3, tiny(3))
    for step in (1, 2, 3):
        assert_same(restore.restore(store, key=Key(0, step)).state, tiny(step))


def test_commit_in_doubt_that_another_writer_has_won_is_given_up() -> None:
    """The next save does not wait for what can never be made."""
    store = LosesAnswers()
    saver = Writer(store)
    saver.save(1, tiny(1))
    store.is_losing = store.is_hidden = True
    with pytest.raises(StoreError):
        saver.save(2, tiny(2))
    store.is_losing = False
    store.files[manifest_path(Key(0, 2))] = b"another's"
    saver.save(3, tiny(3))
    assert_same(restored(store), (3, tiny(3)))


# -- cut off and deleted --------------------------------------------------------------------------------------------


def numbered_failures(store: DictStore, number: int) -> None:
    """Let the n-th operation that changes something fail, and all after it."""
    count = 0

    def fail(operation: str, path: str) -> None:
        nonlocal count
        if operation in ("create", "replace", "delete"):
            count += 1
            if count > number:
                raise OSError(errno.ENOSPC, "No space left on device")

    store.before = fail


@pytest.mark.parametrize("base_every", [1, None])
def test_save_that_fails_anywhere_leaves_what_was_there(base_every: int | None) -> None:
    """Disk full at each operation: the last commit loads, the next save works, and loads."""
    for number in range(8):
        store = DictStore()
        saver = Writer(store, keep_last=1, base_every=base_every)
        for step in (1, 2, 3):
            saver.save(step, tiny(step))
        numbered_failures(store, number)
        try:
            saver.save(4, tiny(4))
        except StoreError:
            assert_same(restored(store), (3, tiny(3)))
        else:
            assert_same(restored(store), (4, tiny(4)))
        store.before = nothing
        saver.save(5, tiny(5))
        assert_same(restored(store), (5, tiny(5)))
        saver.save(6, tiny(6))
        left = {path.split("/")[1] for path in store.files if path.startswith("data/")}
        assert left == {str(key) for key in manifests.published_keys(store)}, "what failed was swept"


def test_each_prefix_of_saves_and_retentions_loads() -> None:
    """Killed after any operation: whatever is published then can be read, bit for bit."""
    store = DictStore()
    prefixes: list[dict[str, bytes]] = []
    store.on_change = lambda: prefixes.append(dict(store.files))
    saver = Writer(store, keep_last=2, base_every=3)
    for step in range(1, 11):
        saver.save(step, tiny(step))
    newest = Key(0, 0)
    num_published = 0
    for files in prefixes:
        prefix = DictStore(files)
        keys = manifests.published_keys(prefix)
        for key in keys:
            num_published += 1
            assert_same(restore.restore(prefix, key=key).state, tiny(key.step))
        if keys:
            assert keys[0] >= newest
            newest = keys[0]
        else:
            assert newest == Key(0, 0)
    assert num_published > 100
    # A run that goes on from any of these states finds its way, and finishes the retention.
    for files in prefixes[::5]:
        after = DictStore(dict(files))
        resumed = Writer(after, keep_last=2)
        resumed.save(20, tiny(20))
        resumed.save(21, tiny(21))
        assert_same(restored(after), (21, tiny(21)))
        left = {path.split("/")[1] for path in after.files if path.startswith("data/")}
        assert left == {str(key) for key in manifests.published_keys(after)}


def test_keep_last_keeps_two_bases() -> None:
    """What is kept: the newest, the base that it needs, and another base that does not depend on that one."""
    store = DictStore()
    saver = Writer(store, keep_last=1, base_every=4)
    kept = []
    for step in range(1, 12):
        saver.save(step, tiny(step))
        kept.append([key.step for key in manifests.published_keys(store)])
    assert kept == [
        [1],
        [2, 1],
        [3, 1],
        [4, 1],
        [5, 1],
        [6, 5, 1],
        [7, 5, 1],
        [8, 5, 1],
        [9, 5],
        [10, 9, 5],
        [11, 9, 5],
    ]


def test_damaged_base_does_not_count_among_those_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Retention reads a base before it relies on it; what a damaged one carries does not replace older ones."""
    store = DictStore()
    first = Writer(store, base_every=4)
    for step in range(1, 7):
        first.save(step, tiny(step))
    pack = next(path for path in store.files if "000000000005/" in path and path.endswith("pack"))
    store.files[pack] = store.files[pack].replace(bytes([5, 0, 0, 0]), bytes(4), 1)
    first.keep_last = 1
    first.retain()
    assert "000000000005 is damaged" in caplog.text
    assert restored(store)[0] == 4
    assert first.save(7, tiny(7)).depth == 0, "the next one does not build on it"
    assert restored(store)[0] == 7


def test_retention_refuses_where_a_newer_program_writes() -> None:
    """Nobody deletes what depends on things he can't read."""
    store = three_checkpoints()
    saver = Writer(store)
    saver.save(4, tiny(4))
    path = manifest_path(Key(2, 3))
    body = store.files[path][:-16].replace(b"\1\0\0\0", b"\2\0\0\0", 1)
    store.files[path] = body + fmt.hash_of(body)
    files = dict(store.files)
    saver.keep_last = 1
    with pytest.raises(UnsupportedCheckpointError):
        saver.retain()
    assert store.files == files


def test_restore_while_checkpoints_are_deleted() -> None:
    """A reader whose checkpoint is deleted under its hands takes a newer one, and reports no damage."""
    store = DictStore()
    saver = Writer(store, keep_last=1, base_every=1)
    for step in (1, 2, 3):
        saver.save(step, tiny(step))
    reader = DictStore(store.files)
    events: list[str] = []

    def overtake(operation: str, path: str) -> None:
        if operation == "read" and path.endswith("pack") and not events:
            events.append(path)
            for step in range(4, 8):
                saver.save(step, tiny(step))

    reader.before = overtake
    found = restore.restore(reader)
    assert events
    assert (found.manifest.key.step, found.damaged) == (7, ())
    assert_same(found.state, tiny(7))


def test_reference_is_checked_when_committing() -> None:
    """A rank whose reference is not the base's bytes is found out before the checkpoint is published."""
    store = DictStore()
    saver = Writer(store)
    saver.save(1, large(1))
    assert saver._reference is not None
    place, (data, _) = next(iter(saver._reference.chunks.items()))
    spoilt = data ^ 1
    saver._reference.chunks[place] = spoilt, fmt.hash_of(np.ascontiguousarray(spoilt).data)
    with pytest.raises(CheckpointDamagedError, match="refers to one that is not in"):
        saver.save(2, large(2))
    assert restored(store)[0] == 1
