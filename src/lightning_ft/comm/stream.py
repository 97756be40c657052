"""Connections over which members send their state to one that will join, while they train on (PROTOCOL.md#M3c).

A frame is a JSON header and bytes; the receiver answers each with one byte, `CAUGHT_UP` or `BEHIND`. What fails ends
the connection and nothing else. Threads: one for each connection; the methods are for the training thread.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ft.comm.gloo import CATCH_UP_KEY
from lightning_ft.comm.names import no_name_server
from lightning_ft.comm.place import as_bytes
from lightning_ft.comm.sockets import Descriptor, descriptor_of
from lightning_ft.coordinator.channel import notice_silence
from lightning_ft.membership.events import Address

_log = logging.getLogger("lightning_ft")

BEHIND, CAUGHT_UP = b"\0", b"\1"

_PREFIX = struct.Struct("<IQ")
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_MAX_HELLO_BYTES = 64 * 1024
_WINDOW = 4
"""Frames that may be unanswered while the next is sent."""

_PIECE_BYTES = 1024 * 1024
_LOOK_S = 0.5

_END = {"type": "end"}


class Frame(NamedTuple):
    """What is sent at once.

    Attributes:
        header: JSON.
        tensors: Contiguous, on the CPU; nobody changes them.
    """

    header: dict[str, Any]
    tensors: Sequence[Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Outlet:
    """A member's end of a connection to one that will join.

    Args:
        joiner: Where its store listens.
        token: The job's secret.
        hello: The first header.
        patience_s: After so long without a sign of the joiner it is given up.

    Attributes:
        is_broken: Nothing is sent any more.
        num_answers: How many frames the joiner has answered.
        is_caught_up: With its last answer the joiner said that it lacks nothing that members have told it of.
    """

    def __init__(self, joiner: Address, token: str, hello: dict[str, Any], patience_s: float) -> None:
        self.is_broken = self.is_caught_up = False
        self.num_answers = 0
        self._joiner = joiner
        self._hello = {**hello, "token": token}
        self._patience_s = patience_s
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._backlog_bytes = 0
        self._num_marks = 0
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="lightning_ft catch-up", daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are not sent yet."""
        return self._backlog_bytes

    @property
    def num_marks(self) -> int:
        """How many frames of the type `mark` the joiner has not answered: how far it is behind."""
        return self._num_marks

    @property
    def descriptors(self) -> list[Descriptor]:
        """The connection's socket, which a forked child must not hold."""
        return [] if self._sock is None else descriptor_of(self._sock)

    def put(self, frame: Frame) -> None:
        """Have a frame sent; never waits."""
        with self._changed:
            if not self.is_broken:
                self._frames.append(frame)
                self._backlog_bytes += frame.num_bytes
                self._num_marks += _is_mark(frame)
                self._changed.notify_all()

    def end(self) -> None:
        """Have the connection end when all was sent; never waits."""
        self.put(Frame(_END))

    def give_up(self) -> None:
        """End the connection now; the joiner has nothing from it then."""
        with self._changed:
            self.is_broken = True
            self._frames.clear()
            self._backlog_bytes = 0
            self._changed.notify_all()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def wait_closed(self, timeout_s: float) -> None:
        """Wait for the connection's thread, not longer than this."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with self._connect() as self._sock:
                self._send_all(self._sock)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this connection alone
            if not self.is_broken:
                _log.debug("sending the state to %s ended: %s", self._joiner, error)
        finally:
            self._sock = None
            self.give_up()

    def _connect(self) -> socket.socket:
        with no_name_server():
            store = dist.TCPStore(
                self._joiner.host,
                self._joiner.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=self._patience_s),
            )
        port = int(store.get(CATCH_UP_KEY))
        sock = socket.create_connection((self._joiner.host, port), self._patience_s)
        notice_silence(sock, self._patience_s)
        return sock

    def _send_all(self, sock: socket.socket) -> None:
        _send(sock, Frame(self._hello))
        unanswered = deque([False])  # for each whether it is a mark
        is_ended = False
        while unanswered or not is_ended:
            frame = None
            with self._changed:
                while not self._frames and not unanswered and not self.is_broken:
                    self._changed.wait()
                if self.is_broken:
                    return
                if self._frames and len(unanswered) <= _WINDOW:
                    frame = self._frames.popleft()
            if frame is not None:
                _send(sock, frame, self._sent)
                unanswered.append(_is_mark(frame))
                is_ended = frame.header == _END
            else:
                self.is_caught_up = bytes(_read_exactly(sock, 1)) == CAUGHT_UP
                with self._changed:
                    self.num_answers += 1
                    self._num_marks -= unanswered.popleft()

    def _sent(self, num_bytes: int) -> None:
        with self._changed:
            self._backlog_bytes = max(0, self._backlog_bytes - num_bytes)


class Inlet:
    """The end of those connections at the process that will join.

    Args:
        host: Address to listen at.
        publish: Told the port.
        token: The job's secret.
        take: Called with each frame's header and bytes (uint8, its to keep) and the hello of its connection; one call
            at a time. Returns whether this process has now caught up. What it raises ends that connection.
        patience_s: After so long without a sign of a member in the middle of a frame it is given up.
    """

    def __init__(
        self,
        host: str,
        publish: Callable[[int], object],
        token: str,
        take: Callable[[dict[str, Any], Tensor, dict[str, Any]], bool],
        patience_s: float,
    ) -> None:
        self._token = token
        self._take = take
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._is_finishing = False
        self._is_closed = False
        self._open: dict[socket.socket, bool] = {}
        self._listener = socket.create_server((host, 0))
        self._accepting = threading.Thread(target=self._accept, name="lightning_ft catch-up", daemon=True)
        self._accepting.start()
        publish(self._listener.getsockname()[1])

    @property
    def descriptors(self) -> list[Descriptor]:
        """All sockets, which a forked child must not hold."""
        return [found for sock in (self._listener, *tuple(self._open)) for found in descriptor_of(sock)]

    def finish(self) -> None:
        """Wait until all connections have ended: each member ends its own when it has sent all."""
        with self._changed:
            self._is_finishing = True
            while self._open:
                self._changed.wait(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Take nothing any more."""
        with self._changed:
            self._is_closed = True
            found = tuple(self._open)
        for sock in (self._listener, *found):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._taking:  # nobody is in the middle of it any more
            pass

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._is_closed or self._is_finishing:
                    sock.close()
                    continue
                self._open[sock] = True
            threading.Thread(target=self._run, args=(sock,), name="lightning_ft catch-up", daemon=True).start()

    def _run(self, sock: socket.socket) -> None:
        hello: dict[str, Any] = {}
        try:
            notice_silence(sock, self._patience_s)
            sock.settimeout(self._patience_s)
            hello = self._greeted(sock)
            while True:
                self._wait_for_frame(sock)
                header, data = _receive(sock, _MAX_HEADER_BYTES, 1 << 62)
                with self._taking:
                    if self._is_closed:
                        return
                    answer = CAUGHT_UP if self._take(header, data, hello) else BEHIND
                sock.sendall(answer)
                if header == _END:
                    return
        except Exception as error:  # noqa: BLE001 - an optimizer may raise what it likes
            _log.debug("being sent the state by %s ended: %s", hello.get("donor"), error)
            with self._taking:
                if hello and not self._is_closed:
                    self._take({"type": "broken"}, torch.empty(0, dtype=torch.uint8), hello)
        finally:
            with self._changed:
                self._open.pop(sock, None)
                self._changed.notify_all()
            sock.close()

    def _greeted(self, sock: socket.socket) -> dict[str, Any]:
        hello, _ = _receive(sock, _MAX_HELLO_BYTES, 0)
        if not hmac.compare_digest(str(hello.pop("token", "")).encode(), self._token.encode()):
            raise ValueError("a connection without the job's token")
        sock.sendall(BEHIND)
        return hello

    def _wait_for_frame(self, sock: socket.socket) -> None:
        """Between frames a member may be silent for as long as a step takes, but not once all of them are at rest."""
        silent_since_s: float | None = None
        while True:
            sock.settimeout(_LOOK_S)
            try:
                if not sock.recv(1, socket.MSG_PEEK):
                    raise ConnectionError("the member has ended the connection")
            except TimeoutError:
                if self._is_finishing and silent_since_s is None:
                    silent_since_s = time.monotonic()
                if silent_since_s is not None and time.monotonic() - silent_since_s > self._patience_s:
                    raise
            else:
                sock.settimeout(self._patience_s)
                return


