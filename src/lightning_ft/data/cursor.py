"""Which samples of an epoch are owed, and to whom they are dealt: pure index arithmetic.

What is dealt are the *positions* 0 to length - 1 of the epoch's order, whatever that is (as a rule a permutation of the
data set). Words:

* a **deal** hands the owed positions to an ordered tuple of members; a **share** is what one member gets of it;
* a sample is **taken** when a committed step has counted it, whether or not its member contributed to the step;
* a **hole** is a position taken by a member that did not contribute: it is owed still;
* **padding** fills a deal up to equal shares with positions that are not owed.

Rules:

* D1 **Deal.** The member of rank r of W gets every W-th of the owed positions, from the r-th on. If W does not divide
  their number, the shares are padded with the epoch's positions 0, 1, ... (and from 0 again after its last), or with
  `drop_last` what remains of the division is dealt to nobody. So the first deal is `DistributedSampler`'s.
* D2 **Commit.** All members take equally many samples at once, so what was taken is always a prefix of the deal. The
  contributors' are done with, the others' become holes. Padding is never a hole, nor does it pay for one.
* D3 **Deal again.** Owed are the holes (by rank, then in the order of the deal), then what was not taken, in the order
  of the deal. What a member has drawn but no step has counted was not taken.

Why each position is done with exactly once. At any time the positions 0 to length - 1 are split into *done*, `holes`
and `rest`. At first all are in `rest`. A commit takes a prefix of `rest`; each position of it is in one member's share,
and so goes either to done or to that member's holes. A deal moves all holes to `rest`. Nothing leaves done. The epoch
is finished when there are no holes and the shares are empty: then `rest` is empty, or with `drop_last` has fewer than W
positions.

How much padding is taken. A deal has fewer than W samples of it, all in its last row, so only the commit that ends the
deal takes them. If everybody contributes to that one, the epoch is finished. Otherwise the holes are dealt again, and
that deal ends, too. So an epoch takes at most W - 1 samples of padding, as with `DistributedSampler`, and at most W - 1
more (with the W of then) for each commit that ended a deal and missed a member. Less is not possible with equal shares
and `DistributedSampler`'s order: that padding was trained on before anybody knew of the failure.

How large it grows. Everything is a concatenation of `range` objects, and every W-th element of one is another. What a
deal leaves as holes is at most W - 1 members' part of the steps until the next deal. They are dealt first, and of each
step at least one member's part is done with, so positions that are owed again never add up. Neighbours are joined where
they can be: the failure of one member costs a range or two until its holes are taken. So the number of ranges depends
neither on the length of the epoch nor on how many failures there were, only on how many come on each other's heels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from lightning_ft.membership.wire_fields import read_flag, read_name, read_natural, short

Member: TypeAlias = str | int
"""A logical id; or a rank, where there are none."""

Ranges: TypeAlias = tuple[range, ...]
"""Positions: the concatenation of ranges that are not empty and grow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """Where an epoch stands; the same on all members. `begin` makes the first.

    Attributes:
        length: Number of samples of the epoch, >= 0.
        members: Whom the present deal is for, in rank order; one or more, all different.
        drop_last: Whether shares are made equal by leaving samples out, instead of by padding.
        rest: Positions of the present deal that were not taken, in the order in which they are dealt.
        holes: For each rank, the positions that it took without contributing. No position is twice in `rest` and
            `holes` together.
        taken: How many samples each member has taken in this epoch, in all deals, holes and padding included.
        is_first_deal: Whether shares are still those that `DistributedSampler` would give these members.
    """

    length: int
    members: tuple[Member, ...]
    drop_last: bool
    rest: Ranges
    holes: tuple[Ranges, ...]
    taken: int = 0
    is_first_deal: bool = True

    def __post_init__(self) -> None:
        assert self.members, "a deal is for somebody"
        assert len(self.holes) == len(self.members), (len(self.holes), len(self.members))
        assert self.taken >= 0, self.taken
        assert _count(self.rest) <= self.length, (self.rest, self.length)

    @classmethod
    def begin(cls, length: int, members: Iterable[Member], *, drop_last: bool = False) -> Cursor:
        """Deal a whole epoch.

        Args:
            length: Number of samples, >= 0.
            members: In rank order.
            drop_last: Leave samples out rather than pad; as for `DistributedSampler`.

        Raises:
            ValueError: `length` is negative; there is no member, or one twice.
        """
        if length < 0:
            raise ValueError(f"begin failed: expected a length >= 0, got {length}")
        dealt = _different(members)
        return cls(length, dealt, drop_last, (range(length),) if length else (), ((),) * len(dealt))

    # -- what it says -----------------------------------------------------------------------------------------------

    @property
    def num_left(self) -> int:
        """How many samples each member's share still has, padding included; the same for all."""
        num_rest, num_members = _count(self.rest), len(self.members)
        return num_rest // num_members if self.drop_last else -(-num_rest // num_members)

    @property
    def num_owed(self) -> int:
        """How many positions have not been done with, whether they are dealt, holes, or left out by `drop_last`."""
        return _count(self.rest) + sum(map(_count, self.holes))

    @property
    def owed(self) -> Ranges:
        """The positions that have not been done with, in the order in which they would be dealt again."""
        return joined(itertools.chain(*self.holes, self.rest))

    @property
    def is_finished(self) -> bool:
        """Whether no share has anything left, and nothing has to be dealt again."""
        return not self.num_left and not any(self.holes)

    def share(self, member: Member) -> Ranges:
        """Return the positions that a member is still to take, in order: `num_left` of them.

        The last may be padding, so it alone may be a position that was done with, or occurs elsewhere.

        Raises:
            ValueError: Nothing is dealt to this member.
        """
        if member not in self.members:
            raise ValueError(
                f"share failed: expected one of the members to whom the samples are dealt, {_named(self.members)}, got "
                f"{member!r}. Deal them again (redeal) to members that include it."
            )
        rank, num_members, num_left = self.members.index(member), len(self.members), self.num_left
        dealt, _ = _split(self.rest, num_left * num_members)
        share = tuple(every(dealt, rank, num_members))
        num_missing = num_left - _count(share)
        assert num_missing in (0, 1), (num_missing, self)
        if num_missing:
            padding = (rank + (num_left - 1) * num_members - _count(dealt)) % self.length
            share += (range(padding, padding + 1),)
        return share

    def next_of_each(self, count: int) -> tuple[Ranges, ...]:
        """Return for each rank the next `count` positions of its share, without padding."""
        num_members = len(self.members)
        dealt, _ = _split(self.rest, count * num_members)
        return tuple(tuple(every(dealt, rank, num_members)) for rank in range(num_members))

    # -- what changes it --------------------------------------------------------------------------------------------

    def commit(self, count: int, contributors: Iterable[Member] | None = None) -> Cursor:
        """Count a step for which every member took the next `count` samples of its share.

        Args:
            count: Samples per member, 0 to `num_left`; of all batches of the step, if gradients were accumulated.
            contributors: Whose samples the step was made of; None: all members'. The others died before, and what they
                took is owed again.

        Raises:
            ValueError: `count` is out of range; there is no contributor, or one to whom nothing was dealt.
        """
        num_members, num_left = len(self.members), self.num_left
        if not 0 <= count <= num_left:
            raise ValueError(
                f"commit failed: expected a count from 0 to {num_left}, which is left of each member's share, got "
                f"{count} (taken={self.taken}). Count each batch once, by how many samples one member took."
            )
        _, rest = _split(self.rest, count * num_members)
        holes = self.holes
        if contributors is not None and contributors != self.members:
            present = self._present(contributors)
            if len(present) < num_members:
                holes = tuple(
                    own if member in present else joined((*own, *taken))
                    for member, own, taken in zip(self.members, self.holes, self.next_of_each(count), strict=True)
                )
        return dataclasses.replace(self, rest=rest, holes=holes, taken=self.taken + count)

    def redeal(self, members: Iterable[Member]) -> Cursor:
        """Deal what is owed to these members; the cursor itself if it is dealt to them already and has no holes.

        Args:
            members: In rank order; joiners are members like any other.

        Raises:
            ValueError: There is no member, or one twice.
        """
        dealt = _different(members)
        if dealt == self.members and not any(self.holes):
            return self
        is_first = self.is_first_deal and not self.taken
        return dataclasses.replace(
            self, members=dealt, rest=self.owed, holes=((),) * len(dealt), is_first_deal=is_first
        )

    def _present(self, contributors: Iterable[Member]) -> frozenset[Member]:
        present = frozenset(contributors)
        unknown = present.difference(self.members)
        if unknown:
            raise ValueError(
                f"commit failed: {_named(unknown)} contributed, but the samples were dealt to {_named(self.members)}. "
                "Deal them again (redeal) at the boundary at which members join, on all members."
            )
        if not present:
            raise ValueError(
                "commit failed: expected at least one contributor, got none. Don't count a step of nobody."
            )
        return present

    # -- as data ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return it as what JSON can hold: a range is `[start, stop, step]`."""
        return {
            "length": self.length,
            "members": list(self.members),
            "drop_last": self.drop_last,
            "rest": _dump(self.rest),
            "holes": [_dump(own) for own in self.holes],
            "taken": self.taken,
            "is_first_deal": self.is_first_deal,
        }

    @classmethod
    def from_state(cls, state: object) -> Cursor:
        """Read what `state` returned, perhaps through JSON.

        Raises:
            ValueError: It is not that; the message names the field.
        """
        fields = read_fields(
            "cursor's state",
            state,
            {
                "length": read_natural,
                "members": _read_members,
                "drop_last": read_flag,
                "rest": _read_ranges,
                "holes": _read_holes,
                "taken": read_natural,
                "is_first_deal": read_flag,
            },
        )
        if len(fields["holes"]) != len(fields["members"]):
            raise ValueError(
                f"cursor's state, field 'holes': expected one list for each of {len(fields['members'])} members, "
                f"got {len(fields['holes'])}"
            )
        _check_positions(fields["length"], {"rest": fields["rest"], "holes": tuple(itertools.chain(*fields["holes"]))})
        return cls(**fields)


