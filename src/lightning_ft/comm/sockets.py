"""Find, break and hide the sockets that a library opened without telling us (Linux).

Gloo can't abort a collective, but a collective whose sockets are shut down fails at once, here and at the peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator

from lightning_ft.coordinator.channel import notice_silence

_TCP_ESTABLISHED = 1

_FORK_PAUSE_US = 1000

_libc = ctypes.PyDLL(None)

_DESCRIPTORS = "/proc/self/fd"


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """A socket of this process. The inode tells it from a later one with the same number."""

    number: int
    inode: str

    def is_open(self) -> bool:
        """Whether the number still names this socket."""
        return _link(self.number) == self.inode


def _link(number: int) -> str:
    try:
        return os.readlink(f"{_DESCRIPTORS}/{number}")  # noqa: PTH115 - in every recovery, for every descriptor
    except OSError:
        return ""


def open_sockets() -> frozenset[Descriptor]:
    """Return all sockets that this process has open now."""
    found = ((int(name), _link(int(name))) for name in os.listdir(_DESCRIPTORS))  # noqa: PTH208
    return frozenset(Descriptor(number, link) for number, link in found if link.startswith("socket:"))


def descriptor_of(sock: socket.socket) -> list[Descriptor]:
    """Return a Python socket's descriptor; none if it is closed."""
    number = sock.fileno()
    return [Descriptor(number, _link(number))] if number >= 0 else []


def ports(descriptor: Descriptor) -> tuple[int, int | None] | None:
    """Return (local port, remote port or None if it listens), or None if it is no open TCP socket."""
    with contextlib.suppress(OSError), _borrow(descriptor) as borrowed:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
            return None
        try:
            remote = borrowed.getpeername()[1]
        except OSError:
            remote = None
        return borrowed.getsockname()[1], remote
    return None


def remote_address(descriptor: Descriptor) -> tuple[str, int]:
    """Return where a TCP connection leads; ("", 0) if it is none any more."""
    with contextlib.suppress(OSError), _borrow(descriptor) as borrowed:
        host, port = borrowed.getpeername()[:2]
        return str(host), int(port)
    return "", 0


def is_established(descriptor: Descriptor) -> bool:
    """Whether a TCP connection is whole: open here, and neither closed nor reset by the peer."""
    with contextlib.suppress(OSError), _borrow(descriptor) as borrowed:
        return borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED
    return False


def shut_down(descriptors: Iterable[Descriptor]) -> None:
    """End the connections for who reads from them: the owner gets an error and closes them, which the peer sees.

    Writing goes on until then. A write that failed in the middle of Gloo's handling of a request would be lost: its
    waiter is not woken (see `InnerGroup.wait`).
    """
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _borrow(descriptor) as borrowed:
            borrowed.getpeername()  # a listener has no peer: it belongs to all views and stays
            borrowed.shutdown(socket.SHUT_RD)


def tune(descriptors: Iterable[Descriptor], silence_s: float) -> None:
    """Have the kernel end these connections if a peer's host is silent for so long."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _borrow(descriptor) as borrowed:
            notice_silence(borrowed, silence_s)


@contextlib.contextmanager
def _borrow(descriptor: Descriptor) -> Iterator[socket.socket]:
    number = os.dup(descriptor.number)
    if _link(number) != descriptor.inode:  # looked up after the dup: its owner may close it at any moment
        os.close(number)
        raise OSError(f"{descriptor} is closed")
    with socket.socket(fileno=number) as borrowed:
        yield borrowed


class ForkGuard:
    """Keeps sockets out of forked children, and forks out of a deadlock.

    A DataLoader worker is a fork. If it kept the ring's sockets open, the peers would not see its parent die.

    Until Python 3.11 a forked child takes the lock on the list of threads before it makes it anew. Gloo's threads take
    that lock when they let go of a tensor, and do so without the interpreter's lock: a fork in just that moment never
    ends. Therefore the parent takes the lock once before it forks, so that whoever holds it has to let go first.

    Args:
        sockets: Called in the child; returns the sockets that the child must not hold.
    """

    def __init__(self, sockets: Callable[[], Iterable[Descriptor]]) -> None:
        self._sockets = sockets
        os.register_at_fork(before=self._wait_for_other_threads, after_in_child=self._close)
        self._is_active = True

    def _wait_for_other_threads(self) -> None:
        if self._is_active:
            _libc.usleep(_FORK_PAUSE_US)  # keeps the interpreter's lock: threads that want it come to rest
            sys._current_frames()

    def _close(self) -> None:
        if not self._is_active:
            return
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in frozenset(self._sockets()):
            if descriptor.is_open():  # else its number may name another file by now
                os.dup2(null, descriptor.number)  # not closed: the number must not come to name another file
        os.close(null)

    def cancel(self) -> None:
        """Stop guarding (fork handlers can't be removed)."""
        self._is_active = False
