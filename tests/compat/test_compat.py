"""Checkpoints of each version of the format that was ever released can be read."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
from typing import Any

import pytest
from checkpoint_twin import assert_same
from mode_job import MODES, Job

import lightning_ft.checkpoint
from lightning_ft.checkpoint.manifests import published_keys, read_manifest
from lightning_ft.checkpoint.records import Key
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.store import open_store

HERE = pathlib.Path(__file__).parent


def _imported(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_v1, make_v1_modes, stranger = map(_imported, ("make_v1", "make_v1_modes", "stranger"))


def test_version_1_is_read(tmp_path: pathlib.Path) -> None:
    """A base and a difference of two ranks, with all kinds of nodes, hold what the script says; all bytes verify."""
    run = tmp_path / "v1"
    shutil.copytree(HERE / "v1", run)
    assert_same(lightning_ft.checkpoint.load(str(run)), make_v1.state(20))
    found = restore(open_store(str(run)), key=Key(0, 10))
    assert_same(found.state, make_v1.state(10))
    assert found.state["conv"][0].is_contiguous(memory_format=make_v1.torch.channels_last)
    assert all(not verdict.problems for verdict in lightning_ft.checkpoint.verify(str(run), deep=True))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_version_1_is_gone_on_with(tmp_path: pathlib.Path, num_ranks: int) -> None:
    """A job that is resumed writes beside it."""
    run = tmp_path / "v1"
    shutil.copytree(HERE / "v1", run)
    writers = [lightning_ft.checkpoint.Writer(str(run), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    plan = writers[0].plan(21)
    for writer in writers:
        writer.write(plan, make_v1.state(11))
    writers[0].commit(plan)
    assert_same(lightning_ft.checkpoint.load(str(run)), make_v1.state(11))


def _expected(mode: str, step: int) -> Any:
    if mode != "gradlog":
        return make_v1_modes.state(step)
    training = make_v1_modes.Training()
    for _ in range(step // 5 - 1):
        training.take([])
    return training.state()


@pytest.mark.parametrize(("mode", "codec"), [("snap", "add-blosc2"), ("bounded", "unchanged"), ("gradlog", "replayed")])
def test_each_mode_of_version_1_is_read(mode: str, codec: str) -> None:
    """By this package and by a stranger's reader: what was saved, or near it."""
    store = open_store(str(HERE / "v1_modes" / mode))
    keys = published_keys(store)
    assert [key.step for key in keys] == [30, 20, 10]
    assert codec in {frame.codec for frame in read_manifest(store, keys[0])[0].frames}
    for key in keys:
        found, expected = restore(store, key=key).state, _expected(mode, key.step)
        assert_same(stranger.read(HERE / "v1_modes" / mode, str(key)), found)
        if mode == "bounded":
            weight, exact = found["state_dict"]["weight"], expected["state_dict"]["weight"]
            assert ((weight - exact).abs() <= make_v1_modes.BOUND * exact.abs()).all()
            found["state_dict"]["weight"] = exact
        assert_same(found, expected)


def test_a_stranger_reads_version_1() -> None:
    """With what FORMAT.md says alone: all kinds of nodes, both checkpoints."""
    for step in (10, 20):
        found = stranger.read(HERE / "v1", str(Key(0, step)))
        assert_same(found, make_v1.state(step))
        assert found["conv"][0].is_contiguous(memory_format=make_v1.torch.channels_last)


@pytest.mark.parametrize("mode", MODES)
def test_a_stranger_reads_what_is_written_now(mode: str, tmp_path: pathlib.Path) -> None:
    """In each mode; steps that were clipped, too."""
    store = open_store(str(tmp_path))
    job = Job([store, store], mode, base_every=4)
    for step in range(1, 4):
        job.train(max_norm=0.5 if step == 2 else None)
        job.save()
    for key in published_keys(store):
        assert_same(stranger.read(tmp_path, str(key)), restore(store, key=key).state)