# -- ranges ---------------------------------------------------------------------------------------------------------


def _count(pieces: Iterable[range]) -> int:
    return sum(map(len, pieces))


def _split(pieces: Ranges, num_first: int) -> tuple[Ranges, Ranges]:
    """Return the first so many positions (all, if there are fewer), and the others."""
    for index, piece in enumerate(pieces):
        if num_first < len(piece):
            front = (*pieces[:index], piece[:num_first]) if num_first else pieces[:index]
            return front, (piece[num_first:], *pieces[index + 1 :])
        num_first -= len(piece)
    return pieces, ()


def every(pieces: Iterable[range], first: int, step: int) -> Iterator[range]:
    """Yield, as ranges, every step-th position of a concatenation, from the first-th on; first < step."""
    for piece in pieces:
        part = piece[first::step]
        if part:
            yield part
        first = (first - len(piece)) % step


def joined(pieces: Iterable[range]) -> Ranges:
    """The same positions in the same order, in as few ranges as come of joining neighbours."""
    found: list[range] = []
    for piece in pieces:
        gap = piece.start - found[-1][-1] if found else 0
        if gap > 0 and _goes_on_by(found[-1], gap) and _goes_on_by(piece, gap):
            found[-1] = range(found[-1].start, piece[-1] + 1, gap)
        else:
            found.append(piece)
    return tuple(found)


