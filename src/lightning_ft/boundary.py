"""What happens between two batches of a fit: others join, this process joins, or all go back to the last save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from lightning.pytorch import Trainer

from lightning_ft import lightning_data, promotion, rejoin
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.replay import Trained
from lightning_ft.comm.transfer import State
from lightning_ft.config import EXACT, KEEP_GLOBAL_BATCH, Settings
from lightning_ft.coordinator.fingerprint import Fact, Fingerprint
from lightning_ft.ddp import StepCommit
from lightning_ft.facts import facts_of_module, facts_of_optimizer, facts_of_script, facts_of_verification
from lightning_ft.resize import Resize

if TYPE_CHECKING:
    from lightning_ft.rollback import Rollback


class Boundary:
    """Keeps a fit's data, members and state in step between its batches.

    Args:
        trainer: Of the fit.
        group: Of all members; None: nobody joins, nobody is lost.
        settings: Of the job.
        on_joined: Called when this process has joined the others, before it takes part in a batch.
    """

    num_fits: ClassVar[int] = 0
    """How many fits this process has begun, with whichever Trainer."""

    def __init__(
        self,
        trainer: Trainer,
        group: FaultTolerantProcessGroup | None,
        settings: Settings,
        on_joined: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._on_joined = on_joined
        self._data = lightning_data.EpochData(
            trainer,
            keeps_global_batch=settings.on_resize == KEEP_GLOBAL_BATCH,
            is_exact=settings.uneven == EXACT,
        )
        self._resize = Resize(trainer, settings.on_resize)
        self._rollback: Rollback | None = None
        self._fit_described = 0
        self._num_sanity_val_steps: float = 0
        # Whoever has no DeltaCheckpoint needs no Blosc2, which takes half a second to load.
        if group is not None and "lightning_ft.delta_checkpoint" in sys.modules:
            from lightning_ft.rollback import Rollback

            self._rollback = Rollback.of(trainer, group, self._give, self._go_back)

    def prepare_to_join(self) -> None:
        """Where this process comes to a job that runs, have it not do again what others have done.

        Raises:
            LaunchError: This fit can't be joined in its middle.
        """
        if self._group is not None and self._group.ring.is_outside:
            rejoin.check_able(self._trainer)
            self._num_sanity_val_steps = self._trainer.num_sanity_val_steps
            self._trainer.num_sanity_val_steps = 0

    @property
    def weight(self) -> float:
        """What the gradients of this rank's batch count."""
        return self._data.weight

    def before_batch(self) -> None:
        """Let those join that wait; in a process that was started while the job ran, join before the first batch."""
        if self._group is not None:
            self._meet(self._group)
        self._data.before_batch()
        if self._group is not None:
            self._resize.tell(self._group.members)
        if self._rollback is not None:
            self._rollback.before_batch()

    def after_batch(self) -> None:
        """Count what the batch consumed."""
        self._data.after_batch()

    def on_commit(self, commit: StepCommit) -> None:
        """Learn who took part in a step, and whether all go back."""
        if self._rollback is not None:
            self._rollback.on_commit(commit)
        self._data.on_commit(commit.contributors)

    def catching(self) -> AbstractContextManager[None]:
        """Have a `training_step` that can't go on ask all to go back, if that is possible."""
        return nullcontext() if self._rollback is None else self._rollback.catching()

    def _meet(self, group: FaultTolerantProcessGroup) -> None:
        ring = group.ring
        if self._fit_described != self.num_fits:
            self._fit_described = self.num_fits
            ring.describe(Fingerprint([*self._facts(), *facts_of_verification(ring.settings)]))
        if not ring.is_outside:
            can_admit = ring.is_admission_due and self._data.is_at_boundary
            ring.boundary(self._give, self._take, self._trained, can_admit=can_admit)
            return
        if not ring.join(self._give, self._take, self._trained):
            raise SystemExit(0)  # all the others have ended
        self._trainer.num_sanity_val_steps = self._num_sanity_val_steps
        self._on_joined()
        self._data.joined()

    def _facts(self) -> Iterator[Fact]:
        yield "the fit", "its number in the script", str(self.num_fits)
        yield from facts_of_module(self._trainer.lightning_module)
        for index, optimizer in enumerate(self._trainer.optimizers):
            yield from facts_of_optimizer(str(index), getattr(optimizer, "optimizer", optimizer))
        yield from facts_of_script()

    def _trained(self) -> Trained:
        return rejoin.trained(self._trainer)

    def _give(self) -> State:
        state = rejoin.dump(self._trainer, self._data.state())
        return State(state.replicated, (self.num_fits, self._resize.told, state.own))

    def _take(self, state: State) -> None:
        num_fits, _, _ = state.own
        assert self._group is not None
        if num_fits != self.num_fits:
            raise ValueError(f"the job is in its fit number {num_fits}, this process in number {self.num_fits}")
        with self._group.ring.outside():
            state = self._begin_epoch(state)
        self._restore(state)
        promotion.forget(self._trainer)

    def _go_back(self, state: State) -> None:
        """As those who join, but all at once, and with the members and the rates that there are now."""
        self._restore(self._begin_epoch(state))
        self._data.joined()

    def _begin_epoch(self, state: State) -> State:
        _, _, own = state.own
        begun = rejoin.begin_epoch(self._trainer, State(state.replicated, own))
        return State(begun.replicated, state.own)

    def _restore(self, state: State) -> None:
        _, self._resize.told, own = state.own  # learning rates are those of the members that there were
        self._data.load(rejoin.restore(self._trainer, State(state.replicated, own)))
