"""Quorums, terms, and who keeps the coordinator's entries; `tests/protocol/test_takeover.py` plays all of it."""

from __future__ import annotations

import pytest

from lightning_ft.membership.replication import Candidacy, Ledger, Replica, is_quorum, next_term, node_of, replica_id


@pytest.mark.parametrize("num_nodes", range(1, 6))
def test_two_quorums_have_a_node_in_common(num_nodes: int) -> None:
    """Of two disjoint sets of nodes at most one is a quorum."""
    for bits in range(2**num_nodes):
        ours = [node for node in range(num_nodes) if bits >> node & 1]
        others = [node for node in range(num_nodes) if not bits >> node & 1]
        assert is_quorum(range(num_nodes), ours) != is_quorum(range(num_nodes), others)


def test_terms_belong_to_one_node() -> None:
    """Two nodes never have the same."""
    terms = [next_term(term, node, 4) for term in range(9) for node in range(4)]
    assert all(next_term(term - 1, term % 4, 4) == term for term in terms)
    assert {next_term(5, node, 4) for node in range(4)} == {6, 7, 8, 9}


def test_ids_of_replicas_are_sorted_by_node() -> None:
    """The one of the lowest node decides between two halves."""
    assert replica_id(0, 2**32 - 1) < replica_id(1, 0) < replica_id(2, 5)
    assert [node_of(replica_id(node, 2**32 - 1)) for node in range(4)] == [0, 1, 2, 3]


def test_one_change_of_the_replicas_after_the_other() -> None:
    """Two at once could have quorums without a common replica."""
    ledger = Ledger(1, 0, (0, 1, 2), (0, 1, 2))
    ledger.propose("", [0])
    assert ledger.propose("", [0, 1]).replicas == (0, 1)
    assert ledger.propose("", [2]).replicas == (0, 1)
    assert ledger.is_changing
    assert not ledger.kept(0, 3)
    assert ledger.kept(1, 3)
    assert not ledger.is_changing
    last = ledger.propose("", [0])
    assert (last.before, last.replicas) == ((0, 1), (0,))


def test_change_needs_the_old_and_the_new_ones() -> None:
    """Either alone could be outvoted by the other."""
    ledger = Ledger(1, 0, (0, 1, 2), (0, 1, 2))
    ledger.propose("", [])
    ledger.kept(0, 1)
    ledger.kept(1, 1)
    ledger.propose("", [2, 3, 4])
    assert not ledger.is_quorum([2, 3, 4])
    assert not ledger.is_quorum([0, 1, 2])
    assert ledger.is_quorum([1, 2, 3])
    assert ledger.holds == 1


def test_replica_keeps_nothing_of_a_lower_term() -> None:
    """Once it has promised; of the same term it keeps the newest."""
    replica = Replica()
    old, new = Ledger(1, 0, (0,), (0,)), Ledger(2, 0, (0,), (0,))
    first, second = old.propose("a", []), old.propose("b", [])
    assert replica.keep(second)
    assert replica.keep(first)
    assert replica.entry == second
    assert replica.promise(2)
    assert not replica.keep(old.propose("c", []))
    assert not replica.promise(1)
    assert replica.keep(newest := new.propose("d", []))
    assert replica.entry == newest


def test_successor_needs_a_quorum_of_those_who_keep_the_newest_entry() -> None:
    """Those who never kept anything, or are not named, don't count."""
    entry = Ledger(1, 4, (0, 1, 2), (0, 1, 2)).propose("a", [])
    candidacy = Candidacy(2)
    for stranger in (5, 6, 7):
        candidacy.take(stranger, None)
    assert candidacy.newest() is None
    candidacy.take(2, entry)
    assert candidacy.newest() is None
    candidacy.take(1, None)
    assert candidacy.newest() == entry
