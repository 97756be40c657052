"""The coordinator's server: owns the sockets and the clock, feeds the pure core, does what the core says.

    frame -> wire.decode -> event ─┐                       ┌─> frame to a member or an agent
    connection broke, tick, probe ─┴─> machine.step ─> effects ─> probe, event log

Everything happens on one event loop, one event at a time. No peer is ever waited for.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from lightning_ft.config import Settings
from lightning_ft.coordinator.accepted import CLOSING_TIME_S, Connection, RefusedError, accept
from lightning_ft.coordinator.channel import AGENT_PATH, GATHERING_PATH, MEMBER_PATH
from lightning_ft.coordinator.chronicle import Chronicle
from lightning_ft.coordinator.decisions import Decisions
from lightning_ft.coordinator.ending import Identity
from lightning_ft.coordinator.enlisting import beginning, who_is_there
from lightning_ft.coordinator.memory import Memory
from lightning_ft.coordinator.metrics import Pace
from lightning_ft.coordinator.metrics_endpoint import MetricsEndpoint
from lightning_ft.coordinator.nodes import Nodes
from lightning_ft.coordinator.page_view import PageView, address_of
from lightning_ft.coordinator.probe import Probes
from lightning_ft.coordinator.status_view import STATUS_PATH, StatusView
from lightning_ft.event_log import DEFAULT_NAME, RECOVERIES, EventLog, exception_of
from lightning_ft.faultpoints import reach
from lightning_ft.membership import effects, events, state, wire
from lightning_ft.membership.ids import in_order
from lightning_ft.membership.replication import node_of

logger = logging.getLogger("lightning_ft")

_TICKS = 12
"""Deadlines are judged at least so often in a `heartbeat_timeout`: silence is noticed a twelfth of it late at most."""

_WORD_EVERY_S = 30.0


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
        self._home = None if replica is None else node_of(replica)
        self._expected = tuple(expected_members)
        self.is_deposed = False
        self.status: int | None = None
        self._chronicle = Chronicle(event_log)
        self._pace = Pace()
        self._recoveries: dict[str, wire.Report] = {}
        self._decisions = Decisions(
            settings, expected_members, event_log, memory=memory, replica=replica or 0, term=term, clock=clock
        )
        self._replicas = self._decisions.replicas
        self._not_over_before_s = clock()
        if self._decisions.is_resumed:
            self._not_over_before_s += settings.heartbeat_timeout  # members and agents may not be back before
        self._next_word_s = clock() + _WORD_EVERY_S
        self._standbys: dict[int, str] = {}
        self._members: dict[Identity, Connection] = {}
        self._agents: dict[int, Connection] = {}
        self._done: set[int] = set()
        self._nodes = Nodes(settings.heartbeat_timeout)
        self._kills: dict[Identity, effects.Kill] = {}
        self._probes = Probes(self._pause_s, self._decisions.apply)
        self._refusals: dict[str, str] = {}
        self._runner: web.AppRunner | None = None
        self._metrics_endpoint = self._make_metrics_endpoint()
        self._ticker: asyncio.Task[None] | None = None
        self._is_closing = False
        self.ended = asyncio.Event()
        self._decisions.begin(self._execute, self._stopped)

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._decisions.generation

    @property
    def is_failed(self) -> bool:
        """Whether the core gave the job up."""
        return self._decisions.is_failed

    @property
    def members(self) -> tuple[str, ...]:
        """The current view's members, in order."""
        return tuple(self._state.view.members)

    @property
    def _state(self) -> state.State:
        return self._decisions.state

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, and start to tick."""
        application = web.Application()
        view = StatusView(self._token, lambda: self._state, self._clock)
        routes = {
            MEMBER_PATH: self._serve_member,
            AGENT_PATH: self._serve_agent,
            GATHERING_PATH: self._serve_arrival,
            STATUS_PATH: view.serve,
        }
        application.add_routes([web.get(path, handler) for path, handler in routes.items()])
        application.add_routes(PageView(self._token, self._event_log, view.told).routes())
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_TIME_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=1024).start()
        self._chronicle.begin(is_resumed=self._decisions.is_resumed)
        if self._metrics_endpoint is not None:
            await self._metrics_endpoint.start()
        if not self._decisions.is_resumed:
            logger.info("the status page is at %s (lightning-ft status --open)", address_of(listener, self._settings))
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def stop(self) -> None:
        """Deliver what was said, close all connections, stop listening. Members keep training."""
        self._is_closing = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._probes.stop()
        connections = [*self._members.values(), *self._agents.values()]
        await asyncio.gather(*(connection.say_goodbye() for connection in connections))
        if self._metrics_endpoint is not None:
            await self._metrics_endpoint.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    def _make_metrics_endpoint(self) -> MetricsEndpoint | None:
        if self._settings.metrics_port is None:
            return None
        from lightning_ft.coordinator.metrics_families import JobCollector, Moment

        def look() -> Moment:
            return Moment(
                state=self._state,
                metrics=self._chronicle.metrics,
                pace=self._pace,
                term=self._replicas.term,
                num_lost=self._event_log.num_lost,
                now_s=self._clock(),
                time_s=time.time(),
            )

        return MetricsEndpoint(self._settings.metrics_host, self._settings.metrics_port, JobCollector(look).text)

    def end(self) -> None:
        """Declare the job over, whoever is still there."""
        if not self.ended.is_set():
            members = self._members_by_node().values()
            status = self._decisions.ending.status({identity for of_node in members for identity in of_node})
            self.record("job_finished", status=status)
            self.status = status
            for agent in self._agents.values():
                agent.send(wire.JobEnded(status))
            self.ended.set()

    def _end_if_over(self) -> None:
        """The job is over when no member is connected and every agent has said that its processes have ended."""
        is_settled = self._decisions.is_stopped or self._clock() >= self._not_over_before_s
        # Without an agent of its own nobody has to hear of it: the agents end when their processes have ended.
        is_told = self._decisions.is_stopped if self._home is None else self._home in self._agents
        if (
            is_settled
            and is_told
            and self._decisions.are_done
            and not self._members
            and set(self._agents) <= self._done
        ):
            self.end()

    def record(self, event: str, member: str | None = None, **fields: Any) -> None:
        """Append a line about the current generation to the event log."""
        self._decisions.record(event, member, **fields)

    # Accepting.

    async def _serve_member(self, request: web.Request) -> web.WebSocketResponse:
        if not self._replicas.is_in_office:
            raise web.HTTPServiceUnavailable(text="too few agents follow this coordinator so far")
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        identity: Identity | None = None
        try:
            hello = await self._first(connection, (events.Hello, events.Ready))
            identity = (hello.member, hello.incarnation)
            self._attach_member(connection, identity)
            self._decisions.apply(hello)
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
                    self._decisions.apply(events.Disconnected(*identity))
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
        told = obstacle or beginning(arrived, self._state, self._settings, self._expected, self._decisions.enlisted)
        if isinstance(told, str):
            raise RefusedError(told)
        self._decisions.enlisted.update({member: last + 1 for member, last in told.incarnations})
        self._decisions.save()
        return told

    def _attach_member(self, connection: Connection, identity: Identity) -> None:
        connection.peer = f"{identity[0]} (incarnation {identity[1]})"
        old = self._members.get(identity)
        self._members[identity] = connection
        if old is not None:
            old.replace()
        self._probes.end(identity)
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
        if self._decisions.is_stopped and self._decisions.are_done:
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
                    self._decisions.apply(events.Vouched(message.computing))
            case wire.Promised():
                if message.term == self._replicas.term:
                    self._replicas.attach(replica, connection)
            case wire.Kept():
                if self._replicas.kept(replica, message.number):
                    self._decisions.carry_out()
            case events.Exited():
                self._on_exited(message, node)
            case wire.AgentDone():
                self._done.add(node)
                self._nodes.forget(node)
                self._replicas.done(replica)
                self._decisions.renew_replicas()
                self._end_if_over()

    def _hear_agent(self, node: int) -> None:
        if node not in self._done and self._nodes.hear(node, self._state.clock_s(self._clock())):
            self.record("node_heard", node=node)

    def _report_silent_nodes(self) -> None:
        for node, late_s in self._nodes.newly_silent(self._state.clock_s(self._clock())).items():
            self.record("node_silent", node=node, late_s=round(late_s, 3))

    def _tell_who_is_awaited(self) -> None:
        """Say now and then who is missing for the first view; nothing else would be said."""
        if self.generation or self._decisions.is_stopped or self._clock() < self._next_word_s:
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
            if isinstance(message, events.Heartbeat) and message.step is not None:
                self._pace.hear(message.member, message.step, self._clock())
            self._decisions.apply(message)  # type: ignore[arg-type]  # FROM_MEMBER holds events and Report only

    def _on_report(self, report: wire.Report) -> None:
        known = self._state.members.get(report.member)
        if known is not None and known.status is state.Status.GONE:
            logger.debug("dropped %s of %s, which is out of the job", report.event, report.member)
            return
        fields = dict(report.fields)
        if report.event == "log_directory":
            if self._settings.event_log is None and isinstance(fields.get("path"), str):
                self._event_log.open(f"{fields['path']}/{DEFAULT_NAME}")
                self._decisions.save()
            return
        if report.event in RECOVERIES:
            if self._recoveries.get(report.member) == report:
                return  # said again, since its connection broke
            self._recoveries[report.member] = report
        generation = fields.pop("generation", self.generation)
        if report.event == "failed":  # it has cut its connections and will come back to no collective
            detail = f"failed with {exception_of(str(fields.get('exception', '')))}"
            signature = str(fields.get("signature", ""))
            self._decisions.apply(events.Failed(report.member, report.incarnation, detail, signature))
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
        if not self._decisions.note_exit(exited):
            if exited.is_last:  # this may be the news, or forgotten with an earlier coordinator
                self._decisions.apply(exited)
            return
        self._kills.pop(identity, None)
        self._probes.end(identity)
        if exited.stacks:
            self.record("member_stacks", exited.member, stacks=exited.stacks)
        self._event_log.write(
            "member_exited",
            generation=self.generation,
            member=exited.member,
            status=exited.status,
            detail=exited.detail,
            incarnation=exited.incarnation,
        )
        self._decisions.apply(exited)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            if self._replicas.is_in_office:  # before, members can't be heard: a time in which it does not run (C8)
                self._decisions.apply(events.Tick())
            self._decisions.renew_replicas()
            self._give_up_without_a_majority()
            if self._replicas.waited_s() > 2 * self._settings.heartbeat_timeout and not self.ended.is_set():
                self._step_down()
            self._report_silent_nodes()
            self._tell_who_is_awaited()
            self._end_if_over()

    @property
    def _pause_s(self) -> float:
        return min(self._settings.heartbeat_interval, self._settings.heartbeat_timeout / _TICKS)

    # Deciding and doing.

    def _step_down(self) -> None:
        """End, because another coordinator has taken this one's place: nobody's state here means anything any more."""
        logger.warning("[job g%d] another coordinator has taken this one's place", self.generation)
        self.is_deposed = True
        self.ended.set()

    def _give_up_without_a_majority(self) -> None:
        """What was decided can't be kept: the others are lost, or this node is cut off and they go on without it."""
        lost_s = self._replicas.lost_s()
        if self._decisions.are_done or lost_s < self._settings.heartbeat_timeout or self.ended.is_set():
            return
        reason = f"too few nodes are left to decide: no majority of their agents was heard for {lost_s:.3g} s"
        self._decisions.abandon()
        self.record("job_stopped", reason=reason)
        for (member, _), connection in self._members.items():
            connection.send(effects.Stop(member, reason))
        members = self._members_by_node()
        for node, agent in self._agents.items():
            agent.send(wire.JobStopped(reason, is_failed=True, members=tuple(members.get(node, []))))
        self.ended.set()

    def _stopped(self) -> None:
        self._probes.end_all()
        members = self._members_by_node()
        for node, agent in self._agents.items():
            self._tell_stopped(agent, members.get(node, []))

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
                self._probes.start(effect)
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

    def _send(self, identity: Identity, message: wire.Message) -> None:
        connection = self._members.get(identity)
        if connection is None or not connection.send(message):
            logger.debug("%s is not connected to hear %s", identity, message)

    def _kill(self, kill: effects.Kill) -> None:
        agent = self._agents.get(int(kill.member.partition("/")[0]))
        if agent is not None:
            agent.send(kill)
        self._kills[kill.member, kill.incarnation] = kill  # again if the agent reconnects, until the exit is reported


def _decode(text: str, expect: tuple[type, ...], peer: wire.Peer | None) -> wire.Message:
    try:
        return wire.decode(text, expect=expect, peer=peer)
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
