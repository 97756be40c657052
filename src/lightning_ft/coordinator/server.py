"""The coordinator's server: owns the sockets and the clock, feeds the pure core, does what the core says.

    frame -> wire.decode -> event ─┐                       ┌─> frame to a member or an agent
    connection broke, tick, probe ─┴─> machine.step ─> effects ─> probe, event log

Everything happens on one event loop, one event at a time. No peer is ever waited for.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from lightning_ft.config import Settings
from lightning_ft.coordinator.accepted import CLOSING_TIME_S, Connection, RefusedError, accept
from lightning_ft.coordinator.channel import AGENT_PATH, GATHERING_PATH, MEMBER_PATH
from lightning_ft.coordinator.ending import Ending, Identity
from lightning_ft.coordinator.enlisting import beginning, who_is_there
from lightning_ft.coordinator.memory import Memory
from lightning_ft.coordinator.nodes import Nodes
from lightning_ft.coordinator.probe import wait_until_refused
from lightning_ft.coordinator.replicas import Replicas
from lightning_ft.coordinator.status_view import STATUS_PATH, StatusView
from lightning_ft.event_log import DEFAULT_NAME, EventLog, exception_of
from lightning_ft.faultpoints import reach
from lightning_ft.membership import effects, events, machine, snapshot, state, wire
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.replication import Ledger, node_of
from lightning_ft.membership.transitions import ALL_LEFT

logger = logging.getLogger("lightning_ft")

START_TIMEOUT_S = 600.0
"""A member may take at least this long from the start of its process to its first sign of life."""

_TICKS = 12
"""Deadlines are judged at least so often in a `heartbeat_timeout`: silence is noticed a twelfth of it late at most."""

_WORD_EVERY_S = 30.0

_FROM_ITSELF = (events.Hello, events.Parked, events.Leaving, events.Ready, events.Described, events.Heartbeat)


class CoordinatorServer:
    """Arbiter of one job.

    Args:
        settings: The job's settings.
        expected_members: Logical ids of the members of the first view.
        token: Secret that peers must present.
        event_log: Where events go.
        memory: Where decisions are kept. If an earlier coordinator left some, this one goes on from there.
        replica: Id of the replica of the agent that has started it; None: no agent did, it is a service of its own.
        term: Its term; 0: no other node keeps its decisions, and it can have no successor.
        clock: Monotonic seconds.

    Attributes:
        ended: Set once the job is over, and its status told: no member is connected, and no agent has processes.
        status: The job's, once it is over.
        is_deposed: Whether it ended because another coordinator has taken its place.

    Threads: one event loop's only.
    """

    def __init__(
        self,
        settings: Settings,
        expected_members: Sequence[str],
        token: str,
        event_log: EventLog,
        *,
        memory: Memory | None = None,
        replica: int | None = 0,
        term: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._token = token
        self._event_log = event_log
        self._clock = clock
        self._memory = memory
        self._home = None if replica is None else node_of(replica)
        self._expected = tuple(expected_members)
        self._enlisted: dict[str, int] = {}
        self.is_deposed = False
        self.status: int | None = None
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        start_timeout_s = max(settings.longest_timeout, START_TIMEOUT_S)
        saved = None if memory is None else memory.load()
        self._not_over_before_s = clock()
        self._next_word_s = clock() + _WORD_EVERY_S
        home = replica or 0
        self._replicas = Replicas(_ledger(saved, term, home), home, settings.heartbeat_timeout, clock)
        if memory is not None and saved is not None:
            self._state = snapshot.load(saved["core"], clock(), settings.longest_timeout, start_timeout_s)
            self._ending = Ending((member, incarnation) for member, incarnation in saved["released"])
            self._enlisted.update(saved["enlisted"])
            for item in memory.items():
                self._ending.note(events.Exited(*item))
            self._not_over_before_s += settings.heartbeat_timeout  # members and agents may not be back before
            if saved["event_log"] is not None:
                event_log.open(saved["event_log"])
            event_log.resume(saved["lines"])
            self.record("coordinator_restarted")
        else:
            self._state = state.initial(expected_members, clock(), start_timeout_s)
            self._ending = Ending()
            shown = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
            self.record("job_started", members=list(self._state.view.members), settings=shown)
        self._standbys: dict[int, str] = {}
        self._members: dict[Identity, Connection] = {}
        self._agents: dict[int, Connection] = {}
        self._done: set[int] = set()
        self._nodes = Nodes(settings.heartbeat_timeout)
        self._kills: dict[Identity, effects.Kill] = {}
        self._probes: dict[Identity, asyncio.Task[None]] = {}
        self._refusals: dict[str, str] = {}
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_closing = False
        self.ended = asyncio.Event()
        self._decided = self._save()  # the last coordinator may have kept it here alone
        again = [(kill, kill.incarnation) for kill in snapshot.pending_kills(self._state)]
        is_stop = self._state.phase is state.Phase.STOPPED
        self._outgoing.append(_Outgoing(self._decided, [], again, events.Tick(), is_stop))
        self._carry_out()

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._state.view.generation

    @property
    def is_failed(self) -> bool:
        """Whether the core gave the job up."""
        return self._state.phase is state.Phase.STOPPED and self._state.reason != ALL_LEFT

    @property
    def members(self) -> tuple[str, ...]:
        """The current view's members, in order."""
        return tuple(self._state.view.members)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, and start to tick."""
        application = web.Application()
        routes = {
            MEMBER_PATH: self._serve_member,
            AGENT_PATH: self._serve_agent,
            GATHERING_PATH: self._serve_arrival,
            STATUS_PATH: StatusView(self._token, lambda: self._state, self._clock).serve,
        }
        application.add_routes([web.get(path, handler) for path, handler in routes.items()])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_TIME_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=1024).start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def stop(self) -> None:
        """Deliver what was said, close all connections, stop listening. Members keep training."""
        self._is_closing = True
        tasks = [task for task in (self._ticker, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = [*self._members.values(), *self._agents.values()]
        await asyncio.gather(*(connection.say_goodbye() for connection in connections))
        if self._runner is not None:
            await self._runner.cleanup()

    def end(self) -> None:
        """Declare the job over, whoever is still there."""
        if not self.ended.is_set():
            members = self._members_by_node().values()
            status = self._ending.status({identity for of_node in members for identity in of_node})
            self.record("job_finished", status=status)
            self.status = status
            for agent in self._agents.values():
                agent.send(wire.JobEnded(status))
            self.ended.set()

    def _end_if_over(self) -> None:
        """The job is over when no member is connected and every agent has said that its processes have ended."""
        is_settled = self._state.phase is state.Phase.STOPPED or self._clock() >= self._not_over_before_s
        # Without an agent of its own nobody has to hear of it: the agents end when their processes have ended.
        is_told = self._state.phase is state.Phase.STOPPED if self._home is None else self._home in self._agents
        if is_settled and is_told and not self._outgoing and not self._members and set(self._agents) <= self._done:
            self.end()

    def record(self, event: str, member: str | None = None, **fields: Any) -> None:
        """Append a line about the current generation to the event log."""
        self._event_log.write(event, generation=self.generation, member=member, **fields)

    # Accepting.

    async def _serve_member(self, request: web.Request) -> web.WebSocketResponse:
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        identity: Identity | None = None
        try:
            hello = await self._first(connection, (events.Hello, events.Ready))
            identity = (hello.member, hello.incarnation)
            self._attach_member(connection, identity)
            self._apply(hello)
            peer = wire.Peer(*identity)
            while (text := await connection.receive()) is not None:
                self._on_member_message(_decode(text, wire.FROM_MEMBER, peer))
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            connection.outbox.close()
            if identity is not None and self._members.get(identity) is connection:
                del self._members[identity]
                if not self._is_closing:
                    self._apply(events.Disconnected(*identity))
                    self._end_if_over()
        return connection.websocket

    async def _serve_agent(self, request: web.Request) -> web.WebSocketResponse:
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        node: int | None = None
        replica = 0
        try:
            hello = await self._first(connection, (wire.AgentHello,))
            node = hello.node
            replica = hello.replica
            self._attach_agent(connection, hello)
            while (text := await connection.receive()) is not None:
                self._on_agent_message(_decode(text, wire.FROM_AGENT, None), node, replica, connection)
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            connection.outbox.close()
            self._replicas.detach(replica, connection)
            if node is not None and self._agents.get(node) is connection:
                del self._agents[node]
                if not self._is_closing:
                    logger.debug("the agent of node %d disconnected", node)
                    self._end_if_over()
        return connection.websocket

    async def _serve_arrival(self, request: web.Request) -> web.WebSocketResponse:
        """C7b: tell an agent that comes to a job that runs which members it may start."""
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        try:
            connection.send(await self._beginning_for(await self._first(connection, (wire.NodeArrived,))))
            await connection.say_goodbye()
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            connection.outbox.close()
        return connection.websocket

    async def _beginning_for(self, arrived: wire.NodeArrived) -> wire.JobBegins:
        deadline_s = self._clock() + 2 * self._settings.heartbeat_timeout
        while (obstacle := who_is_there(self._state, self._agents, arrived.node)) and self._clock() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(self._pause_s)  # it may have died a moment ago
        told = obstacle or beginning(arrived, self._state, self._settings, self._expected, self._enlisted)
        if isinstance(told, str):
            raise RefusedError(told)
        self._enlisted.update({member: last + 1 for member, last in told.incarnations})
        self._save()
        return told

    def _attach_member(self, connection: Connection, identity: Identity) -> None:
        connection.peer = f"{identity[0]} (incarnation {identity[1]})"
        old = self._members.get(identity)
        self._members[identity] = connection
        if old is not None:
            old.replace()
        self._end_probe(identity)
        connection.send(wire.Welcome(self._settings.heartbeat_interval, self._replicas.term))
        self._tell_standbys(connection)

    def _attach_agent(self, connection: Connection, hello: wire.AgentHello) -> None:
        connection.peer = f"the agent of node {hello.node}"
        old = self._agents.get(hello.node)
        self._agents[hello.node] = connection
        if old is not None:
            old.replace()
        self._done.discard(hello.node)  # until it says so again
        self._hear_agent(hello.node)
        connection.send(wire.Welcome(self._settings.heartbeat_interval, self._replicas.term))
        if hello.term > self._replicas.term:
            self._step_down()
            return
        if hello.standby and self._standbys.get(hello.node) != hello.standby:
            self._standbys[hello.node] = hello.standby
            for other in (*self._members.values(), *self._agents.values()):
                self._tell_standbys(other)
        else:
            self._tell_standbys(connection)
        if self._state.phase is state.Phase.STOPPED and not self._outgoing:
            self._tell_stopped(connection, self._members_by_node().get(hello.node, []))
        for identity in hello.incarnations:
            if identity in self._kills:
                connection.send(self._kills[identity])

    def _tell_standbys(self, connection: Connection) -> None:
        if self._standbys:
            connection.send(wire.Standbys(tuple(endpoint for _, endpoint in sorted(self._standbys.items()))))

    def _on_agent_message(self, message: wire.Message, node: int, replica: int, connection: Connection) -> None:
        self._hear_agent(node)
        match message:
            case wire.AgentHeartbeat():
                self._replicas.heard(replica, message.heard_s)
                self._replicas.beat(replica)
                if message.computing:
                    self._apply(events.Vouched(message.computing))
            case wire.Promised():
                if message.term == self._replicas.term:
                    self._replicas.attach(replica, connection)
            case wire.Kept():
                if self._replicas.kept(replica, message.number):
                    self._carry_out()
            case events.Exited():
                self._on_exited(message, node)
            case wire.AgentDone():
                self._done.add(node)
                self._nodes.forget(node)
                self._replicas.done(replica)
                self._renew_replicas()
                self._end_if_over()

    def _hear_agent(self, node: int) -> None:
        if node not in self._done and self._nodes.hear(node, self._state.clock_s(self._clock())):
            self.record("node_heard", node=node)

    def _report_silent_nodes(self) -> None:
        for node, late_s in self._nodes.newly_silent(self._state.clock_s(self._clock())).items():
            self.record("node_silent", node=node, late_s=round(late_s, 3))

    def _tell_who_is_awaited(self) -> None:
        """Say now and then who is missing for the first view; nothing else would be said."""
        if self.generation or self._state.phase is state.Phase.STOPPED or self._clock() < self._next_word_s:
            return
        self._next_word_s = self._clock() + _WORD_EVERY_S
        known = self._state.members.scan()
        missing = in_order(member.member for member in known if member.status is state.Status.RUNNING)
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        logger.warning("[job g0] waiting for %s%s", ", ".join(missing[:8]), more)

    def _tell_stopped(self, agent: Connection, members: Sequence[tuple[str, int]]) -> None:
        agent.send(wire.JobStopped(self._state.reason, is_failed=self.is_failed, members=tuple(members)))

    def _members_by_node(self) -> dict[int, list[tuple[str, int]]]:
        found: dict[int, list[tuple[str, int]]] = {}
        for member in self._state.members.scan():
            if member.incarnation is not None:
                node = int(member.member.partition("/")[0])
                found.setdefault(node, []).append((member.member, member.incarnation))
        return found

    # Receiving.

    async def _first(self, connection: Connection, expect: tuple[type, ...]) -> Any:
        try:
            async with asyncio.timeout(self._settings.heartbeat_timeout):
                text = await connection.receive()
        except TimeoutError:
            raise RefusedError("no hello came in time") from None
        if text is None:
            raise RefusedError("the connection ended without a hello")
        return _decode(text, expect, None)

    def _on_member_message(self, message: wire.Message) -> None:
        if isinstance(message, wire.Report):
            self._on_report(message)
        else:
            self._apply(message)  # type: ignore[arg-type]  # FROM_MEMBER holds events and Report only

    def _on_report(self, report: wire.Report) -> None:
        known = self._state.members.get(report.member)
        if known is not None and known.status is state.Status.GONE:
            logger.debug("dropped %s of %s, which is out of the job", report.event, report.member)
            return
        fields = dict(report.fields)
        if report.event == "log_directory":
            if self._settings.event_log is None and isinstance(fields.get("path"), str):
                self._event_log.open(f"{fields['path']}/{DEFAULT_NAME}")
                self._save()
            return
        generation = fields.pop("generation", self.generation)
        if report.event == "failed":  # it has cut its connections and will come back to no collective
            detail = f"failed with {exception_of(str(fields.get('exception', '')))}"
            signature = str(fields.get("signature", ""))
            self._apply(events.Failed(report.member, report.incarnation, detail, signature))
        self._event_log.write(
            report.event,
            generation=generation if isinstance(generation, int) else self.generation,
            member=report.member,
            **{name: value for name, value in fields.items() if name not in ("event", "member")},
        )

    def _on_exited(self, exited: events.Exited, node: int) -> None:
        identity = (exited.member, exited.incarnation)
        if exited.member.partition("/")[0] != str(node):
            logger.warning("dropped an exit of %s from the agent of node %d: not its member", exited.member, node)
            return
        if not self._ending.note(exited):
            return
        if self._memory is not None:
            self._memory.append([exited.member, exited.incarnation, exited.status, exited.detail])
        self._kills.pop(identity, None)
        self._end_probe(identity)
        if exited.stacks:
            self.record("member_stacks", exited.member, stacks=exited.stacks)
        self._event_log.write(
            "member_exited",
            generation=self.generation,
            member=exited.member,
            status=exited.status,
            detail=exited.detail,
        )
        self._apply(exited)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._apply(events.Tick())
            self._renew_replicas()
            self._give_up_without_a_majority()
            self._report_silent_nodes()
            self._tell_who_is_awaited()
            self._end_if_over()

    @property
    def _pause_s(self) -> float:
        return min(self._settings.heartbeat_interval, self._settings.heartbeat_timeout / _TICKS)

    # Deciding and doing.

    def _apply(self, event: events.Event) -> None:
        """Let the core decide, keep what it decided, then do what it says. An event it can't take changes nothing."""
        before = self._state
        try:
            self._state, todo = machine.step(self._settings, before, event, self._clock())
        except Exception:
            logger.exception("the coordinator dropped %s", event)
            return
        for effect in todo:
            if isinstance(effect, effects.Release) and self._state.phase is state.Phase.STOPPED:
                self._note_released(effect)
        lines = [self._line(effect) for effect in todo if isinstance(effect, effects.Record)]
        if snapshot.is_decision(before, self._state):
            reach("decision.made")
            self._decided = self._save(lines)  # before anybody hears of it
            reach("decision.saved")
        is_stop = self._state.phase is state.Phase.STOPPED and before.phase is not state.Phase.STOPPED
        named = [(effect, self._incarnation(effect.member, event)) for effect in todo if effect.member is not None]
        self._outgoing.append(_Outgoing(self._decided, lines, named, event, is_stop))
        self._carry_out()

    def _carry_out(self) -> None:
        """Do what was decided, in order, as far as enough nodes keep it."""
        while self._outgoing and self._replicas.holds(self._outgoing[0].number):
            outgoing = self._outgoing.popleft()
            for line in outgoing.lines:
                self._event_log.append(line)
            for effect, incarnation in outgoing.todo:
                try:
                    self._execute(effect, incarnation, outgoing.cause)
                except Exception:
                    logger.exception("the coordinator failed to carry out %s", effect)
            if outgoing.is_stop:
                self._stopped()

    def _renew_replicas(self) -> None:
        """Have those nodes keep the decisions that are there."""
        if self._replicas.are_outdated and self._state.phase is not state.Phase.STOPPED:
            self._save()

    def _step_down(self) -> None:
        """End, because another coordinator has taken this one's place: nobody's state here means anything any more."""
        logger.warning("[job g%d] another coordinator has taken this one's place", self.generation)
        self.is_deposed = True
        self.ended.set()

    def _give_up_without_a_majority(self) -> None:
        """What was decided can't be kept: the others are lost, or this node is cut off and they go on without it."""
        lost_s = self._replicas.lost_s()
        if not self._outgoing or lost_s < self._settings.heartbeat_timeout or self.ended.is_set():
            return
        reason = f"too few nodes are left to decide: no majority of their agents was heard for {lost_s:.3g} s"
        self._outgoing.clear()
        self.record("job_stopped", reason=reason)
        for (member, _), connection in self._members.items():
            connection.send(effects.Stop(member, reason))
        members = self._members_by_node()
        for node, agent in self._agents.items():
            agent.send(wire.JobStopped(reason, is_failed=True, members=tuple(members.get(node, []))))
        self.ended.set()

    def _stopped(self) -> None:
        for identity in list(self._probes):
            self._end_probe(identity)
        members = self._members_by_node()
        for node, agent in self._agents.items():
            self._tell_stopped(agent, members.get(node, []))

    def _line(self, record: effects.Record) -> str:
        fields = dict(record.fields)
        return self._event_log.line(record.event, generation=record.generation, member=record.member, **fields)

    def _save(self, lines: Sequence[str] = ()) -> int:
        """Keep what was decided. If that fails, this process ends: another goes on from what was kept before.

        Returns: Number of the entry that the nodes have to keep before it may be told.
        """
        if self._memory is None:
            return 0
        log_path = self._event_log.path
        waiting = [line for outgoing in self._outgoing for line in outgoing.lines]
        saved = {
            "core": snapshot.dump(self._state),
            "enlisted": self._enlisted,
            "released": sorted(self._ending.released),
            "event_log": None if log_path is None else str(log_path),
            "lines": [*self._event_log.unwritten(), *waiting, *lines],
        }
        entry = self._replicas.propose(saved)
        if entry is None:
            self._memory.save({**saved, "replication": None})
            return 0
        self._memory.save({**saved, "replication": [entry.term, entry.number, entry.before, entry.replicas]})
        self._replicas.send(entry)
        return entry.number

    def _note_released(self, release: effects.Release) -> None:
        known = self._state.members.get(release.member)
        if known is not None and known.incarnation == release.incarnation:  # else it came when the job had ended
            self._ending.released.add((release.member, release.incarnation))

    def _execute(self, effect: effects.Effect, incarnation: int, cause: events.Event) -> None:
        match effect:
            case effects.Record():
                pass  # it is in the event log already
            case effects.Refuse():
                is_new = self._refusals.get(effect.member) != effect.reason
                self._refusals[effect.member] = effect.reason
                is_news = is_new and not isinstance(cause, events.Exited)  # whoever ends may not have been admitted
                level = logging.WARNING if is_news else logging.DEBUG
                logger.log(level, "[%s g%d] a message was dropped: %s", effect.member, self.generation, effect.reason)
            case effects.Probe():
                self._probe(effect)
            case effects.Kill():
                self._kill(effect)
            case effects.Acknowledge():
                if self._replicas.has_lease:
                    self._send((effect.member, incarnation), effect)
            case effects.Evict() | effects.Release() | effects.Decline():
                reach("member.told")
                self._send((effect.member, effect.incarnation), effect)
            case _:
                reach("member.told")
                self._send((effect.member, incarnation), effect)

    def _incarnation(self, member: str, cause: events.Event) -> int:
        """The one that the core means when it names a member alone: who asked, or who is waited for."""
        if isinstance(cause, _FROM_ITSELF) and cause.member == member:
            return cause.incarnation
        joiner, known = self._state.joiners.get(member), self._state.members.get(member)
        if joiner is not None:
            return joiner.incarnation
        return known.incarnation if known is not None and known.incarnation is not None else 0

    def _send(self, identity: Identity, message: wire.Message) -> None:
        connection = self._members.get(identity)
        if connection is None or not connection.send(message):
            logger.debug("%s is not connected to hear %s", identity, message)

    def _kill(self, kill: effects.Kill) -> None:
        agent = self._agents.get(int(kill.member.partition("/")[0]))
        if agent is not None:
            agent.send(kill)
        self._kills[kill.member, kill.incarnation] = kill  # again if the agent reconnects, until the exit is reported

    def _probe(self, probe: effects.Probe) -> None:
        identity = (probe.member, probe.incarnation)
        if identity not in self._probes:
            task = asyncio.get_running_loop().create_task(self._probe_until_resolved(probe))
            self._probes[identity] = task

    async def _probe_until_resolved(self, probe: effects.Probe) -> None:
        identity = (probe.member, probe.incarnation)
        await wait_until_refused(probe.address, self._pause_s)
        self._probes.pop(identity, None)
        self._apply(events.ProbeRefused(*identity))

    def _end_probe(self, identity: Identity) -> None:
        task = self._probes.pop(identity, None)
        if task is not None:
            task.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class _Outgoing:
    """What is to be done after a step, once the entry `number` holds; each effect with the incarnation it is for."""

    number: int
    lines: list[str]
    todo: list[tuple[Any, int]]
    cause: events.Event
    is_stop: bool


def _ledger(saved: dict[str, Any] | None, term: int, replica: int) -> Ledger | None:
    if not term:
        return None
    if saved is not None:
        _, number, before, replicas = saved["replication"]
        return Ledger(term, number, tuple(before), tuple(replicas))
    return Ledger(term, 0, (replica,), (replica,))


def _decode(text: str, expect: tuple[type, ...], peer: wire.Peer | None) -> wire.Message:
    try:
        return wire.decode(text, expect=expect, peer=peer)
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
