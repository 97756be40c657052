"""What lies between the model members: connections to the coordinator, and inner groups."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_ft.membership import effects, events, wire

if TYPE_CHECKING:
    from model import Member
    from simulation import Simulation


class Connection:
    """One WebSocket: in order in each direction, until it is dropped; then each end hears of it in its own time."""

    def __init__(self, sim: Simulation, member: Member) -> None:
        self.sim, self.member, self.is_open = sim, member, True
        self._last = {"up": 0.0, "down": 0.0}

    def _deliver(self, direction: str, action: Callable[[], None]) -> None:
        when = max(self.sim.now + self.sim.delay(), self._last[direction])
        self._last[direction] = when
        self.sim.at_time(when, lambda: action() if self.is_open else None)

    def to_coordinator(self, event: events.Event) -> None:
        """Send an event, through the wire format."""
        peer = wire.Peer(self.member.name, self.member.incarnation)
        decoded = wire.decode(wire.encode(event), expect=wire.FROM_MEMBER, peer=peer)  # type: ignore[arg-type]
        assert decoded == event
        self._deliver("up", lambda: self.sim.arrived(self, event))

    def to_member(self, effect: effects.Effect) -> None:
        """Send an effect, through the wire format."""
        peer = wire.Peer(self.member.name, self.member.incarnation)
        decoded = wire.decode(wire.encode(effect), expect=wire.TO_MEMBER, peer=peer)  # type: ignore[arg-type]
        assert decoded == effect
        self._deliver("down", lambda: self.sim.at(self.member, lambda: self._received(effect)))

    def _received(self, effect: effects.Effect) -> None:
        if self.member.connection is self:
            self.member.receive(effect)

    def drop(self, reconnect_s: float | None) -> None:
        """Break it. What is under way is lost; the member comes back after `reconnect_s`."""
        if not self.is_open:
            return
        self.is_open = False
        self.member.connection = None
        self.sim.later(self.sim.delay(), lambda: self.sim.dropped(self))
        if reconnect_s is not None:
            self.sim.later(reconnect_s, lambda: self.sim.at(self.member, lambda: self.sim.connect(self.member)))


class Group:
    """An inner group: full-dependency, and broken for good by one death or sever."""

    def __init__(self, sim: Simulation, generation: int, members: tuple[str, ...]) -> None:
        self.sim, self.generation, self.members = sim, generation, members
        self._entered: dict[tuple[object, ...], dict[str, object]] = collections.defaultdict(dict)
        self._issued: dict[str, list[tuple[object, ...]]] = collections.defaultdict(list)
        self._present: dict[str, Member] = {}
        self._broken: set[str] = set()

    def enter(self, member: Member, operation: tuple[object, ...], payload: object) -> None:
        """I9: the n-th operation is the same on all members."""
        issued = self._issued[member.name]
        issued.append(operation)
        for other in self._issued.values():
            if len(other) >= len(issued):
                assert other[len(issued) - 1] == operation, f"I9: {member} issues {operation}, others {other}"
        self._entered[operation][member.name] = payload
        self._present[member.name] = member
        if self.all_entered(operation):
            for other in self._present.values():
                self._schedule(other, lambda other=other: other.succeeded(self, operation))
        elif member.name in self._broken:
            self._schedule(member, lambda: member.broken(self))

    def _schedule(self, member: Member, action: Callable[[], None]) -> None:
        self.sim.later(self.sim.delay(), lambda: self.sim.at(member, action))

    def all_entered(self, operation: tuple[object, ...]) -> bool:
        """Whether everybody's data is there."""
        return len(self._entered[operation]) == len(self.members)

    def payload(self, operation: tuple[object, ...], member: str) -> object:
        """What a member put in."""
        return self._entered[operation][member]

    def last(self, member: Member) -> tuple[object, ...]:
        """The operation that a member issued last."""
        return self._issued[member.name][-1]

    def is_broken_for(self, member: Member) -> bool:
        """Whether it has heard of a death or a sever."""
        return member.name in self._broken

    def broken_by(self, member: Member) -> None:
        """A member died or severed: the others notice one by one, sometimes after they finished."""
        self._present.setdefault(member.name, member)
        for name in self.members:
            if name != member.name and name not in self._broken:
                self.sim.later(self.sim.delay(), lambda name=name: self._notice(name))

    def _notice(self, name: str) -> None:
        self._broken.add(name)
        member = self._present.get(name)
        if member is not None:
            self.sim.at(member, lambda: member.broken(self))
