"""The order of a view, and the tree over it."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lightning_ft.membership.arrangement import num_levels, tree, with_joined
from lightning_ft.membership.ids import in_order, parse_logical_id

ids = st.builds("{}/{}".format, st.integers(0, 5), st.integers(0, 4))


def nodes(members: tuple[str, ...]) -> list[int]:
    """The nodes that a way along some members comes to, one after the other."""
    return [node for node, _ in itertools.groupby(members, key=lambda member: parse_logical_id(member)[0])]


@given(st.sets(ids, min_size=1), st.lists(st.tuples(st.sets(ids), st.sets(ids)), max_size=6))
def test_members_of_a_node_stay_neighbours(expected: set[str], changes: list[tuple[set[str], set[str]]]) -> None:
    """Whoever goes or joins, foreign nodes too: each node is entered once, and those that stay keep their order."""
    view = in_order(expected)
    for left, joined in changes:
        stayed = tuple(member for member in view if member not in left)
        view = with_joined(stayed, in_order(joined - set(stayed)))
        assert set(view) == set(stayed) | joined
        assert tuple(member for member in view if member in stayed) == stayed
        assert view[:1] == stayed[:1] or not stayed
        assert len(nodes(view)) == len(set(nodes(view)))


def test_joiners_come_behind_their_node() -> None:
    """A member that comes back is with its node again; a new node comes last."""
    assert with_joined(("0/0", "0/2", "1/0"), ("0/1", "2/0", "1/1")) == ("0/0", "0/2", "0/1", "1/0", "1/1", "2/0")


@given(st.sets(ids, min_size=1).map(in_order))
def test_tree_reaches_all_and_enters_each_node_once(members: tuple[str, ...]) -> None:
    """Everybody but the first has one above, of a lower rank; only a node's first has it on another node."""
    above = tree(members)
    assert above[0] is None
    for rank, upper in enumerate(above[1:], 1):
        assert upper is not None
        assert upper < rank
        is_first = nodes(members[rank - 1 : rank + 1]) != nodes(members[rank : rank + 1])
        assert is_first == (nodes((members[upper],)) != nodes((members[rank],)))
    most = max(len(list(group)) for _, group in itertools.groupby(members, key=lambda name: parse_logical_id(name)[0]))
    assert num_levels(above) <= math.ceil(math.log2(len(nodes(members)))) + math.ceil(math.log2(most))


@pytest.mark.parametrize(
    ("members", "above"),
    [
        ([f"0/{slot}" for slot in range(8)], [None, 0, 0, 2, 0, 4, 4, 6]),
        ([f"{node}/0" for node in range(5)], [None, 0, 0, 2, 0]),
        (["0/0", "0/1", "0/2", "1/0", "1/1", "1/2", "2/0", "2/1"], [None, 0, 0, 0, 3, 3, 0, 6]),
    ],
)
def test_tree_is_binomial(members: list[str], above: list[int | None]) -> None:
    """Within a node, and among nodes."""
    assert tree(members) == tuple(above)
