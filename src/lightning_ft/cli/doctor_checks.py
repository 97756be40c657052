"""What `lightning-ft doctor` looks at. Each check says what it found, and what to do if that is not good."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import os
import resource
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_ft.config import Settings, checkpoint_interval, parse_endpoint, unknown_variables

if TYPE_CHECKING:
    from lightning_ft.checkpoint.store import Store

FINE, WARNING, FAILED = "ok", "warn", "FAILED"

_PATIENCE_S = 5.0
_LEAST_FILES = 1024
_LEAST_SHM_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What one check has found.

    Attributes:
        name: Of the check.
        status: `ok`, `warn` (it works, less well) or `FAILED`.
        found: What there is.
        advice: What to do; "" if there is nothing to.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def check_machine(coordinator: str | None, num_processes: int) -> list[Check]:
    """Check all but the storage.

    Args:
        coordinator: `host:port` of the job to be; None: one node.
        num_processes: Ranks on this node.

    Raises:
        ValueError: The endpoint is none.
    """
    checks = [
        check_versions(),
        check_environment(),
        check_loopback(),
        check_refusal("127.0.0.1"),
        check_shutdown(),
        check_clock(),
        check_processors(num_processes),
        check_limits(),
    ]
    if coordinator is not None:
        host, port = parse_endpoint(coordinator)
        checks += check_nodes(host, port)
    return checks


# -- this process -----------------------------------------------------------------------------------------------------


def check_versions(requirements: list[str] | None = None) -> Check:
    """Whether the packages that are installed are those that are required."""
    from packaging.requirements import Requirement

    if requirements is None:
        try:
            requirements = importlib.metadata.requires("lightning-ft") or []
        except importlib.metadata.PackageNotFoundError:
            return Check("versions", WARNING, "lightning-ft is not installed", "pip install lightning-ft")
    found, wrong = [f"python {sys.version.split()[0]}"], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return Check("versions", FAILED, "; ".join(wrong), "pip install --upgrade lightning-ft")
    return Check("versions", FINE, ", ".join(found))


def check_environment(environ: Mapping[str, str] = os.environ) -> Check:
    """Whether the variables of the environment are understood."""
    try:
        Settings.resolve(environ)
        checkpoint_interval(environ)
    except ValueError as error:
        return Check("environment", FAILED, str(error), "correct the variable")
    if unknown := unknown_variables(environ):
        return Check("environment", WARNING, f"nobody reads {', '.join(unknown)}", "are they misspelt?")
    return Check("environment", FINE, "the settings in it are right")


def check_clock() -> Check:
    """Whether deadlines are independent of the time of day."""
    if time.get_clock_info("monotonic").adjustable or not hasattr(time, "CLOCK_BOOTTIME"):
        return Check("clock", WARNING, "no monotonic clock that goes on in sleep", "use Linux for jobs that matter")
    return Check("clock", FINE, "monotonic: no deadline depends on the time of day")


def check_processors(num_processes: int, environ: Mapping[str, str] = os.environ) -> Check:
    """Whether there are as many processors as ranks, and threads do not crowd them."""
    available = len(os.sched_getaffinity(0))
    threads = environ.get("OMP_NUM_THREADS", "")
    found = f"{available} processors for {num_processes} processes, OMP_NUM_THREADS={threads or 'unset'}"
    if available < num_processes:
        return Check("processors", WARNING, found, "start fewer processes: these will wait for each other")
    if threads.isdecimal() and int(threads) * num_processes > available:
        fitting = max(1, available // num_processes)
        return Check("processors", WARNING, found, f"set OMP_NUM_THREADS={fitting}, or leave it unset")
    return Check("processors", FINE, found)


def check_limits() -> Check:
    """Whether there are files and shared memory enough."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    has_files = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    try:
        shared_bytes: float = shutil.disk_usage("/dev/shm").total  # noqa: S108 - where DataLoader workers put batches
    except OSError:
        shared_bytes = float("inf")
    found = f"{files} open files, {shared_bytes / 2**20:.0f} MiB of shared memory"
    if not has_files:
        return Check("limits", WARNING, found, f"ulimit -n {_LEAST_FILES}, or more")
    if shared_bytes < _LEAST_SHM_BYTES:
        return Check("limits", WARNING, found, "data loaders with workers need more: docker run --shm-size=1g")
    return Check("limits", FINE, found)


