"""Is a process whose connection broke still running? Its liveness port tells (PROTOCOL.md, A3)."""

from __future__ import annotations

import asyncio
import enum
import errno
import socket
from collections.abc import Callable
from contextlib import closing

from lightning_ft.membership.effects import Probe
from lightning_ft.membership.events import Address, ProbeRefused

_NO_WAY_THERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH})
"""The address family is not in use between here and there: says nothing about the process."""

_FIRST_PAUSE_S = 0.001


class Verdict(enum.Enum):
    """What a connection attempt showed."""

    REFUSED = "a live host refused: the process does not run"
    OPEN = "something listens: the process may run, or be just about to end"
    SILENT = "no answer: nothing is known"


class Probes:
    """The processes that are being looked after, each by its logical id and incarnation.

    Args:
        pause_s: As of `wait_until_refused`.
        on_refused: Told which process is proven not to run.

    Threads: the event loop's.
    """

    def __init__(self, pause_s: float, on_refused: Callable[[ProbeRefused], None]) -> None:
        self._pause_s = pause_s
        self._on_refused = on_refused
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def start(self, probe: Probe) -> None:
        """Look after a process, unless that is being done."""
        identity = (probe.member, probe.incarnation)
        if identity not in self._tasks:
            self._tasks[identity] = asyncio.get_running_loop().create_task(self._run(probe))

    def end(self, identity: tuple[str, int]) -> None:
        """Look after a process no longer."""
        task = self._tasks.pop(identity, None)
        if task is not None:
            task.cancel()

    def end_all(self) -> None:
        """Look after nobody any longer."""
        for identity in list(self._tasks):
            self.end(identity)

    async def stop(self) -> None:
        """End all, and wait until they have ended."""
        tasks = list(self._tasks.values())
        self.end_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, probe: Probe) -> None:
        identity = (probe.member, probe.incarnation)
        await wait_until_refused(probe.address, self._pause_s)
        self._tasks.pop(identity, None)
        self._on_refused(ProbeRefused(*identity))


async def wait_until_refused(address: Address, pause_s: float) -> None:
    """Return once the process behind `address` is proven not to run; cancel this to give up.

    A process that is being killed may still accept. Its end closes the accepted connection, so that is waited for, and
    the next attempt follows at once.

    Args:
        address: The process's liveness port.
        pause_s: Most seconds between two attempts, and for each.
    """
    loop = asyncio.get_running_loop()
    least_s = _FIRST_PAUSE_S
    while True:
        earliest = loop.time() + least_s
        if await attempt(address, pause_s) is Verdict.REFUSED:
            return
        await asyncio.sleep(max(0.0, earliest - loop.time()))
        least_s = min(2 * least_s, pause_s)


async def attempt(address: Address, patience_s: float) -> Verdict:
    """Connect to every address of the host; stay connected, if accepted, until the other end closes.

    Args:
        address: The process's liveness port.
        patience_s: Most seconds to wait for an answer, and for an accepted connection to be closed.
    """
    try:
        async with asyncio.timeout(patience_s):
            found = await _resolve(address)
            verdicts = [await _attempt_one(family, target, patience_s) for family, target in found]
    except (OSError, TimeoutError):
        return Verdict.SILENT
    known = {verdict for verdict in verdicts if verdict is not None}
    return known.pop() if len(known) == 1 else Verdict.OPEN if Verdict.OPEN in known else Verdict.SILENT


async def _resolve(address: Address) -> list[tuple[int, tuple[object, ...]]]:
    try:  # a numeric address needs neither a thread nor a name server
        found = socket.getaddrinfo(
            address.host, address.store_port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.store_port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


async def _attempt_one(family: int, target: tuple[object, ...], patience_s: float) -> Verdict | None:
    loop = asyncio.get_running_loop()
    with closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.settimeout(0)
        try:
            await loop.sock_connect(sock, target)
        except ConnectionRefusedError:
            return Verdict.REFUSED
        except OSError as error:
            return None if error.errno in _NO_WAY_THERE else Verdict.SILENT
        try:
            async with asyncio.timeout(patience_s):
                await loop.sock_recv(sock, 1)
        except (OSError, TimeoutError):  # reset by the process's end, or it lives on
            return Verdict.OPEN
        return Verdict.OPEN
