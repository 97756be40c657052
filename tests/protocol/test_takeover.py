"""Random schedules of coordinators, nodes and networks: what one coordinator has told, no other contradicts."""

from __future__ import annotations

import json
import os
import random

import pytest

from lightning_ft.membership.replication import Candidacy, Entry, Ledger, Replica, next_term

NUM_SCHEDULES = int(os.environ.get("SIM_SCHEDULES", "750"))
CHUNK = 250


class Coordinator:
    """One that decides: its state is the list of all decisions so far. It tells them once they hold."""

    def __init__(self, entry: Entry, term: int) -> None:
        self.ledger = Ledger(term, entry.number, entry.before, entry.replicas)
        self.decisions: list[str] = json.loads(entry.text)
        self.lengths: dict[int, int] = {}
        self.told: list[str] = []

    def decide(self, decision: str | None, nodes: list[int]) -> Entry:
        """Decide something, or only who keeps it."""
        if decision is not None:
            self.decisions = [*self.decisions, decision]
        entry = self.ledger.propose(json.dumps(self.decisions), nodes)
        self.lengths[entry.number] = len(self.decisions)
        return entry

    def kept(self, node: int, number: int) -> None:
        """Tell what holds."""
        if self.ledger.kept(node, number):
            self.told = self.decisions[: self.lengths[self.ledger.holds]]


class Schedule:
    """Messages are lost, late and out of order; nodes die for good; anybody may stand at any time, again and again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_nodes = self.random.randint(1, 7)
        self.replicas = {node: Replica() for node in range(self.num_nodes)}
        self.coordinators: list[Coordinator] = []
        self.candidacies: list[Candidacy] = []
        self.messages: list[tuple[object, ...]] = []
        self.told: list[str] = []
        self.num_told = 0
        everybody = tuple(range(self.num_nodes))
        first = Coordinator(Entry(0, 0, everybody, everybody, "[]"), next_term(0, 0, self.num_nodes))
        self.coordinators.append(first)
        self.terms = {first.ledger.term}
        self.send(first, first.decide(None, []))

    def run(self) -> None:
        """Play, and check after each step."""
        for number in range(300):
            self.step(number)
            for coordinator in self.coordinators:
                short, long = sorted((self.told, coordinator.told), key=len)
                assert long[: len(short)] == short, f"contradiction: {self.told} and {coordinator.told}"
                self.told = long
            self.messages = self.messages[-60:]

    def step(self, number: int) -> None:
        """Do one thing."""
        what = self.random.random()
        if self.messages and what < 0.75:
            self.deliver(*self.messages.pop(self.random.randrange(len(self.messages))))
        elif what < 0.92:
            coordinator = self.random.choice(self.coordinators[-3:])
            living = [node for node in range(self.num_nodes) if node in self.replicas and self.random.random() < 0.8]
            decision = f"{coordinator.ledger.term}.{number}" if self.random.random() < 0.7 else None
            self.send(coordinator, coordinator.decide(decision, living))
        elif what < 0.98:
            self.stand()
        elif len(self.replicas) > 1 and self.random.random() < 0.3:
            del self.replicas[self.random.choice(sorted(self.replicas))]

    def stand(self) -> None:
        """A node's agent starts a successor, which asks all."""
        node = self.random.choice(sorted(self.replicas))
        taken = self.terms  # a node remembers which it has had
        term = self.replicas[node].term
        while (term := next_term(term, node, self.num_nodes)) in taken:
            pass
        self.terms.add(term)
        self.candidacies.append(Candidacy(term))
        self.messages += [("stand", self.candidacies[-1], other) for other in self.replicas]

    def send(self, coordinator: Coordinator, entry: Entry) -> None:
        """To all nodes."""
        self.messages += [("keep", coordinator, node, entry) for node in self.replicas]

    def deliver(self, kind: object, to: object, node: object, *rest: object) -> None:
        """A message arrives, if its receiver lives."""
        assert isinstance(node, int)
        replica = self.replicas.get(node)
        match kind, to:
            case "keep", Coordinator() if replica is not None:
                (entry,) = rest
                assert isinstance(entry, Entry)
                if replica.keep(entry):
                    self.messages.append(("kept", to, node, entry.number))
            case "kept", Coordinator():
                (number,) = rest
                assert isinstance(number, int)
                to.kept(node, number)
            case "stand", Candidacy() if replica is not None:
                if replica.promise(to.term):
                    self.messages.append(("promised", to, node, replica.entry))
            case "promised", Candidacy() if to in self.candidacies:
                (given,) = rest
                to.take(node, given)  # type: ignore[arg-type]
                entry = to.newest()
                if entry is not None:
                    self.candidacies.remove(to)
                    self.coordinators.append(successor := Coordinator(entry, to.term))
                    self.send(successor, successor.decide(None, []))


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_coordinator_contradicts_another(first: int) -> None:
    """Whatever is lost, whoever dies or stands: all that was ever told is one sequence."""
    num_told = num_successors = 0
    for seed in range(first, min(first + CHUNK, NUM_SCHEDULES)):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_told += len(schedule.told)
        num_successors += sum(bool(later.told) for later in schedule.coordinators[1:])
    assert num_told > CHUNK
    assert num_successors > CHUNK / 5, "successors get to decide, too"
