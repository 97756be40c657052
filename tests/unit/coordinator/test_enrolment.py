"""The member's bookkeeping: what each message of the coordinator means in each state."""

from __future__ import annotations

import pytest

from lightning_ft.coordinator.enrolment import Enrolment, Left, NextView, Resync, Sever
from lightning_ft.coordinator.fingerprint import Fingerprint
from lightning_ft.errors import EvictedError, LaunchError, ProtocolViolationError, QuorumLostError
from lightning_ft.membership import effects, events
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import View

HERE = Address("h0", 1000)
MEETING = Address("h1", 2000)


def view(
    generation: int, base: int | None, left: tuple[str, ...], joined: tuple[str, ...], size: int = 3
) -> effects.CommitView:
    return effects.CommitView("0/1", generation, base, left, joined, size, MEETING)


@pytest.fixture
def enrolment() -> Enrolment:
    return Enrolment(events.Hello("0/1", 3, 0, HERE, pid=7), ("0/0", "0/1", "0/2"))


@pytest.fixture
def running(enrolment: Enrolment) -> Enrolment:
    """In view 1 with three members."""
    enrolment.park(0, "start", admits=False)
    enrolment.take(view(1, 0, (), ()))
    enrolment.collect()
    return enrolment


def test_first_view_is_a_difference_to_the_expected_members(enrolment: Enrolment) -> None:
    """Everybody knows these from the start; the view answers the park."""
    parked = enrolment.park(0, "start", admits=False)
    assert parked == events.Parked("0/1", 3, 0, 0, "start", False)
    assert enrolment.take(view(1, 0, ("0/2",), (), 2)) == ()
    assert enrolment.request is None
    assert enrolment.collect() == NextView(View(1, ("0/0", "0/1")), MEETING)
    assert enrolment.collect() is None


def test_later_views_are_differences(running: Enrolment) -> None:
    """Survivors keep their order, joiners come last."""
    running.park(4, "connection", admits=False)
    running.take(view(2, 1, ("0/0",), ("1/0",)))
    assert running.view == View(2, ("0/1", "0/2", "1/0"))
    assert running.hello().generation == 2


def test_whole_view_replaces_whatever_was_known(running: Enrolment) -> None:
    """After a missed view the coordinator repeats the whole one."""
    running.park(4, "connection", admits=False)
    running.take(view(5, None, (), ("0/1",), 1))
    assert running.view == View(5, ("0/1",))


def test_repeated_view_is_ignored(running: Enrolment) -> None:
    """The answer to a park that was sent twice changes nothing."""
    assert running.take(view(1, 0, (), ())) == ()
    assert running.collect() is None


def test_difference_to_an_unknown_view_asks_for_a_new_start(running: Enrolment) -> None:
    """A wrong base means that something was missed; said twice in a row it is a bug."""
    running.park(4, "connection", admits=False)
    (advice,) = running.take(view(4, 3, (), ()))
    assert isinstance(advice, Resync)
    assert running.view.generation == 1
    assert running.request is not None
    with pytest.raises(ProtocolViolationError, match="builds on 3"):
        running.take(view(4, 3, (), ()))


@pytest.mark.parametrize(
    ("left", "joined"),
    [(("9/9",), ()), ((), ("0/2",)), (("0/1",), ("1/0",)), (("0/0",), ("1/0", "0/2")), (("0/0",), ())],
    ids=["unknown-left", "joined-twice", "without-this-member", "one-joined-twice", "other-size"],
)
def test_impossible_difference_is_a_violation(
    running: Enrolment, left: tuple[str, ...], joined: tuple[str, ...]
) -> None:
    """A difference that does not fit changes nothing and names member and generation."""
    running.park(4, "connection", admits=False)
    with pytest.raises(ProtocolViolationError) as caught:
        running.take(view(2, 1, left, joined))
    assert (caught.value.member, caught.value.generation) == ("0/1", 1)
    assert running.view.generation == 1
    assert running.request is not None


def test_view_for_nobody_is_a_violation(running: Enrolment) -> None:
    """Only who waits is given a view."""
    with pytest.raises(ProtocolViolationError, match="waits for none"):
        running.take(view(2, 1, ("0/0",), (), 2))


def test_suspend_severs_the_current_view_only(running: Enrolment) -> None:
    """A suspension of an older view is over."""
    assert running.take(effects.Suspend("0/1", 1, "x")) == (Sever(1),)
    running.park(4, "suspended", admits=False)
    running.take(view(2, 1, ("0/0",), (), 2))
    assert running.take(effects.Suspend("0/1", 1, "x")) == ()


