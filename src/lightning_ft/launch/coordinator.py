"""Keeps the coordinator's process running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_ft import child, errors
from lightning_ft.config import parse_endpoint
from lightning_ft.coordinator.channel import NOT_IN_OFFICE
from lightning_ft.coordinator.listening import listen
from lightning_ft.coordinator.memory import make_files
from lightning_ft.launch.status import end_of, in_words

logger = logging.getLogger("lightning_ft")

_BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from lightning_ft.coordinator.standalone import main
sys.exit(main(sys.argv[2:]))
"""

_SOURCE = str(Path(errors.__file__).parents[1])

_HEALTHY_LIFE_S = 5.0
_STARTING_S = 60.0
"""So long it may take to be heard of at first: where all ranks import torch at once, processors are scarce."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


class CoordinatorProcess:
    """The coordinator of a job, started again on the same port whenever it dies or does not answer.

    Args:
        endpoint: `host:port` to listen on; None: loopback, any port.
        listener: A socket that is bound to it already.

    Attributes:
        endpoint: Where it is reached.
        is_deposed: Whether it has ended since another node's coordinator has taken its place.

    Raises:
        LaunchError: The address can't be bound.

    Threads: the event loop's.
    """

    def __init__(self, endpoint: str | None, listener: socket.socket | None = None) -> None:
        host, port = ("127.0.0.1", 0) if endpoint is None else parse_endpoint(endpoint)
        try:
            self._listener = listen(host, port) if listener is None else listener
        except OSError as error:
            raise errors.LaunchError(
                f"starting the coordinator failed: can't listen on {host}:{port}: {error.strerror}. "
                "Choose another port with the setting coordinator."
            ) from error
        self.endpoint = endpoint if endpoint is not None else f"{host}:{self._listener.getsockname()[1]}"
        self._memory = make_files()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._options: list[str] = []
        self.is_deposed = False
        self._keeper: asyncio.Task[None] | None = None

    def start(self, environment: Mapping[str, str], *options: str) -> None:
        """Start it, and again whenever it dies; call it in the main thread.

        Args:
            environment: Settings, token and expected members.
            options: As in `coordinator.standalone`.
        """
        self._options = list(options)
        self._keeper = asyncio.get_running_loop().create_task(
            self._keep({**os.environ, **environment, "LIGHTNING_FT_MEMBER": "coordinator"})
        )

    def replace_if_stuck(self, silent_s: float, limit_s: float) -> None:
        """Kill it if it runs, but does not answer: something has stopped it, or it spins.

        Args:
            silent_s: For how long nothing was heard of it.
            limit_s: How long that may be.
        """
        process, running_s = self._process, time.monotonic() - self._started_s
        patience_s = max(limit_s, _HEALTHY_LIFE_S if silent_s < running_s else _STARTING_S)
        if process is not None and process.returncode is None and min(silent_s, running_s) > patience_s:
            logger.warning("the coordinator (process %d) has not answered for %.0f s", process.pid, silent_s)
            process.kill()

    async def ended(self) -> None:
        """Wait until it has ended for good."""
        if self._keeper is not None:
            await asyncio.wait((self._keeper,))

    async def end(self, patience_s: float) -> None:
        """Have it declare the job over, and wait until it has ended; it is killed if that takes too long."""
        process, keeper = self._process, self._keeper
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if process is not None and process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):  # it has ended by itself
                process.stdin.write(b"\n")
                process.stdin.close()
            try:
                async with asyncio.timeout(patience_s):
                    await end_of(process)
            except TimeoutError:
                process.kill()
                await end_of(process)
        self._listener.close()
        for descriptor in self._memory:
            os.close(descriptor)
        self._memory = []

    async def _keep(self, environment: Mapping[str, str]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._started_s = time.monotonic()
            try:
                self._process = self._spawn(environment)
            except OSError as error:  # no memory, or too many processes: it may pass
                logger.warning("the coordinator can't be started: %s; trying again", error)
            else:
                status = await end_of(self._process)
                self.is_deposed = status == NOT_IN_OFFICE
                if status == 0 or self.is_deposed:
                    return  # the job is over, or goes on with another
                logger.warning("the coordinator was %s; starting it again", in_words(status))
            environment = {name: text for name, text in environment.items() if name != "LIGHTNING_FT_FAIL_AT"}
            is_healthy = time.monotonic() - self._started_s > _HEALTHY_LIFE_S
            pause_s = _FIRST_PAUSE_S if is_healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        descriptors = (self._listener.fileno(), *self._memory)
        listener, *memory = map(str, descriptors)
        command = [
            sys.executable,
            "-P",
            "-c",
            _BOOT,
            _SOURCE,
            "--listener",
            listener,
            "--memory",
            *memory,
            *self._options,
        ]
        return subprocess.Popen(
            child.tied_to_this_process(command),
            env=dict(environment),
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
        )
