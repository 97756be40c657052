"""The parts of a comparison: when it is due, and the commit's slots, which follow the view."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import pytest
from tests.unit.comm import inner_groups
from tests.unit.comm.test_operations import finish, hand_over, run

from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.reduction import Commit
from lightning_ft.verification import is_due

NUM_MEMBERS = 3


@pytest.fixture(scope="module")
def members() -> Iterator[list[GlooTransport]]:
    """Three members."""
    with inner_groups.transports(NUM_MEMBERS) as made:
        yield made


def test_each_of_several_models_is_compared() -> None:
    """One step of each n is, the first of all among them, and each model's as often as another's, or nearly so."""
    num_blocks = 400
    for every, num_models in itertools.product(range(1, 13), range(1, 5)):
        due = [step for step in range(every * num_blocks) if is_due(step, every)]
        assert [step // every for step in due] == list(range(num_blocks))
        assert due[0] == 0
        turns = collections.Counter(step % num_models for step in due)
        assert min(turns[model] for model in range(num_models)) > num_blocks / num_models / 2, (every, num_models)
    assert not is_due(0, 0)


def test_a_commits_slots_are_those_of_the_view_that_finishes_it(members: list[GlooTransport]) -> None:
    """One that is done again among fewer has fewer slots, in the order of their ranks; so has whoever adopts it."""
    commits = [Commit(1 << rank, -(1 << 62) - rank) for rank in range(NUM_MEMBERS)]
    run(commits, inner_groups.places(members))
    assert [commit.digests for commit in commits] == [[-(1 << 62) - rank for rank in range(3)]] * 3
    again = inner_groups.places([members[2], members[0]])
    inner_groups.together(lambda: finish(commits[2], again[0]), lambda: finish(commits[0], again[1]))
    late = Commit(1, 5)
    hand_over(commits[0], late)
    for commit in (commits[0], commits[2], late):
        assert commit.total == 0b101
        assert commit.digests == [-(1 << 62) - 2, -(1 << 62)]
    plain = Commit(7)
    finish(plain, inner_groups.places(members[:1])[0])
    assert (plain.total, plain.digests) == (7, [])
