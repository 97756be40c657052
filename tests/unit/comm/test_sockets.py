"""Finding, breaking and hiding sockets, with real ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from lightning_ft.comm.sockets import Descriptor, open_sockets, ports, shut_down


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        near.settimeout(30)
        far.settimeout(30)
        yield near, far


def descriptor_of(sock: socket.socket) -> Descriptor:
    return next(found for found in open_sockets() if found.number == sock.fileno())


def test_open_sockets_are_all_sockets_and_no_files(pair: tuple[socket.socket, socket.socket]) -> None:
    """A socket is found while it is open; a file never is."""
    near, far = pair
    with open(os.devnull) as file:  # noqa: PTH123 - a descriptor is wanted
        numbers = {found.number for found in open_sockets()}
        assert {near.fileno(), far.fileno()} <= numbers
        assert file.fileno() not in numbers
    number = near.fileno()
    near.close()
    assert number not in {found.number for found in open_sockets()}


def test_ports_tell_connections_from_listeners(pair: tuple[socket.socket, socket.socket]) -> None:
    """A connection has two ports, a listener one; what is not TCP has none."""
    near, far = pair
    assert ports(descriptor_of(near)) == (near.getsockname()[1], far.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ports(descriptor_of(listener)) == (listener.getsockname()[1], None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram, socket.socket(socket.AF_UNIX) as local:
        assert ports(descriptor_of(datagram)) is None
        assert ports(descriptor_of(local)) is None
    gone = descriptor_of(near)
    near.close()
    assert ports(gone) is None


def test_shut_down_frees_who_is_blocked(pair: tuple[socket.socket, socket.socket]) -> None:
    """A thread blocked in a read sees the end of the connection at once, the peer when the owner then closes it."""
    near, far = pair
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(near.recv(1)))
    reader.start()
    shut_down([descriptor_of(near)])
    reader.join(30)
    assert found == [b""]
    assert near.fileno() >= 0, "its owner closes it"
    near.close()
    assert far.recv(1) == b""


def test_shut_down_spares_listeners() -> None:
    """A listener goes on accepting: it belongs to all views."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shut_down([descriptor_of(listener)])
        with socket.create_connection(listener.getsockname(), timeout=30):
            accepted, _ = listener.accept()
            accepted.close()


def test_a_reused_number_is_another_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    """A descriptor whose number names another socket by now is closed, and the other is left alone."""
    near, far = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        old = socket.create_connection(listener.getsockname())
        stale, number = descriptor_of(old), old.fileno()
        old.close()
        os.dup2(near.fileno(), number)
        try:
            assert not stale.is_open()
            assert ports(stale) is None
            shut_down([stale])
            far.sendall(b"x")
            assert near.recv(1) == b"x"
        finally:
            os.close(number)


FORKER = """
import os, signal, socket, sys, time
from lightning_ft.comm.sockets import ForkGuard, open_sockets
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
if sys.argv[2] == "guarded":
    number = connection.fileno()
    guard = ForkGuard(lambda: [found for found in open_sockets() if found.number == number])
elif sys.argv[2] == "cancelled":
    guard = ForkGuard(open_sockets)
    guard.cancel()
elif sys.argv[2] == "stale":
    other = socket.socket()
    stale = [found for found in open_sockets() if found.number == other.fileno()]
    os.dup2(connection.fileno(), other.fileno())
    guard = ForkGuard(lambda: stale)
read, write = os.pipe()
child = os.fork()
if child == 0:
    assert os.fstat(connection.fileno())  # the number still names something
    os.write(write, b"x")
    time.sleep(3600)
os.read(read, 1)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("kind", "is_seen"), [("guarded", True), ("none", False), ("cancelled", False), ("stale", False)]
)
def test_a_killed_parent_is_seen_in_spite_of_its_fork(kind: str, is_seen: bool) -> None:
    """A guarded connection ends with the parent, though a forked child lives on; others are kept open by the child."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", FORKER, port, kind], stdout=subprocess.PIPE)
        child = 0
        try:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                assert process.stdout is not None
                child = int(process.stdout.readline())
                assert process.wait(60) == -signal.SIGKILL
                if is_seen:
                    connection.settimeout(60)
                    assert connection.recv(1) == b""
                else:
                    connection.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        connection.recv(1)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if child:
                os.kill(child, signal.SIGKILL)
