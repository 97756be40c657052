"""What a new view's members do with their standings: who hands a result over, and what becomes of the next number.

Pure planning for M3 to M6: every member computes it from the same exchanged standings, so all have the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_ft.errors import ProtocolViolationError, QuorumLostError


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What one member says of itself in the exchange, by rank.

    Attributes:
        completed: Its last finished number; without meaning for a joiner.
        unredoable: It is in number `completed + 1`, and that can't be redone in the new view.
        kept_is_poison: The result that it keeps of number `completed` is poison.
        kept_generation: Generation in which that result became final at the first member.
        is_joiner: It never confirmed a view, so it has no standing and is given M.
    """

    completed: int
    unredoable: bool
    kept_is_poison: bool
    kept_generation: int
    is_joiner: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SettlePlan:
    """What all members of the view do between exchange and confirm, and right after.

    Attributes:
        target: M, what everybody has completed after the confirm.
        donor: Lowest rank at M, which hands its kept result of number M over; None if nobody is behind.
        laggards: Ranks at M - 1 that adopt it, ascending.
        joiners: Ranks that are given M without a result, ascending.
        handover_is_poison: The result of number M is poison.
        poison_next: After the confirm everybody takes M + 1 as final with the result poison.
    """

    target: int
    donor: int | None
    laggards: tuple[int, ...]
    joiners: tuple[int, ...]
    handover_is_poison: bool
    poison_next: bool


def plan(standings: Sequence[Standing]) -> SettlePlan:
    """Plan the settling of a view.

    Args:
        standings: One for each member, in rank order.

    Raises:
        QuorumLostError: Only joiners are in the view: nobody has the state of the job.
        ProtocolViolationError: Members are more than one number apart (I3), or keep different results (I5).
    """
    ranks = [rank for rank, standing in enumerate(standings) if not standing.is_joiner]
    if not ranks:
        raise QuorumLostError("settle failed: all members of the view are joiners, nobody has the state of the job")
    target = max(standings[rank].completed for rank in ranks)
    laggards = tuple(rank for rank in ranks if standings[rank].completed < target)
    for rank in laggards:
        if standings[rank].completed != target - 1:
            raise ProtocolViolationError(
                f"settle failed: expected every member at number {target} or {target - 1}, "
                f"got rank {rank} at {standings[rank].completed}"
            )
    leaders = [rank for rank in ranks if standings[rank].completed == target]
    is_poison = standings[leaders[0]].kept_is_poison
    for rank in leaders:
        if standings[rank].kept_is_poison != is_poison:
            raise ProtocolViolationError(
                f"settle failed: expected one result of number {target}, got poison at only one of the ranks "
                f"{leaders[0]} and {rank}"
            )
    return SettlePlan(
        target=target,
        donor=leaders[0] if laggards else None,
        laggards=laggards,
        joiners=tuple(rank for rank, standing in enumerate(standings) if standing.is_joiner),
        handover_is_poison=is_poison,
        poison_next=any(standings[rank].unredoable for rank in leaders),
    )
