"""The states that were saved last, as far as a rank can go back to them in process."""

from __future__ import annotations

import dataclasses

from lightning_ft.checkpoint.records import Key
from lightning_ft.checkpoint.snapshots import Share

_NUM_KEPT = 3
"""So many: the last may never become a checkpoint, nor the one before, if storage fails or ranks are lost."""


@dataclasses.dataclass(slots=True)
class Snapshot:
    """What a rank has in memory of a state that was saved.

    Attributes:
        key: Of the checkpoint that it became, or was to become.
        num_ranks: How many have saved it.
        share: Of its tensors; None: they are in the storage alone, if they are.
        own: What the rank needs besides to go on from there; None: that is to be taken before the next batch.
    """

    key: Key
    num_ranks: int
    share: Share | None
    own: bytes | None = None


class Kept:
    """Some snapshots, oldest first. The tensors of one at most are held: the memory is used again for the next."""

    def __init__(self) -> None:
        self._snapshots: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        """Keep another one, and forget what is too old, unless its tensors are the ones that are held."""
        self._snapshots.append(snapshot)
        old = self._snapshots[:-_NUM_KEPT]
        self._snapshots = [kept for kept in old if kept.share is not None] + self._snapshots[-_NUM_KEPT:]

    def let_go(self) -> None:
        """Forget the tensors: others are about to be copied into their memory."""
        for snapshot in self._snapshots:
            snapshot.share = None

    @property
    def incomplete(self) -> Snapshot | None:
        """The last one, if it lacks what is the rank's own."""
        last = self._snapshots[-1] if self._snapshots else None
        return last if last is not None and last.own is None else None

    def forget(self, snapshot: Snapshot) -> None:
        """Nobody can go back to that one."""
        self._snapshots.remove(snapshot)

    def forget_after(self, key: Key) -> None:
        """The fit has gone back to this one: what followed has never been."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.key <= key]

    def whole(self) -> dict[Key, Snapshot]:
        """Return those that lack nothing of the rank's own."""
        return {snapshot.key: snapshot for snapshot in self._snapshots if snapshot.own is not None}
