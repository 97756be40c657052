"""What the callback makes of what other ranks say, and of saves whose rank 0 is gone."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest
import torch

import lightning_ft
from lightning_ft import delta_checkpoint
from lightning_ft.checkpoint import Writer
from lightning_ft.checkpoint.records import Key
from lightning_ft.checkpoint.saver import Saver
from lightning_ft.delta_memory import Kept, Snapshot
from lightning_ft.delta_modes import mode_of
from lightning_ft.errors import StoreError


class _Strategy:
    """Of a job of two ranks, of which the other one answers so."""

    root_device = torch.device("cpu")
    model = None

    def __init__(self, other: list[float]) -> None:
        self.other = other

    def reduce(self, own: torch.Tensor, reduce_op: str) -> torch.Tensor:
        """Add what the other one says, or take the larger."""
        other = torch.tensor(self.other[: own.numel()]).reshape(own.shape)
        return own + other if reduce_op == "sum" else torch.maximum(own, other)


class _Trainer:
    global_rank, world_size, global_step = 0, 2, 7
    is_global_zero = True
    optimizers: tuple[Any, ...] = ()

    def __init__(self, other: list[float]) -> None:
        self.strategy = _Strategy(other)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is reported: event and step."""
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(
        delta_checkpoint.backend, "report", lambda event, **fields: events.append((event, fields["step"]))
    )
    return events


def test_a_save_that_another_rank_knows_nothing_of_is_given_up(
    tmp_path: pathlib.Path, told: list[tuple[str, int]]
) -> None:
    """It came in the place of one that died: its share would be waited for in vain, and saves left out meanwhile."""
    saves = lightning_ft.DeltaCheckpoint(tmp_path / "run", every_n_train_steps=1)
    trainer: Any = _Trainer([0.0, 0.0, 0.0, 0.0])
    saver = Saver(Writer(str(tmp_path / "run"), rank=0, num_ranks=2))
    plan = saver.writer.plan(5)
    saver.start(plan, {"x": torch.zeros(4)}, 0.0)
    assert saver.wait_written(30)
    saves._trainer, saves._saver, saves._begun = trainer, saver, plan.key
    assert saves._settle(trainer, waits=False)
    assert (saves._saver, saves.num_failed, told) == (None, 1, [("checkpoint_failed", 5)])
    assert not any(thread.name == "lightning_ft checkpoint" for thread in threading.enumerate())


def test_the_storage_decides_what_became_of_a_save_whose_rank_0_is_gone(
    tmp_path: pathlib.Path, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to have failed if it is not there, never if it is; a storage that fails is asked again."""
    url = str(tmp_path / "run")
    Writer(url).save(5, {"x": torch.zeros(4)})
    saves = lightning_ft.DeltaCheckpoint(url, every_n_train_steps=1)
    saves._trainer = _Trainer([])  # type: ignore[assignment]
    saves._uncertain = [Key(0, 5), Key(0, 6)]

    def fail(*_: Any) -> int:
        raise StoreError("no answer", operation="size", path="", reason="timeout")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_ft.checkpoint.stores.local.LocalStore._size", fail)
        saves._find_out()
    assert (told, len(saves._uncertain)) == ([], 2)
    saves._find_out()
    assert (told, saves._uncertain, saves.num_failed) == ([("checkpoint_failed", 6)], [], 1)


@pytest.mark.parametrize("other_knows", [True, False])
def test_ranks_round_by_what_all_of_them_know(other_knows: bool) -> None:
    """One that has just come does not know the parameters of the last save: then nobody rounds them, once."""
    mode: Any = mode_of("snap")
    trainer: Any = _Trainer([0.0 if other_knows else 1.0])
    parameter = torch.nn.Parameter(torch.linspace(0, 1, 9))
    optimizer = torch.optim.SGD([parameter])
    trainer.optimizers = (optimizer,)
    mode._know(trainer)
    mode._rounded_at = -10
    with torch.no_grad():
        parameter.add_(torch.linspace(0.01, 0.02, 9))
    before = parameter.detach().clone()
    assert not mode.needs_base(trainer, {}, None)
    mode.prepared(trainer, None, {})
    assert torch.equal(parameter, before) != other_knows
    assert mode.state() == trainer.global_step


def test_what_can_be_gone_back_to_is_kept_newest_first_and_forgotten_when_it_never_was() -> None:
    """Some of the last, and the one whose tensors are held; one that lacks what is the rank's own does not count."""
    kept, share = Kept(), object()
    kept.add(Snapshot(Key(0, 1), 2, share, b"1"))  # type: ignore[arg-type]
    for step in range(2, 7):
        kept.add(Snapshot(Key(0, step), 2, None, b"own"))
    assert [key.step for key in kept.whole()] == [1, 4, 5, 6]
    kept.let_go()
    kept.add(Snapshot(Key(0, 7), 2, None))
    assert [key.step for key in kept.whole()] == [5, 6]
    assert kept.incomplete is not None
    kept.forget(kept.incomplete)
    assert kept.incomplete is None
    kept.forget_after(Key(0, 5))
    assert [key.step for key in kept.whole()] == [5]
