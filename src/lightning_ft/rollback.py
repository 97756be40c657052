"""Going back, in process, to the state that `DeltaCheckpoint` saved last: all ranks, between the same two batches.

Whoever can't go on with a step (a `FaultToleranceError` in `training_step`) contributes nothing to it and asks, with
the commit's word, to go back. So all learn of it with the same commit; nobody's weights change in that step, and
nothing of it is saved. Each rank holds its share of the state's tensors, and all of the rest. They hand the shares to
each other; the shares of ranks that are gone are in the storage, if that save was committed.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_ft.checkpoint.records import Key
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.snapshots import num_share_bytes, put_share
from lightning_ft.checkpoint.tree import unflatten
from lightning_ft.checkpoint.watched import WatchedStore
from lightning_ft.comm import backend
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.transfer import State
from lightning_ft.ddp import FaultTolerantDDP, StepCommit
from lightning_ft.delta_checkpoint import DeltaCheckpoint
from lightning_ft.delta_memory import Snapshot
from lightning_ft.elastic import parameters_and_rest, set_random_state
from lightning_ft.errors import FINAL, CheckpointError, FaultToleranceError, MembershipChangedError
from lightning_ft.lightning_progress import WaitingBar

_PIECE_BYTES = 64 << 20


class Rollback:
    """Takes a fit back to the last snapshot when it is asked to.

    Args:
        trainer: Of the fit; its loop is changed.
        saves: Takes the snapshots.
        group: Of all members.
        give: Returns what a rank needs to go on at this batch.
        take: Has the fit go on there.
    """

    def __init__(
        self,
        trainer: Trainer,
        saves: DeltaCheckpoint,
        group: FaultTolerantProcessGroup,
        give: Callable[[], State],
        take: Callable[[State], None],
    ) -> None:
        self._trainer = trainer
        self._saves = saves
        self._group = group
        self._give = give
        self._take = take
        self._error: FaultToleranceError | None = None
        self._count: tuple[Key | None, int] = None, 0
        self._random: dict[str, Any] | None = None
        loop = trainer.fit_loop.epoch_loop
        end_batch = loop.on_advance_end

        def go_back_or_end_batch(data_fetcher: Any) -> None:
            if saves.is_rolling_back:
                self._go_back()
            else:
                end_batch(data_fetcher)

        loop.on_advance_end = go_back_or_end_batch  # type: ignore[method-assign]

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        group: FaultTolerantProcessGroup,
        give: Callable[[], State],
        take: Callable[[State], None],
    ) -> Rollback | None:
        """Return one if the fit can go back."""
        known: Any = trainer  # Lightning sets what follows from outside
        saves = next((part for part in known.callbacks if isinstance(part, DeltaCheckpoint)), None)
        if saves is None or not saves.max_rollbacks or not known.lightning_module.automatic_optimization:
            return None
        return cls(trainer, saves, group, give, take)

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Have a `training_step` that can't go on ask for it, in DDP's forward."""
        attributes = vars(self._trainer.lightning_module)
        step, own = self._trainer.lightning_module.training_step, attributes.get("training_step")

        def caught(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except FaultToleranceError as error:
                if isinstance(error, FINAL):
                    raise
                return self._ask(error)

        attributes["training_step"] = caught
        try:
            yield
        finally:
            del attributes["training_step"]
            if own is not None:
                attributes["training_step"] = own

    def _ask(self, error: FaultToleranceError) -> torch.Tensor:
        model = self._trainer.strategy.model
        assert isinstance(model, FaultTolerantDDP)
        self._error = error
        model.is_rollback_requested = True
        backend.report(
            "rollback_requested", step=self._trainer.global_step, exception=f"{type(error).__name__}: {error}"
        )
        parameters = [part for part in self._trainer.lightning_module.parameters() if part.requires_grad]
        return torch.stack([part.sum() for part in parameters]).sum() * 0.0  # each has a gradient, as in every step

    def on_commit(self, commit: StepCommit) -> None:
        """Learn whether anybody asks. If so, what has been reduced is no step: the optimizers find no gradients."""
        if commit.rollback_requests:
            self._saves.is_rolling_back = True
            for parameter in self._trainer.lightning_module.parameters():
                parameter.grad = None

    def before_batch(self) -> None:
        """Complete a new snapshot by what is each rank's own: what followed the step that was saved is over now.

        Called when the next batch can be drawn; a rank that went back has drawn random numbers to come so far.
        """
        random, self._random = self._random, None
        if random is not None:
            set_random_state(random)
        snapshot = self._saves.kept.incomplete
        if snapshot is not None:
            own = self._give().own
            if own[-1]["data"] is None:  # where in an epoch it was can't be told
                self._saves.kept.forget(snapshot)
                return
            buffer = io.BytesIO()
            torch.save(own, buffer)
            snapshot.own = buffer.getvalue()

    # -- going back ---------------------------------------------------------------------------------------------------

    def _go_back(self) -> None:
        started_s, step = time.monotonic(), self._trainer.global_step
        self._saves.is_rolling_back = False
        error, self._error = self._error, None
        error = error or FaultToleranceError("another rank has asked all to go back to an earlier state")
        try:
            key, state, source = self._recall()
        except FaultToleranceError as cause:
            raise error from cause  # all ranks alike
        count = self._count[1]  # of all: who has joined meanwhile does not know it
        if count >= self._saves.max_rollbacks:
            raise error from FaultToleranceError(f"going back to step {key.step} has not helped, {count} times")
        self._count = key, count + 1
        self._take(state)
        self._random = state.own[-1]["random"]
        if self._trainer.is_global_zero:
            backend.report(
                "checkpoint_restored",
                step=key.step,
                source=source,
                steps_lost=max(0, step - 1 - key.step),
                duration_s=round(time.monotonic() - started_s, 6),
                path=self._saves.url,
            )

    def _recall(self) -> tuple[Key, State, str]:
        """Put the last snapshot that can be had together. Raises the same on all ranks."""
        refused: dict[Key, str] = {}
        while True:
            with contextlib.suppress(MembershipChangedError):  # the shares are counted again
                found = self._recall_from(self._group, refused)
                if found is not None:
                    return found

    def _recall_from(self, group: FaultTolerantProcessGroup, refused: dict[Key, str]) -> tuple[Key, State, str] | None:
        """Return None if the newest that was not refused can't be had: then it is refused now."""
        mine = self._saves.kept.whole()
        held = {key: (kept.num_ranks, None if kept.share is None else kept.share.rank) for key, kept in mine.items()}
        answers = _gathered(group, (held, self._count))
        members = group.members
        keys = {key for told, _ in answers for key in told} - refused.keys()
        if not keys:
            what = "; ".join(f"step {key.step}: {reason}" for key, reason in refused.items())
            raise FaultToleranceError(f"going back failed: {what or 'nothing was saved yet'}")
        key = max(keys)
        counts = [count for _, (of, count) in answers if of == key]
        holders = {rank: told[key] for rank, (told, _) in enumerate(answers) if key in told}
        num_ranks = holders[min(holders)][0]
        holder_of = {share: rank for rank, (_, share) in holders.items() if share is not None}
        kept = mine.get(key)
        if len(holder_of) == num_ranks:
            source = "memory"
            state, own = self._from_memory(members, kept, holder_of)
        else:
            source = "storage"
            state, own, reason = self._from_storage(key, kept, min(holders), is_whole=len(holders) == num_ranks)
            reasons = [told for told in _gathered(group, reason) if told is not None]
            if reasons:  # of whomever: all go back to the same
                refused[key] = reasons[0]
                return None
        self._stay(members)
        self._count = key, max(counts, default=0)
        self._saves.kept.forget_after(key)
        parameters, _ = parameters_and_rest(self._trainer.lightning_module, state["state_dict"])
        replicated = {"state_dict": parameters, "optimizer_states": state["optimizer_states"]}
        own = (kept.own if kept is not None else None) or own
        return key, State(replicated, torch.load(io.BytesIO(own), weights_only=False)), source

    def _from_storage(
        self, key: Key, kept: Snapshot | None, first: int, *, is_whole: bool
    ) -> tuple[Any, bytes, str | None]:
        """Return a state, what its first rank needs besides, and why there is no state; None: there is."""
        self._saves.finish(self._trainer, is_whole=is_whole)
        own = self._trainer.strategy.broadcast(None if kept is None else kept.own, first)
        if own is None:
            raise MembershipChangedError("the rank that held what all need is gone")
        try:
            with WaitingBar("Going back to an earlier state") as bar:
                store = WatchedStore(self._saves.open_store(), bar.done)
                return restore(store, key=key, weights_only=False).state, own, None
        except CheckpointError as error:
            return None, own, str(error)

    def _from_memory(
        self, members: tuple[str, ...], kept: Snapshot | None, holder_of: dict[int, int]
    ) -> tuple[Any, bytes]:
        """Hand the shares around. Collectives with a root: if that goes, all raise.

        Returns: The state, and what its first rank needs besides.
        """
        share = None if kept is None else kept.share
        mine = None if kept is None or share is None else (share.flat.streams, share.rest(), kept.own)
        told: Any = self._trainer.strategy.broadcast(mine, min(holder_of.values()))
        if told is None:
            raise MembershipChangedError("the rank that held what all need is gone")
        streams, rest, own = told
        contents = [torch.empty(stream.num_bytes, dtype=torch.uint8) for stream in streams]
        for index, stored in rest.items():
            contents[index] = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
        num_ranks = len(holder_of)
        for number in range(num_ranks):
            self._stay(members)
            is_mine = share is not None and share.rank == number
            data = (
                share.data
                if share is not None and is_mine
                else torch.empty(num_share_bytes(streams, number, num_ranks), dtype=torch.uint8)
            )
            for piece in data.split(_PIECE_BYTES):
                backend.progress("going back to an earlier state")
                dist.broadcast(piece, holder_of[number])
            put_share(streams, number, num_ranks, data, contents)
        return unflatten(streams, contents, "the snapshot", weights_only=False), own

    def _stay(self, members: tuple[str, ...]) -> None:
        """Make sure that ranks still mean the same members."""
        if self._group.members != members:
            raise MembershipChangedError("the ranks have changed while the fit went back")


def _gathered(group: FaultTolerantProcessGroup, told: Any) -> list[Any]:
    """Return what each rank tells."""
    return [pickle.loads(entry) for entry in group.gather_bytes(pickle.dumps(told))]  # noqa: S301 - the ranks trust each other
