"""Where a coordinator listens."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Listen on loopback, or, for any other name of this host, on all interfaces: it may not be one to bind (NAT)."""
    listener = bind(host, port)
    listener.listen(1024)
    return listener


def bind(host: str, port: int) -> socket.socket:
    """Take a port as `listen` does, without listening: whoever tries it is refused."""
    is_dual = host not in ("127.0.0.1", "localhost", "::1") and socket.has_dualstack_ipv6()
    is_ipv6 = is_dual or host == "::1"
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if is_dual else 1)
        local = "127.0.0.1" if host == "localhost" else host
        bound.bind((local if local in ("127.0.0.1", "::1") else "", port))
    except OSError:
        bound.close()
        raise
    return bound