# -- the network ------------------------------------------------------------------------------------------------------


def check_loopback() -> Check:
    """Whether processes of this machine reach each other."""
    try:
        _talk("127.0.0.1")
    except OSError as error:
        return Check("loopback", FAILED, f"127.0.0.1: {error}", "bring the interface lo up; look at the firewall")
    return Check("loopback", FINE, "127.0.0.1 works")


def check_refusal(host: str) -> Check:
    """Whether a closed port refuses: that is how the death of a process is told from silence, without any clock."""
    name = f"liveness ({host})"
    try:
        with _listening(host) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        return Check(name, FAILED, f"nothing can listen there: {error}", "is that an address of this machine?")
    started_s = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return Check(name, FINE, f"a closed port refuses, after {1000 * (time.monotonic() - started_s):.1f} ms")
    except OSError as error:
        return Check(
            name,
            WARNING,
            f"a closed port does not refuse: {error}",
            "let the firewall reject instead of drop; else a dead process is noticed after heartbeat_timeout only",
        )
    return Check(name, WARNING, "something else took the port at once", "try again")


def check_shutdown() -> Check:
    """Whether shutting a socket down frees who is blocked in it: how a broken collective is left."""
    freed = threading.Event()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname(), timeout=_PATIENCE_S)
            far, _ = listener.accept()
    except OSError as error:
        return Check("sockets", FAILED, f"127.0.0.1: {error}", "see loopback")
    near.settimeout(None)

    def receive() -> None:
        near.recv(1)
        freed.set()

    with near, far:
        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        with socket.socket(fileno=os.dup(near.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
        is_freed = freed.wait(_PATIENCE_S)
        has_ended = far.recv(1) == b"" if is_freed else False
    if not (is_freed and has_ended):
        return Check(
            "sockets",
            FAILED,
            "shutdown() does not free a blocked recv()",
            "run on Linux itself: else a broken collective can't be left",
        )
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return Check("sockets", WARNING, "there is no TCP_USER_TIMEOUT", "a cut cable is noticed by heartbeats only")
    return Check("sockets", FINE, "shutdown() frees who is blocked")


def check_nodes(host: str, port: int) -> Iterator[Check]:
    """Whether this machine has the way to the coordinator, and an address that others can use."""
    from lightning_ft.coordinator.channel import reachable_host

    name = f"{host}:{port}"
    try:
        own = reachable_host(name if ":" not in host else f"[{host}]:{port}")
    except OSError as error:
        yield Check("coordinator", FAILED, f"{host}: {error}", "is the name right? Does the name server know it?")
        return
    token = os.environ.get("LIGHTNING_FT_TOKEN")
    if not token:
        advice = "set it to the same secret on all nodes: openssl rand -hex 16"
        yield Check("token", FAILED, "LIGHTNING_FT_TOKEN is not set", advice)
    yield _check_coordinator(host, port, own)
    yield _check_own_address(own)


def _check_coordinator(host: str, port: int, own: str) -> Check:
    try:
        with socket.create_server((host, port)):
            return Check("coordinator", FINE, f"{host} is this machine, and port {port} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "does a job run already? Else choose another port"
            return Check("coordinator", WARNING, f"{host} is this machine, and port {port} is in use", advice)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return Check("coordinator", FINE, f"{host} is reached from {own}; nothing listens at {port} yet")
    except OSError as error:
        advice = f"start that machine, or let its firewall pass port {port}"
        return Check("coordinator", FAILED, f"{host}:{port} does not answer: {error}", advice)
    return Check("coordinator", FINE, f"{host}:{port} is reached from {own}, and something listens there")


def _check_own_address(own: str) -> Check:
    advice = "set LIGHTNING_FT_HOST to an address of this machine that the other nodes can reach"
    try:
        _talk(own)
    except OSError as error:
        return Check("own address", FAILED, f"{own}: {error}", advice)
    if own.startswith("127.") or own == "::1":
        return Check("own address", WARNING, f"{own} is of this machine alone: fine for one node", advice)
    refusal = check_refusal(own)
    if refusal.status != FINE:
        return refusal
    return Check("own address", FINE, f"{own}, where ranks of other nodes reach those of this one")


def _talk(host: str) -> None:
    """Raises: OSError: A byte does not get from this machine to itself by that address."""
    with (
        _listening(host) as listener,
        socket.create_connection(listener.getsockname()[:2], timeout=_PATIENCE_S) as near,
        listener.accept()[0] as far,
    ):
        near.sendall(b"?")
        far.settimeout(_PATIENCE_S)
        if far.recv(1) != b"?":
            raise OSError("what was sent does not arrive")


def _listening(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


# -- the storage ------------------------------------------------------------------------------------------------------


def check_storage(url: str, options: Mapping[str, Any]) -> Check:
    """Whether checkpoints can be kept at a URL: an object is made once, listed, read, replaced and deleted.

    Raises:
        ValueError: The URL, or an option, is wrong.
    """
    from lightning_ft.checkpoint.store import open_store
    from lightning_ft.errors import CheckpointError

    name = f"storage ({url})"
    path = f"doctor/{secrets.token_hex(8)}"
    steps: list[str] = []

    started_s = time.monotonic()
    try:
        store = open_store(url, **options)
        try:
            for what, is_done in _tries(store, open_store(url, **options), path):
                steps.append(what)
                if not is_done():
                    return Check(name, FAILED, f"{what}: it does not do what was asked", _ADVICE[what])
        finally:
            store.delete([path])
        if path in store.list("doctor/"):
            return Check(
                name, FAILED, "delete: the object is still there", "are its versions kept, or deletes refused?"
            )
    except (CheckpointError, ImportError) as error:
        what = steps[-1] if steps else "open"
        return Check(name, FAILED, f"{what}: {error}", _ADVICE.get(what, "see the message"))
    found = f"made, listed, read, replaced, deleted in {time.monotonic() - started_s:.2f} s"
    if type(store).__name__ == "PlainStore":
        advice = "let only one job write to a directory; s3, webhdfs, gs, az or a path exclude a second writer"
        return Check(name, WARNING, f"{found}; two writers at the same moment are not told apart", advice)
    return Check(name, FINE, f"{found}; of two writers one is refused")


def _tries(store: Store, other: Store, path: str) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield what a storage must do, with a function that tries it, in this order; `other` is a second writer's."""
    from lightning_ft.errors import AlreadyThereError

    content, new = b"made by lightning-ft doctor", b"made anew"

    def create() -> bool:
        store.create(path, [content])
        return True

    def create_again() -> bool:
        try:
            other.create(path, [b"another's"])
        except AlreadyThereError:
            return store.read(path) == content
        return False

    def replace() -> bool:
        store.replace(path, new)
        return store.read(path) == new

    yield "create", create
    yield "list", lambda: path in store.list("doctor/")
    yield "read", lambda: store.size(path) == len(content) and store.read(path) == content
    yield "create only once", create_again
    yield "replace", replace


_ADVICE = {
    "create": "are credentials, bucket and permissions right?",
    "list": "permit listing; a job looks for what others have written",
    "read": "permit reading",
    "create only once": "two writers would replace each other's checkpoints there: use another storage",
    "replace": "permit overwriting of LATEST",
}