def _is_mark(frame: Frame) -> bool:
    return bool(frame.header["type"] == "mark")


def _send(sock: socket.socket, frame: Frame, sent: Callable[[int], object] = lambda _: None) -> None:
    header = json.dumps(frame.header).encode()
    sock.sendall(_PREFIX.pack(len(header), frame.num_bytes) + header)
    for piece in _pieces(frame.tensors):
        sock.sendall(piece)
        sent(len(piece))


def _pieces(tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    for tensor in tensors:
        raw = _raw(tensor) if tensor.nbytes else memoryview(b"")
        for start in range(0, len(raw), _PIECE_BYTES):
            yield raw[start : start + _PIECE_BYTES]


def _raw(tensor: Tensor) -> memoryview:
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


def _receive(sock: socket.socket, max_header_bytes: int, max_bytes: int) -> tuple[dict[str, Any], Tensor]:
    header_bytes, num_bytes = _PREFIX.unpack(_read_exactly(sock, _PREFIX.size))
    if header_bytes > max_header_bytes or num_bytes > max_bytes:
        raise ValueError(f"a frame of {header_bytes} and {num_bytes} bytes")
    header = json.loads(_read_exactly(sock, header_bytes))
    if not isinstance(header, dict):
        raise TypeError("a header that is no object")
    data = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        _read_into(sock, _raw(data))
    return header, data


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    _read_into(sock, memoryview(data))
    return data


def _read_into(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the peer has ended the connection")
        view = view[count:]
