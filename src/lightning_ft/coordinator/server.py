"""The coordinator's server: owns the sockets and the clock, feeds the pure core, does what the core says.

    frame -> wire.decode -> event ─┐                       ┌─> frame to a member or an agent
    connection broke, tick, probe ─┴─> machine.step ─> effects ─> probe, event log

Everything happens on one event loop, one event at a time. No peer is ever waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from aiohttp import web

from lightning_ft.config import Settings
from lightning_ft.coordinator.accepted import CLOSING_TIME_S, Connection, RefusedError, accept
from lightning_ft.coordinator.channel import AGENT_PATH, MEMBER_PATH
from lightning_ft.coordinator.probe import wait_until_refused
from lightning_ft.event_log import DEFAULT_NAME, EventLog, last_line
from lightning_ft.membership import effects, events, machine, state, wire
from lightning_ft.membership.transitions import ALL_LEFT

logger = logging.getLogger("lightning_ft")

Identity = tuple[str, int]
"""A member's logical id and incarnation."""

START_TIMEOUT_S = 600.0
"""A member may take at least this long from the start of its process to its first sign of life."""

_FROM_ITSELF = (events.Hello, events.Parked, events.Leaving, events.Ready, events.Heartbeat)


class CoordinatorServer:
    """Arbiter of one job.

    Args:
        settings: The job's settings.
        expected_members: Logical ids of the members of the first view.
        token: Secret that peers must present.
        event_log: Where events go.
        on_kill: Called for a kill if the member's node has no agent connected; None: the kill waits for an agent.
        clock: Monotonic seconds.

    Attributes:
        stopped: Set once there will be no other view: all members left, or the core gave the job up (`is_failed`).
        exits: Every process that ended, in order, as its agent said.

    Threads: one event loop's only.
    """

    def __init__(
        self,
        settings: Settings,
        expected_members: Sequence[str],
        token: str,
        event_log: EventLog,
        *,
        on_kill: Callable[[effects.Kill], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._token = token
        self._event_log = event_log
        self._on_kill = on_kill
        self._clock = clock
        self._state = state.initial(expected_members, clock(), max(settings.timeout, START_TIMEOUT_S))
        self._members: dict[Identity, Connection] = {}
        self._agents: dict[int, Connection] = {}
        self._kills: dict[Identity, effects.Kill] = {}
        self._probes: dict[Identity, asyncio.Task[None]] = {}
        self._released: set[Identity] = set()
        self._refusals: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._is_closing = False
        self.stopped = asyncio.Event()
        self.exits: list[events.Exited] = []

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

    @property
    def released(self) -> frozenset[Identity]:
        """Who was let go after its last collective."""
        return frozenset(self._released)

    async def start(self, host: str | None = "127.0.0.1", port: int = 0) -> int:
        """Listen and start to tick.

        Args:
            host: Interface; None: all.
            port: 0: any free one.

        Returns: The port.

        Raises:
            OSError: The address can't be bound.
        """
        application = web.Application()
        application.add_routes([web.get(MEMBER_PATH, self._serve_member), web.get(AGENT_PATH, self._serve_agent)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSING_TIME_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())
        return int(self._runner.addresses[0][1])

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

    async def wait_for_others(self, own_node: int) -> None:
        """Wait until no member and no other node's agent is connected."""
        while self._members or set(self._agents) - {own_node}:
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_exits(self, identities: Collection[Identity]) -> None:
        """Wait until an agent has reported the end of all these processes."""
        while not set(identities) <= {(ended.member, ended.incarnation) for ended in self.exits}:
            self._changed.clear()
            await self._changed.wait()

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
                self._changed.set()
                if not self._is_closing:
                    self._apply(events.Disconnected(*identity))
        return connection.websocket

    async def _serve_agent(self, request: web.Request) -> web.WebSocketResponse:
        connection = await accept(request, self._token, self._settings.heartbeat_timeout)
        node: int | None = None
        try:
            hello = await self._first(connection, (wire.AgentHello,))
            node = hello.node
            self._attach_agent(connection, hello)
            while (text := await connection.receive()) is not None:
                message = _decode(text, wire.FROM_AGENT, None)
                if isinstance(message, events.Exited):
                    self._on_exited(message, node)
        except RefusedError as refusal:
            await connection.refuse(str(refusal))
        finally:
            connection.outbox.close()
            if node is not None and self._agents.get(node) is connection:
                del self._agents[node]
                self._changed.set()
                if not self._is_closing:
                    logger.debug("the agent of node %d disconnected", node)
        return connection.websocket

    def _attach_member(self, connection: Connection, identity: Identity) -> None:
        connection.peer = f"{identity[0]} (incarnation {identity[1]})"
        old = self._members.get(identity)
        self._members[identity] = connection
        if old is not None:
            old.replace()
        self._end_probe(identity)
        connection.send(wire.Welcome(self._settings.heartbeat_interval))

    def _attach_agent(self, connection: Connection, hello: wire.AgentHello) -> None:
        connection.peer = f"the agent of node {hello.node}"
        old = self._agents.get(hello.node)
        self._agents[hello.node] = connection
        if old is not None:
            old.replace()
        connection.send(wire.Welcome(self._settings.heartbeat_interval))
        for identity in hello.incarnations:
            if identity in self._kills:
                connection.send(self._kills[identity])

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
        fields = dict(report.fields)
        if report.event == "log_directory":
            if self._settings.event_log is None and isinstance(fields.get("path"), str):
                self._event_log.open(f"{fields['path']}/{DEFAULT_NAME}")
            return
        generation = fields.pop("generation", self.generation)
        if report.event == "failed":  # it has cut its connections and will come back to no collective
            detail = f"failed with {last_line(str(fields.get('exception', '')))}"
            self._apply(events.Exited(report.member, report.incarnation, 1, detail))
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
        if any((seen.member, seen.incarnation) == identity for seen in self.exits):
            return  # an agent that reconnects says again what may have been lost
        self.exits.append(exited)
        self._changed.set()
        self._kills.pop(identity, None)
        self._end_probe(identity)
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

    @property
    def _pause_s(self) -> float:
        return min(self._settings.heartbeat_interval, self._settings.heartbeat_timeout / 4)

    # Deciding and doing.

    def _apply(self, event: events.Event) -> None:
        """Let the core decide, then do what it says. An event it can't take changes nothing."""
        try:
            self._state, todo = machine.step(self._settings, self._state, event, self._clock())
        except Exception:
            logger.exception("the coordinator dropped %s", event)
            return
        for effect in todo:
            try:
                self._execute(effect, event)
            except Exception:
                logger.exception("the coordinator failed to carry out %s", effect)
        if self._state.phase is state.Phase.STOPPED and not self.stopped.is_set():
            self.stopped.set()
            for identity in list(self._probes):
                self._end_probe(identity)

    def _execute(self, effect: effects.Effect, cause: events.Event) -> None:
        match effect:
            case effects.Record():
                self._event_log.write(
                    effect.event, generation=effect.generation, member=effect.member, **dict(effect.fields)
                )
            case effects.Refuse():
                is_new = self._refusals.get(effect.member) != effect.reason
                self._refusals[effect.member] = effect.reason
                level = logging.WARNING if is_new else logging.DEBUG
                logger.log(level, "[%s g%d] a message was dropped: %s", effect.member, self.generation, effect.reason)
            case effects.Probe():
                self._probe(effect)
            case effects.Kill():
                self._kill(effect)
            case effects.Evict():
                self._send((effect.member, effect.incarnation), effect)
            case _:
                identity = (effect.member, self._incarnation(effect.member, cause))
                if isinstance(effect, effects.Release):
                    self._released.add(identity)
                self._send(identity, effect)

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
        elif self._on_kill is not None:
            self._on_kill(kill)
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


def _decode(text: str, expect: tuple[type, ...], peer: wire.Peer | None) -> wire.Message:
    try:
        return wire.decode(text, expect=expect, peer=peer)
    except wire.WireError as error:
        raise RefusedError(str(error)) from None
