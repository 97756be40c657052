"""Links that fail again and again: whose fault it is."""

from __future__ import annotations

import pytest
from driver import INTERVAL_S, Job

from lightning_ft.membership import effects, links
from lightning_ft.membership.links import LinkFailure
from lightning_ft.membership.state import Phase, Status

A, B, C, D = "0/0", "0/1", "1/0", "1/1"
MAX = 3


def broken(job: Job, reporter: str, suspect: str, *others: str) -> None:
    """One view breaks at a link, and the same members go on."""
    job.park(reporter, 5, suspects=(suspect,))
    for member in (suspect, *others):
        if job.state.members[member].status is Status.RUNNING:
            job.park(member, 5)


def test_a_few_failures_are_forgiven_and_reported() -> None:
    """The same members go on, and the log names both ends, their hosts and how often."""
    job = Job.running(A, C)
    for number in range(1, MAX + 1):
        broken(job, A, C)
        assert (job.state.generation, job.state.view.members) == (1 + number, (A, C))
        assert job.records("link_failed") == [{"member": A, "peer": C, "hosts": ["host0", "host1"], "count": number}]


def test_too_many_cost_the_end_that_others_report_too() -> None:
    """Here the lower of the two."""
    job = Job.running(A, B, C, D)
    broken(job, D, B, A, C)
    for _ in range(MAX + 1):
        broken(job, B, C, A, D)
    (failure,) = job.records("failure_detected")
    assert failure["member"] == B
    assert "its link to 1/0 failed 4 times" in str(failure["detail"])
    assert [kill.member for kill in job.of(effects.Kill)] == [B]
    assert job.state.view.members == (A, C, D)


def test_of_two_that_nobody_else_reports_the_higher_goes() -> None:
    """One must; the job keeps its first member, and the half with the lowest id may go on."""
    job = Job.running(A, B)
    for _ in range(MAX + 1):
        broken(job, A, B)
    assert job.state.view.members == (A,)


def test_one_end_of_many_bad_links_goes_and_not_the_others() -> None:
    """A bad card shows at all its links; that it alone speaks of them does not save it."""
    job = Job.running(A, B, C, D)
    for _ in range(MAX + 1):
        job.park(A, 5, suspects=(B, C, D))
        for member in (B, C, D):
            job.park(member, 5)
    assert job.state.view.members == (B, C, D)


def test_only_first_hand_news_counts() -> None:
    """Whoever parks after the view was suspended has seen others sever, unless it says that it tried to reach them."""
    job = Job.running(A, B, C)
    job.park(A, 5)
    job.park(B, 5, suspects=(A,))
    job.park(C, 5, suspects=(A,), reason="unreachable")
    assert [(failure.reporter, failure.suspect) for failure in job.state.link_failures] == [(C, A)]


def test_a_dead_end_is_no_bad_link() -> None:
    """The peers of a member that dies see their links to it break."""
    job = Job.running(A, B, C)
    job.park(B, 5, suspects=(A,))
    job.exited(A)
    job.park(C, 5)
    assert not job.records("link_failed")
    assert job.state.view.members == (B, C)


def test_links_of_those_who_heard_of_a_death_first_are_not_to_blame() -> None:
    """A notices that C died and severs; to B it looks as if its link to A had broken, and B is heard first."""
    job = Job.running(A, B, C)
    job.park(B, 5, suspects=(A, C))
    job.park(A, 5)
    job.exited(C)
    assert job.state.view.members == (A, B)
    assert not job.state.link_failures
    assert not job.records("link_failed")


@pytest.mark.parametrize("is_joining", [True, False])
def test_whoever_comes_to_a_boundary_first_cuts_links_that_are_good(is_joining: bool) -> None:
    """B has learned with the commit that somebody joins, and parks; to A, which is in it still, its link breaks."""
    job = Job.running(A, B)
    job.park(A, 5, suspects=(B,))
    job.park(B, 6, admits=is_joining)
    assert bool(job.records("link_failed")) != is_joining
    assert bool(job.state.link_failures) != is_joining
    assert job.state.view.members == (A, B)


def test_suspects_that_nobody_knows_are_ignored() -> None:
    """As is a member that reports itself."""
    job = Job.running(A, B)
    job.park(A, 5, suspects=("7/7", A))
    assert not job.state.link_failures


def test_old_failures_are_forgotten() -> None:
    """A link that fails once a day is not given up after days."""
    job = Job.running(A, B)
    for _ in range(3 * MAX):
        broken(job, A, B)
        job.tick(links.WINDOW_S, alive=(A, B))
    assert job.state.view.members == (A, B)


def test_a_verdict_waits_for_its_proof() -> None:
    """Those that are left may be no majority before the process of the other is known to be dead."""
    job = Job.running(A, B)
    for _ in range(MAX):
        broken(job, B, A)
    job.park(B, 5, suspects=(A,))
    job.leave(A, 5)
    job.tick(INTERVAL_S, alive=(A, B))
    assert job.state.phase is not Phase.STOPPED


@pytest.mark.parametrize("max_failures", [0, 1])
def test_count_is_of_views_not_of_reports(max_failures: int) -> None:
    """Both ends report the same break."""
    failures = [LinkFailure(0.0, 1, A, B), LinkFailure(0.0, 1, B, A)]
    assert links.counts(failures) == {(A, B): 1}
    assert links.accused(failures, max_failures) == ((B, A, 1) if max_failures == 0 else None)
