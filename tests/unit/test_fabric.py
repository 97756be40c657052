"""Fabric's strategy: its arguments, its loaders, and the private parts of Fabric that it relies on."""

from __future__ import annotations

import collections
import datetime
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.wrappers import _FabricDataLoader, _FabricOptimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft
from lightning_ft.data.sampler import ElasticDistributedSampler
from lightning_ft.elastic import ElasticState
from lightning_ft.fabric import FaultTolerantFabricStrategy
from lightning_ft.fabric_data import ElasticFabricDataLoader, use_elastic_loaders


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (Fabric, "_wrap_and_launch", "to_run = partial(self._wrap_with_setup, to_run)"),
        (Fabric, "_wrap_with_setup", "self._strategy.setup_environment()"),
        (Fabric, "setup_dataloaders", "self._setup_dataloader("),
        (Fabric, "_setup_dataloader", "self._get_distributed_sampler(dataloader, **"),
        (Fabric, "_setup_dataloader", "_FabricDataLoader(dataloader=dataloader, device=device)"),
        (Fabric, "rank_zero_first", "with _InfiniteBarrier() as barrier:"),
        (_FabricDataLoader, "__iter__", "_set_sampler_epoch(self._dataloader, self._num_iter_calls)"),
        (_FabricOptimizer, "__init__", "self._optimizer = optimizer"),
        (DDPStrategy, "setup_environment", "self._setup_distributed()"),
        (DDPStrategy, "_setup_distributed", "self._set_world_ranks()"),
        (DDPStrategy, "_configure_launcher", "self._launcher ="),
    ],
)
def test_fabric_is_what_was_read(owner: object, name: str, text: str) -> None:
    """The function is there, and does what is relied on."""
    assert text in inspect.getsource(getattr(owner, name))


def test_fabric_knows_the_strategy() -> None:
    """By its name, with its defaults."""
    fabric = Fabric(strategy="ft_ddp", accelerator="cpu", devices=2)
    assert type(fabric.strategy) is FaultTolerantFabricStrategy
    assert "ft_ddp" in STRATEGY_REGISTRY


def test_arguments_are_settings_or_ddps() -> None:
    """Each is passed on to whom it belongs."""
    timeout = datetime.timedelta(minutes=1)
    strategy = lightning_ft.FaultTolerantFabricStrategy(timeout=timeout, max_restarts=7, bucket_cap_mb=1)
    assert (strategy.settings.timeout, strategy.settings.max_restarts) == (60.0, 7)
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 1}


@pytest.mark.parametrize("name", ["max_restart", "on_resize", "enable"])
def test_an_unknown_argument_is_named(name: str) -> None:
    """A misspelt setting, and one of the Trainer's, is told before anything is started."""
    with pytest.raises(ValueError, match=f"'{name}' is no setting of FaultTolerantFabricStrategy"):
        FaultTolerantFabricStrategy(**{name: 1})


def test_the_first_rank_of_each_node_prints() -> None:
    """Whoever that is now: who comes back is behind the others of its node."""
    members = ("0/1", "0/0", "1/0", "1/1")
    is_first = FaultTolerantFabricStrategy._is_first_of_node
    assert [is_first(members, member) for member in members] == [True, False, True, False]


LENGTH = 26


def loader_of(members: int, rank: int, *, batch_size: int = 2, drop_last: bool = False) -> ElasticFabricDataLoader:
    """Return a loader over numbers, as Fabric makes it, on one of so many ranks that no process group knows."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=DDPStrategy())
    fabric._launched = True
    use_elastic_loaders(fabric, lambda loader: None)
    sampler = ElasticDistributedSampler(TensorDataset(torch.arange(LENGTH)), members, rank, shuffle=False)
    loader = DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last)
    found = fabric.setup_dataloaders(loader)
    assert isinstance(found, ElasticFabricDataLoader)
    return found


class Ranks:
    """Loaders of ranks that come and go, in one process: `redeal` deals to whoever is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
        self.loaders = {rank: loader_of(num, rank) for rank in range(num)}
        redeal = ElasticDistributedSampler.redeal
        monkeypatch.setattr(ElasticDistributedSampler, "redeal", lambda own: redeal(own, tuple(self.loaders)))
        monkeypatch.setattr(ElasticDistributedSampler, "_members", lambda own: tuple(self.loaders))

    def epoch(self, iterators: dict[int, Iterator[Any]], steps: int = 1 << 30) -> collections.Counter[int]:
        """Train in step, on each rank that has batches, and count what was trained on."""
        seen: collections.Counter[int] = collections.Counter()
        for _ in range(steps):
            drawn = {rank: next(iterators[rank], None) for rank in self.loaders}
            assert len({batch is None for batch in drawn.values()}) == 1, "all have a batch, or none"
            if None in drawn.values():
                break
            for rank, (batch,) in drawn.items():
                seen.update(batch.tolist())
                self.loaders[rank].on_commit(list(self.loaders))
        return seen