def _goes_on_by(piece: range, gap: int) -> bool:
    return len(piece) == 1 or piece.step == gap


def _meet(one: range, other: range) -> bool:
    """Whether two ranges have a position in common (Chinese remainder theorem)."""
    common = math.gcd(one.step, other.step)
    distance = other.start - one.start
    if distance % common:
        return False
    modulus = other.step // common
    position = one.start + distance // common * pow(one.step // common, -1, modulus) % modulus * one.step
    period = one.step * modulus
    low = max(one.start, other.start)
    position += -(-(low - position) // period) * period  # the first from `low` on
    return position <= min(one[-1], other[-1])


# -- what comes in --------------------------------------------------------------------------------------------------


def _named(names: Iterable[object]) -> str:
    return short(sorted(map(str, names)))


def _different(members: Iterable[Member]) -> tuple[Member, ...]:
    dealt = tuple(members)
    if not dealt or len(set(dealt)) != len(dealt):
        raise ValueError(f"expected one or more different members to deal to, got {short(dealt)}")
    return dealt


def read_fields(what: str, state: object, readers: Mapping[str, Callable[[object], Any]]) -> dict[str, Any]:
    """Read an object that has exactly these fields.

    Args:
        what: What it is, for the error.
        state: As JSON gave it.
        readers: For each field, what returns its value checked or raises ValueError.

    Raises:
        ValueError: It has other fields, or a value is wrong; the message names the field.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"{what}: expected an object, got {short(state)}")  # noqa: TRY004 - it is data, not an argument
    if state.keys() != readers.keys():
        raise ValueError(f"{what}: expected the fields {sorted(readers)}, got {_named(state)}")
    fields = {}
    for name, reader in readers.items():
        try:
            fields[name] = reader(state[name])
        except ValueError as error:
            raise ValueError(f"{what}, field {name!r}: {error}") from None
    return fields


def _read_list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, got {short(value)}")  # noqa: TRY004 - it is data, not an argument
    return list(value)


def _read_members(value: object) -> tuple[Member, ...]:
    return _different(read_natural(item) if isinstance(item, int) else read_name(item) for item in _read_list(value))


def _read_ranges(value: object) -> Ranges:
    return tuple(map(_read_range, _read_list(value)))


def _read_range(value: object) -> range:
    numbers = [read_natural(number) for number in _read_list(value)]
    if len(numbers) != 3 or not numbers[2] or numbers[0] >= numbers[1]:
        raise ValueError(f"expected [start, stop, step] with start < stop and step > 0, got {short(value)}")
    return range(*numbers)


def _read_holes(value: object) -> tuple[Ranges, ...]:
    return tuple(map(_read_ranges, _read_list(value)))


def _check_positions(length: int, fields: Mapping[str, Ranges]) -> None:
    """Make sure that all positions are of the epoch and that none is owed twice."""
    open_ranges: list[range] = []
    for piece, name in sorted(
        ((piece, name) for name, pieces in fields.items() for piece in pieces), key=lambda found: found[0].start
    ):
        if piece[-1] >= length:
            raise ValueError(
                f"cursor's state, field {name!r}: expected positions below the length {length}, got {piece[-1]}"
            )
        open_ranges = [earlier for earlier in open_ranges if earlier[-1] >= piece.start]
        for earlier in open_ranges:
            if _meet(earlier, piece):
                raise ValueError(
                    f"cursor's state, field {name!r}: {_dump([piece])} has a position that {_dump([earlier])} has, too"
                )
        open_ranges.append(piece)


def _dump(pieces: Iterable[range]) -> list[list[int]]:
    return [[piece.start, piece.stop, piece.step] for piece in pieces]
