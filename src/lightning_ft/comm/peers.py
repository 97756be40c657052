"""Which peers can't be reached, when a group breaks or can't be made though nobody is known to be dead."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence

PATIENCE_S = 1.0
"""A host that is there answers within milliseconds; a lost packet is sent again after one second."""

_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a member listens.

    Attributes:
        host: As the others reach it.
        store_port: Of its store, which stands being connected to and left at once.
        group_port: Of its Gloo device.
    """

    host: str
    store_port: int
    group_port: int

    def __str__(self) -> str:
        return f"{self.store_port} {self.group_port} {self.host}"

    @classmethod
    def read(cls, text: str) -> PeerAddress:
        """Read what `str` wrote."""
        store_port, group_port, host = text.split(" ", 2)
        return cls(host, int(store_port), int(group_port))


def unreachable(
    peers: Sequence[PeerAddress], is_moot: Callable[[], bool] = lambda: False, patience_s: float = 2 * PATIENCE_S
) -> tuple[int, ...]:
    """Connect to all at once, and return the ranks of those that don't answer in time.

    A refusal is an answer: that host is there, and what became of the member is for others to find out.

    Args:
        peers: By rank.
        is_moot: Asked now and then; once it says so, nobody is returned.
        patience_s: How long to wait for answers.
    """
    deadline_s = time.monotonic() + patience_s
    silent = set(range(len(peers)))
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as sockets:
        for rank, peer in enumerate(peers):
            try:
                family = socket.getaddrinfo(peer.host, peer.store_port, type=socket.SOCK_STREAM)[0][0]
                sock = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.setblocking(False)  # noqa: FBT003 - the standard library's order
                sock.connect_ex((peer.host, peer.store_port))
            except OSError:  # no way there
                continue
            selector.register(sock, selectors.EVENT_WRITE, rank)
        while selector.get_map() and (patience_s := deadline_s - time.monotonic()) > 0:
            if is_moot():
                return ()
            for key, _ in selector.select(min(patience_s, _LOOK_S)):
                sock = key.fileobj  # type: ignore[assignment]
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    silent.discard(key.data)
                selector.unregister(sock)
    return tuple(sorted(silent))


_ANSWERS = (0, errno.ECONNREFUSED)
"""Connected, or refused."""
