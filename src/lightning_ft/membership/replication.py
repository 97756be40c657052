"""The coordinator's decisions, kept by several nodes' agents, so that another coordinator can go on from them.

A *replica* is one agent's memory. It is lost with its process: an agent that is started again for the same node is
another replica, with another id, since it has forgotten what it had promised.

What is kept is one value, the coordinator's whole state, in numbered entries. An entry *holds* once a quorum of the
replicas has kept it; nobody is told of a decision before. A successor has a higher term. It takes what a quorum gives
it, when that quorum has promised to keep nothing of a lower term any more. The replicas themselves may change with an
entry; then both the old and the new ones have to agree.

Source: Lamport, "Paxos Made Simple", 2001 (promises, terms); Ongaro and Ousterhout, "In Search of an Understandable
Consensus Algorithm", 2014, section 6 (change of the replicas).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A state of the coordinator.

    Attributes:
        term: Of the coordinator that wrote it; each belongs to one node.
        number: Only grows, across terms too.
        before: The replicas that the last entry which is known to hold named.
        replicas: Those that keep entries from now on; not empty.
        text: The state.
    """

    term: int
    number: int
    before: tuple[int, ...]
    replicas: tuple[int, ...]
    text: str = dataclasses.field(repr=False)

    @property
    def age(self) -> tuple[int, int]:
        """Of two entries, the one with the larger is the newer."""
        return self.term, self.number

    def holds_with(self, kept: Collection[int]) -> bool:
        """Whether it holds if these replicas have kept it."""
        return is_quorum(self.before, kept) and is_quorum(self.replicas, kept)


_NUM_NONCES = 1_000_000_000


def replica_id(node: int, nonce: int) -> int:
    """The id of a new replica on a node; `nonce` is a random number. Ids are sorted by node."""
    return node * _NUM_NONCES + nonce % _NUM_NONCES


def node_of(replica: int) -> int:
    """The node that a replica is on."""
    return replica // _NUM_NONCES


def is_quorum(replicas: Iterable[int], answered: Collection[int]) -> bool:
    """Whether more than half of the replicas are among those that answered, or exactly half with the lowest.

    Any two quorums of the same replicas have one in common.
    """
    among = sorted(replicas)
    num = sum(replica in answered for replica in among)
    return 2 * num > len(among) or (2 * num == len(among) > 0 and among[0] in answered)


def next_term(term: int, node: int, num_nodes: int) -> int:
    """The lowest term above `term` that belongs to a node (from 0 to `num_nodes` - 1)."""
    return term + 1 + (node - term - 1) % num_nodes


class Replica:
    """What one agent has promised and kept.

    Attributes:
        term: The highest that it has promised: nothing of a lower one is kept.
        entry: The newest kept.
    """

    def __init__(self) -> None:
        self.term = 0
        self.entry: Entry | None = None

    def promise(self, term: int) -> bool:
        """Follow a coordinator of this term. Returns: False if a higher one was promised."""
        if term < self.term:
            return False
        self.term = term
        return True

    def keep(self, entry: Entry) -> bool:
        """Keep an entry. Returns: False if it comes from a coordinator that has a successor."""
        if not self.promise(entry.term):
            return False
        if self.entry is None or entry.age > self.entry.age:
            self.entry = entry
        return True


class Ledger:
    """The running coordinator's view of its entries.

    Args:
        term: Its own.
        number: Of the last entry that it goes on from; 0 at first.
        before: As in that entry; at first, the replica of its own node alone.
        replicas: As well.

    Attributes:
        holds: All entries up to this number hold.
        last: The newest entry.
    """

    def __init__(self, term: int, number: int, before: tuple[int, ...], replicas: tuple[int, ...]) -> None:
        self.term = term
        self.holds = number
        self.last: Entry | None = None
        self._number = number
        self._before, self.replicas = before, replicas
        self._open: list[Entry] = []
        self._kept: dict[int, int] = {}

    @property
    def is_changing(self) -> bool:
        """Whether it is open who keeps entries from now on."""
        return self._before != self.replicas

    def propose(self, text: str, replicas: Iterable[int]) -> Entry:
        """Write an entry, to be sent to all replicas.

        Args:
            text: The state.
            replicas: Who should keep entries from now on; ignored at the first entry, and while a change is open.
        """
        if not self.is_changing and self.last is not None:
            self.replicas = tuple(sorted(replicas)) or self.replicas
        self._number += 1
        self.last = Entry(self.term, self._number, self._before, self.replicas, text)
        self._open.append(self.last)
        return self.last

    def kept(self, replica: int, number: int) -> bool:
        """Note that a replica has kept an entry, and so all earlier ones. Returns: Whether more of them hold now."""
        self._kept[replica] = max(number, self._kept.get(replica, 0))
        done = 0
        for position, entry in enumerate(self._open, start=1):
            if entry.holds_with([other for other, last in self._kept.items() if last >= entry.number]):
                done = position
        if not done:
            return False
        newest = self._open[done - 1]
        self.holds, self._before = newest.number, newest.replicas
        del self._open[:done]
        return True

    def is_quorum(self, replicas: Collection[int]) -> bool:
        """Whether these replicas can decide now."""
        return is_quorum(self._before, replicas) and is_quorum(self.replicas, replicas)


class Candidacy:
    """A successor's: what the replicas give it.

    Args:
        term: Its own, higher than that of any coordinator that it knows of.
    """

    def __init__(self, term: int) -> None:
        self.term = term
        self._given: dict[int, Entry | None] = {}

    def take(self, replica: int, entry: Entry | None) -> None:
        """Note what a replica has kept, which has promised this term."""
        self._given[replica] = entry

    def newest(self) -> Entry | None:
        """Return the entry to go on from; None while too few have answered."""
        newest = max((entry for entry in self._given.values() if entry is not None), key=lambda e: e.age, default=None)
        return newest if newest is not None and newest.holds_with(self._given) else None
