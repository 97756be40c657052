"""An epoch of a real fit, dealt anew in its middle; and what of Lightning that relies on."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from lightning_ft import lightning_data, lightning_deal, lightning_internals, lightning_refresh
from lightning_ft.data.sampler import ElasticDistributedSampler

pytestmark = pytest.mark.filterwarnings("default")  # what Lightning warns of, of itself and of the test


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (data_connector, "_get_distributed_sampler", "return DistributedSampler(dataloader.dataset, **kwargs)"),
        (data_connector._DataConnector, "_resolve_sampler", "_get_distributed_sampler("),
        (data_connector, "_parse_num_batches", "int(length * limit_batches)"),
        (_FitLoop, "setup_data", "self._combined_loader is not None and not self._should_reload_train_dl"),
        (_FitLoop, "setup_data", "combined_loader.limits = limits"),
        (_FitLoop, "setup_data", "self._load_combined_loader_states()"),
        (_FitLoop, "on_advance_start", "self.setup_data()"),
        (_FitLoop, "on_advance_start", "_set_sampler_epoch(dl, self.epoch_progress.current.processed)"),
        (_FitLoop, "state_dict", 'destination[prefix + "state_dict"] = self.on_save_checkpoint()'),
        (_TrainingEpochLoop, "reset", "self.batch_progress.current.completed >= self.trainer.num_training_batches"),
        (_TrainingEpochLoop, "reset", "You're resuming from a checkpoint that ended before the epoch ended"),
        (_FitLoop, "on_advance_end", "on_train_epoch_end"),
        (_TrainingEpochLoop, "on_run_start", "data_fetcher.fetched += self.batch_progress.current.ready"),
        (_TrainingEpochLoop, "run", "self.advance(data_fetcher)"),
        (_TrainingEpochLoop, "update_lr_schedulers", 'if interval == "step" and self._should_accumulate():'),
        (_DataFetcher, "__next__", "self.done = self.fetched >= self.length"),
        (_EvaluationLoop, "setup_data", "self._combined_loader is not None and trainer_fn == TrainerFn.FITTING"),
    ],
)
def test_lightning_is_what_was_read(owner: object, name: str, text: str) -> None:
    """The function is there, and does what is relied on."""
    assert text in inspect.getsource(getattr(owner, name))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 7, 24, 1003])
def test_a_renumbered_sampler_is_as_if_made_anew(length: int, drop_last: bool) -> None:
    """The arithmetic is DistributedSampler's own."""
    data = TensorDataset(torch.zeros(length))
    for before, now in ((4, 3), (3, 2), (2, 5)):
        sampler = DistributedSampler(data, before, 0, drop_last=drop_last)
        expected = DistributedSampler(data, now, 1, drop_last=drop_last)
        lightning_refresh.renumber_sampler(sampler, rank=1, num_replicas=now)
        assert list(sampler) == list(expected)
        assert len(sampler) == len(expected)


