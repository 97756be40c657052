"""The fault matrix: which fault, at which moment, in how many ranks, what must hold, and the jobs to try it in."""

from __future__ import annotations

import dataclasses
import enum
import os
import random
from collections.abc import Sequence

from tests.integration import test_kill_points
from tests.integration.programs import hits

NUM_RANKS = 4
MEMBERS = tuple(f"0/{slot}" for slot in range(NUM_RANKS))

RECOVERY = "recovery"

MOMENTS = (
    "setup",
    "sanity_check",
    "first_step",
    "first_backward",
    "mid_epoch",
    "validation",
    "epoch_end",
    "save",
    RECOVERY,
    "last_step",
)
"""In order of time. In the recovery from another's death: at any of these points."""

POINTS = test_kill_points.RECOVERY

ALL_BUT_ONE = 0
"""As a number: of those that live."""


class Outcome(enum.Enum):
    """What a fault does to the job."""

    LOST = "the victims are given up; the others go on"
    LEFT = "the victims leave in peace; the others go on"
    SPARED = "nobody is lost"
    STOPPED = "all ranks end at the same batch"
    BEREFT = "the agent is dead, so nobody is left"
    FAILED = "no rank can go on, and each says why"
    CONTRADICTED = "the ranks' program is wrong: somebody is lost; whoever goes on goes on right"


@dataclasses.dataclass(frozen=True)
class Promise:
    """What must hold when a fault strikes.

    Attributes:
        outcome: For the job.
        causes: One of these is in the event log for each that is lost.
        moments: When it can happen.
        numbers: In how many ranks at once.
        status: Of the job.
    """

    outcome: Outcome
    causes: tuple[str, ...] = ()
    moments: tuple[str, ...] = MOMENTS
    numbers: tuple[int, ...] = (1, 2, ALL_BUT_ONE)
    status: int = 0

    @property
    def is_end(self) -> bool:
        """Whether nothing can be tried after it."""
        return self.outcome not in (Outcome.LOST, Outcome.LEFT, Outcome.SPARED)


def without(*moments: str) -> tuple[str, ...]:
    return tuple(moment for moment in MOMENTS if moment not in moments)


ENDED = ("exit", "connection")
"""Which sign of a death comes first is not certain."""

IN_STEPS = ("first_step", "mid_epoch", "validation", "save", "last_step")

FAULTS = {
    "kill": Promise(Outcome.LOST, ENDED),
    "abort": Promise(Outcome.LOST, ENDED),
    "segfault": Promise(Outcome.LOST, ENDED),
    "memory": Promise(Outcome.LOST, ENDED),
    "exception": Promise(Outcome.LOST, ENDED, without(RECOVERY)),
    "callback_exception": Promise(Outcome.LOST, ENDED, without(RECOVERY)),
    "worker_exception": Promise(Outcome.LOST, ENDED, ("sanity_check", "first_step", "mid_epoch", "validation")),
    "worker_killed": Promise(Outcome.LOST, ENDED, ("sanity_check", "first_step", "mid_epoch", "validation")),
    "stop": Promise(Outcome.LOST, ("heartbeat",)),
    "gil": Promise(Outcome.LOST, ("hang",)),
    "loop": Promise(Outcome.LOST, ("hang",)),
    "lock": Promise(Outcome.LOST, ("hang",)),
    "exit_0": Promise(Outcome.LEFT),
    "exit_1": Promise(Outcome.LEFT),
    "short_stop": Promise(Outcome.SPARED),
    "slow": Promise(Outcome.SPARED),
    "coordinator_killed": Promise(Outcome.SPARED, numbers=(1,)),
    "events_full": Promise(Outcome.SPARED, moments=IN_STEPS, numbers=(1,)),
    "terminate": Promise(Outcome.LEFT),
    "interrupt": Promise(Outcome.STOPPED, status=1),
    "agent_killed": Promise(Outcome.BEREFT, numbers=(1,), status=-9),
    "logs_full": Promise(Outcome.FAILED, moments=IN_STEPS, numbers=(1,), status=1),
    "lone_collective": Promise(Outcome.CONTRADICTED, moments=IN_STEPS, numbers=(1,)),
    "misshapen_collective": Promise(Outcome.CONTRADICTED, moments=IN_STEPS, numbers=(1,)),
}

