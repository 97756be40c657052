"""`lightning-ft doctor`: what it finds, and what it advises."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.checkpoint.stores.remote import MemoryStore
from lightning_ft.cli import doctor_checks, main
from lightning_ft.cli.doctor_checks import FAILED, FINE, WARNING


def test_machine_that_is_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one: status 0, each check with what it found; the storage is left as it was."""
    monkeypatch.setenv("LIGHTNING_FT_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    assert main(["doctor", "--coordinator", endpoint, "--storage", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in told["checks"]}
    assert told["is_fit"]
    for name in ("versions", "loopback", "liveness (127.0.0.1)", "sockets", "clock", "environment", "coordinator"):
        assert found[name]["status"] == FINE, found[name]
    assert "torch" in found["versions"]["found"]
    assert found[f"storage ({tmp_path / 'run'})"]["status"] == FINE
    assert not list((tmp_path / "run").rglob("*"))
    assert all(check["advice"] for check in told["checks"] if check["status"] != FINE)


def test_machine_that_is_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1; what failed is said with an advice, in text as well."""
    monkeypatch.delenv("LIGHTNING_FT_TOKEN", raising=False)
    monkeypatch.setenv("LIGHTNING_FT_TIMEOUT", "soon")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert main(["doctor", "--coordinator", f"127.0.0.1:{busy.getsockname()[1]}"]) == 1
    text = capsys.readouterr().out
    assert "FAILED  environment: environment variable LIGHTNING_FT_TIMEOUT='soon'" in text
    assert "FAILED  token: LIGHTNING_FT_TOKEN is not set" in text
    assert "warn    coordinator: 127.0.0.1 is this machine, and port" in text
    assert text.splitlines()[-1] == "something has to be mended"


@pytest.mark.parametrize(
    ("requirements", "status", "told"),
    [
        (["fsspec>=2020"], FINE, "fsspec 20"),
        (["fsspec>=2999"], FAILED, "is not >=2999"),
        (["no-such-package>=1"], FAILED, "no-such-package>=1 is missing"),
        (["no-such-package>=1; extra == 'dev'"], FINE, "python"),
    ],
)
def test_versions_are_compared(requirements: list[str], status: str, told: str) -> None:
    """With what this package requires; what an extra requires does not count."""
    check = doctor_checks.check_versions(requirements)
    assert check.status == status
    assert told in check.found


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, FINE),
        ({"HCCL_FT_CHECKPOINT_INTERVAL": "often"}, FAILED),
        ({"LIGHTNING_FT_SPARE": "1"}, WARNING),
    ],
)
def test_environment_is_read(environ: dict[str, str], status: str) -> None:
    """Aliases as well; a name that nobody reads is a warning."""
    assert doctor_checks.check_environment(environ).status == status


def test_threads_that_crowd_are_told() -> None:
    """More processes than processors, or as many threads for each."""
    available = len(os.sched_getaffinity(0))
    check = doctor_checks.check_processors
    assert check(1, {}).status == FINE
    assert check(available + 1, {}).status == WARNING
    assert "OMP_NUM_THREADS=1" in check(available, {"OMP_NUM_THREADS": str(available + 1)}).advice


def test_own_name_that_leads_nowhere_is_told() -> None:
    """A host that no name server knows."""
    (check,) = doctor_checks.check_nodes("no-such-host.invalid", 1)
    assert check.status == FAILED


def test_coordinator_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached, refused, or silent: three different answers, only the last one a fault."""
    monkeypatch.setattr(doctor_checks, "_PATIENCE_S", 0.2)

    def no_address_of_ours(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    def answer(host: str, port: int) -> str:
        with monkeypatch.context() as context:
            context.setattr(socket, "create_server", no_address_of_ours)
            return doctor_checks._check_coordinator(host, port, "127.0.0.1").status

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert answer("127.0.0.1", port) == FINE
        listener.listen(0)
        assert answer("127.0.0.1", port) == FINE
        assert answer("127.0.0.1", port) == FAILED, "the queue is full, which is silence"


class Forgetful(LocalStore):
    """Replaces what is there."""

    def _create(self, path: str, attempt: Any) -> None:
        self._replace(path, b"".join(attempt.source))


class Blind(MemoryStore):
    """Lists nothing."""

    def _list(self, prefix: str) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda place: Forgetful(str(place), timeout_s=None), "create only once"),
        (lambda place: Blind("memory://x", MemoryFileSystem(), "/blind", timeout_s=None), "list"),
    ],
    ids=["overwrites", "lists nothing"],
)
def test_storage_that_breaks_a_promise_is_told(
    make: Callable[[Path], Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the promise, and what to do."""
    monkeypatch.setattr("lightning_ft.checkpoint.store.open_store", lambda url, **_: make(tmp_path / "run"))
    check = doctor_checks.check_storage("x", {})
    assert check.status == FAILED
    assert check.found.startswith(f"{told}:")
    assert check.advice


def test_storage_that_can_not_be_written_or_tells_no_writers_apart(tmp_path: Path) -> None:
    """A file where the directory should be; a file system that fsspec knows and this package doesn't."""
    (tmp_path / "file").write_text("")
    check = doctor_checks.check_storage(str(tmp_path / "file" / "run"), {})
    assert check.status == FAILED
    assert check.found.startswith("create:")
    fsspec.register_implementation("othermemory", MemoryFileSystem, clobber=True)
    with pytest.warns(UserWarning, match="Two jobs"):
        assert doctor_checks.check_storage("othermemory://place/run", {}).status == WARNING
