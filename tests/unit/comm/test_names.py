"""Names without a name server."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from lightning_ft.comm.names import no_name_server, resolver_state

NOBODY = ("203.0.113.7", 80)
"""An address for documentation (RFC 5737), which no hosts file has."""


@pytest.mark.skipif(resolver_state() is None, reason="the C library is not glibc")
def test_one_thread_asks_no_name_server() -> None:
    """A reverse lookup fails at once, as it does when no name server is configured; afterwards all is as before."""
    before = resolver_state()
    assert before is not None
    num_servers = before.nscount
    seen = []
    with no_name_server():
        with pytest.raises(socket.gaierror):
            socket.getnameinfo(NOBODY, 0)
        assert socket.getnameinfo(NOBODY, socket.NI_NUMERICHOST)[0] == NOBODY[0]
        assert resolver_state().nscount == 0  # type: ignore[union-attr]
        other = threading.Thread(target=lambda: seen.append(resolver_state().nscount))  # type: ignore[union-attr]
        other.start()
        other.join()
    assert seen == [num_servers]
    assert resolver_state().nscount == num_servers  # type: ignore[union-attr]


def test_a_store_is_reached_by_address_without_a_name() -> None:
    """What it is for."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with no_name_server():
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert server.get("key") == b"value"
