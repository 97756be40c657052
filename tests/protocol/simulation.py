"""Virtual time, one random generator: the coordinator's core against model members, with faults.

Delays are random, so messages of different connections overtake each other; those of one connection don't. A seed
determines everything.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Callable

from model import Member, Mode, Result, kind_of
from network import Connection, Group

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events, machine, snapshot
from lightning_ft.membership.ids import parse_logical_id
from lightning_ft.membership.state import Phase, State, Status, Tally, initial

HORIZON_S = 300.0
SETTINGS = {"heartbeat_interval": 1.0, "heartbeat_timeout": 5.0, "timeout": 15.0}


class Simulation:
    """One schedule, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        size = self.random.randint(1, 6)
        self.settings = Settings(
            min_world_size=self.random.choice([1, 1, 1, 2]),
            max_failures=self.random.choice([None, None, None, 2]),
            max_world_size=self.random.choice([None, 20]),
            spares=self.random.choice([0, 1]),
            rejoin_timeout=self.random.choice([0.0, 4.0, 40.0]),
            **SETTINGS,  # type: ignore[arg-type]
        )
        self.max_delay_s = self.random.choice([0.01, 0.1, 0.6])
        self.cascade = self.random.choice([0.0, 0.0, 0.02, 0.08])
        self.last = self.random.randint(1, 14)
        self.state: State = initial([f"{i // 2}/{i % 2}" for i in range(size)], 0.0, self.settings.timeout)
        self.saved = snapshot.dump(self.state)
        self.num_restarts = 0
        self.views: dict[int, tuple[str, ...]] = {0: self.state.view.members}
        self.processes: dict[tuple[str, int], Member] = {}
        self.connections: dict[tuple[str, int], Connection] = {}
        self.groups: dict[int, Group] = {}
        self.failures: collections.Counter[tuple[str, int]] = collections.Counter()
        self.busy_until = 0.0
        self.inbox: collections.deque[tuple[str, events.Event]] = collections.deque()
        self.trace: list[str] = []
        self.dead_agents: set[str] = set()
        self.exits: list[events.Exited] = []
        self.num_kills_left = 4
        for name in self.state.view.members:
            member = Member(self, name, 1, last=self.last, is_joiner=False)
            self.processes[name, 1] = member
            if not self.chance(0.02):
                self.later(self.random.random(), lambda member=member: self.at(member, lambda: self.connect(member)))
            else:  # it never comes
                member.alive = member.port_open = False
        self._plan_faults()
        self.later(1.0, self._tick)
        for member in list(self.processes.values()):
            self.later(1.0, lambda member=member: self._heartbeat(member))

    # --- time -------------------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        """Whether something that happens with a probability happens now."""
        return self.random.random() < probability

    def delay(self) -> float:
        """How long a message or a notice takes."""
        return self.random.random() ** 2 * self.max_delay_s

    def compute_time(self) -> float:
        """How long a member computes between two numbers."""
        return self.random.random() * (6.0 if self.chance(0.02) else 0.3)

    def at_time(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, action))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a while."""
        self.at_time(self.now + seconds, action)

    def at(self, member: Member, action: Callable[[], None]) -> None:
        """Let a process do something: not if it is dead, and only once it is thawed if it is stopped."""
        if member.frozen:
            member.backlog.append(action)
        elif member.alive:
            action()

    def run(self) -> None:
        """Until every process has ended (I7)."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if self.state.phase is Phase.STOPPED and not any(m.alive for m in self.processes.values()):
                break
            if self.now > HORIZON_S:
                self._check_waiting()
                break
        self._check_results()

    # --- coordinator ------------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection, event: events.Event) -> None:
        """The server read a message."""
        member = connection.member
        if isinstance(event, events.Hello | events.Ready):
            self.connections[member.name, member.incarnation] = connection
        self.post(event)

    def dropped(self, connection: Connection) -> None:
        """The server saw a connection end; a replaced one does not count."""
        member = connection.member
        if self.connections.get((member.name, member.incarnation)) is connection:
            self.post(events.Disconnected(member.name, member.incarnation))

    def post(self, event: events.Event) -> None:
        """Give the core an event, later if the coordinator is starved."""
        self.inbox.append(("", event))
        if self.now >= self.busy_until:
            self._drain()

    def _drain(self) -> None:
        if self.now < self.busy_until:
            return
        while self.inbox:
            self._step(self.inbox.popleft()[1])

    def _step(self, event: events.Event) -> None:
        before = self.state
        self.state, todo = machine.step(self.settings, before, event, self.now)
        if not isinstance(event, events.Heartbeat | events.Tick):
            self.log(f"{event}")
        if self.state.generation != before.generation:
            self._check_view(before, event)
        self._check_tally()
        if snapshot.is_decision(before, self.state):
            self.saved = snapshot.dump(self.state)
        life = self.num_restarts
        for effect in todo:
            if self.num_restarts == life:  # else it died in the middle of this
                self._execute(effect)
            if self.chance(self.cascade / 8):
                self._restart()
        self._check_numbers()

    def _execute(self, effect: effects.Effect) -> None:
        self.log(f"    -> {effect}")
        match effect:
            case effects.Probe():
                process, life = self.processes[effect.member, effect.incarnation], self.num_restarts
                self.later(self.delay(), lambda: self._probe(process, life))
            case effects.Kill():
                process, life = self.processes[effect.member, effect.incarnation], self.num_restarts
                if effect.member not in self.dead_agents:
                    self.later(self.delay(), lambda: self._kill_if_told(process, life))
            case effects.Record():
                if effect.event == "failure_detected":
                    assert effect.member is not None
                    record = self.state.members[effect.member]
                    identity = (effect.member, record.incarnation or 0)
                    self.failures[identity] += 1
                    assert self.failures[identity] == 1, f"{identity} failed twice"
                    process = self.processes.get(identity)
                    if process is not None:
                        process.num_finished_when_gone = len(process.finished)
                        self._check_lease(process, dict(effect.fields))
            case effects.Refuse():
                pass
            case _:
                connection = self.connections.get((effect.member, self._incarnation(effect)))
                if connection is not None and connection.is_open:
                    connection.to_member(effect)

    def _check_lease(self, process: Member, failure: dict[str, object]) -> None:
        """M8: nobody is given up for silence within `heartbeat_timeout` of a heartbeat that it knows to be heard."""
        if "nothing was heard of it" in str(failure["detail"]):
            silent_s = self.now - process.renewed_s
            assert silent_s >= self.settings.heartbeat_timeout, f"{process.name} had a lease: {silent_s} s, {failure}"
            if process.connection is not None or process.is_cut_off:
                mute_s = self.now - process.vouched_s
                assert mute_s >= self.settings.heartbeat_timeout, (
                    f"{process.name} was vouched for: {mute_s} s, {failure}"
                )

    def _incarnation(self, effect: effects.Effect) -> int:
        assert not isinstance(effect, effects.Record)
        if isinstance(effect, effects.Evict | effects.Release | effects.Decline):
            return effect.incarnation
        known, joiner = self.state.members.get(effect.member), self.state.joiners.get(effect.member)
        if joiner is not None:
            return joiner.incarnation
        return (known.incarnation if known is not None else 0) or 0

    def _kill_if_told(self, process: Member, life: int) -> None:
        if self.num_restarts == life or self.chance(0.5):  # the message may have been lost with the coordinator
            self.die(process)

    def _restart(self) -> None:
        """The coordinator is killed, and started again from what it saved; all connections are made anew."""
        self.log("the coordinator is killed")
        self.num_restarts += 1
        open_connections = list(self.connections.values())
        self.connections.clear()
        self.inbox.clear()
        self.busy_until = self.now + self.random.random()
        self.later(self.busy_until - self.now, self._drain)
        for connection in open_connections:
            connection.member.is_cut_off = connection.is_open
            connection.drop(self.busy_until - self.now + self.random.random())
        self.state = snapshot.load(self.saved, self.now, self.settings.timeout, self.settings.timeout)
        self._check_tally()
        for kill in snapshot.pending_kills(self.state):
            self._execute(kill)
        for exited in self.exits:  # its agents say again how processes ended
            self.later(self.busy_until - self.now + self.delay(), lambda exited=exited: self.post(exited))

    def _probe(self, process: Member, life: int) -> None:
        if not process.port_open and self.num_restarts == life:
            self.post(events.ProbeRefused(process.name, process.incarnation))

    def _tick(self) -> None:
        self.later(1.0, self._tick)
        if self.now >= self.busy_until:
            self._drain()
            self._step(events.Tick())

    # --- processes --------------------------------------------------------------------------------------------------

    def connect(self, member: Member) -> None:
        """A process reaches the coordinator, for the first time or again."""
        if member.alive and member.connection is None:
            member.connection, member.is_cut_off = Connection(self, member), False
            member.connected()

    def _heartbeat(self, member: Member) -> None:
        if member.alive:
            self.later(1.0, lambda: self._heartbeat(member))
            if not member.frozen and member.mode is not Mode.ENDED and member.connection is not None:
                member.send(member.heartbeat())

    def die(self, member: Member) -> None:
        """A process ends: its sockets close one by one, and its agent sees the exit, in any order."""
        if not member.alive:
            return
        self.log(f"{member} dies ({member.outcome or 'killed'})")
        member.alive = member.frozen = False
        member.backlog.clear()
        if member.group is not None:
            member.group.broken_by(member)
        if member.connection is not None:
            member.connection.drop(None)
        self.later(self.delay(), lambda: setattr(member, "port_open", False))
        if member.name not in self.dead_agents:
            exited = events.Exited(member.name, member.incarnation, -9, "killed by SIGKILL")
            self.later(self.delay() * self.random.choice([1, 30]), lambda: self._exited(exited))

    def _exited(self, exited: events.Exited) -> None:
        self.exits.append(exited)
        self.post(exited)

    def given(self, member: Member, generation: int, members: tuple[str, ...]) -> None:
        """I1: a generation has one view."""
        assert self.views[generation] == members, f"I1: {member} was given {members} as {generation}"

    def group(self, generation: int, members: tuple[str, ...]) -> Group:
        """The inner group of a generation."""
        return self.groups.setdefault(generation, Group(self, generation, members))

    def reached(self, member: Member, point: str) -> None:
        """Sometimes a process dies just where recovery is most delicate."""
        if point != "number" and self.num_kills_left and self.chance(self.cascade):
            self.num_kills_left -= 1
            self.log(f"{member} is killed at {point}")
            self.die(member)

    def confirmed(self, member: Member, group: Group) -> None:
        """M3: whoever leaves the confirm knows that all are at M."""
        for name in group.members:
            other = self._process_in(group.generation, name)
            assert other.completed in (None, member.completed) or (other.completed or 0) >= (member.completed or 0), (
                other
            )

    def finished(self, member: Member, number: int, result: Result) -> None:
        """I4, I8."""
        self.log(f"{member} finishes {number}: {result}")
        if member.num_finished_when_gone is not None:
            assert len(member.finished) <= member.num_finished_when_gone + 1, f"I8: {member} finishes {number}"
        for name in self.views[result.generation]:
            other = self._process_in(result.generation, name)
            is_behind = other.completed is not None and other.completed < number - 1
            assert not is_behind, f"I4: {member} finished {number}, {other} is at {other.completed}"

    def _process_in(self, generation: int, name: str) -> Member:
        candidates = [m for m in self.processes.values() if m.name == name and generation in m.views]
        return candidates[-1] if candidates else next(m for m in self.processes.values() if m.name == name)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        names = self.state.view.members
        for name in names:
            if self.chance(0.08):
                self.dead_agents.add(name)
        span_s = 1.0 + self.last * 0.5
        for _ in range(self.random.choice([0, 1, 1, 2, 3, 4])):
            member = self.processes[self.random.choice(names), 1]
            fault = self.random.choice(
                [
                    *(self._kill, self._kill, self._freeze, self._mute, self._cut, self._cut, self._hang),
                    *(self._starve, self._crash),
                ]
            )
            self.later(self.random.random() * span_s, lambda fault=fault, member=member: fault(member))
        for number in range(self.random.choice([0, 0, 1, 2])):
            name = f"9/{number}" if self.chance(0.7) else self.random.choice(names)
            self.later(self.random.random() * span_s, lambda name=name: self._join(name))

    def _kill(self, member: Member) -> None:
        self.die(member)

    def _freeze(self, member: Member) -> None:
        if member.alive:
            self.log(f"{member} is stopped")
            member.frozen = True
            self.later(self.random.random() * 20, lambda: self._thaw(member))

    def _mute(self, member: Member) -> None:
        self._freeze(member)
        member.is_computing = True
        self._vouch(member)

    def _vouch(self, member: Member) -> None:
        if member.alive and member.is_computing and member.name not in self.dead_agents:
            member.vouched_s = self.now
            self.post(events.Vouched(((member.name, member.incarnation),)))
            self.later(1.0, lambda: self._vouch(member))

    def _thaw(self, member: Member) -> None:
        if member.alive and member.frozen:
            self.log(f"{member} is continued")
            member.frozen = member.is_computing = False
            backlog, member.backlog = member.backlog, []
            for action in backlog:
                self.at(member, action)  # type: ignore[arg-type]

    def _cut(self, member: Member) -> None:
        if member.connection is not None:
            self.log(f"{member} loses its connection")
            member.connection.drop(self.random.random() * self.random.choice([0.2, 12.0]))

    def _hang(self, member: Member) -> None:
        self.log(f"{member} hangs")
        member.is_stuck = True

    def _starve(self, _: Member) -> None:
        self.busy_until = self.now + self.random.random() * 15
        self.later(self.busy_until - self.now, self._drain)

    def _crash(self, _: Member) -> None:
        self._restart()

    def _join(self, name: str) -> None:
        incarnation = max((i for n, i in self.processes if n == name), default=0) + 1
        previous = self.processes.get((name, incarnation - 1))
        if previous is not None and previous.alive:
            return
        member = Member(self, name, incarnation, last=self.last, is_joiner=True)
        self.processes[name, incarnation] = member
        self.connect(member)
        self._heartbeat(member)

    # --- checks -----------------------------------------------------------------------------------------------------

    def log(self, line: str) -> None:
        """Keep a line for the report of a failing seed."""
        self.trace.append(f"{self.now:8.3f} {line}")

    def _check_view(self, before: State, event: events.Event) -> None:
        """I2, C7a: a view is a part of the one before, and joiners that may join."""
        ready = {joiner.member: joiner.fingerprint for joiner in before.joiners.scan()}
        if isinstance(event, events.Ready):  # it may be just what the others have waited for
            ready[event.member] = event.fingerprint
        view = self.state.view
        self.views[view.generation] = view.members
        stays = (Status.PARKED, Status.LEAVING, Status.RUNNING)
        old = [m for m in before.view.members if m in view.members and before.members[m].status in stays]
        joined = [member for member in view.members if member not in old]
        assert [member for member in view.members if member in old] == old
        nodes = [node for node, _ in itertools.groupby(view.members, key=lambda member: parse_logical_id(member)[0])]
        assert len(nodes) == len(set(nodes)), view
        assert all(member in ready for member in joined), joined
        num_places = self.settings.max_world_size or self.state.num_expected
        assert not joined or len(view.members) <= num_places, view
        others = [member for member in joined if ready[member] != "model"]
        assert not others or not before.fingerprint, others

    def _check_tally(self) -> None:
        """The counters against a recount."""
        if self.state.phase is Phase.STOPPED:
            return
        members = [self.state.members[name] for name in self.state.view.members]
        count = collections.Counter(member.status for member in members)
        assert self.state.tally == Tally(
            running=count[Status.RUNNING],
            parked=count[Status.PARKED],
            leaving=count[Status.LEAVING],
            gone=count[Status.GONE],
            released=count[Status.RELEASED],
            admitting=sum(member.admits for member in members),
            proven=sum(member.is_proven for member in members),
            holding=sum(member.status is Status.PARKED and member.has_state for member in members),
            opposing=sum(
                member.status is Status.GONE and member.has_state and not member.is_proven for member in members
            ),
        )

    def _check_numbers(self) -> None:
        """I3, among the members of the view that the coordinator believes in."""
        records = [self.state.members[name] for name in self.state.view.members]
        numbers = [
            process.completed
            for record in records
            if record.status not in (Status.GONE, Status.RELEASED)
            and (process := self.processes.get((record.member, record.incarnation or 0))) is not None
            and process.completed is not None
            and process.alive
        ]
        assert not numbers or max(numbers) - min(numbers) <= 1, f"I3: {numbers}"

    def _check_waiting(self) -> None:
        """I7: nobody waits for ever, but for a hung member that is the last one: then nobody misses it."""
        alive = [process for process in self.processes.values() if process.alive]
        waiting = [process for process in alive if not process.is_stuck and process.given]
        assert not waiting, f"I7: {[(process, process.mode) for process in waiting]} still wait"
        assert any(process.is_stuck for process in alive), f"I7: {alive} still wait"

    def _check_results(self) -> None:
        """I5, over the whole run."""
        final: dict[int, Result] = {}
        for process in self.processes.values():
            if process.outcome in ("released", "stopped"):
                for number, result in process.finished.items():
                    assert final.setdefault(number, result) == result, f"I5: {number} at {process}"
        for process in self.processes.values():  # the dead and evicted, too, may have stepped and written a checkpoint
            for number, result in process.finished.items():
                if kind_of(number) == "reduction" and number + 1 in process.finished and number in final:
                    assert final[number] == result, f"I5: {process} stepped with another gradient {number}"
