"""The processes of a node's members, and what they find in their environment.

What a child finds in its environment:

    LIGHTNING_FT_COORDINATOR, LIGHTNING_FT_TOKEN     where the coordinator is, and the proof of belonging to the job
    LIGHTNING_FT_STANDBYS                            where its successors may be (`host:port,host:port`)
    LIGHTNING_FT_MEMBER, LIGHTNING_FT_INCARNATION    who it is (`node/slot`), and its how-manieth start this is
    LIGHTNING_FT_EXPECTED                            the members the job starts with, as ranges (`0-3/0-7`)
    LIGHTNING_FT_AGENT_FD, LIGHTNING_FT_AGENT_PID    a pipe that ends when the agent does (see `child.watch_agent`)
    LIGHTNING_FT_SPOKESMAN_FD                        a pipe with one byte, for one of them (see `child.speaks_for_all`)
    LIGHTNING_FT_STACKS_FD                           a file for its threads' stacks (see `child.STACKS_SIGNAL`)
    LIGHTNING_FT_<SETTING>                           the settings, as this agent resolved them
    RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    as with torchrun
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from lightning_ft import child as child_module
from lightning_ft.config import ENV_PREFIX, Settings, parse_endpoint
from lightning_ft.errors import LaunchError
from lightning_ft.launch.status import Processor, is_stopped
from lightning_ft.membership.ids import as_ranges

logger = logging.getLogger("lightning_ft")

_MAX_STACKS = 64 * 1024
_STACKS_PATIENCE_S = 0.5
_STACKS_POLL_S = 0.01


@dataclasses.dataclass(slots=True)
class ChildProcess:
    """A member's process, and the file that it writes its threads' stacks to."""

    member: str
    slot: int
    incarnation: int
    process: subprocess.Popen[bytes]
    processor: Processor
    stacks: IO[bytes]

    def read_stacks(self) -> str:
        """Return the end of what it wrote about its threads' stacks, innermost call first."""
        size = os.fstat(self.stacks.fileno()).st_size
        found = os.pread(self.stacks.fileno(), _MAX_STACKS, max(0, size - _MAX_STACKS))
        return found.decode(errors="replace")

    async def ask_for_stacks(self) -> None:
        """Have it write its stacks, and wait until it has, or can't."""
        deadline_s, before = time.monotonic() + _STACKS_PATIENCE_S, b""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(child_module.STACKS_SIGNAL)
        while time.monotonic() < deadline_s and not self.stacks.closed and not is_stopped(self.process.pid):
            written = self.read_stacks().encode()
            if written and written == before:
                return
            before = written
            await asyncio.sleep(_STACKS_POLL_S)

    def kill(self) -> None:
        """Kill it and what it started; stopped processes too."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end_rest(self, number: signal.Signals) -> None:
        """End what it started and left behind, once it has ended itself: DataLoader workers, other forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class ChildStarter:
    """Starts the processes of one node.

    Args:
        command_for: Gives the command line of a slot.
        env_for: Gives what to add to a slot's environment.
        node: Number of the node.
        num_slots: How many members it has; processes beyond these share the first slots' commands and devices.
        settings: The job's.
        expected: Logical ids of all members that the job starts with, in order.
        token: The job's.
        cwd: Directory that the commands run in; None: this process's.
    """

    def __init__(
        self,
        command_for: Callable[[int], Sequence[str]],
        env_for: Callable[[int], Mapping[str, str]],
        *,
        node: int,
        num_slots: int,
        settings: Settings,
        expected: Sequence[str],
        token: str,
        cwd: str | None,
    ) -> None:
        self._command_for = command_for
        self._env_for = env_for
        self._node = node
        self._num_slots = num_slots
        self._settings = settings
        self._expected = expected
        self._token = token
        self._cwd = cwd
        self._common: dict[str, str] = {}
        self._pass_fds: tuple[int, ...] = ()

    def belong_to(self, endpoint: str, agent_fd: int, spokesman_fd: int) -> None:
        """Say where the coordinator is, and which pipes all share; once, before anything is started.

        Args:
            endpoint: `host:port` of the coordinator.
            agent_fd: It ends with this process.
            spokesman_fd: It has one byte, for the first process that speaks for all.
        """
        self._common = self._common_environment(endpoint, agent_fd, spokesman_fd)
        self._pass_fds = (agent_fd, spokesman_fd)

    def member(self, slot: int) -> str:
        """Return a slot's logical id."""
        return f"{self._node}/{slot}"

    def start(self, slot: int, incarnation: int, endpoints: Sequence[str]) -> ChildProcess:
        """Start a slot's process.

        Args:
            slot: From 0.
            incarnation: Its how-manieth start this is, from 1.
            endpoints: Where the coordinator's successors may be.

        Raises:
            LaunchError: It could not be started.
        """
        member, place = self.member(slot), slot % self._num_slots
        command = list(self._command_for(place))
        if not command or shutil.which(command[0]) is None:
            raise LaunchError(
                f"starting {member} failed: {command[:1]} is no program. Check the command.", member=member
            )
        command = child_module.tied_to_this_process(command)
        environment = {
            **os.environ,
            **self._common,
            "LOCAL_RANK": str(place),
            f"{ENV_PREFIX}STANDBYS": ",".join(endpoints),
            **self._ranks(member, incarnation),
            f"{ENV_PREFIX}MEMBER": member,
            f"{ENV_PREFIX}INCARNATION": str(incarnation),
            **self._env_for(place),
        }
        stacks = tempfile.TemporaryFile(prefix="lightning_ft-")  # noqa: SIM115  (closed with the child)
        environment[child_module.STACKS_FD_VARIABLE] = str(stacks.fileno())
        try:
            # A session of its own: Ctrl-C reaches the agent alone, which passes it on once.
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._cwd,
                pass_fds=(*self._pass_fds, stacks.fileno()),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"starting {member} failed: {error}. Check the command.", member=member) from error
        logger.debug("[%s] process %d started (incarnation %d)", member, process.pid, incarnation)
        return ChildProcess(member, slot, incarnation, process, Processor(process.pid), stacks)

    def joins(self, member: str, incarnation: int) -> bool:
        """Whether a process is none of those that the job starts with."""
        return incarnation > 1 or member not in self._expected

    def _ranks(self, member: str, incarnation: int) -> dict[str, str]:
        """What a process takes itself for until it has joined, if it has to: never for the one that writes for all."""
        num_expected = len(self._expected)
        if not self.joins(member, incarnation):
            return {"RANK": str(self._expected.index(member)), "WORLD_SIZE": str(num_expected)}
        return {"RANK": str(max(1, num_expected - 1)), "WORLD_SIZE": str(max(2, num_expected))}

    def job_environment(self) -> dict[str, str]:
        """Return what coordinators and members find in their environment alike."""
        settings = {
            f"{ENV_PREFIX}{name.upper()}": str(value)
            for name, value in dataclasses.asdict(self._settings).items()
            if value is not None or name == "max_failures"  # "None" there means no limit, over any alias
        }
        return {**settings, f"{ENV_PREFIX}TOKEN": self._token, f"{ENV_PREFIX}EXPECTED": as_ranges(self._expected)}

    def _common_environment(self, endpoint: str, agent_fd: int, spokesman_fd: int) -> dict[str, str]:
        environment = {
            **self.job_environment(),
            f"{ENV_PREFIX}COORDINATOR": endpoint,
            child_module.AGENT_FD_VARIABLE: str(agent_fd),
            child_module.SPOKESMAN_FD_VARIABLE: str(spokesman_fd),
            child_module.AGENT_PID_VARIABLE: str(os.getpid()),
            "NODE_RANK": str(self._node),
            "LOCAL_WORLD_SIZE": str(self._num_slots),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR") or parse_endpoint(endpoint)[0],
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_free_port()),
        }
        environment["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is no news
        if self._num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = "1"
        return environment


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
