"""The agent's side: tells the coordinator how processes ended, and hears whom to kill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from lightning_ft.config import Settings
from lightning_ft.coordinator.channel import AGENT_PATH
from lightning_ft.coordinator.link import Link
from lightning_ft.membership import effects, events, wire

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

    Attributes:
        stopped: Set once there will be no other view; `is_failed` if not because all members left in peace, `members`
            the processes of this node, with incarnations, that were members at any time.
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
    ) -> None:
        self._node = node
        self._on_kill = on_kill
        self._running: dict[str, int] = {}
        self._exits: list[events.Exited] = []
        self._is_done = False
        self._is_connected = asyncio.Event()
        self.stopped = asyncio.Event()
        self.is_failed = False
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
            heartbeat=lambda: wire.encode(wire.AgentHeartbeat(computing())),
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.get_running_loop().create_task(self._link.run())

    def started(self, member: str, incarnation: int) -> None:
        """Note a process; said at the next connection."""
        self._running[member] = incarnation

    def exited(self, exited: events.Exited) -> None:
        """Report how a process ended; said again at each new connection, since it may have been lost."""
        self._exits.append(exited)
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
        yield wire.encode(wire.AgentHello(self._node, tuple(self._running.items())))
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
            self._link.interval_s = message.heartbeat_interval_s or self._link.interval_s
        elif isinstance(message, effects.Kill):
            self._on_kill(message.member, message.incarnation, message.reason)
        elif isinstance(message, wire.JobStopped):
            self.is_failed, self.members = message.is_failed, frozenset(message.members)
            self.stopped.set()
        elif isinstance(message, wire.JobEnded):
            self.job_status = message.status
            self.ended.set()
        return True

    def _on_change(self) -> None:
        if self._link.is_connected:
            self._is_connected.set()
        else:
            self._is_connected.clear()
