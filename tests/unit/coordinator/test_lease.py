"""What a process may conclude from its own clock and the coordinator's answers."""

from __future__ import annotations

from lightning_ft.coordinator.lease import Lease


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_valid_for_as_long_as_nobody_is_given_up() -> None:
    """Counted from when the heartbeat was sent, not from when its answer came."""
    clock = Clock()
    lease = Lease(10.0, clock)
    assert not lease.is_valid, "nothing was answered yet"
    sent_s = lease.beat()
    clock.now_s += 4
    lease.renew(sent_s)
    clock.now_s += 5.9
    assert lease.is_valid
    clock.now_s += 0.1
    assert not lease.is_valid
    lease.renew(sent_s - 50)
    lease.renew(clock.now_s)
    lease.renew(sent_s)  # answers of an older connection change nothing
    assert lease.is_valid


def test_a_silent_coordinator_is_no_doubt() -> None:
    """Whoever keeps sending was not away."""
    clock = Clock()
    lease = Lease(10.0, clock)
    lease.renew(lease.beat())
    for _ in range(10):
        clock.now_s += 9
        lease.beat()
    assert not lease.is_valid
    assert not lease.is_in_doubt


def test_who_was_away_is_in_doubt_until_it_is_answered() -> None:
    """Before the first heartbeat after the gap, and after it; an answer to an earlier one does not help."""
    clock = Clock()
    lease = Lease(10.0, clock)
    before_s = lease.beat()
    clock.now_s += 10.1
    assert lease.is_in_doubt
    lease.renew(before_s)
    assert lease.is_in_doubt
    after_s = lease.beat()
    assert lease.is_in_doubt
    lease.renew(before_s)
    assert lease.is_in_doubt
    lease.renew(after_s)
    assert not lease.is_in_doubt
