"""Making, breaking and freeing inner groups, with real Gloo."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import socket
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.unit.comm import inner_groups

from lightning_ft.comm import gloo
from lightning_ft.comm.gloo import Build, InnerGroup, RingBrokenError
from lightning_ft.comm.sockets import open_sockets
from lightning_ft.membership.events import Address


def count_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone


def settled_descriptors(limit: int) -> int:
    """Count them once the stores have closed their ends of what was closed here, which they do in threads of theirs."""
    deadline_s = time.monotonic() + 30.0
    while (count := count_descriptors()) > limit and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return count


def test_private_api_of_torch() -> None:
    """The private names that this layer uses are there; if not, comm/gloo.py has to follow torch."""
    options = dist.ProcessGroupGloo._Options()
    assert hasattr(options, "_devices"), "ProcessGroupGloo._Options has no _devices any more"
    assert hasattr(options, "_timeout"), "ProcessGroupGloo._Options has no _timeout any more"
    assert callable(dist.ProcessGroupGloo.create_device), "ProcessGroupGloo.create_device is gone"
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options._devices = [device]
    assert len(options._devices) == 1


def test_a_group_reduces() -> None:
    """Members that build the same prefix at the same store are a group."""
    with inner_groups.transports(3) as members:
        groups = inner_groups.make(members)
        tensors = [torch.tensor([float(2**rank)]) for rank in range(3)]
        works = [inner.group.allreduce([tensor]) for inner, tensor in zip(groups, tensors, strict=True)]
        for work in works:
            work.wait()
        assert [tensor.item() for tensor in tensors] == [7.0] * 3


def test_sever_frees_a_blocked_collective() -> None:
    """A collective that waits for a member that never comes fails when another thread severs its group."""
    with inner_groups.transports(2) as members:
        first, _ = inner_groups.make(members)
        work = first.group.allreduce([torch.ones(1)])
        threading.Timer(0.05, first.sever).start()
        with pytest.raises(RuntimeError):
            work.wait()


def test_sever_is_seen_by_the_peer() -> None:
    """What one member severs fails for the others too."""
    with inner_groups.transports(2) as members:
        first, second = inner_groups.make(members)
        work = first.group.allreduce([torch.ones(1)])
        threading.Timer(0.05, second.sever).start()
        with pytest.raises(RuntimeError):
            work.wait()


def test_a_work_that_gloo_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work that does not end though its group was severed frees its waiter, and the group can be freed."""
    monkeypatch.setattr(gloo, "_LOOK", datetime.timedelta(seconds=0.01))
    monkeypatch.setattr(gloo, "_GRACE_S", 0.1)
    with inner_groups.transports(2) as members:
        first, second = inner_groups.make(members)
        work = first.group.allreduce([torch.ones(1)])
        first.sockets = ()  # as if nothing were woken
        first.sever()
        with pytest.raises(RingBrokenError, match="lost"):
            first.wait(work)
        members[0].free(first)
        second.sever()
        with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
            first.wait(work)


def test_wait_raises_what_a_work_failed_with() -> None:
    """A work that fails by itself raises its own error, one that succeeds none, however long both take."""
    with inner_groups.transports(2) as members:
        first, second = inner_groups.make(members)
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            first.wait(first.group.allreduce([torch.ones(1, dtype=torch.int16)]))
        first, second = inner_groups.make(members)
        work = first.group.allreduce([torch.ones(1)])
        timer = threading.Timer(1.2, lambda: second.group.allreduce([torch.ones(1)]))  # longer than it looks
        timer.start()
        first.wait(work)
        timer.join()


def test_cancel_frees_a_blocked_build() -> None:
    """A build that waits for a member that never comes ends when another thread cancels it, and so does its thread."""
    with inner_groups.transports(2) as members:
        build, _ = inner_groups.prepare(members)
        threading.Timer(0.05, build.cancel).start()
        with pytest.raises(RingBrokenError):
            build.result()
        build.join(60)
        assert not build.is_running


def test_a_build_that_was_cancelled_before_it_started() -> None:
    """Such a build fails at once and leaves nothing."""
    with inner_groups.transports(1) as members:
        before = count_descriptors()
        for _ in range(20):
            (build,) = inner_groups.prepare(members)
            build.cancel()
            with pytest.raises(RingBrokenError):
                build.result()
            build.join(60)
        del build
        assert settled_descriptors(before + 4) <= before + 4


