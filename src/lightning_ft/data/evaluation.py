"""Whose results an evaluation still has, and what must be evaluated again: pure index arithmetic.

The results of what a member has evaluated are in its memory alone, and die with it. So all of its share is owed again,
however much of it was done: it is dealt to the others, to each one of a row in turn, without padding. What these have
evaluated stays evaluated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from lightning_ft.data.cursor import Cursor, Member, Ranges, every, joined


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationShares:
    """What each member has evaluated; the same on all members.

    Attributes:
        of: For each member, the positions whose results it has, padding left out. No position is in two of them.
    """

    of: Mapping[Member, Ranges]

    @classmethod
    def begin(cls, cursor: Cursor, count: int) -> EvaluationShares:
        """Take it that each member has evaluated the first samples of its share.

        Args:
            cursor: The deal of the evaluation.
            count: Samples of each member, at most as many as are left of its share.
        """
        return cls(dict(zip(cursor.members, cursor.next_of_each(count), strict=True)))

    def redeal(self, members: Iterable[Member]) -> tuple[EvaluationShares, Mapping[Member, Ranges]]:
        """Deal what the results of the others were made of.

        Args:
            members: Who is left, in rank order.

        Returns: The new shares, and what of it each of the members is to evaluate; the first ones may have one sample
            more than the last.
        """
        left = tuple(members)
        lost = joined(itertools.chain(*(positions for member, positions in self.of.items() if member not in left)))
        parts = {member: tuple(every(lost, rank, len(left))) for rank, member in enumerate(left)}
        return EvaluationShares({member: self.of[member] + parts[member] for member in left}), parts
