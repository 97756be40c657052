"""The exit status of a job, from how its processes ended."""

from __future__ import annotations

import pytest

from lightning_ft.coordinator.ending import job_status
from lightning_ft.membership import events

EITHER = frozenset({("0/0", 1), ("0/1", 1)})
ONLY_0 = frozenset({("0/0", 1)})
NOBODY: frozenset[tuple[str, int]] = frozenset()


@pytest.mark.parametrize(
    ("statuses", "released", "expected"),
    [
        ((0, 0), EITHER, 0),
        ((0, 0), NOBODY, 0),
        ((-9, 0), ONLY_0, 0),
        ((1, 0), NOBODY, 1),
        ((0, 3), EITHER, 3),
        ((3, 4), NOBODY, 4),
        ((1, -15), NOBODY, 143),
        ((-9, -9), NOBODY, 137),
        ((-9, 5), ONLY_0, 5),
        ((), NOBODY, 0),
    ],
    ids=[
        "all-finished",
        "plain-script",
        "one-lost-on-the-way",
        "nobody-released",
        "released-then-failed",
        "last-failure-counts",
        "signal",
        "all-killed",
        "survivor-failed",
        "nothing-started",
    ],
)
def test_job_status(statuses: tuple[int, ...], released: frozenset[tuple[str, int]], expected: int) -> None:
    """0 if a released member succeeded and none failed, else the last failure."""
    order = ("0/1", "0/0") if len(statuses) == 2 else ()
    exits = [events.Exited(member, 1, status, "") for member, status in zip(order, statuses, strict=True)]
    assert job_status(exits, released) == expected