SPECIAL = {
    ("terminate", "setup"): Promise(Outcome.LOST, ENDED),
    ("interrupt", "setup"): Promise(Outcome.LEFT),
    ("terminate", "last_step"): Promise(Outcome.SPARED),
}
"""At setup Lightning has not taken the signals yet: they do what they do to any Python. After the last step all end."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One field of the matrix."""

    fault: str
    moment: str
    number: int

    @property
    def promise(self) -> Promise:
        """What must hold."""
        return promise_of(self.fault, self.moment)


def promise_of(fault: str, moment: str) -> Promise:
    return SPECIAL.get((fault, moment), FAULTS[fault])


CELLS = [
    Cell(fault, moment, number)
    for fault, promise in FAULTS.items()
    for moment in promise.moments
    for number in promise.numbers
]

DISKS = {"logs_full": "logs", "events_full": "events"}
"""Faults that need a small disk, so a job of their own."""


def assign(cells: Sequence[Cell], chance: random.Random) -> list[str] | None:
    """Return the arguments of a job with these cells, or None if they don't go together.

    No two have the same moment or a victim in common, and one rank lives to the end.
    """
    cells = sorted(cells, key=lambda cell: MOMENTS.index(cell.moment))
    if len({cell.moment for cell in cells}) < len(cells) or any(cell.promise.is_end for cell in cells[:-1]):
        return None
    if len(cells) > 1 and any(cell.fault in DISKS for cell in cells):
        return None
    alive, fresh, arguments = set(MEMBERS), set(MEMBERS), []
    for cell in cells:
        if cell.moment == RECOVERY:  # somebody else must die first
            if len(alive) < 3 or not alive & fresh:
                return None
            first = chance.choice(sorted(alive & fresh))
            arguments.append(f"kill@second_epoch={first}")
            alive.discard(first)
        candidates = sorted(alive if cell.number == ALL_BUT_ONE else alive & fresh)
        number = cell.number or len(alive) - 1
        is_alone = cell.fault in ("lone_collective", "misshapen_collective", "terminate") and number >= len(alive)
        if not number or len(candidates) < number or is_alone:
            return None
        victims = sorted(chance.sample(candidates, number))
        moment = chance.choice(POINTS) if cell.moment == RECOVERY else cell.moment
        arguments.append(f"{cell.fault}@{moment}={','.join(victims)}")
        fresh -= set(victims)
        if cell.promise.outcome in (Outcome.LOST, Outcome.LEFT):
            alive -= set(victims)
        if not alive:
            return None
    return arguments


def deal(cells: Sequence[Cell], chance: random.Random) -> list[str]:
    """Deal cells to as few jobs as chance has it; returns the arguments of each."""
    hands: list[list[Cell]] = []
    plans: list[list[str]] = []
    for cell in chance.sample(cells, len(cells)):
        for index, hand in enumerate(hands):
            plan = assign([*hand, cell], chance)
            if plan is not None:
                hand.append(cell)
                plans[index] = plan
                break
        else:
            plan = assign([cell], chance)
            assert plan is not None, cell
            hands.append([cell])
            plans.append(plan)
    return [" ".join(plan) for plan in plans]


JOBS_PER_DEAL = 3


def _sample(seed: int) -> list[str]:
    """Return those jobs of a deal that are struck most often; each fault is dealt once, at a moment that chance has."""
    chance = random.Random(seed)
    cells = [chance.choice([cell for cell in CELLS if cell.fault == fault]) for fault in FAULTS]
    return sorted(deal(cells, chance), key=lambda plan: plan.count("@"), reverse=True)[:JOBS_PER_DEAL]


def plans() -> list[str]:
    """Return the jobs that the environment asks for."""
    asked = os.environ.get("MATRIX", "")
    if "@" in asked:
        return [asked]
    if asked == "all":
        return deal(CELLS, random.Random(0))
    first = int(asked or "0")
    return [plan for seed in range(first, first + int(os.environ.get("NUM_SWEEPS", "1"))) for plan in _sample(seed)]


class Hit(hits.Hit):
    """With what must hold."""

    @property
    def promise(self) -> Promise:
        return promise_of(self.fault, self.moment)
