"""The running coordinator's entries on the nodes' agents: sent, acknowledged, and with whom it still may decide."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from lightning_ft.coordinator.accepted import Connection
from lightning_ft.membership import wire
from lightning_ft.membership.replication import Entry, Ledger


def pack(state: Mapping[str, Any]) -> str:
    """Write a state in little space: each decision goes to all nodes."""
    return base64.b64encode(zlib.compress(json.dumps(state).encode(), level=1)).decode()


def unpack(text: str) -> dict[str, Any]:
    """Read what `pack` wrote."""
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return state


class Replicas:
    """Who keeps the coordinator's entries; each by the id of its replica.

    Args:
        ledger: Of the entries; None: nobody but this node keeps them, since there are no others.
        home: The replica of this node's agent.
        duration_s: `heartbeat_timeout`: so long no agent follows another after it last heard of this coordinator.
        clock: Monotonic seconds.

    Attributes:
        is_in_office: Whether members may be let in: nothing was decided before this coordinator was started, or so many
            agents have come that it can decide. Until then there may be a successor that it does not know of.

    Threads: the event loop's.
    """

    def __init__(self, ledger: Ledger | None, home: int, duration_s: float, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._home = home
        self._duration_s = duration_s
        self._clock = clock
        self._agents: dict[int, Connection] = {}
        self._done: set[int] = set()
        self._heard_s: dict[int, float] = {}
        self._alive_s: dict[int, float] = {}
        self._quorum_s: float | None = None
        self.is_in_office = ledger is None or not ledger.holds
        self._started_s = clock()

    @property
    def term(self) -> int:
        """This coordinator's; 0 if it can have no successor."""
        return 0 if self._ledger is None else self._ledger.term

    def propose(self, state: Mapping[str, Any]) -> Entry | None:
        """Make an entry of a state, to be kept here before `send` gives it to the nodes."""
        return None if self._ledger is None else self._ledger.propose(pack(state), self._wanted())

    def send(self, entry: Entry) -> None:
        """Give an entry to all nodes that follow."""
        for agent in self._agents.values():
            agent.send(entry)

    def holds(self, number: int) -> bool:
        """Whether what was decided with an entry may be told."""
        return self._ledger is None or self._ledger.holds >= number

    def attach(self, replica: int, agent: Connection) -> None:
        """Note that a node's agent follows this coordinator."""
        if self._ledger is not None:
            self._agents[replica] = agent
            self._done.discard(replica)
            self.beat(replica)
            self.is_in_office = self.is_in_office or self._ledger.is_quorum(self._present())
            if self._ledger.last is not None:
                agent.send(self._ledger.last)

    def detach(self, replica: int, agent: Connection) -> None:
        """Note that a connection broke."""
        if self._agents.get(replica) is agent:
            del self._agents[replica]

    def beat(self, replica: int) -> None:
        """Note that an agent lives, and say to it what time it is; its next heartbeat repeats it."""
        if replica in self._agents:
            self._alive_s[replica] = self._clock()
            self._agents[replica].send(wire.CoordinatorHeartbeat(max(0.0, self._clock())))

    def heard(self, replica: int, sent_s: float) -> None:
        """Note that an agent has heard what was said at `sent_s`."""
        self._heard_s[replica] = max(sent_s, self._heard_s.get(replica, 0.0))

    def kept(self, replica: int, number: int) -> bool:
        """Note that a node has kept an entry. Returns: Whether more entries hold now."""
        if self._ledger is None or not self._ledger.kept(replica, number):
            return False
        if not self._ledger.is_changing:
            for other in self._done & set(self._agents) - set(self._ledger.replicas):
                self._agents[other].send(wire.Dismissed())
        return True

    def done(self, replica: int) -> None:
        """Note that an agent will end."""
        self._done.add(replica)

    @property
    def are_outdated(self) -> bool:
        """Whether others should keep the entries than do: nodes were lost, have come, or are done."""
        ledger = self._ledger
        return ledger is not None and not ledger.is_changing and set(ledger.replicas) != set(self._wanted())

    @property
    def has_lease(self) -> bool:
        """Whether no successor can decide yet, whatever happens: too many agents have heard of this one lately."""
        if self._ledger is None:
            return True
        since_s = self._clock() - self._duration_s
        return self._ledger.is_quorum([replica for replica, heard_s in self._heard_s.items() if heard_s > since_s])

    def lost_s(self) -> float:
        """For how long there were too few agents to decide; 0 before there were enough for the first time."""
        now_s = self._clock()
        if self._ledger is None or self._ledger.is_quorum(self._present()):
            self._quorum_s = now_s
        return 0.0 if self._quorum_s is None else now_s - self._quorum_s

    def waited_s(self) -> float:
        """For how long there have been too few agents since this coordinator was started; 0 once it is in office."""
        return 0.0 if self.is_in_office else self._clock() - self._started_s

    def _present(self) -> set[int]:
        """Whose agents answer. The silent are left out soon, so that the rest can lose others, and taken back in."""
        since_s = self._clock() - self._duration_s / 2
        return {replica for replica in self._agents if self._alive_s[replica] > since_s}

    def _wanted(self) -> set[int]:
        return (self._present() - self._done) | {self._home}
