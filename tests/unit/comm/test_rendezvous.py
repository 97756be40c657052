"""The store of torch's own rendezvous is opened at its first use only."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ft.comm.rendezvous import _DeferredStore, defer_rendezvous

_PROGRAM = """
import sys
sys.modules["lightning"] = None
import torch, torch.distributed as dist
import lightning_ft
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
group = dist.new_group([0, 1])
dist.barrier(group)
print("sum", int(total))
"""


def _not_opened() -> dist.Store:
    raise AssertionError("it was opened")


def test_it_is_opened_at_the_first_use_only() -> None:
    """And passes everything on then."""
    inner: Any = dist.HashStore()
    opened: list[dist.Store] = []

    def open_store() -> dist.Store:
        opened.append(inner)
        return inner  # type: ignore[no-any-return]

    store = _DeferredStore(open_store)
    prefixed: Any = dist.PrefixStore("p", store)
    assert not opened
    prefixed.set("a", "1")
    assert prefixed.get("a") == inner.get("p/a") == b"1"
    assert prefixed.add("n", 2) == 2
    assert prefixed.check(["a"])
    prefixed.wait(["a"])
    assert prefixed.compare_set("a", "1", "2") == b"2"
    assert prefixed.num_keys() >= 2
    assert prefixed.delete_key("a")
    assert not prefixed.check(["a"])
    assert opened == [inner]


def test_a_member_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env://` returns at once for a member, though there is no rank 0."""
    defer_rendezvous()
    for name, value in (("LIGHTNING_FT_MEMBER", "0/1"), ("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, rank, world_size = next(dist.rendezvous("env://"))
    assert (type(store), rank, world_size) == (_DeferredStore, 1, 2)


def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job, torch's own rendezvous asks for what it needs."""
    defer_rendezvous()
    for name in ("LIGHTNING_FT_MEMBER", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        next(dist.rendezvous("env://"))


def test_another_backend_in_a_job_meets_as_ever(tmp_path: pathlib.Path) -> None:
    """A script that was started as members may use Gloo itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "LIGHTNING_FT_MEMBER": f"0/{rank}",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == ["sum 2\n", "sum 2\n"]
