"""What is left of the epoch that a fit is in: dealt anew when its ranks change, and in its checkpoints.

Read in lightning 2.6.6 (tests/unit/test_lightning_data.py fails clearly if it changes):
`trainer.connectors.data_connector._parse_num_batches`,
`_FitLoop._combined_loader`, `_data_fetcher`, `max_batches`, `epoch_progress`, `setup_data` and `on_advance_end`,
`_TrainingEpochLoop.batch_progress`, `reset`, `_accumulated_batches_reached` and `_should_accumulate`,
`CombinedLoader.limits`, `_DataFetcher.fetched`, `length` and `done`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_warn

from lightning_ft import lightning_internals
from lightning_ft.comm.backend import progress
from lightning_ft.data.cursor import Cursor, Member
from lightning_ft.data.global_batch import StepShape, step_shape
from lightning_ft.lightning_deal import Deal, find_deal, why_not
from lightning_ft.lightning_internals import run_before

_warnings = WarningCache()


class EpochData:
    """What is left of the epoch that a fit is in; in its checkpoints, too.

    It counts what each commit consumed. Who missed one has left what it had drawn for it to the others. When the ranks
    have changed, the rest is dealt anew: the epoch then has other lengths, and its iterator is made again, with all
    that it had drawn ahead thrown away. A fit that is resumed goes on with what was left when the checkpoint was made.

    Args:
        trainer: Of the fit.
        keeps_global_batch: Whether a step has as many samples as it would have if all ranks that the fit was started
            with were there: batches are accumulated, and smaller.
        is_exact: Whether no sample is there twice to make shares equal.

    Attributes:
        weight: Of the present batch's loss, in a step in which some ranks have more samples than others: its gradients
            are to be a mean over samples.

    Raises:
        ValueError: The global batch can't be kept: a callback or the module decides when to step.
    """

    def __init__(self, trainer: Trainer, *, keeps_global_batch: bool = False, is_exact: bool = False) -> None:
        self._trainer = trainer
        self._is_exact = is_exact
        self._num_of_each: Mapping[Member, int] | None = None  # samples of the present batch, if they differ
        self.weight = 1.0
        self._num_accumulated = trainer.accumulate_grad_batches  # as the user wants it for all ranks
        self._first_of_steps = 0  # the batch of the epoch from which on windows of accumulation are counted
        self._keeps_global_batch = keeps_global_batch
        self._told_shape: StepShape | None = None
        self._num_open = 0  # batches before the present one that no commit has counted
        self._is_counted = False  # the present one
        self._is_stale = False
        self._has_joined = False
        self._has_gradients_left = False
        self._epoch = (0, 0)
        self._num_skipped = 0  # batches of this epoch that were trained on before this fit was resumed
        self._saved: list[dict[str, Any]] | None = None  # in the checkpoint that this fit is resumed from
        self._is_restored = False  # the present epoch, from there
        self._is_over = False  # the epoch that the checkpoint is of
        self._is_measured = self._are_lengths_old = False  # lengths are not those of a whole epoch; of an epoch past
        self._before_step: tuple[int, list[Cursor]] = (-1, [])  # where the last commit found the trainer and the data
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        if keeps_global_batch:
            _check_steps_are_ours(trainer)
            loop._accumulated_batches_reached = self._is_step_full  # type: ignore[method-assign]
        accumulates = loop._should_accumulate
        # What follows a step follows it also if it was that of the last batch, which is not the last any more.
        loop._should_accumulate = lambda: not self._has_gradients_left and accumulates()  # type: ignore[method-assign]
        lightning_internals.keep_in_checkpoints(fit, self.state, self._take_saved)
        lightning_internals.around_data_setup(fit, self._forget_lengths, self._restore, self._measure_restored)
        fit.on_advance_end = run_before(self._end_epoch, fit.on_advance_end)  # type: ignore[method-assign]
        loop.reset = self._reset_as_restored(loop.reset)  # type: ignore[method-assign]

    @property
    def deal(self) -> Deal | None:
        """How the batches are drawn; None if they can't be dealt anew before the next epoch.

        That takes loaders with a sampler that Lightning has put in, and batches that are made of what it yields one
        after the other.
        """
        return find_deal(self._trainer.fit_loop, is_exact=self._is_exact)

    @property
    def is_at_boundary(self) -> bool:
        """Whether ranks may join: all that was drawn is counted, and there is a batch left for each that might."""
        deal = self.deal
        if deal is None or self._num_open:
            return False
        return deal.is_enough_for(max(dist.get_world_size(), self._trainer.num_devices * self._trainer.num_nodes))

    def before_batch(self) -> None:
        """Draw from the present deal. Called on all ranks at the same batch."""
        self._is_counted = False
        deal = self.deal
        if deal is None:
            _warnings.warn(
                f"When ranks come or go, {why_not(self._trainer.fit_loop)} can't be dealt anew before the next epoch: "
                "what a dead rank leaves is not trained on, and a rank can't come back. The settings uneven and "
                "on_resize change no batches."
            )
            return
        is_reshaped = False
        epoch = (id(deal.loaders[0].sampler), deal.loaders[0].sampler.epoch)
        if epoch != self._epoch:
            # One that a checkpoint of another strategy has begun is dealt whole, and ends so many batches earlier.
            self._epoch, self._num_open, self._first_of_steps = epoch, 0, 0
            is_reshaped = self._shape_steps(deal)
            self._num_skipped = 0 if deal.has_begun or self._is_restored else self._num_done
        if self._num_open == 0:
            number = deal.number
            is_stale = deal.redeal()
            if deal.number != number or self._has_joined or is_reshaped:
                self._shape_steps(deal)
                self._measure(deal, self._num_done)
                self._is_stale = True
                self._trainer.fit_loop.max_batches = max(self._trainer.fit_loop.max_batches, self._num_done + 1)
            # Workers have begun to draw, perhaps from the deal of another epoch; without them the iterator has not
            # asked the sampler yet, so that it is as new as the deal.
            self._is_stale |= is_stale and any(loader.has_workers for loader in deal.loaders)
        self._has_joined = False
        if self._is_stale:
            self._draw_anew()
        self._weigh(deal)
        if self._has_gradients_left:
            self._has_gradients_left = False
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad()

    def joined(self) -> None:
        """This process has got the state of the others: what it had drawn is none of its share."""
        self._has_joined = True

    def after_batch(self) -> None:
        """The batch is over, with or without a commit."""
        self._num_open += not self._is_counted

    def on_commit(self, contributors: Iterable[str]) -> None:
        """A step is final: count what it consumed. With several in a batch, the first."""
        deal = self.deal
        if deal is None or self._is_counted:
            return
        self._weigh_survivors(frozenset(contributors))
        self._before_step = (self._trainer.global_step, [loader.sampler.cursor for loader in deal.loaders])
        is_stale = deal.record(self._num_open + 1, contributors)
        self._num_open, self._is_counted = 0, True
        if is_stale:  # now, not with the next batch: this one may have been the last
            self._shape_steps(deal)
            self._measure(deal, self._num_done)
            self._is_stale = True

    # -- in checkpoints and for joiners -------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]] | None:
        """Return what is left of the epoch, for each loader; None if that can't be told.

        A step that is committed, but has not changed the weights yet, is not in a checkpoint that is made just then:
        its samples are left, too.
        """
        deal = self.deal
        if deal is None:
            return None
        states = [loader.sampler.state_dict() for loader in deal.loaders]
        step, cursors = self._before_step
        if self._is_counted and step == self._trainer.global_step:
            for state, cursor in zip(states, cursors, strict=True):
                state["cursor"] = cursor.state()
        return states

    def load(self, states: list[dict[str, Any]] | None) -> None:
        """Go on where `state` was called; what is left is dealt to the present members.

        Raises:
            ValueError: The loaders are others, or can't be dealt anew. Nothing changed.
        """
        deal, self._saved = self.deal, None
        if deal is None or states is None:
            raise ValueError("the data can't be dealt anew in the middle of an epoch")
        if len(deal.loaders) != len(states):
            raise ValueError(f"expected {len(deal.loaders)} data loaders, as here, got {len(states)}")
        samplers = [loader.sampler for loader in deal.loaders]
        before = [sampler.state_dict() for sampler in samplers]
        try:
            for sampler, state in zip(samplers, states, strict=True):
                sampler.load_state_dict(state)
        except ValueError:
            for sampler, state in zip(samplers, before, strict=True):
                sampler.load_state_dict(state)
            raise

    def _take_saved(self, saved: list[dict[str, Any]] | None) -> None:
        self._saved = saved

    def _restore(self) -> None:
        """Load what the checkpoint has; called when the loaders are there and nothing was drawn."""
        deal, saved = self.deal, self._saved
        if deal is None or not saved:
            return
        if saved[0].get("epoch") != self._loop_epoch:  # it was saved after that epoch's last batch
            self._saved = None
            return
        seeds = [loader.sampler.seed for loader in deal.loaders]
        try:
            for loader, state in zip(deal.loaders, saved, strict=False):
                loader.sampler.seed = state.get("seed", loader.sampler.seed)  # the order is that of the checkpoint
            self.load(saved)
            self._is_restored = True
        except ValueError as error:
            for loader, seed in zip(deal.loaders, seeds, strict=True):
                loader.sampler.seed = seed
            rank_zero_warn(
                f"The epoch can't go on with the samples that were left when the checkpoint was saved: {error} All of "
                "them are dealt, and the epoch ends as many batches earlier as were done."
            )

    def _measure_restored(self) -> None:
        fit, deal = self._trainer.fit_loop, self.deal
        if not self._is_restored or deal is None or fit._data_fetcher is None:
            return
        progressed: Any = fit.epoch_loop.batch_progress.current
        done = int(progressed.processed)  # a batch that was under way is done again
        self._shape_steps(deal)
        self._measure(deal, done)
        fit._data_fetcher.length = int(fit.max_batches)  # Lightning adds what is done to what it has fetched
        self._are_lengths_old = self._is_over = fit.max_batches <= done  # what follows is another epoch

    def _forget_lengths(self) -> bool:
        """Have Lightning ask for the loader again, with the lengths of a whole epoch. Returns: Whether it must."""
        deal, epoch = self.deal, self._loop_epoch
        if deal is None or deal.loaders[0].sampler.epoch == epoch:
            return False
        self._is_restored = False
        for loader in deal.loaders:  # Lightning does it later, but asks for their lengths now
            loader.sampler.set_epoch(epoch)
        if self._are_lengths_old:
            self._are_lengths_old = False
            self._trainer.fit_loop._combined_loader = None
            return True
        return False

    def _end_epoch(self) -> None:
        self._are_lengths_old, self._is_measured, self._is_restored = self._is_measured, False, False

    def _reset_as_restored(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Have the epoch's loop begin as what was restored wants it."""

        def reset_epoch() -> None:
            fit = self._trainer.fit_loop
            lengths = fit.max_batches
            if self._is_over:  # Lightning compares what is done with the length, and that is another epoch's by now
                fit.max_batches = self._num_done
            with warnings.catch_warnings():
                if self._is_restored:  # it takes a loader without a state of its own for one that can't be resumed
                    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
                reset()
            fit.max_batches, self._is_over = lengths, False

        return reset_epoch

    # -- steps --------------------------------------------------------------------------------------------------------

    def _is_step_full(self) -> bool:
        return (self._num_done - self._first_of_steps) % self._trainer.accumulate_grad_batches == 0

    def _shape_steps(self, deal: Deal) -> bool:
        """Have the next steps be made of what makes up the global batch; called between two steps, on all ranks.

        Returns: Whether batches have another size now.
        """
        if not self._keeps_global_batch:
            return False
        trainer, num_members = self._trainer, len(deal.loaders[0].sampler.members)
        self._first_of_steps = self._num_done
        sizes = [loader.batches.full_size for loader in deal.loaders]
        wanted = [trainer.num_devices * trainer.num_nodes * self._num_accumulated * size for size in sizes]
        shape = step_shape(wanted[0], num_members, sizes[0])
        trainer.accumulate_grad_batches = shape.num_batches
        before = [loader.batches.batch_size for loader in deal.loaders]
        for loader, size in zip(deal.loaders, wanted, strict=True):
            loader.batches.batch_size = max(1, round(size / (num_members * shape.num_batches)))
        if num_members * shape.num_samples != wanted[0] and shape != self._told_shape:
            rank_zero_warn(
                f"A step has {num_members * shape.num_samples} samples instead of {wanted[0]}: "
                f"{num_members} ranks can't have equally large batches of together as many."
            )
        self._told_shape = shape
        return before != [loader.batches.batch_size for loader in deal.loaders]

    def _weigh(self, deal: Deal) -> None:
        self._num_of_each, self.weight = deal.loaders[0].batches.num_of_each(self._num_open), 1.0
        if self._num_of_each is not None:
            counts = list(self._num_of_each.values())
            self.weight = counts[deal.loaders[0].sampler.rank] * len(counts) / sum(counts)

    def _weigh_survivors(self, contributors: frozenset[Member]) -> None:
        """Make an average that some members are missing from the mean over the others' samples.

        Of an accumulated step, that is right for the last batch alone.
        """
        if self._num_of_each is None or len(contributors) == len(self._num_of_each):
            return
        counts = self._num_of_each
        num_samples = sum(counts[member] for member in contributors)
        factor = len(contributors) * sum(counts.values()) / (len(counts) * max(1, num_samples))
        for parameter in self._trainer.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    # -- lengths ------------------------------------------------------------------------------------------------------

    @property
    def _loop_epoch(self) -> int:
        progressed: Any = self._trainer.fit_loop.epoch_progress.current
        return int(progressed.processed)

    @property
    def _num_done(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _measure(self, deal: Deal, done: int) -> None:
        """Correct the lengths that Lightning has computed when the epoch began."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        total = done + max(0, deal.num_left - self._num_skipped)
        total = max(
            done, int(data_connector._parse_num_batches(RunningStage.TRAINING, total, trainer.limit_train_batches))
        )
        self._is_measured = True
        fit.max_batches = total
        assert fit._combined_loader is not None
        fit._combined_loader.limits = [total - done] * len(deal.loaders)
        batches = fit.epoch_loop.batch_progress
        # The step of what was the last batch is done in the middle of a window of accumulation.
        self._has_gradients_left |= batches.is_last_batch and total > done
        batches.is_last_batch = total == done
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(total * trainer.val_check_interval))

    def _draw_anew(self) -> None:
        fit = self._trainer.fit_loop
        fetcher = fit._data_fetcher
        assert fetcher is not None
        progress("drawing batches from a new deal")
        iter(fetcher)
        fetcher.fetched, fetcher.length = self._num_done, int(fit.max_batches)
        fetcher.done = fetcher.fetched >= fetcher.length
        self._is_stale = False


def _check_steps_are_ours(trainer: Trainer) -> None:
    known: Any = trainer  # Lightning sets what follows from outside
    other = next((part for part in known.callbacks if isinstance(part, GradientAccumulationScheduler)), None)
    if other is not None or not known.lightning_module.automatic_optimization:
        what = "a GradientAccumulationScheduler" if other is not None else "manual optimization"
        raise ValueError(
            f"on_resize='keep_global_batch' can't be had with {what}, which decides on its own when to step. Use "
            "'keep' or 'scale_lr'."
        )
