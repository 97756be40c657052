"""Make, break and free inner Gloo groups.

All that depends on Gloo's own behaviour is here. Private API read in torch 2.13.0: `ProcessGroupGloo._Options`,
`_devices`, `_timeout`, `_set_default_timeout` (tests/unit/comm/test_gloo.py fails clearly if they change).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ft.comm.names import no_name_server
from lightning_ft.comm.peers import PATIENCE_S, PeerAddress, unreachable
from lightning_ft.comm.sockets import (
    Descriptor,
    ForkGuard,
    is_established,
    open_sockets,
    ports,
    remote_address,
    shut_down,
    tune,
)
from lightning_ft.comm.tree import TreeRunner, TreeWork
from lightning_ft.membership.events import Address

_LOOK = datetime.timedelta(seconds=1)
"""How often a blocked wait looks whether its group was severed meanwhile; costs nothing."""

_CONNECT_TIME = datetime.timedelta(seconds=0.05)
"""Added to the time for making a group for each member of it: each connects to all others."""

CATCH_UP_KEY = "lightning_ft/catch_up"
"""Of a joiner's store."""

_FOREVER = datetime.timedelta(days=365)

_GRACE_S = 5.0
"""After so long, or half the silence that is allowed, a severed group's work is lost: others fail in milliseconds."""


class RingBrokenError(Exception):
    """The inner group can't be used any more: a peer is gone or the view is suspended. Never leaves `comm`.

    Args:
        message: What happened.
        suspects: Ranks of the group whose hosts gave no answer.
    """

    def __init__(self, message: str, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects


class CallerError(Exception):
    """Carries what a signal handler of the caller raised during a wait, past all that repairs a broken ring.

    torch's DataLoader raises RuntimeError from its handler when a worker dies; so do alarm handlers. It is no failure
    of a peer. Never leaves `comm`.
    """

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class InnerGroup:
    """One view's Gloo group.

    Attributes:
        group: The torch group; its works fail once `sever` was called, here or at a peer.

    Threads: `sever` may be called from any thread, all else from the training thread.
    """

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        store: dist.Store,
        sockets: Iterable[Descriptor],
        outgoing: Sequence[tuple[Descriptor, int]],
        grace_s: float = _GRACE_S,
    ) -> None:
        self.group = group
        self._grace_s = grace_s
        self._store = store  # the group's own rendezvous object must outlive it
        self.sockets = tuple(sockets)
        self._outgoing = tuple(outgoing)
        self._severed_s: float | None = None
        self._is_stuck = False
        self._tree: TreeRunner | None = None

    def sever(self) -> None:
        """End every connection, so that blocked and later works fail within milliseconds."""
        if self._severed_s is None:
            self._severed_s = time.monotonic()
        shut_down(self.sockets)

    def tree(self, rank: int, above: Callable[[], Sequence[int | None]]) -> TreeRunner:
        """Return what runs all-reduces along this group's tree, as `rank`; its shape is asked for the first time."""
        if self._tree is None:
            self._tree = TreeRunner(self.group, rank, above())
        return self._tree

    def end_tree(self) -> bool:
        """Wait until no message of the tree is under way any more: soon after the group was severed.

        Returns: Whether its thread has ended; else Gloo has lost a message.
        """
        if self._tree is None or self._tree.close(0.0 if self._is_stuck else self._grace_s):
            return True
        self._keep_for_ever()
        return False

    def broken_peers(self) -> tuple[int, ...]:
        """Return the ranks to which a connection broke that was made from here: ask before `sever`."""
        return tuple(rank for descriptor, rank in self._outgoing if not is_established(descriptor))

    def wait(self, work: dist.Work) -> None:
        """Block until a work of this group has ended.

        Gloo loses a send whose write fails in its event loop (torch 2.13, gloo/transport/tcp/pair.cc: the peer's
        request was taken from its queue, and the send from the list of those that an error wakes). Its work ends with
        the group's timeout only. It writes nothing any more, since its connections are closed.

        Raises:
            RuntimeError: It failed.
            RingBrokenError: It was lost.
            CallerError: A signal handler raised RuntimeError meanwhile.
        """
        if isinstance(work, TreeWork):
            while not self._look(work):
                self._check_not_lost()
            work.wait()
            return
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise CallerError(error) from None  # raised by Python code that ran within the call
                if work.is_completed():
                    work.wait()  # raises what it failed with, if it did not end just now
                    return
            else:
                return
            self._check_not_lost()

    def wait_messages(self, works: Sequence[dist.Work], ended: Callable[[int], object]) -> None:
        """Block until sends and receives of this group have ended, as `wait` does for collectives.

        A message that is waited for with a timeout breaks all connections when that is over (torch 2.13,
        gloo/transport/tcp/unbound_buffer.cc). So a thread waits without one, while this one looks.

        Args:
            works: They end in any order, but are waited for in this one.
            ended: Told how many have ended, now and then.

        Raises:
            RuntimeError: One failed.
            RingBrokenError: One was lost.
            CallerError: A signal handler raised RuntimeError meanwhile.
        """
        waiter = _MessageWaiter(works)
        num_told = 0
        while not self._look(waiter):
            if waiter.num_ended > num_told:
                num_told = waiter.num_ended
                ended(num_told)
            self._check_not_lost()
        if waiter.error is not None:
            raise waiter.error
        ended(len(works))

    @staticmethod
    def _look(waiter: _MessageWaiter | TreeWork) -> bool:
        try:
            return waiter.is_done.wait(_LOOK.total_seconds())
        except RuntimeError as error:
            raise CallerError(error) from None

    def _check_not_lost(self) -> None:
        if self._severed_s is not None and time.monotonic() - self._severed_s > self._grace_s:
            self._keep_for_ever()
            raise RingBrokenError("Gloo lost a message when the group was severed")

    def _keep_for_ever(self) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            # Its destructor would wait for the work. Never freed, not even at the interpreter's end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    def wait_for_future(self, future: torch.futures.Future[Any]) -> Any:
        """Return the value of a future that stands on works of this group; as `wait`."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(_LOOK.total_seconds()):
            if self._severed_s is not None and time.monotonic() - self._severed_s > self._grace_s:
                raise RingBrokenError("Gloo lost a message when the group was severed")
        return future.wait()


class _MessageWaiter:
    """Waits for messages in a thread of its own.

    Attributes:
        is_done: All have ended, or one has failed.
        num_ended: How many have.
        error: What one failed with.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.is_done = threading.Event()
        self.num_ended = 0
        self.error: RuntimeError | None = None
        threading.Thread(target=self._run, args=(works,), name="lightning_ft messages", daemon=True).start()

    def _run(self, works: Sequence[dist.Work]) -> None:
        try:
            for work in works:
                work.wait(_FOREVER)
                self.num_ended += 1
        except RuntimeError as error:
            self.error = error
        self.is_done.set()


