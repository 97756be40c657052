"""The agent: the process that a user starts. It starts one child per device, and ends with the job's status.

The agent of node 0 also hosts the coordinator. An agent is never a rank, so that every rank is as mortal as any other.
What a child finds in its environment:

    LIGHTNING_FT_COORDINATOR, LIGHTNING_FT_TOKEN     where the coordinator is, and the proof of belonging to the job
    LIGHTNING_FT_MEMBER, LIGHTNING_FT_INCARNATION    who it is (`node/slot`), and its how-manieth start this is
    LIGHTNING_FT_EXPECTED                            the members the job starts with, as ranges (`0-3/0-7`)
    LIGHTNING_FT_AGENT_FD, LIGHTNING_FT_AGENT_PID    a pipe that ends when the agent does (see `child.watch_agent`)
    LIGHTNING_FT_<SETTING>                           the settings, as this agent resolved them
    RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as with torchrun
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from lightning_ft.config import ENV_PREFIX, Settings, parse_endpoint
from lightning_ft.coordinator.agent_client import AgentClient
from lightning_ft.coordinator.server import CoordinatorServer
from lightning_ft.errors import LaunchError
from lightning_ft.event_log import EventLog
from lightning_ft.launch import child as child_module
from lightning_ft.launch.status import Exit, end_of, job_status
from lightning_ft.membership.ids import as_ranges, in_order

logger = logging.getLogger("lightning_ft")

TERMINATION_GRACE_TIME_S = 30.0
"""How long a child that is asked to end may take; as torchrun's."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclasses.dataclass(slots=True)
class _Child:
    member: str
    slot: int
    incarnation: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it and what it started; stopped processes too."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end_rest(self, number: signal.Signals) -> None:
        """End what it started and left behind, once it has ended itself: DataLoader workers, other forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Agent:
    """Supervises the members of one node.

    Args:
        command_for: Gives the command line of a slot.
        env_for: Gives what to add to a slot's environment.
        node: Number of this node.
        num_slots: How many members this node has.
        settings: The job's settings.
        expected_members: Logical ids of all members the job starts with; sorted, they are the first ranks.
        host_coordinator: Whether the coordinator runs in this process.
        event_log: Where events go; None: a log at `settings.event_log`.
        cwd: Directory that the commands run in; None: this process's.
        termination_grace_time: Seconds a child may take to end when it is asked to.
    """

    def __init__(
        self,
        command_for: Callable[[int], Sequence[str]],
        env_for: Callable[[int], Mapping[str, str]],
        *,
        node: int,
        num_slots: int,
        settings: Settings,
        expected_members: Sequence[str],
        host_coordinator: bool,
        event_log: EventLog | None = None,
        cwd: str | None = None,
        termination_grace_time: float = TERMINATION_GRACE_TIME_S,
    ) -> None:
        self._command_for = command_for
        self._env_for = env_for
        self._node = node
        self._num_slots = num_slots
        self._settings = settings
        self._expected = in_order(expected_members)
        self._host_coordinator = host_coordinator
        self._event_log = event_log if event_log is not None else EventLog(settings.event_log)
        self._cwd = cwd
        self._grace_s = termination_grace_time
        self._token = os.environ.get(f"{ENV_PREFIX}TOKEN") or secrets.token_urlsafe(32)
        self._children: dict[str, _Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._exits: list[Exit] = []
        self._server: CoordinatorServer | None = None
        self._client: AgentClient | None = None
        self._num_interrupts = 0
        self._early_signals: list[signal.Signals] | None = []
        self._given_up = asyncio.Event()
        missing = [self._member(slot) for slot in range(num_slots) if self._member(slot) not in self._expected]
        if missing:
            raise ValueError(f"expected_members must hold the members of node {node}, but lacks {missing}")
        if settings.min_world_size > len(self._expected):
            raise ValueError(
                f"min_world_size must be at most the number of members, {len(self._expected)}, got "
                f"{settings.min_world_size}"
            )
        if settings.coordinator is None and (not host_coordinator or len(self._expected) != num_slots):
            raise ValueError("a job of several nodes needs the setting coordinator=host:port of node 0, got None")

    async def run(self) -> int:
        """Start the children and stay until the job is over; no child survives this call.

        Returns: The job's exit status.

        Raises:
            LaunchError: The coordinator or a child could not be started; what was started is ended.
        """
        with self._forwarded_signals(), _agent_pipe() as read_fd:
            try:
                endpoint = await self._start_coordinator()
                self._client = AgentClient(endpoint, self._token, self._node, self._settings, self._kill)
                self._client.start()
                try:
                    self._start_children(endpoint, read_fd)
                    self._release_early_signals()
                    await self._wait()
                finally:
                    await self._end_children()
                return await self._finish()
            finally:
                await self._close()

    def _member(self, slot: int) -> str:
        return f"{self._node}/{slot}"

    async def _start_coordinator(self) -> str:
        configured = self._settings.coordinator
        if not self._host_coordinator:
            return str(configured)
        self._server = CoordinatorServer(self._settings, self._expected, self._token, self._event_log)
        host, port = ("127.0.0.1", 0) if configured is None else parse_endpoint(configured)
        is_local = host in ("127.0.0.1", "localhost", "::1")
        try:
            # The name that others use for this host may not be one that can be bound (NAT): listen on all interfaces.
            port = await self._server.start(host if is_local else None, port)
        except OSError as error:
            raise LaunchError(
                f"starting the coordinator failed: can't listen on {host}:{port}: {error.strerror}. "
                "Choose another port with the setting coordinator."
            ) from error
        shown = {name: value for name, value in dataclasses.asdict(self._settings).items() if value is not None}
        self._event_log.write("job_started", generation=0, members=list(self._expected), settings=shown)
        return configured if configured is not None else f"127.0.0.1:{port}"

    def _start_children(self, endpoint: str, read_fd: int) -> None:
        common = self._common_environment(endpoint, read_fd)
        for slot in range(self._num_slots):
            child = self._start_child(slot, 1, common, read_fd)
            self._watchers.add(asyncio.create_task(self._watch(child)))

    def _start_child(self, slot: int, incarnation: int, common: Mapping[str, str], read_fd: int) -> _Child:
        member = self._member(slot)
        command = list(self._command_for(slot))
        if not command or shutil.which(command[0]) is None:
            raise LaunchError(
                f"starting {member} failed: {command[:1]} is no program. Check the command.", member=member
            )
        if sys.platform.startswith("linux"):  # tie it to us before anything of the user's runs
            command = [sys.executable, "-I", "-S", str(child_module.__file__), str(os.getpid()), *command]
        environment = {
            **os.environ,
            **common,
            "LOCAL_RANK": str(slot),
            "RANK": str(self._expected.index(member)),
            f"{ENV_PREFIX}MEMBER": member,
            f"{ENV_PREFIX}INCARNATION": str(incarnation),
            **self._env_for(slot),
        }
        try:
            # A session of its own: Ctrl-C reaches the agent alone, which passes it on once.
            process = subprocess.Popen(
                command, env=environment, cwd=self._cwd, pass_fds=(read_fd,), start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"starting {member} failed: {error}. Check the command.", member=member) from error
        child = _Child(member, slot, incarnation, process)
        self._children[member] = child
        if self._client is not None:
            self._client.started(member, incarnation)
        logger.debug("[%s] process %d started (incarnation %d)", member, process.pid, incarnation)
        return child

    def _common_environment(self, endpoint: str, read_fd: int) -> dict[str, str]:
        settings = {
            f"{ENV_PREFIX}{name.upper()}": str(value)
            for name, value in dataclasses.asdict(self._settings).items()
            if value is not None or name == "max_failures"  # "None" there means no limit, over any alias
        }
        environment = {
            **settings,
            f"{ENV_PREFIX}COORDINATOR": endpoint,
            f"{ENV_PREFIX}TOKEN": self._token,
            f"{ENV_PREFIX}EXPECTED": as_ranges(self._expected),
            child_module.AGENT_FD_VARIABLE: str(read_fd),
            child_module.AGENT_PID_VARIABLE: str(os.getpid()),
            "NODE_RANK": str(self._node),
            "WORLD_SIZE": str(len(self._expected)),
            "LOCAL_WORLD_SIZE": str(self._num_slots),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR") or parse_endpoint(endpoint)[0],
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_free_port()),
        }
        environment["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is no news
        if self._num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = "1"
        return environment

    async def _watch(self, child: _Child) -> None:
        """Follow one child to its end. A respawn under the next incarnation belongs at the end of this."""
        ended = Exit(child.member, child.incarnation, await end_of(child.process))
        self._exits.append(ended)
        logger.debug("[%s] process %d %s", child.member, child.process.pid, ended.detail)
        if self._client is not None:
            self._client.exited(ended.member, ended.incarnation, ended.status, ended.detail)
        child.end_rest(signal.SIGKILL if ended.status else signal.SIGTERM)

    async def _wait(self) -> None:
        """Stay until all children ended, or had their time to do so after the coordinator gave the job up."""
        if self._server is None:
            await asyncio.wait(self._watchers)
            return
        all_ended = asyncio.create_task(asyncio.wait(self._watchers))
        stopped = asyncio.create_task(self._server.stopped.wait())
        await asyncio.wait((all_ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        # Members of a failed job were told, say why and exit by themselves. Whoever was released may take its time.
        await asyncio.wait((all_ended,), timeout=self._grace_s if self._server.is_failed else None)
        all_ended.cancel()
        stopped.cancel()

    async def _end_children(self) -> None:
        """Ask the children that are left to end, then make them."""
        if not self._watchers:
            return
        for child in self._alive():
            logger.warning("[%s] process %d is still running; asking it to end", child.member, child.process.pid)
        self._forward(signal.SIGTERM)
        await asyncio.wait(self._watchers, timeout=self._grace_s)
        self._kill_all()
        await asyncio.wait(self._watchers)

    async def _finish(self) -> int:
        """Deliver the last exits; stay for the other nodes if they need our coordinator."""
        if self._client is not None:
            await self._client.flush(self._settings.heartbeat_timeout)
        if self._server is None:
            return job_status(self._exits, frozenset((e.member, e.incarnation) for e in self._exits if e.status == 0))
        mine = [(ended.member, ended.incarnation) for ended in self._exits]
        await self._unless_given_up(self._server.wait_for_exits(mine), self._settings.heartbeat_timeout)
        # The agents of other nodes end with their members; those of a failed job are not waited for for ever.
        patience_s = self._grace_s if self._server.is_failed else None
        await self._unless_given_up(self._server.wait_for_others(self._node), patience_s)
        others = [Exit(e.member, e.incarnation, e.status) for e in self._server.exits if e.member not in self._children]
        status = job_status([*others, *self._exits], self._server.released)
        self._event_log.write("job_finished", generation=self._server.generation, status=status)
        return status

    async def _unless_given_up(self, waiting: Coroutine[Any, Any, None], patience_s: float | None) -> None:
        tasks = (asyncio.create_task(waiting), asyncio.create_task(self._given_up.wait()))
        await asyncio.wait(tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self._event_log.close)

    def _alive(self) -> list[_Child]:
        return [child for child in self._children.values() if child.process.returncode is None]

    def _kill(self, member: str, incarnation: int, reason: str) -> None:
        child = self._children.get(member)
        if child is not None and child.incarnation == incarnation and child.process.returncode is None:
            logger.warning("[%s] process %d is killed: %s", member, child.process.pid, reason)
            child.kill()

    def _kill_all(self) -> None:
        for child in self._alive():
            child.kill()

    def _forward(self, number: signal.Signals) -> None:
        for child in self._alive():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _release_early_signals(self) -> None:
        early, self._early_signals = self._early_signals, None
        for number in early or ():
            self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._early_signals is not None:
            self._early_signals.append(number)  # some children don't exist yet
            return
        if not self._alive():
            if number in (signal.SIGINT, signal.SIGTERM):
                self._given_up.set()  # only other nodes are waited for
            return
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                logger.warning("second SIGINT: killing %d processes", len(self._alive()))
                self._kill_all()
                return
        logger.info("passing %s on to %d processes", number.name, len(self._alive()))
        self._forward(number)

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup stays nohup
        for number in taken:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number] or signal.SIG_DFL)


def run_agent(
    command_for: Callable[[int], Sequence[str]],
    env_for: Callable[[int], Mapping[str, str]],
    *,
    node: int,
    num_slots: int,
    settings: Settings,
    expected_members: Sequence[str],
    host_coordinator: bool,
    event_log: EventLog | None = None,
    cwd: str | None = None,
    termination_grace_time: float = TERMINATION_GRACE_TIME_S,
) -> int:
    """Run an `Agent` to its end, in the main thread. Arguments, result and errors are the class's."""
    agent = Agent(
        command_for,
        env_for,
        node=node,
        num_slots=num_slots,
        settings=settings,
        expected_members=expected_members,
        host_coordinator=host_coordinator,
        event_log=event_log,
        cwd=cwd,
        termination_grace_time=termination_grace_time,
    )
    return asyncio.run(agent.run())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _agent_pipe() -> Iterator[int]:
    """The read end of a pipe whose write end only this process holds: children see it close when we die."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)
