"""The agent: the process that a user starts. It starts one child per device, and ends with the job's status.

The agent of node 0 also keeps the coordinator running; if it is lost with its node, another node's agent starts a
successor. An agent is never a rank, so that every rank is as mortal as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from lightning_ft import child as child_module
from lightning_ft.config import ENV_PREFIX, Settings, unknown_variables
from lightning_ft.coordinator.agent_client import AgentClient
from lightning_ft.coordinator.ending import job_status
from lightning_ft.errors import LaunchError
from lightning_ft.launch.children import ChildProcess, ChildStarter
from lightning_ft.launch.coordinator import CoordinatorProcess
from lightning_ft.launch.standby import Standby
from lightning_ft.launch.status import end_of, in_words
from lightning_ft.membership import events
from lightning_ft.membership.ids import in_order, parse_logical_id
from lightning_ft.membership.replication import next_term

logger = logging.getLogger("lightning_ft")

TERMINATION_GRACE_TIME_S = 30.0
"""How long a child that is asked to end may take; as torchrun's."""

_MAX_BACKOFF_S = 30.0
"""The second restart comes after a second, then twice as late each time, up to this."""

_FIRST_PAUSE_S = 0.2
"""Ranks that fail by the same bug fail together, which ends the job; none is started again for that."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Agent:
    """Supervises the members of one node.

    Args:
        command_for: Gives the command line of a slot.
        env_for: Gives what to add to a slot's environment.
        node: Number of this node.
        num_slots: How many members this node has. With `settings.spares` it has as many more processes; those share
            the first slots' commands and devices.
        settings: The job's settings.
        expected_members: Logical ids of all members the job starts with; sorted, they are the first ranks. This node's
            are not among them if it joins the job while that runs.
        host_coordinator: Whether this agent runs the coordinator.
        is_hosted: Whether it is a service of its own, which no node's agent can replace.
        incarnations: Of this node's members, the last that the job knows: another agent of this node was there before.
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
        is_hosted: bool = False,
        incarnations: Mapping[str, int] | None = None,
        cwd: str | None = None,
        termination_grace_time: float = TERMINATION_GRACE_TIME_S,
    ) -> None:
        self._node = node
        self._num_slots = num_slots
        self._settings = settings
        self._expected = in_order(expected_members)
        self._host_coordinator = host_coordinator
        self._is_hosted = is_hosted
        self._earlier = dict(incarnations or {})
        self._grace_s = termination_grace_time
        self._token = os.environ.get(f"{ENV_PREFIX}TOKEN") or secrets.token_urlsafe(32)
        self._starter = ChildStarter(
            command_for,
            env_for,
            node=node,
            num_slots=num_slots,
            settings=settings,
            expected=self._expected,
            token=self._token,
            cwd=cwd,
        )
        self._children: dict[str, ChildProcess] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        self._exits: list[events.Exited] = []
        self._coordinator: CoordinatorProcess | None = None
        self._standby: Standby | None = None
        self._client: AgentClient | None = None
        self._guard: asyncio.Task[None] | None = None
        self._num_interrupts = 0
        self._early_signals: list[signal.Signals] | None = []
        self._given_up = asyncio.Event()
        self._asked_to_stop = asyncio.Event()
        self._restarts_end = asyncio.Event()
        self._is_ending = asyncio.Event()
        for name in unknown_variables(os.environ):
            logger.warning("the environment variable %s means nothing to lightning_ft; is it misspelt?", name)
        missing = [
            self._starter.member(slot) for slot in range(num_slots) if self._starter.member(slot) not in self._expected
        ]
        if missing and host_coordinator:
            raise ValueError(f"expected_members must hold the members of node {node}, but lacks {missing}")
        if host_coordinator:
            _check_limits(settings, len(self._expected))
        if settings.coordinator is None and (not host_coordinator or len(self._expected) != num_slots):
            raise ValueError(
                "a job of several nodes needs the setting coordinator=host:port of node 0, or MASTER_ADDR and "
                "MASTER_PORT in the environment, got None"
            )

    async def run(self) -> int:
        """Start the children and stay until the job is over; no child survives this call.

        Returns: The job's exit status.

        Raises:
            LaunchError: The coordinator or a child could not be started; what was started is ended.
        """
        with self._forwarded_signals(), _agent_pipe() as agent_fd, _spokesman_pipe() as spokesman_fd:
            try:
                endpoint = self._start_coordinator()
                self._client = self._connect(endpoint)
                self._guard = asyncio.create_task(self._guard_coordinator())
                try:
                    self._starter.belong_to(endpoint, agent_fd, spokesman_fd)
                    self._start_children()
                    self._release_early_signals()
                    await self._wait()
                finally:
                    await self._end_children()
                return await self._finish()
            finally:
                await self._close()

    @property
    def _num_nodes(self) -> int:
        return 1 + max(parse_logical_id(member)[0] for member in self._expected)

    def _start_coordinator(self) -> str:
        if not self._host_coordinator:
            return str(self._settings.coordinator)
        self._coordinator = CoordinatorProcess(self._settings.coordinator)
        return self._coordinator.endpoint

    def _connect(self, endpoint: str) -> AgentClient:
        if self._node < self._num_nodes > 1 and not self._is_hosted:  # whoever joined later has no terms of its own
            try:
                self._standby = Standby(endpoint, self._node, self._num_nodes, self._settings)
            except OSError as error:
                logger.warning("this node can't take a lost coordinator's place: %s", error)
        client = AgentClient(
            endpoint,
            self._token,
            self._node,
            self._settings,
            self._kill,
            computing=self._computing,
            standby="" if self._standby is None else self._standby.endpoint,
        )
        if self._coordinator is not None:
            term = next_term(0, self._node, self._num_nodes) if self._num_nodes > 1 else 0
            self._coordinator.start(
                self._starter.job_environment(), "--replica", str(client.replica_id), "--term", str(term)
            )
        client.start()
        return client

    async def _guard_coordinator(self) -> None:
        """Replace the coordinator if it does not answer; start a successor if another node's is lost."""
        assert self._client is not None
        client = self._client
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval)
            if self._coordinator is not None and self._coordinator.is_deposed:
                coordinator, self._coordinator = self._coordinator, None
                await coordinator.end(0.0)
                if self._standby is not None:
                    self._standby.renew()
            elif self._coordinator is not None:
                self._coordinator.replace_if_stuck(client.silent_s, self._settings.heartbeat_timeout)
            elif self._standby is not None and not client.stopped.is_set() and self._standby.is_due(client):
                logger.warning("the coordinator is lost: trying to take its place")
                self._coordinator = self._standby.start(client, self._starter.job_environment())

    def _start_children(self) -> None:
        for slot in range(self._num_slots + self._settings.spares):
            child = self._start(slot, self._earlier.get(self._starter.member(slot), 0) + 1)
            self._watchers.add(asyncio.create_task(self._keep_running(child)))

    def _start(self, slot: int, incarnation: int) -> ChildProcess:
        assert self._client is not None
        child = self._starter.start(slot, incarnation, self._client.endpoints)
        self._children[child.member] = child
        self._client.started(child.member, incarnation)
        return child

    async def _keep_running(self, child: ChildProcess) -> None:
        """Follow a slot's child to its end, and start it again as often as it may be."""
        while not (ended := await self._watch(child)).is_last:
            num_starts = self._num_starts(child)
            pause_s = _FIRST_PAUSE_S if num_starts == 1 else min(_MAX_BACKOFF_S, 2.0 ** (num_starts - 2))
            assert self._client is not None
            waits = (self._is_ending.wait(), self._client.stopped.wait(), self._restarts_end.wait())
            await _first_of(*waits, timeout_s=pause_s)
            try:
                if self._may_restart(child):
                    logger.info(
                        "[%s] starting it again (%d of %d)", child.member, num_starts, self._settings.max_restarts
                    )
                    child = self._start(child.slot, child.incarnation + 1)
                    continue
            except LaunchError:
                logger.exception("[%s] it stays away", child.member)
            self._client.exited(dataclasses.replace(ended, is_last=True))
            return

    def _num_starts(self, child: ChildProcess) -> int:
        return child.incarnation - self._earlier.get(child.member, 0)

    def _may_restart(self, child: ChildProcess) -> bool:
        assert self._client is not None
        if (
            self._starter.joins(child.member, child.incarnation)
            and child.process.returncode == child_module.CANNOT_JOIN_STATUS
        ):
            logger.warning("[%s] stays away: it can't join, for the reason that it has told", child.member)
            return False
        is_wanted = self._settings.respawn and self._num_starts(child) <= self._settings.max_restarts
        is_over = self._client.stopped.is_set() or self._restarts_end.is_set() or self._is_ending.is_set()
        is_cut_off = self._client.silent_s > self._client.succession_s  # it would find no job to join
        return is_wanted and not is_over and not is_cut_off

    async def _watch(self, child: ChildProcess) -> events.Exited:
        """Follow a child to its end."""
        status = await end_of(child.process)
        comes_back = status != 0 and self._client is not None and self._may_restart(child)
        stacks = child.read_stacks()
        ended = events.Exited(child.member, child.incarnation, status, in_words(status), stacks, not comes_back)
        child.stacks.close()
        self._exits.append(ended)
        logger.debug("[%s] process %d %s", child.member, child.process.pid, ended.detail)
        if self._client is not None:
            self._client.exited(ended)
        child.end_rest(signal.SIGKILL if status else signal.SIGTERM)
        return ended

    async def _wait(self) -> None:
        """Stay until all children ended, or had their time to do so after there was nothing more to do for them."""
        all_ended = asyncio.create_task(asyncio.wait(self._watchers))
        is_over = asyncio.create_task(self._is_over())
        await asyncio.wait((all_ended, is_over), return_when=asyncio.FIRST_COMPLETED)
        if is_over.done():
            await asyncio.wait((all_ended,), timeout=self._grace_s)
        all_ended.cancel()
        is_over.cancel()

    async def _is_over(self) -> None:
        """Wait until no child has work: the job was given up, or all members left and the user wants an end.

        Members of a failed job were told, say why and exit by themselves. Whoever was released may take its time, to
        write its results; but not if everything was asked to stop. Whoever comes too late to be a member has none.
        """
        assert self._client is not None
        await self._client.stopped.wait()
        for child in self._alive():
            if (child.member, child.incarnation) not in self._client.members:
                logger.log(
                    logging.INFO if self._settings.spares else logging.WARNING,
                    "[%s] process %d is ended: the job ended before it joined",
                    child.member,
                    child.process.pid,
                )
                child.kill()
        if not self._client.is_failed:
            await self._asked_to_stop.wait()

    @property
    def _patience_s(self) -> float | None:
        return self._grace_s if self._client is not None and self._client.is_failed else None

    async def _end_children(self) -> None:
        """Ask the children that are left to end, then make them."""
        self._is_ending.set()
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
        assert self._client is not None
        self._client.done()
        if self._client.is_failed:
            num_failed = sum(ended.status != 0 for ended in self._exits)
            logger.error("the job was stopped: %s; failed processes of this node: %d", self._client.reason, num_failed)
        known, is_told = self._client.members, self._client.stopped.is_set()
        exits = [ended for ended in self._exits if not is_told or (ended.member, ended.incarnation) in known]
        own_status = job_status(exits, [(ended.member, ended.incarnation) for ended in exits if ended.status == 0])
        if self._coordinator is None:
            # Once the job has ended the coordinator has heard of everything, and is there no more.
            await _first_of(self._depart(self._client), self._client.ended.wait())
            return own_status if self._client.job_status is None else self._client.job_status
        # The agents of other nodes end with their members; those of a failed job are not waited for for ever.
        waits = (self._client.ended.wait(), self._given_up.wait(), self._coordinator.ended())
        await _first_of(*waits, timeout_s=self._patience_s)
        await self._coordinator.end(self._settings.heartbeat_timeout)
        return own_status if self._client.job_status is None else self._client.job_status

    async def _depart(self, client: AgentClient) -> None:
        """Deliver the last exits, and wait until nobody needs what this agent keeps of the coordinator's decisions."""
        if await client.flush(client.succession_s) and client.replica.term and not client.is_failed:
            await _first_of(client.dismissed.wait(), timeout_s=client.succession_s)

    async def _close(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
        if self._client is not None:
            await self._client.aclose()
        if self._coordinator is not None:
            await self._coordinator.end(self._settings.heartbeat_timeout)
        if self._standby is not None:
            self._standby.close()

    def _alive(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.process.returncode is None]

    def _computing(self) -> tuple[tuple[str, int], ...]:
        return tuple((child.member, child.incarnation) for child in self._alive() if child.processor.was_used())

    def _kill(self, member: str, incarnation: int, reason: str) -> None:
        child = self._children.get(member)
        if child is not None and child.incarnation == incarnation and child.process.returncode is None:
            logger.warning("[%s] process %d is killed: %s", member, child.process.pid, reason)
            task = asyncio.get_running_loop().create_task(self._kill_after_a_look(child))
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)

    @staticmethod
    async def _kill_after_a_look(child: ChildProcess) -> None:
        try:
            await child.ask_for_stacks()
        finally:
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
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._restarts_end.set()  # whoever ends now does so because it was asked to
        if number in (signal.SIGINT, signal.SIGTERM):
            self._asked_to_stop.set()
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
        more = "; once more kills them" if number == signal.SIGINT else ""
        logger.info("passing %s on to %d processes%s", number.name, len(self._alive()), more)
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
    is_hosted: bool = False,
    incarnations: Mapping[str, int] | None = None,
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
        is_hosted=is_hosted,
        incarnations=incarnations,
        cwd=cwd,
        termination_grace_time=termination_grace_time,
    )
    return asyncio.run(agent.run())


def _check_limits(settings: Settings, num_expected: int) -> None:
    if settings.min_world_size > num_expected:
        raise ValueError(
            f"min_world_size must be at most the number of members, {num_expected}, got {settings.min_world_size}"
        )
    if settings.max_world_size is not None and settings.max_world_size < num_expected:
        raise ValueError(
            f"max_world_size must be at least the number of members, {num_expected}, got {settings.max_world_size}"
        )


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Wait until one of these is over, and give the others up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@contextlib.contextmanager
def _agent_pipe() -> Iterator[int]:
    """The read end of a pipe whose write end only this process holds: children see it close when we die."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)


@contextlib.contextmanager
def _spokesman_pipe() -> Iterator[int]:
    """The read end of a pipe with one byte in it, and no more to come."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"!")
    os.close(write_fd)
    try:
        yield read_fd
    finally:
        os.close(read_fd)