class GlooTransport:
    """What a process needs once for all its inner groups: a store server, and a Gloo device with one listener.

    Args:
        host: Address of this machine that the other members can reach.
        silence_s: How long a peer's host may be silent: while they meet, besides what the number of members takes, and
            after that for the kernel. An inner collective may take any time: who hangs is the coordinator's to judge,
            who sees all.
    """

    def __init__(self, host: str, silence_s: float) -> None:
        self.host = host
        self._timeout = datetime.timedelta(seconds=silence_s)
        before = open_sockets()
        listener = socket.create_server((host, 0))
        address, port = listener.getsockname()[:2]
        with no_name_server():
            self._store = dist.TCPStore(  # given a listener, it does not listen on every interface
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),
            )
        self.address = Address(host, self._store.port)
        middle = open_sockets()
        self._device = dist.ProcessGroupGloo.create_device(hostname=host)
        listeners = [found for found in map(ports, open_sockets() - middle) if found is not None and found[1] is None]
        if len(listeners) != 1:
            raise RuntimeError(f"expected a Gloo device to open one listener, found {len(listeners)}")
        self._listener_port = listeners[0][0]
        self._base_sockets = open_sockets() - before
        self._groups: list[InnerGroup] = []
        self._builds: list[Build] = []
        self._has_lost_thread = False
        self._lock = threading.Lock()
        self._fork_guard = ForkGuard(self._own_sockets)

    def publish_catch_up(self, port: int) -> None:
        """Say in the own store where this process listens for the state of the job (`stream`)."""
        self._store.set(CATCH_UP_KEY, str(port))

    def _own_sockets(self) -> Iterable[Descriptor]:
        """Return every socket of the store and of the groups, accepted ones included."""
        own_ports = {self._store.port, self._listener_port}
        for descriptor in open_sockets():
            found = ports(descriptor)
            if found is not None and (found[0] in own_ports or found[1] in own_ports):
                yield descriptor
        yield from self._base_sockets
        for group in self._groups:
            yield from group.sockets
        for build in self._builds:
            yield from build.sockets

    def build(self, prefix: str, rank: int, size: int, meeting: Address) -> Build:
        """Prepare to make the group `prefix` of `size` members, as its rank `rank`; all of them must do so.

        Args:
            prefix: Never used before, or keys of an earlier group would be met.
            rank: 0 <= rank < size.
            size: Number of members.
            meeting: Store of the member where they meet.

        Returns: The build, not started: `Build.result` makes the group, `Build.cancel` ends it from another thread.
        """
        build = Build(
            prefix, lambda build: self._open_group(prefix, rank, size, meeting, build), self._groups.append, self.free
        )
        with self._lock:
            self._builds = [*(earlier for earlier in self._builds if earlier.is_running), build]
        return build

    def close(self) -> None:
        """End what is still being made, so that the interpreter can end."""
        for build in self._builds:
            build.cancel()
        deadline_s = time.monotonic() + 1.0
        for build in self._builds:
            build.join(max(0.0, deadline_s - time.monotonic()))
        for inner in self._groups:
            inner.sever()
        self._fork_guard.cancel()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits in Gloo, for a connection from a member that is dead, or for a lost message."""
        return self._has_lost_thread or any(build.is_running for build in self._builds)

    def free(self, inner: InnerGroup) -> None:
        """Close a group. Blocks until its works have ended; they do once it is severed.

        Its threads end with the last reference to it: one that let go of a tensor after the interpreter ended would
        abort the process.
        """
        inner.sever()
        self._has_lost_thread |= not inner.end_tree()
        with self._lock:  # a cancelled build frees its own group
            self._builds = [build for build in self._builds if not build.has_made(inner)]
        with contextlib.suppress(ValueError):  # was never handed out
            self._groups.remove(inner)
        with contextlib.suppress(RuntimeError):
            inner.group.shutdown()

    def _open_group(self, prefix: str, rank: int, size: int, meeting: Address, build: Build) -> InnerGroup:
        before = open_sockets()
        try:  # a store client retries a dead server for long; a plain connection is refused at once
            timeout_s = self._timeout.total_seconds()
            with socket.create_connection((meeting.host, meeting.store_port), timeout=timeout_s) as connection:
                address = str(connection.getpeername()[0])
        except (ConnectionRefusedError, ConnectionResetError):
            raise
        except OSError as error:  # no answer, or no way there
            raise RingBrokenError(f"{meeting.host} can't be reached: {error}", suspects=(0,)) from error
        with no_name_server():
            store = dist.TCPStore(  # a client even of the own server: its socket can be shut down, a wait inside can't
                address, meeting.store_port, is_master=False, wait_for_workers=False, timeout=self._timeout
            )
        build.sockets = tuple(_store_sockets(open_sockets() - before, meeting.store_port))
        prefixed = dist.PrefixStore(prefix, store)
        own = PeerAddress(self.host, self.address.store_port, self._listener_port)
        prefixed.set(f"peer/{rank}", str(own))
        texts = prefixed.multi_get([f"peer/{peer}" for peer in range(size)])
        peers = [PeerAddress.read(text.decode()) for text in texts]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = self._timeout + size * _CONNECT_TIME
        build.peers = peers
        try:
            group = dist.ProcessGroupGloo(prefixed, rank, size, options)
        except RuntimeError as error:
            raise RingBrokenError(str(error), unreachable(peers, lambda: build.is_cancelled)) from error
        group._set_default_timeout(_FOREVER)
        group_ports = [peer.group_port for peer in peers]
        opened = tuple(_ring_sockets(open_sockets() - before, self._listener_port, group_ports))
        tune(opened, self._timeout.total_seconds())
        grace_s = min(_GRACE_S, self._timeout.total_seconds() / 2)
        return InnerGroup(group, store, {*opened, *build.sockets}, _outgoing(opened, peers), grace_s)


class Build:
    """A group in the making, in a thread of its own because Gloo's and the store's waits can't be interrupted.

    Attributes:
        sockets: The store client's, once it is connected.
        peers: The members by rank, once they have met and connect to one another.
    """

    def __init__(
        self,
        prefix: str,
        make: Callable[[Build], InnerGroup],
        keep: Callable[[InnerGroup], None],
        drop: Callable[[InnerGroup], None],
    ) -> None:
        self.sockets: tuple[Descriptor, ...] = ()
        self.peers: Sequence[PeerAddress] = ()
        self._prefix = prefix
        self._make = make
        self._keep = keep
        self._drop = drop
        self._inner: InnerGroup | None = None
        self._error: Exception | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._wake = threading.Event()  # finished or cancelled
        self._thread = threading.Thread(target=self._run, name=f"lightning_ft build {prefix}", daemon=True)

    def cancel(self) -> None:
        """Give up, from any thread: `result` raises at once, and what is still made is broken when it is there."""
        with self._lock:
            self._is_cancelled = True
            if self._inner is not None:
                self._inner.sever()
        self._wake.set()
        shut_down(self.sockets)  # frees the thread from a wait at the store

    def result(self) -> InnerGroup:
        """Make the group and return it.

        Raises:
            RingBrokenError: A member is gone, or the build was cancelled.
        """
        self._thread.start()
        silent: tuple[int, ...] = ()
        while not silent and not self._wake.wait(PATIENCE_S + len(self.peers) * _CONNECT_TIME.total_seconds()):
            # Gloo waits for a host that does not answer for as long as the kernel sends again, minutes (torch 2.13).
            silent = unreachable(self.peers, self._wake.is_set)
        with self._lock:
            inner, error, is_cancelled = self._inner, self._error, self._is_cancelled
            if inner is not None and not is_cancelled:
                return inner
            self._inner = None
            self._is_cancelled = True  # what is made from here on is nobody's
        self.cancel()
        if inner is not None:
            self._drop(inner)
        if is_cancelled:
            raise RingBrokenError(f"building {self._prefix} failed: the view was suspended")
        if error is None:
            raise RingBrokenError(f"building {self._prefix} failed: no answer from ranks {silent}", silent)
        suspects = error.suspects if isinstance(error, RingBrokenError) else ()
        raise RingBrokenError(f"building {self._prefix} failed: {error}", suspects) from error

    def has_made(self, inner: InnerGroup) -> bool:
        """Whether this build's result is `inner`."""
        return self._inner is inner

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants the group any more."""
        return self._is_cancelled

    @property
    def is_running(self) -> bool:
        """Whether its thread has been started and has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a cancelled build: one that is in C++ when the interpreter ends would abort it."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            inner = self._make(self)
        except (OSError, RuntimeError, RingBrokenError) as error:
            self._error = error
        else:
            with self._lock:
                is_cancelled = self._is_cancelled
                if not is_cancelled:
                    self._keep(inner)
                    self._inner = inner
            if is_cancelled:
                self._drop(inner)
        self._wake.set()


def _store_sockets(candidates: Iterable[Descriptor], store_port: int) -> Iterable[Descriptor]:
    """Pick the connections to a store: another thread may have opened sockets of its own at the same moment."""
    for descriptor in candidates:
        found = ports(descriptor)
        if found is not None and found[1] == store_port:
            yield descriptor


def _outgoing(opened: Iterable[Descriptor], peers: Sequence[PeerAddress]) -> list[tuple[Descriptor, int]]:
    """Find out where the connections lead that were made from here; of the others only the peers know."""
    rank_of = {(peer.host, peer.group_port): rank for rank, peer in enumerate(peers)}
    found = ((descriptor, rank_of.get(remote_address(descriptor))) for descriptor in opened)
    return [(descriptor, rank) for descriptor, rank in found if rank is not None]


def _ring_sockets(candidates: Iterable[Descriptor], own: int, peers: Sequence[int]) -> Iterable[Descriptor]:
    """Pick the group's connections: on each pair of members one end is the listener's."""
    for descriptor in candidates:
        found = ports(descriptor)
        if found is not None and found[1] is not None and (found[0] == own or found[1] in peers):
            yield descriptor