def test_a_dead_store_is_refused_at_once() -> None:
    """A meeting place where nobody listens fails the build without waiting for the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with inner_groups.transports(1, timeout_s=3600) as (member,), pytest.raises(RingBrokenError, match="refused"):
        member.build("dead", 0, 2, Address("127.0.0.1", port)).result()


def test_freed_groups_leave_nothing_open() -> None:
    """Many groups, made and freed, cost no descriptor."""
    with inner_groups.transports(2) as members:
        for inner, transport in zip(inner_groups.make(members), members, strict=True):
            transport.free(inner)
        del inner
        before = count_descriptors()
        for _ in range(40):
            for inner, transport in zip(inner_groups.make(members), members, strict=True):
                transport.free(inner)
            del inner
        assert settled_descriptors(before + 8) <= before + 8


def test_a_freed_group_is_gone_at_once() -> None:
    """Nothing but its user refers to a group: its threads have ended before the interpreter does."""
    with inner_groups.transports(2) as members:
        groups = inner_groups.make(members)
        is_gone = [weakref.ref(inner) for inner in groups]
        for transport, inner in zip(members, groups, strict=True):
            transport.free(inner)
        del groups, inner
        assert [reference() for reference in is_gone] == [None, None]


def test_cancelled_groups_leave_nothing_open() -> None:
    """A build that is cancelled at any moment leaves no group behind."""
    with inner_groups.transports(2, timeout_s=2.0) as members:  # Gloo's own wait for a peer can't be cut short
        before = count_descriptors()
        for number in range(0, 16, 2):
            builds = inner_groups.prepare(members)
            timers = [threading.Timer(number * 0.001, build.cancel) for build in builds]
            for timer in timers:
                timer.start()
            made = inner_groups.together(*(functools.partial(attempt, build) for build in builds))
            for member, inner in zip(members, made, strict=True):
                if inner is not None:
                    member.free(inner)
            for timer, build in zip(timers, builds, strict=True):
                timer.join()
                build.join(60)
        del builds, build, made, inner
        assert all(not transport._groups for transport in members)
        assert settled_descriptors(before + 8) <= before + 8


def attempt(build: Build) -> InnerGroup | None:
    try:
        return build.result()
    except RingBrokenError:
        return None


def test_a_foreign_socket_is_not_severed() -> None:
    """A socket that another thread opens while a group is made is not taken for the group's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, inner_groups.transports(1) as (member,):
        is_over = threading.Event()
        foreign: list[socket.socket] = []

        def open_many() -> None:
            while not is_over.is_set() and len(foreign) < 200:
                foreign.append(socket.create_connection(listener.getsockname(), timeout=60))
                foreign.append(listener.accept()[0])

        opener = threading.Thread(target=open_many)
        opener.start()
        try:
            while len(foreign) < 20:
                (inner,) = inner_groups.make([member])
                inner.sever()
                member.free(inner)
            is_over.set()
            opener.join(60)
            for near, far in zip(foreign[::2], foreign[1::2], strict=True):
                near.sendall(b"x")
                assert far.recv(1) == b"x"
        finally:
            is_over.set()
            opener.join(60)
            for sock in foreign:
                sock.close()


def test_own_sockets_are_kept_from_forks() -> None:
    """Of every connection of its groups and its store, a transport knows its own end."""
    before = open_sockets()
    with inner_groups.transports(2) as members:
        groups = inner_groups.make(members)
        guarded = {descriptor for transport in members for descriptor in transport._own_sockets()}
        assert guarded >= open_sockets() - before
        assert len(groups) == 2


def test_a_message_may_be_waited_for_for_long() -> None:
    """Longer than the pause after which one looks whether the group was severed: that must not break it."""
    with inner_groups.transports(2) as members:
        one, other = inner_groups.make(members)
        data, told = torch.zeros(3), list[int]()
        work = one.group.recv([data], 1, 5)

        def send_late() -> None:
            time.sleep(1.2 * gloo._LOOK.total_seconds())  # the time itself is what is tried
            other.wait_messages([other.group.send([torch.ones(3)], 0, 5)], lambda _: None)

        inner_groups.together(lambda: one.wait_messages([work], told.append), send_late)
        assert told == [1]
        assert data.tolist() == [1, 1, 1]


def test_messages_of_a_severed_group_fail() -> None:
    """At once, whichever end it was that was severed."""
    with inner_groups.transports(2) as members:
        one, other = inner_groups.make(members)
        works = [one.group.recv([torch.zeros(3)], 1, 5)]
        other.sever()
        with pytest.raises(RuntimeError):
            one.wait_messages(works, lambda _: None)
