"""A DistributedSampler for members that come and go: each sample of an epoch is trained on exactly once.

Read in torch 2.13.0 and Lightning 2.6.6: Lightning leaves a loader alone whose sampler is a `DistributedSampler`, and
wraps any other into one of its own; hence the base class, of which only the constructor is used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.data.cursor import Cursor, Member, Ranges, read_fields
from lightning_ft.membership.wire_fields import read_flag, short

_log = logging.getLogger("lightning_ft")

_STATE_VERSION = 1
"""Raised whenever the state's form changes, the cursor's included."""

_BLOCK = 4096
"""Indices that are looked up at once: enough to make a call of torch cheap, and too few to count in memory."""


class ElasticDistributedSampler(DistributedSampler[int]):
    """Deals a data set to the members of a job, and what is left of it again when they change.

    As long as nobody fails it yields index for index what `DistributedSampler` does. It keeps count of what the
    committed steps consumed, and nothing else: samples that were drawn ahead, or died with their member, are owed.

    ```python
    sampler = ElasticDistributedSampler(dataset)  # after init_process_group("ft")
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    while state.epoch < num_epochs:
        sampler.set_epoch(state.epoch)
        while sampler.redeal() or sampler.num_left:
            for batch in loader:
                state.boundary()  # members may join here
                if sampler.redeal():  # members died, left or joined: this batch may be another's now
                    break
                contributors = train(batch)  # StepCommit.contributors, which FaultTolerantDDP.on_commit was given
                sampler.record_batch(len(batch), contributors)
        state.epoch += 1
    ```

    All members must make the same calls of `set_epoch`, `record_batch` and `redeal` at the same steps. A joiner starts
    from the state of one that is in: `load_state_dict`, then `redeal` at the same boundary as all others.

    Iterators: each starts at what was recorded when it was made, and does not change the sampler. One that was made
    before the samples were dealt again (`redeal`, another epoch, a loaded state) and is not at its end raises
    RuntimeError when it is asked for more, rather than end as if the epoch were over. A DataLoader may still hand out
    what it had drawn by then: make a new iterator right after `redeal` returned True.

    Length: what this member has taken in the epoch plus what is left of its share, so that a loop that counts batches
    from the start of the epoch ends with it. It changes with `redeal`.

    The length of the data set is read when an epoch begins: at construction, and at `set_epoch` of another epoch, or of
    the same if nothing was recorded in it. The epoch keeps it. A data set may grow meanwhile.

    Args:
        dataset: Of which only `len` is used; may have another length in another epoch.
        num_replicas: As for `DistributedSampler`. Default: of the default process group.
        rank: As for `DistributedSampler`. Default: in the default process group. If backend `ft` is the default
            process group and both are its own, members go by their logical ids, else by the ranks given here.
        shuffle: Whether the order is a permutation by `seed` and epoch, or the data set's own.
        seed: The same on all members.
        drop_last: Whether samples that don't make up a row of one for each member are left out rather than padded.

    Attributes:
        num_replicas: Number of members of the present deal.
        rank: Own rank among these.
        num_samples: As `len`.
        total_size: `num_samples` of all members together.
        member: Own logical id, or rank.

    Raises:
        ValueError: `rank` is not one of `num_replicas`; or one of them is not given and there is no process group.
    """

    _cursor: Cursor

    def __init__(  # noqa: PLR0917 - DistributedSampler's
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - DistributedSampler's
        seed: int = 0,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - DistributedSampler's
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        world = _world()
        members: tuple[Member, ...] = tuple(range(self.num_replicas))
        self.member: Member = self.rank
        if world is not None and (world.size(), world.rank()) == (self.num_replicas, self.rank):
            members, self.member = world.members, world.ring.member
        self._permutation: torch.Tensor | None = None
        self._permutation_of = (0, 0, 0)
        self._num_deals = self._iterated_deal = 0
        self._open_blocks: dict[int, list[int]] = {}
        self._deal(Cursor.begin(self._dataset_length(), members, drop_last=drop_last), self.member, self.epoch)

    # -- what DistributedSampler has ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Yield the data set indices that are left of the own share.

        Raises:
            ValueError: The data set has become shorter than the epoch.
        """
        cursor = self._cursor
        if cursor.taken and not cursor.num_left:
            advice = "call set_epoch" if cursor.is_finished else "samples of lost members are owed, call redeal"
            _log.warning("[%s] nothing is left of this share of epoch %d: %s", self.member, self.epoch, advice)
        self._iterated_deal = self._num_deals
        return self._drawn_from(cursor)

    def __len__(self) -> int:
        return self._cursor.taken + self._cursor.num_left

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the present one, which stays as it is, also if it is finished.

        Members are those of the last `redeal`; if they go by logical ids, those that the process group has now.

        Args:
            epoch: Its number; with `seed` it decides on the order.
        """
        if epoch == self.epoch and (self._cursor.taken or self._dataset_length() == self._cursor.length):
            return
        cursor = Cursor.begin(self._dataset_length(), self._members(), drop_last=self.drop_last)
        self._deal(cursor, self.member, epoch)

    # -- what it does beyond that -------------------------------------------------------------------------------------

    @property
    def num_left(self) -> int:
        """Samples that are left of the own share, padding included; as many for every member."""
        return self._cursor.num_left

    @property
    def num_true(self) -> int:
        """Samples that are left of the own share, without padding."""
        return sum(map(len, self._cursor.next_of_each(self.num_left)[self.rank]))

    @property
    def cursor(self) -> Cursor:
        """What the recorded steps have consumed of the epoch; never changes."""
        return self._cursor

    @property
    def is_first_deal(self) -> bool:
        """Whether shares are still those of `DistributedSampler`: nobody came or went since the epoch's first step."""
        return self._cursor.is_first_deal

    @property
    def num_taken(self) -> int:
        """Samples that each member has taken in this epoch, in all deals."""
        return self._cursor.taken

    @property
    def num_deals(self) -> int:
        """How often samples were dealt: epochs and loaded states included."""
        return self._num_deals

    @property
    def members(self) -> tuple[Member, ...]:
        """Whom the present deal is for, in rank order."""
        return self._cursor.members

    def draw_nothing(self) -> None:
        """Take note that an iterator of the present deal was needed no more: nothing is left of the share."""
        self._iterated_deal = self._num_deals

    def whole_share(self) -> Iterator[int]:
        """Yield the data set indices of a share of the whole epoch, whatever was recorded."""
        cursor = self._cursor
        return self._drawn_from(Cursor.begin(cursor.length, cursor.members, drop_last=cursor.drop_last))

    def record_batch(self, count: int, contributors: Iterable[Member] | None = None) -> None:
        """Count what a committed step consumed.

        Args:
            count: How many samples this member took for it, padding included; as many as every other. Of all batches of
                the step together, if gradients were accumulated.
            contributors: Whose samples are in the step (`StepCommit.contributors`); default: all members'. What the
                others took is owed, and comes first when the samples are dealt again.

        Raises:
            ValueError: More than is left of the share, no contributor, or one that was dealt nothing. Nothing changed.
        """
        self._cursor = self._cursor.commit(count, contributors)

    def redeal(self, members: Iterable[Member] | None = None, *, member: Member | None = None) -> bool:
        """Deal what is left of the epoch to these members; all of them must do so after the same step.

        Args:
            members: In rank order, the own included. Default: those of the process group of backend `ft`.
            member: Own id among them, if it is not the present one (`self.member`).

        Returns: Whether anything is dealt otherwise than when the last iterator was made, so that it must be made anew:
            by this call, or by a state that was loaded since. False if the members are the same and none of them missed
            a step.

        Raises:
            ValueError: There is no such process group; no or equal members; the own is not among them. Nothing changed.
        """
        own = self.member if member is None else member
        if members is None:
            world = _world()
            if world is None:
                raise ValueError(
                    "redeal failed: expected the members, got None, and the default process group is not of backend "
                    "'ft'. Pass the members (or their ranks) in rank order."
                )
            members, own = world.members, world.ring.member
        cursor = self._cursor.redeal(members)
        if cursor is not self._cursor or own != self.member:
            self._deal(cursor, own, self.epoch)
        return self._num_deals != self._iterated_deal

    def state_dict(self) -> dict[str, Any]:
        """Return what the recorded steps consumed of the epoch, as what JSON can hold; the same on all members."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "cursor": self._cursor.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken; what is left is dealt to the members that this sampler has.

        Args:
            state_dict: From `state_dict`, of any member of a job of any size.

        Raises:
            ValueError: It is no such state, or one of another data set length, seed, `shuffle` or `drop_last`; the
                message has both values. Nothing changed.
        """
        readers = {"version": _read_int, "epoch": _read_int, "seed": _read_int, "shuffle": read_flag}
        state = read_fields("sampler's state", state_dict, {**readers, "cursor": Cursor.from_state})
        cursor: Cursor = state["cursor"]
        for name, expected, got in (
            ("version", _STATE_VERSION, state["version"]),
            ("seed", self.seed, state["seed"]),
            ("shuffle", self.shuffle, state["shuffle"]),
            ("drop_last", self.drop_last, cursor.drop_last),
            ("data set length", self._dataset_length(), cursor.length),
        ):
            if expected != got:
                raise ValueError(
                    f"load_state_dict failed: expected {name} {expected}, which this sampler has, got {got} in the "
                    "state. Make the sampler with the same arguments as the one whose state it is."
                )
        self._deal(cursor.redeal(self._members()), self.member, state["epoch"])

    def indices(self, positions: range) -> list[int]:
        """Return the data set indices at these positions of the epoch's order."""
        if not self.shuffle:
            return list(positions)
        wanted = (self.seed, self.epoch, self._cursor.length)
        if self._permutation is None or self._permutation_of != wanted:
            self._permutation = None  # before the next is made
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            self._permutation = torch.randperm(self._cursor.length, generator=generator)
            self._permutation_of = wanted
        found: list[int] = self._permutation[positions.start : positions.stop : positions.step].tolist()
        return found

    # -- within -------------------------------------------------------------------------------------------------------

    def _deal(self, cursor: Cursor, member: Member, epoch: int) -> None:
        """Take over a new deal, and stop the iterators of the old one."""
        cursor.share(member)  # raises if it has none
        self._cursor, self.member, self.epoch = cursor, member, epoch
        self._num_deals += 1
        for block in self._open_blocks.values():
            block.clear()
        self.num_replicas, self.rank = len(cursor.members), cursor.members.index(member)
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.num_replicas

    def _members(self) -> tuple[Member, ...]:
        world = _world()
        members: tuple[Member, ...] = self._cursor.members
        if world is not None and world.ring.member == self.member:
            members = world.members
        return members

    def _dataset_length(self) -> int:
        length: int = len(self.dataset)  # type: ignore[arg-type]
        return length

    def _drawn_from(self, cursor: Cursor) -> Iterator[int]:
        if self._dataset_length() < cursor.length:
            raise ValueError(
                f"iterating failed: expected a data set of at least the {cursor.length} samples with which epoch "
                f"{self.epoch} began, got {self._dataset_length()}. Change it between epochs, before set_epoch."
            )
        return itertools.chain.from_iterable(self._blocks(cursor.share(self.member), self._num_deals))

    def _blocks(self, share: Ranges, deal: int) -> Iterator[list[int]]:
        """Yield indices in blocks, in one list: whoever deals again clears it, which ends the block at once.

        A check for each sample would cost more than all the rest. The permutation is held by the sampler alone.
        """
        self._check_deal(deal)
        block: list[int] = []
        self._open_blocks[id(block)] = block
        try:
            for piece in share:
                for first in range(0, len(piece), _BLOCK):
                    block[:] = self.indices(piece[first : first + _BLOCK])
                    yield block
                    self._check_deal(deal)
        finally:
            del self._open_blocks[id(block)]

    def _check_deal(self, deal: int) -> None:
        if deal != self._num_deals:
            raise RuntimeError(
                f"iterating failed: the samples were dealt again after this iterator was made (member={self.member}, "
                f"epoch={self.epoch}), and what it would yield may be another member's now. Make a new iterator."
            )


def _world() -> FaultTolerantProcessGroup | None:
    world = dist.group.WORLD
    return world if isinstance(world, FaultTolerantProcessGroup) else None


def _read_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected an integer, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return value
