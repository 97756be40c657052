"""What a new view's members do with their standings: who hands a result over to whom.

Pure planning for M3 and M4: every member computes it from the same exchanged standings, so all have the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_ft.errors import ProtocolViolationError, QuorumLostError


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What one member says of itself in the exchange, by rank.

    Attributes:
        completed: Its last finished number; None for a joiner that does not hold the job's state yet, and is given M.
        kept_is_void: The result that it keeps of number `completed` is void.
        kept_generation: Generation in which that result became final at the first member.
    """

    completed: int | None
    kept_is_void: bool
    kept_generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class SettlePlan:
    """What all members of the view do between exchange and confirm.

    Attributes:
        target: M, what everybody has completed after the confirm.
        donor: Lowest rank at M, which hands its kept result of number M over; None if nobody is behind.
        laggards: Ranks at M - 1 that adopt it, ascending.
        joiners: Ranks that are given M without a result, ascending.
        handover_is_void: The result of number M is void.
    """

    target: int
    donor: int | None
    laggards: tuple[int, ...]
    joiners: tuple[int, ...]
    handover_is_void: bool


def plan(standings: Sequence[Standing]) -> SettlePlan:
    """Plan the settling of a view.

    Args:
        standings: One for each member, in rank order.

    Raises:
        QuorumLostError: Only joiners are in the view: nobody has the state of the job.
        ProtocolViolationError: Members are more than one number apart (I3), or keep different results (I5).
    """
    numbers = {rank: standing.completed for rank, standing in enumerate(standings) if standing.completed is not None}
    if not numbers:
        raise QuorumLostError("settle failed: all members of the view are joiners, nobody has the state of the job")
    target = max(numbers.values())
    laggards = tuple(rank for rank, number in numbers.items() if number < target)
    for rank in laggards:
        if numbers[rank] != target - 1:
            raise ProtocolViolationError(
                f"settle failed: expected every member at number {target} or {target - 1}, "
                f"got rank {rank} at {numbers[rank]}"
            )
    leaders = [rank for rank, number in numbers.items() if number == target]
    first = standings[leaders[0]]
    for rank in leaders:
        if standings[rank] != first:
            raise ProtocolViolationError(
                f"settle failed: expected one result of number {target}, got {first} at rank {leaders[0]} and "
                f"{standings[rank]} at rank {rank}"
            )
    return SettlePlan(
        target=target,
        donor=leaders[0] if laggards else None,
        laggards=laggards,
        joiners=tuple(rank for rank in range(len(standings)) if rank not in numbers),
        handover_is_void=first.kept_is_void,
    )
