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

from lightning_ft.checkpoint.records import Key, Stream
from lightning_ft.checkpoint.restore import restore
from lightning_ft.checkpoint.snapshots import num_share_bytes, put_share
from lightning_ft.checkpoint.tree import unflatten
from lightning_ft.comm import backend
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.transfer import State
from lightning_ft.ddp import FaultTolerantDDP, StepCommit
from lightning_ft.delta_checkpoint import DeltaCheckpoint
from lightning_ft.elastic import parameters_and_rest, set_random_state
from lightning_ft.errors import (
    CheckpointError,
    EvictedError,
    FaultToleranceError,
    LaunchError,
    MembershipChangedError,
    ProtocolViolationError,
    QuorumLostError,
)

_FINAL = (QuorumLostError, EvictedError, ProtocolViolationError, LaunchError, CheckpointError)
"""After these a rank can't go on at all."""

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
                if isinstance(error, _FINAL):
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
        snapshot = self._saves.snapshot
        if snapshot is not None and snapshot.own is None:
            own = self._give().own
            if own[-1]["data"] is None:  # where in an epoch it was can't be told
                self._saves.snapshot = None
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
        """Put the last snapshot together. Raises the same on all ranks, but for what only one rank can't read."""
        while True:
            with contextlib.suppress(MembershipChangedError):  # the shares are counted again
                return self._recall_from(self._group)

    def _recall_from(self, group: FaultTolerantProcessGroup) -> tuple[Key, State, str]:
        snapshot = self._saves.snapshot
        is_whole = snapshot is not None and snapshot.own is not None
        held = (snapshot.key, snapshot.share.rank, snapshot.share.num_ranks) if snapshot and is_whole else None
        told = pickle.dumps((held, self._count))
        answers = [pickle.loads(entry) for entry in group.gather_bytes(told)]  # noqa: S301 - the ranks trust each other
        entries = [entry for entry, _ in answers]
        known = [entry for entry in entries if entry is not None]
        if not known:
            raise FaultToleranceError("going back failed: nothing was saved yet")
        key, _, num_ranks = max(known, key=lambda entry: entry[0])
        self._count = key, max((count for _, (of, count) in answers if of == key), default=0)
        holder_of = {entry[1]: rank for rank, entry in enumerate(entries) if entry is not None and entry[0] == key}
        first = min(holder_of.values())
        is_mine = snapshot is not None and is_whole and snapshot.key == key
        share = snapshot.share if snapshot is not None and is_mine else None
        own = snapshot.own if snapshot is not None and is_mine else None
        of_first: Any = self._trainer.strategy.broadcast(
            (share.flat.streams, share.rest(), own) if share else None, first
        )
        if of_first is None:
            raise MembershipChangedError("the rank that held what all need is gone")
        streams, rest, own_of_first = of_first
        source = "memory"
        if len(holder_of) == num_ranks:
            state = self._gather(streams, rest, holder_of, share.data if share is not None else None, num_ranks)
        else:
            source = "storage"
            state = restore(self._saves.open_store(), key=key, weights_only=False).state
        parameters, _ = parameters_and_rest(self._trainer.lightning_module, state["state_dict"])
        replicated = {"state_dict": parameters, "optimizer_states": state["optimizer_states"]}
        return key, State(replicated, torch.load(io.BytesIO(own or own_of_first), weights_only=False)), source

    def _gather(
        self,
        streams: tuple[Stream, ...],
        rest: dict[int, bytes],
        holder_of: dict[int, int],
        own: torch.Tensor | None,
        num_ranks: int,
    ) -> Any:
        """Hand the shares around. Collectives with a root: if that goes, all raise."""
        contents = [torch.empty(stream.num_bytes, dtype=torch.uint8) for stream in streams]
        for index, stored in rest.items():
            contents[index] = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
        for share in range(num_ranks):
            is_own = own is not None and holder_of[share] == self._trainer.global_rank
            data = torch.empty(0 if is_own else num_share_bytes(streams, share, num_ranks), dtype=torch.uint8)
            if own is not None and is_own:
                data = own
            for piece in data.split(_PIECE_BYTES):
                backend.progress("going back to an earlier state")
                dist.broadcast(piece, holder_of[share])
            put_share(streams, share, num_ranks, data, contents)
        return unflatten(streams, contents, "the snapshot", weights_only=False)
