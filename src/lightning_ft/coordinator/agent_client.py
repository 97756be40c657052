"""The agent's side: tells the coordinator how processes ended, and hears whom to kill."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable

from lightning_ft.config import Settings
from lightning_ft.coordinator.channel import AGENT_PATH
from lightning_ft.coordinator.link import Link
from lightning_ft.membership import effects, events, wire
from lightning_ft.membership.replication import Entry, Replica, replica_id

logger = logging.getLogger("lightning_ft")


class AgentClient:
    """One agent's connection to the coordinator.

    Args:
        endpoint: `host:port` of the coordinator.
        token: The job's secret.
        node: Number of the agent's node.
        settings: The job's settings.
        on_kill: Called with (member, incarnation, reason) of a process to kill.
        computing: Returns the running members that have computed since it was last called, with their incarnations.
        standby: `host:port` where this agent would start a successor of the coordinator; empty: nowhere.

    Attributes:
        replica_id: Of what this agent keeps; no other agent has the same, of this node either.
        replica: What this agent keeps of the coordinator's decisions.
        dismissed: Set once nobody needs that any more.
        stopped: Set once there will be no other view, for `reason`; `is_failed` if not because all members left in
            peace, `members` the processes of this node, with incarnations, that were members at any time.
        ended: Set once the job is over, with `job_status`.

    Threads: the event loop's.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        node: int,
        settings: Settings,
        on_kill: Callable[[str, int, str], None],
        *,
        computing: Callable[[], tuple[tuple[str, int], ...]] = lambda: (),
        standby: str = "",
    ) -> None:
        self._node = node
        self._on_kill = on_kill
        self._settings = settings
        self.standby = standby
        self.replica_id = replica_id(node, secrets.randbits(32))
        self.replica = Replica()
        self.dismissed = asyncio.Event()
        self._followed_s = time.monotonic()
        self._clock_s = 0.0
        self._running: dict[str, int] = {}
        self._exits: list[events.Exited] = []
        self._is_done = False
        self._is_connected = asyncio.Event()
        self.stopped = asyncio.Event()
        self.is_failed = False
        self.reason = ""
        self.members: frozenset[tuple[str, int]] = frozenset()
        self.ended = asyncio.Event()
        self.job_status: int | None = None
        self._link = Link(
            endpoint,
            AGENT_PATH,
            token,
            settings,
            greet=self._greet,
            on_frame=self._on_frame,
            on_change=self._on_change,
            heartbeat=lambda: wire.encode(wire.AgentHeartbeat(computing(), self._clock_s)),
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.get_running_loop().create_task(self._link.run())

    def started(self, member: str, incarnation: int) -> None:
        """Note a process; said at the next connection."""
        self._running[member] = incarnation

    def exited(self, exited: events.Exited) -> None:
        """Report how a process ended, or that it was the last; said again at each new connection: it may get lost."""
        identity = (exited.member, exited.incarnation)
        self._exits = [*(known for known in self._exits if (known.member, known.incarnation) != identity), exited]
        if self._running.get(exited.member) == exited.incarnation:
            del self._running[exited.member]
        self._link.send(wire.encode(exited))

    def done(self) -> None:
        """Say that all processes have ended; also said again."""
        self._is_done = True
        self._link.send(wire.encode(wire.AgentDone()))

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator was last in contact; 0 while it is."""
        return self._link.silent_s()

    @property
    def leaderless_s(self) -> float:
        """Seconds since anything was heard of a coordinator in office."""
        return time.monotonic() - self._followed_s

    @property
    def succession_s(self) -> float:
        """After so long without a coordinator none will come any more."""
        return self._link.succession_s

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where a coordinator may be; first where the last one was."""
        first = self._link.endpoint
        return (first, *(endpoint for endpoint in self._link.endpoints if endpoint != first))

    def add_endpoint(self, endpoint: str) -> None:
        """Look for a coordinator there too."""
        self._link.add_endpoints([endpoint])

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything was handed to the kernel, connecting first if necessary.

        Returns: False if that took longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._is_connected.wait()
                    if await self._link.flush():
                        return True
                    self._is_connected.clear()
        except TimeoutError:
            logger.warning("the exits of node %d's processes could not be reported: %s", self._node, self._link.cause)
            return False

    async def aclose(self) -> None:
        """Send what is queued and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _greet(self) -> Iterable[str]:
        yield wire.encode(
            wire.AgentHello(self._node, tuple(self._running.items()), self.replica_id, self.replica.term, self.standby)
        )
        yield from (wire.encode(exited) for exited in self._exits)
        if self._is_done:
            yield wire.encode(wire.AgentDone())

    def _on_frame(self, text: str) -> bool:
        try:
            message = wire.decode(text, expect=wire.TO_AGENT)
        except wire.WireError:
            logger.exception("the coordinator broke the protocol")
            return True
        if isinstance(message, wire.Welcome):
            if not self._follow(message.term):
                return False
            self._link.interval_s = message.heartbeat_interval_s or self._link.interval_s
        self._followed_s = time.monotonic()
        self._take(message)
        return True

    def _take(self, message: wire.Message) -> None:
        match message:
            case Entry():
                if self.replica.keep(message):
                    self._link.send(wire.encode(wire.Kept(message.number)))
            case wire.CoordinatorHeartbeat():
                self._clock_s = message.sent_s
            case wire.Standbys():
                self._link.add_endpoints(message.endpoints)
            case wire.Dismissed():
                self.dismissed.set()
            case effects.Kill():
                self._on_kill(message.member, message.incarnation, message.reason)
            case wire.JobStopped():
                self.is_failed, self.members = message.is_failed, frozenset(message.members)
                self.reason = message.reason
                self.stopped.set()
            case wire.JobEnded():
                self.job_status = message.status
                self.ended.set()

    def _follow(self, term: int) -> bool:
        """Promise a coordinator to follow none before it, unless one of these may still be in office (C11)."""
        is_new = term > self.replica.term > 0
        if is_new and self.leaderless_s < self._settings.heartbeat_timeout:
            return False
        if not self.replica.promise(term):
            return False
        self._clock_s = 0.0  # what another coordinator's clock said means nothing to this one
        if term:
            if self.replica.entry is not None:
                self._link.send(wire.encode(self.replica.entry))
            self._link.send(wire.encode(wire.Promised(term)))
        return True

    def _on_change(self) -> None:
        if self._link.is_connected:
            self._is_connected.set()
        else:
            self._is_connected.clear()