def test_ranks_come_and_go_and_each_sample_is_trained_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies after two steps, another joins with the state; the next epoch is a whole one again."""
    ranks = Ranks(monkeypatch, 3)
    iterators = {rank: iter(loader) for rank, loader in ranks.loaders.items()}
    seen = ranks.epoch(iterators, 2)
    del ranks.loaders[0]
    seen += ranks.epoch(iterators, 1)
    ranks.loaders[7] = loader_of(8, 7)
    ranks.loaders[7].load_state_dict(ranks.loaders[1].state_dict())
    iterators[7] = iter(ranks.loaders[7])
    seen += ranks.epoch(iterators)
    assert set(seen) == set(range(LENGTH))
    assert seen.total() <= LENGTH + 3
    whole = ranks.epoch({rank: iter(loader) for rank, loader in ranks.loaders.items()})
    assert set(whole) == set(range(LENGTH))
    assert {loader.state_dict()["epoch"] for loader in ranks.loaders.values()} == {2}


def test_who_joins_at_the_end_of_an_epoch_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was admitted after the last step, when the others had not asked for another batch: it has none either."""
    ranks = Ranks(monkeypatch, 2)
    iterators = {rank: iter(loader) for rank, loader in ranks.loaders.items()}
    ranks.epoch(iterators, 7)
    assert ranks.loaders[0]._batches.num_left == 0
    ranks.loaders[7] = loader_of(8, 7)
    ranks.loaders[7].load_state_dict(ranks.loaders[1].state_dict())
    iterators[7] = iter(ranks.loaders[7])
    assert ranks.epoch(iterators) == {}
    assert {loader.state_dict()["epoch"] for loader in ranks.loaders.values()} == {1}


def test_all_that_was_drawn_for_a_backward_counts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient accumulation nothing is dealt anew in the middle of a step, and no batch is lost after it."""
    ranks = Ranks(monkeypatch, 2)
    loader = ranks.loaders[1]
    iterator = iter(loader)
    seen = [next(iterator)[0].tolist()]
    del ranks.loaders[0]
    seen.append(next(iterator)[0].tolist())
    assert seen == [[1, 3], [5, 7]], "as it was dealt"
    loader.on_commit([1])
    left = [index for (batch,) in iterator for index in batch.tolist() if loader.on_commit([1]) is None]
    assert sorted([*seen[0], *seen[1], *left]) == list(range(LENGTH))


def test_a_loop_without_backward_keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation is not dealt again when ranks change in it; the next one is."""
    ranks = Ranks(monkeypatch, 2)
    iterator = iter(ranks.loaders[1])
    next(iterator)
    del ranks.loaders[0]
    assert sum(len(batch) for (batch,) in iterator) == LENGTH // 2 - 2
    assert sum(len(batch) for (batch,) in ranks.loaders[1]) == LENGTH


def test_nobody_joins_between_a_batch_and_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary in a wrong place is told at once, not when a rank comes back a week later."""
    ranks = Ranks(monkeypatch, 1)
    (loader,) = ranks.loaders.values()
    loader.check_boundary()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"boundary\(\) failed: a batch has been drawn"):
        loader.check_boundary()
    loader.on_commit([0])
    loader.check_boundary()


def test_an_iterator_from_before_a_restore_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that holds on to it goes on where the state was taken, in the same epoch."""
    ranks = Ranks(monkeypatch, 1)
    (loader,) = ranks.loaders.values()
    iterator = iter(loader)
    seen = ranks.epoch({0: iterator}, 3)
    state = loader.state_dict()
    ranks.epoch({0: iterator}, 2)
    next(iterator)
    loader.load_state_dict(state)
    loader.check_boundary()
    iterator = iter(loader)  # only now the old one is closed
    seen += ranks.epoch({0: iterator})
    assert sorted(seen.elements()) == list(range(LENGTH))
    assert loader.state_dict()["epoch"] == 1


def test_drop_last_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes up no batch is left out, and is not waited for."""
    ranks = Ranks(monkeypatch, 1)
    loader = ranks.loaders[0] = loader_of(1, 0, batch_size=4, drop_last=True)
    assert ranks.epoch({0: iter(loader)}).total() == LENGTH - LENGTH % 4


def test_state_of_what_fabric_wraps_is_split_as_it_is() -> None:
    """Parameters are known as such, so that joiners are sent them in stripes; buffers are each rank's own."""
    fabric = Fabric(accelerator="cpu", devices=1)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    state = ElasticState(model=model, optimizer=optimizer)
    given = state._give()
    assert set(given.replicated["model"]) == {name for name, _ in net.named_parameters()}
    assert set(given.own[0][0]["model"]) == {name for name, _ in net.named_buffers()}
    trained = state._trained()
    assert trained.optimizers == [optimizer.optimizer]
    assert len(trained.parameters) == 4
