"""What a step may send ahead follows from what steps have cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ft.comm.pace import LEAST_BYTES, Pace, shares


def settled(quiet_s: float, slowdown: float, bytes_per_s: float, num_steps: int = 60) -> tuple[Pace, list[float]]:
    """Run steps that send what they may, on a link that costs them time. Returns: The durations of the last half."""
    pace = Pace(slowdown)
    for _ in range(5):
        pace.stepped(quiet_s, 0)
    durations = []
    for _ in range(num_steps):
        sent_bytes = pace.budget_bytes
        durations.append(quiet_s + sent_bytes / bytes_per_s)
        pace.stepped(durations[-1], sent_bytes)
    return pace, durations[num_steps // 2 :]


@given(
    quiet_s=st.floats(0.01, 100.0),
    slowdown=st.floats(0.01, 1.0),
    bytes_per_s=st.floats(1e6, 1e12),
)
def test_steps_are_longer_by_the_share_that_is_allowed(quiet_s: float, slowdown: float, bytes_per_s: float) -> None:
    """Not more, whatever the link is, and hardly less; but for what is always sent."""
    pace, durations = settled(quiet_s, slowdown, bytes_per_s)
    allowed_bytes = slowdown * quiet_s * bytes_per_s
    if allowed_bytes <= LEAST_BYTES:
        assert pace.budget_bytes == LEAST_BYTES
    else:
        assert max(durations) <= quiet_s * (1 + 1.01 * slowdown)
        assert min(durations) >= quiet_s * (1 + 0.99 * slowdown) - LEAST_BYTES / bytes_per_s


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(0, 10**12))))
def test_the_budget_moves_by_half_at_most(steps: list[tuple[float, int]]) -> None:
    """One step that was long for a reason of its own ruins nothing; there is always something to send."""
    pace = Pace(0.1)
    for duration_s, sent_bytes in steps:
        before = pace.budget_bytes
        pace.stepped(duration_s, sent_bytes)
        assert max(LEAST_BYTES, before // 2) <= pace.budget_bytes <= 2 * before


def test_without_a_step_to_compare_with_nothing_is_learned() -> None:
    """The first steps of a job may be those in which somebody joins."""
    pace = Pace(0.1)
    before = pace.budget_bytes
    pace.stepped(5.0, 1000)
    assert pace.quiet_s is None
    assert pace.budget_bytes == before


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 9))
def test_each_thing_is_one_donors(sizes: list[int], num_donors: int) -> None:
    """And nobody has more than another by more than the largest."""
    dealt = shares(sizes, num_donors)
    assert sorted(position for positions in dealt for position in positions) == list(range(len(sizes)))
    totals = [sum(sizes[position] for position in positions) for positions in dealt]
    assert max(totals) - min(totals) <= max(sizes, default=0)