class Numbers(Dataset[torch.Tensor]):
    """The numbers from 0 on."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Half(pl.LightningModule):
    """Rank 0 of 2 in one process: the other one dies in the step `dies_in`, which rank 0 finishes alone.

    With `saves` as the name of a hook and how often it was called, a checkpoint is made then.
    """

    def __init__(
        self, dies_in: int, num_members: int = 2, saves: tuple[str, int] = ("", 0), path: Any = None, **trainer: Any
    ) -> None:
        super().__init__()
        self.num_members = num_members
        self.saves, self.path, self.num_calls = saves, path, 0
        self.at_save: dict[str, Any] = {}
        self.net = torch.nn.Linear(1, 1)
        self.dies_in = dies_in
        self.seen: list[list[int]] = []
        self.last: list[bool] = []
        self.steps: list[int] = []
        self.validated: list[int] = []
        self.sampler = ElasticDistributedSampler(Numbers(), num_members, 0, shuffle=False)
        self.members = tuple(range(num_members))
        self.stock_redeal = self.sampler.redeal
        self.sampler.redeal = lambda: self.stock_redeal(self.members)  # type: ignore[method-assign, assignment]
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{"max_epochs": 1, **trainer},
        )
        self.data = lightning_data.EpochData(self.trainer)
        lightning_internals.around_each_batch(self.trainer, self.data.before_batch, self.data.after_batch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Note what was drawn."""
        self.seen.append(batch[:, 0].int().tolist())
        self.steps.append(self.trainer.global_step)
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def on_after_backward(self) -> None:
        """Commit at the end of each backward that steps."""
        step = self.trainer.global_step
        if not self.trainer.fit_loop.epoch_loop._should_accumulate():
            self.members = (0,) if step >= self.dies_in else tuple(range(self.num_members))
            self.data.on_commit(self.members)  # type: ignore[arg-type]

    def save_if_due(self, hook: str) -> None:
        """Make a checkpoint, and note what was trained on."""
        self.num_calls += hook == self.saves[0]
        if (hook, self.num_calls) == self.saves and not self.at_save:
            self.trainer.save_checkpoint(self.path)
            self.at_save = {"num_seen": len(self.seen), "step": self.trainer.global_step}

    def on_before_optimizer_step(self, *_: Any) -> None:
        """The step is committed, but the weights are what they were."""
        self.save_if_due("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        """All of the epoch is done."""
        self.save_if_due("on_train_epoch_end")

    def on_train_batch_end(self, *_: Any) -> None:
        """Note whether Lightning takes it for the last."""
        self.last.append(self.trainer.is_last_batch)
        self.save_if_due("on_train_batch_end")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Note when."""
        self.validated.append(len(self.seen))
        self.save_if_due("validation_step")

    def configure_optimizers(self) -> Any:
        """Return any, and a schedule that counts its steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def fit(self, num_workers: int = 0, batch_size: int = 2, ckpt_path: Any = None) -> None:
        """Train; batches of two, so six for each of two ranks."""
        loader = DataLoader(Numbers(), batch_size, sampler=self.sampler, num_workers=num_workers)
        self.trainer.fit(self, loader, DataLoader(Numbers(), 24), ckpt_path=ckpt_path)


def others(num_steps: int) -> set[int]:
    """Return what the other rank has contributed in its first steps: every second number."""
    return {1 + 2 * index for index in range(2 * num_steps)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dies_in", [0, 2, 5])
def test_the_rest_of_the_epoch_is_drawn_anew(dies_in: int, num_workers: int) -> None:
    """What the dead has not contributed is trained on, also what it drew for the last step; the epoch is longer."""
    half = Half(dies_in)
    half.fit(num_workers)
    drawn = [number for batch in half.seen for number in batch]
    assert sorted(drawn) == sorted(set(range(24)) - others(dies_in)), half.seen
    assert half.last == [False] * (len(half.seen) - 1) + [True]
    assert half.trainer.num_training_batches == len(half.seen)
    assert half.validated == [len(half.seen)], "at the end of the epoch, which is later now"


def test_without_a_failure_nothing_is_drawn_anew() -> None:
    """The iterator of the epoch is the only one."""
    half = Half(99, max_epochs=2)
    made = []
    iterate = type(half.sampler).__iter__
    half.sampler.__class__ = type(
        "Counted", (ElasticDistributedSampler,), {"__iter__": lambda self: made.append(1) or iterate(self)}
    )
    half.fit()
    assert half.seen == 2 * [[4 * index, 4 * index + 2] for index in range(6)]
    assert len(made) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("dies_in", "expected"), [(99, [7, 5]), (0, [7, 7, 5, 5]), (1, [7, 5, 5])])
def test_what_is_left_ends_in_no_tiny_batch(dies_in: int, expected: list[int], num_workers: int) -> None:
    """The last two batches of what was dealt anew are equally large, and counted as they are."""
    half = Half(dies_in)
    half.fit(num_workers, batch_size=7)
    assert [len(batch) for batch in half.seen] == expected
    left = set(range(24)) - {index for batch in half.seen for index in batch}
    assert left == {1 + 2 * index for index in range(sum(expected[: min(dies_in, 2)]))}
    assert half.last[-1]


def test_what_was_accumulated_counts_with_its_step() -> None:
    """A rank that dies in the third of three batches has left all three of them to the others."""
    half = Half(1, accumulate_grad_batches=3)
    half.fit()
    drawn = [number for batch in half.seen for number in batch]
    assert sorted(drawn) == sorted(set(range(24)) - others(3)), half.seen


def test_a_step_that_was_the_epochs_last_counts_as_one() -> None:
    """It is done within a window of accumulation; what Lightning does after a step it does all the same."""
    half = Half(1, accumulate_grad_batches=4)
    half.fit()
    drawn = [number for batch in half.seen for number in batch]
    assert sorted(drawn) == sorted(set(range(24)) - others(4)), half.seen
    assert half.last[5] is False, "the other died in what was the last batch"
    (config,) = half.trainer.lr_scheduler_configs
    assert (
        config.scheduler.last_epoch
        == half.trainer.global_step
        == half.trainer.fit_loop.epoch_loop._batches_that_stepped
    )


@pytest.mark.parametrize(("limit", "expected"), [(4, 4), (7, 7), (0.5, 5)])
def test_limits_hold_for_the_whole_epoch(limit: float, expected: int) -> None:
    """A number of batches stays what it is, a share is of the batches that there are now: 3 done and 7 left."""
    half = Half(2, limit_train_batches=limit)
    half.fit()
    assert len(half.seen) == expected
    assert half.last[-1]


def test_validations_within_the_epoch_follow_its_length() -> None:
    """Every third of it; it has ten batches instead of six from the third on."""
    half = Half(2, val_check_interval=0.34)
    half.fit()
    assert half.validated == [2, 3, 6, 9]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("saved_after", "expected"), [(12, 6), (9, 3 + 6)], ids=["epoch's end", "mid-epoch"])
def test_a_resumed_fit_has_as_many_batches_as_with_the_stock_sampler(
    tmp_path: Any, saved_after: int, expected: int, num_workers: int
) -> None:
    """Lightning's count of what is left of the epoch is right for what is dealt."""
    first = Half(99, max_epochs=2)
    path = tmp_path / "saved.ckpt"
    note = first.on_train_batch_end

    def save(*_: Any) -> None:
        note()
        if first.trainer.global_step == saved_after and saved_after < 12:
            first.trainer.save_checkpoint(path)

    first.on_train_batch_end = save  # type: ignore[method-assign]
    first.fit()
    if saved_after == 12:
        first.trainer.save_checkpoint(path)
    resumed = Half(99, max_epochs=3)
    loader = DataLoader(Numbers(), 2, sampler=resumed.sampler, num_workers=num_workers)
    resumed.trainer.fit(resumed, loader, DataLoader(Numbers(), 24), ckpt_path=path)
    assert len(resumed.seen) == expected
    assert resumed.trainer.global_step == 18


def test_a_death_in_a_resumed_epoch_leaves_what_was_done_before(tmp_path: Any) -> None:
    """The epoch of 6 has 3 batches left, of which one is done when the other rank dies: 2 x 2 + 1 of 6 are left."""
    first = Half(99, max_epochs=1)
    path = tmp_path / "saved.ckpt"
    note = first.on_train_batch_end

    def save(*_: Any) -> None:
        note()
        if first.trainer.global_step == 3:
            first.trainer.save_checkpoint(path)

    first.on_train_batch_end = save  # type: ignore[method-assign]
    first.fit()
    resumed = Half(4, max_epochs=1)
    loader = DataLoader(Numbers(), 2, sampler=resumed.sampler)
    resumed.trainer.fit(resumed, loader, DataLoader(Numbers(), 24), ckpt_path=path)
    assert 3 < len(resumed.seen) < 12
    assert resumed.last[-1]


@pytest.mark.parametrize("resumed_with", [(1, 0), (1, 2), (3, 0)], ids=["alone", "alone, workers", "three"])
@pytest.mark.parametrize("dies_in", [99, 2])
@pytest.mark.parametrize(
    ("saves", "trainer"),
    [
        (("on_train_batch_end", 4), {}),
        (("on_train_batch_end", 6), {}),  # the last one, if nobody dies
        (("on_before_optimizer_step", 4), {}),
        (("on_train_batch_end", 5), {"accumulate_grad_batches": 2}),
        (("validation_step", 1), {"val_check_interval": 0.5}),
        (("validation_step", 1), {}),
        (("on_train_epoch_end", 1), {}),
    ],
)
def test_a_resumed_fit_trains_on_what_was_left(
    tmp_path: Any, saves: tuple[str, int], trainer: dict[str, Any], dies_in: int, resumed_with: tuple[int, int]
) -> None:
    """Whenever the checkpoint was made, whoever had died before, and however many go on: no sample twice, none lost."""
    first = Half(dies_in, saves=saves, path=tmp_path / "saved.ckpt", **trainer)
    first.fit()
    num_batches = min(first.at_save["step"] * trainer.get("accumulate_grad_batches", 1), first.at_save["num_seen"])
    num_of_both = min(num_batches, dies_in * trainer.get("accumulate_grad_batches", 1))
    done = {index for batch in first.seen[:num_batches] for index in batch} | others(num_of_both)
    num_members, num_workers = resumed_with
    resumed = Half(99, num_members, **{**trainer, "max_epochs": 2})
    resumed.fit(num_workers, ckpt_path=tmp_path / "saved.ckpt")
    num_whole = -(-24 // num_members // 2)
    rest = {index for batch in resumed.seen[:-num_whole] for index in batch}
    owed = set(range(24)) - done
    assert rest == owed if num_members == 1 else rest <= owed | {0}
    assert len(rest) == -(-len(owed) // num_members)
    whole = [index for batch in resumed.seen[-num_whole:] for index in batch]
    assert whole == list(range(0, 24, num_members)), "the next epoch is a whole one"
    assert resumed.trainer.num_training_batches == num_whole
    ends = [index for index, is_last in enumerate(resumed.last) if is_last]
    assert ends == [len(resumed.seen) - num_whole - 1, len(resumed.seen) - 1][0 if rest else 1 :]


def test_a_cursor_that_fits_no_more_is_said_to_be_lost(tmp_path: Any) -> None:
    """The data set has another length: the epoch is dealt whole, and ends as early as with the stock sampler."""
    first = Half(99, saves=("on_train_batch_end", 4), path=tmp_path / "saved.ckpt")
    first.fit()
    resumed = Half(99, num_members=1)
    resumed.sampler.dataset = TensorDataset(torch.zeros(40))  # type: ignore[assignment]
    resumed.sampler.set_epoch(0)
    with pytest.warns(UserWarning, match="data set length 40, which this sampler has, got 24"):
        resumed.fit(ckpt_path=tmp_path / "saved.ckpt")


class Several(Half):
    """Draws from two loaders at once: of 24 numbers, and of the first 10 of them."""

    def __init__(self, dies_in: int, **options: Any) -> None:
        super().__init__(dies_in, **options)
        self.short = ElasticDistributedSampler(range(10), self.num_members, 0, shuffle=False)  # type: ignore[arg-type]
        redeal_short = self.short.redeal
        self.short.redeal = lambda: redeal_short(self.members)  # type: ignore[method-assign, assignment]
        self.seen_short: list[list[int] | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Note what was drawn."""
        short = batch["short"]
        self.seen_short.append(None if short is None else short.tolist())
        if batch["long"] is None:
            self.seen.append([])
            return self.net(torch.zeros(1, 1)).sum()  # type: ignore[no-any-return]
        return super().training_step(batch["long"], batch_idx)

    def fit_both(self, mode: Any, num_workers: int, ckpt_path: Any = None) -> None:
        """Train; six batches of the long one for each of two ranks, three of the short one."""
        loaders = {
            "long": DataLoader(Numbers(), 2, sampler=self.sampler, num_workers=num_workers),
            "short": DataLoader(range(10), 2, sampler=self.short, num_workers=num_workers),  # type: ignore[arg-type]
        }
        self.trainer.fit(self, CombinedLoader(loaders, mode), ckpt_path=ckpt_path)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dies_in", [0, 1, 2, 99])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_several_loaders_are_dealt_anew(mode: str, dies_in: int, accumulate: int, num_workers: int) -> None:
    """Each has all its samples drawn as its mode wants it: the longest once, a shorter one once or again and again."""
    several = Several(dies_in, accumulate_grad_batches=accumulate)
    several.fit_both(mode, num_workers)
    long = [number for batch in several.seen for number in batch]
    short = [number for batch in several.seen_short if batch is not None for number in batch]
    assert mode == "max_size_cycle" or len(short) - len(set(short)) <= 1, "a lone sample is in its batch twice"
    num_steps = dies_in * accumulate
    if mode == "min_size":
        assert len(set(short)) == len(set(range(10)) - others_of(10, num_steps))
        assert len(long) == len(set(long))
    else:
        assert sorted(long) == sorted(set(range(24)) - others_of(24, num_steps))
        missing = set(range(10)) - others_of(10, num_steps) - set(short)
        assert not missing
    if mode == "max_size":
        assert several.seen_short[-1] is None
    if mode == "max_size_cycle":
        assert None not in several.seen_short
    assert several.last == [False] * (len(several.seen) - 1) + [True]
    assert several.trainer.num_training_batches == len(several.seen)


def others_of(length: int, num_batches: int) -> set[int]:
    """Return what the other rank has contributed of so many numbers in its first batches."""
    return set(range(1, length, 2)[: 2 * num_batches])


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_several_loaders_are_resumed(tmp_path: Any, mode: str) -> None:
    """Each goes on where it was; one that had come to its end starts again if the mode says so."""
    whole = Several(99, num_members=1)
    whole.fit_both(mode, 0)
    for num_done in (3, 8):
        path = tmp_path / f"{num_done}.ckpt"
        Several(99, num_members=1, saves=("on_train_batch_end", num_done), path=path).fit_both(mode, 0)
        if path.exists():
            resumed = Several(99, num_members=1)
            resumed.fit_both(mode, 0, path)
            assert resumed.seen == whole.seen[num_done:]
            if mode != "max_size_cycle" or num_done < 5:
                assert resumed.seen_short == whole.seen_short[num_done:]
            else:  # it begins its second time anew
                assert resumed.seen_short == whole.seen_short[: len(resumed.seen)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("dies_in", "accumulate"), [(0, 1), (2, 1), (1, 2), (99, 1)])
def test_a_step_keeps_its_samples(dies_in: int, accumulate: int, num_workers: int) -> None:
    """Two ranks with batches of two, then one that takes twice as many batches for a step, from the next step on."""
    half = Half(dies_in, max_epochs=2)
    half.data._keeps_global_batch = True
    half.data._num_accumulated = 2 * accumulate  # as if the trainer had two devices
    loop = half.trainer.fit_loop.epoch_loop
    loop._accumulated_batches_reached = half.data._is_step_full  # type: ignore[method-assign]
    half.fit(num_workers)
    drawn = [number for batch in half.seen for number in batch]
    of_first = len(drawn) - (24 if dies_in < 99 else 12)
    assert sorted(drawn[:of_first]) == sorted(set(range(24)) - others(min(dies_in * accumulate, 6)))
    samples = collections.Counter[int]()
    for step, batch in zip(half.steps, half.seen, strict=True):
        samples[step] += len(batch) * (2 if step < dies_in else 1)
    num_steps = len(samples)
    of_epoch = [samples[step] for step in range(num_steps)]
    whole = 4 * accumulate
    assert set(of_epoch) <= {whole, whole // 2, *range(1, whole)}
    assert of_epoch.count(whole) >= num_steps - 3, "but the one in which the other died, and the last of each epoch"
    assert samples[dies_in] == whole // 2 or dies_in == 99


@pytest.mark.parametrize(
    ("options", "what"),
    [({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "a GradientAccumulationScheduler"), ({}, "manual")],
)
def test_who_steps_on_its_own_has_no_global_batch(options: dict[str, Any], what: str) -> None:
    """The fit is refused, with the reason."""
    half = Half(99, **options)
    half.automatic_optimization = "callbacks" in options
    half.trainer.strategy.connect(half)
    with pytest.raises(ValueError, match=what):
        lightning_data.EpochData(half.trainer, keeps_global_batch=True)


class Weighed(Half):
    """One of several ranks that deal 23 numbers; its gradient is the mean of what it draws, times a weight."""

    def __init__(self, rank: int, num_members: int, length: int, dies_in: int = 99, **options: Any) -> None:
        super().__init__(dies_in, num_members, **options)
        self.sampler = ElasticDistributedSampler(range(length), num_members, rank, shuffle=False)  # type: ignore[arg-type]
        redeal = self.sampler.redeal
        self.sampler.redeal = lambda: redeal(self.members)  # type: ignore[method-assign, assignment]
        self.data._is_exact = True
        self.means: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Weigh as the strategy does."""
        numbers = super().training_step(batch, batch_idx) * 0 + (self.net.weight * batch).mean()
        return numbers * self.data.weight

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Take what would be reduced with the others' and was, of a rank that is alone."""
        self.means.append(float(self.net.weight.grad))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize(("length", "num_members"), [(24, 2), (23, 2), (22, 4), (9, 4), (10, 4), (17, 3)])
def test_without_padding_gradients_are_means_over_samples(length: int, num_members: int, batch_size: int) -> None:
    """Each sample is in one batch, and an average over the ranks is the mean over all samples of the step."""
    ranks = [Weighed(rank, num_members, length) for rank in range(num_members)]
    for rank in ranks:
        loader = DataLoader(torch.arange(length).float()[:, None], batch_size, sampler=rank.sampler)  # type: ignore[arg-type]
        rank.trainer.fit(rank, loader)
    assert len({len(rank.seen) for rank in ranks}) == 1
    seen: list[int] = []
    for step in range(len(ranks[0].seen)):
        true = sorted(
            {number for rank in ranks for number in rank.seen[step] if number not in seen}
        )  # what a rank without any has instead was there before
        seen += true
        mean = sum(rank.means[step] for rank in ranks) / num_members
        assert mean == pytest.approx(sum(true) / len(true))
    assert sorted(seen) == list(range(length))


def test_the_mean_is_over_the_samples_of_those_that_finish_the_step() -> None:
    """The other rank dies with one sample of the last step, in which this one has two."""
    rank = Weighed(0, 2, 7, dies_in=1)
    loader = DataLoader(torch.arange(7).float()[:, None], 2, sampler=rank.sampler)  # type: ignore[arg-type]
    rank.trainer.fit(rank, loader)
    assert rank.seen[:2] == [[0, 2], [4, 6]]
    assert rank.means[1] == pytest.approx(5.0), "its own mean: it is alone"
    assert sorted(number for batch in rank.seen for number in batch) == [0, 2, 4, 5, 5, 6]


class Stream(IterableDataset[int]):
    """Its shard of the numbers from 0 on."""

    shard = (0, 1)

    def reshard(self, rank: int, world_size: int) -> None:
        """Yield another shard from the next iterator on."""
        self.shard = rank, world_size

    def __iter__(self) -> Iterator[int]:
        rank, world_size = self.shard
        return iter(range(rank, 12, world_size))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_that_can_is_told_its_shard(num_workers: int) -> None:
    """Also if workers that live on hold an old copy of it; one that can't is left alone."""
    loader = DataLoader(Stream(), 2, num_workers=num_workers, persistent_workers=num_workers > 0)
    for rank, world_size in ((0, 1), (1, 3), (1, 2)):
        lightning_deal.tell_shard(loader, rank, world_size)
        drawn = [number for batch in loader for number in batch.tolist()]
        assert drawn == list(range(rank, 12, world_size))
    lightning_deal.tell_shard(DataLoader(Numbers(), 2), 1, 3)
    lightning_deal.tell_shard([1, 2], 1, 3)


class Backwards(BatchSampler):
    """A batch sampler of a user's own."""


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda _: DataLoader(Numbers(), 24), "what the sampler SequentialSampler yields"),
        (lambda _: DataLoader(torch.utils.data.ChainDataset([Stream()])), "an IterableDataset"),
        (
            lambda own: DataLoader(Numbers(), batch_sampler=Backwards(own, 12, drop_last=False)),
            "the batches of Backwards",
        ),
    ],
)
def test_what_cannot_be_dealt_anew_is_said(make: Any, what: str) -> None:
    """Once, by what it is; and the data are what they are without us."""
    lightning_data._warnings.clear()
    half = Half(99)
    half.training_step = lambda *_: None  # type: ignore[method-assign, assignment]
    with pytest.warns(UserWarning, match=f"{what} can't be dealt anew before the next epoch"):
        half.trainer.fit(half, make(half.sampler))
