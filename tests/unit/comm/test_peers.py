"""Which peers can be reached."""

from __future__ import annotations

import socket

import pytest

from lightning_ft.comm.peers import PeerAddress, unreachable


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "node-7.cluster"])
def test_address_survives_the_store(host: str) -> None:
    """It travels as text."""
    address = PeerAddress(host, 1, 65535)
    assert PeerAddress.read(str(address)) == address


def test_whoever_answers_can_be_reached() -> None:
    """Also by refusing: that host is there. One that does not answer, and one that nobody knows, can't."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed, socket.socket() as full:
        closed.bind(("127.0.0.1", 0))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]  # they fill its queue: it answers no more
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        peers = [
            PeerAddress("127.0.0.1", listener.getsockname()[1], 1),
            PeerAddress("127.0.0.1", closed.getsockname()[1], 1),
            PeerAddress("127.0.0.1", full.getsockname()[1], 1),
            PeerAddress("no-such-host.invalid", 1, 1),
        ]
        assert unreachable(peers, patience_s=0.3) == (2, 3)
        assert unreachable(peers, lambda: True) == (), "nobody wants to know any more"
        for sock in waiting:
            sock.close()
    assert unreachable([]) == ()
