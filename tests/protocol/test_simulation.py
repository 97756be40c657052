"""Thousands of random schedules of failures, against the invariants of PROTOCOL.md section 6."""

from __future__ import annotations

import os

import pytest
from simulation import Simulation

NUM_SCHEDULES = int(os.environ.get("SIM_SCHEDULES", "750"))
CHUNK = 250


def play(seed: int) -> Simulation:
    """Run one schedule; a failure says how to see it again."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        trace = "\n".join(simulation.trace[-120:])
        raise AssertionError(f"{trace}\n{error}\nreplay with SIM_SEED={seed} pytest {__file__}") from error
    return simulation


@pytest.mark.skipif("SIM_SEED" in os.environ, reason="one seed is replayed")
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_invariants_hold_in_random_schedules(first: int) -> None:
    """No order of messages, deaths, hangs, cuts, leaves and joins breaks an invariant or blocks a member for ever."""
    for seed in range(first, min(first + CHUNK, NUM_SCHEDULES)):
        play(seed)


@pytest.mark.skipif("SIM_SEED" not in os.environ, reason="set SIM_SEED to replay a schedule")
def test_replay() -> None:
    """Replay the schedule of `SIM_SEED` and print it."""
    print("\n".join(play(int(os.environ["SIM_SEED"])).trace))
