"""Checkpoints of each version of the format that was ever released can be read."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

import pytest
from checkpoint_twin import assert_same

import lightning_ft.checkpoint
from lightning_ft.checkpoint.records import Key
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.store import open_store

HERE = pathlib.Path(__file__).parent
spec = importlib.util.spec_from_file_location("make_v1", HERE / "make_v1.py")
assert spec
assert spec.loader
make_v1 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_v1)


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