def test_suspend_that_overtakes_its_view_is_kept(running: Enrolment) -> None:
    """After a reconnect the suspension may be told before the missed view is."""
    running.park(4, "connection", admits=False)
    assert running.take(effects.Suspend("0/1", 2, "x")) == ()
    assert running.take(view(2, None, (), ("0/0", "0/1"), 2)) == (Sever(2),)


def test_leavers_are_those_of_the_view(running: Enrolment) -> None:
    """A leaver is told once, and forgotten with the view: who is needed in the next one leaves again."""
    assert running.take(effects.NotifyLeaving("0/1", "0/0", 7)) == (Left("0/0", 7),)
    assert running.take(effects.NotifyLeaving("0/1", "0/0", 7)) == ()
    assert running.take(effects.NotifyLeaving("0/1", "0/2", 8)) == (Left("0/2", 8),)
    running.park(7, "leave", admits=False)
    running.take(view(2, 1, ("0/0",), (), 2))
    assert running.leavers == {}


def test_leaver_may_be_given_a_view_first(running: Enrolment) -> None:
    """Somebody needs its result: it establishes, then leaves again."""
    running.leave(9)
    running.take(view(2, 1, ("0/0",), (), 2))
    assert running.collect() is not None
    assert running.leave(9).generation == 2
    assert not running.is_released
    running.take(effects.Release("0/1", 1, "done"))
    assert running.is_released


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (effects.Evict("0/1", 3, "too slow"), EvictedError),
        (effects.Stop("0/1", "too few"), QuorumLostError),
    ],
    ids=["evicted", "stopped"],
)
def test_end_is_final_and_severs(running: Enrolment, message: effects.Evict | effects.Stop, kind: type) -> None:
    """Whoever is out must be freed from its collective, and the first cause stays."""
    assert running.take(message) == (Sever(1),)
    first = running.error
    assert type(first) is kind
    assert message.reason in str(first)
    assert first.member == "0/1"
    assert first.generation == 1
    running.take(effects.Stop("0/1", "another"))
    assert running.error is first


def test_join_is_pending_until_the_next_view(running: Enrolment) -> None:
    """What was said of it lives as long as the view that it was said in."""
    waiting = (Address("host1", 29),)
    running.take(effects.AnnounceJoin("0/1", "ready", waiting))
    assert running.joiners == waiting
    running.park(4, "join", admits=True)
    running.take(view(2, 1, (), ("1/0",), 4))
    assert running.joiners == ()


def fingerprint(optimizer: str) -> Fingerprint:
    return Fingerprint([("optimizer 0", "optimizer", optimizer)])


def test_the_first_of_a_view_says_what_it_trains(running: Enrolment) -> None:
    """Nobody else does, so that it is said once; whoever becomes the first says it then."""
    assert running.description() is None
    running.fingerprint = fingerprint("SGD")
    assert running.description() is None
    running.park(4, "connection", admits=False)
    running.take(view(2, 1, ("0/0",), (), 2))
    assert running.description() == events.Described(
        "0/1", 3, running.fingerprint.digest, fingerprint("SGD").description
    )


def test_a_joiner_that_is_declined_says_where_it_differs() -> None:
    """Its digest goes with ready; what comes back tells why it can't join, for a person."""
    joiner = Enrolment(events.Hello("0/1", 3, 0, HERE, pid=7), ("0/0", "0/1"), is_joiner=True)
    joiner.fingerprint = fingerprint("Adam")
    assert joiner.hello() == events.Ready("0/1", 3, HERE, 7, fingerprint("Adam").digest)
    assert joiner.description() is None
    joiner.take(effects.Decline("0/1", 3, "it does not train what the job trains", fingerprint("SGD").description))
    assert isinstance(joiner.error, LaunchError)
    reason = "it does not train what the job trains (optimizer 0: optimizer is SGD there, Adam here)"
    assert str(joiner.error).startswith(f"joining the job failed: {reason}. ")


def test_a_joiner_without_a_place_is_told_so() -> None:
    """There is nothing to compare."""
    joiner = Enrolment(events.Hello("0/1", 3, 0, HERE, pid=7), ("0/0", "0/1"), is_joiner=True)
    joiner.take(effects.Decline("0/1", 3, "there is no room"))
    assert str(joiner.error) == "joining the job failed: there is no room. The job goes on without this process."
