"""`lightning-ft status`: who is in a job that runs, and how they are."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_ft.cli.common import EXIT_OK, CommandError, add_command, add_json, print_json, table
from lightning_ft.config import ENV_PREFIX, parse_endpoint

STATUS_PATH = "/v1/status"
"""As in `coordinator.status_view`, which needs aiohttp."""

_EXAMPLES = """
lightning-ft status                                # the job that runs on this machine, started by you
lightning-ft status --open                         # the same and more as a page in the browser
lightning-ft status --pid 4711                     # the one whose agent, or one of whose ranks, is process 4711
LIGHTNING_FT_TOKEN=... lightning-ft status --coordinator node0:29400
lightning-ft status --json | jq '.members[] | select(.state != "running")'
"""

_PATIENCE_S = 10.0
_LIMIT_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Where to ask, and the secret that proves that one may.

    Attributes:
        endpoint: Of the coordinator.
        token: The secret.
        standbys: Where its successor listens, if another node has taken its place.
    """

    endpoint: str
    token: str
    standbys: tuple[str, ...] = ()


def add(commands: Any) -> None:
    """Add the command."""
    status = add_command(
        commands,
        "status",
        _status,
        "show who is in a job that runs: the table of members, the ring and the tree",
        _EXAMPLES,
    )
    status.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where it listens (default: LIGHTNING_FT_COORDINATOR); the token is LIGHTNING_FT_TOKEN",
    )
    status.add_argument("--rdzv-id", "--rdzv_id", default="", metavar="ID", help="as given to `lightning-ft run`")
    status.add_argument(
        "--open", action="store_true", help="show the status page: print its address, and open it if there is a browser"
    )
    status.add_argument("--pid", type=int, metavar="PID", help="agent, or rank, of a job on this machine")
    add_json(status)


def _status(options: argparse.Namespace) -> int:
    job = _job(options)
    told = ask(job)
    if options.open:
        return _open(job)
    if options.json:
        print_json(told)
    else:
        print(shown(told))
    return EXIT_OK


def _open(job: Job) -> int:
    """Print the page's address with a key that is good for nothing else, and open it where there is a screen."""
    import webbrowser

    from lightning_ft.page.key import key_of

    address = f"http://{job.endpoint}/?token={key_of(job.token)}"
    print(address)
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        webbrowser.open(address)
    return EXIT_OK


def _job(options: argparse.Namespace) -> Job:
    endpoint = options.coordinator or os.environ.get(f"{ENV_PREFIX}COORDINATOR")
    if options.pid is None and endpoint:
        token = os.environ.get(f"{ENV_PREFIX}TOKEN", "")
        if not token:
            raise ValueError(
                "with a coordinator the environment variable LIGHTNING_FT_TOKEN must hold the job's secret"
            )
        parse_endpoint(endpoint)
        return Job(endpoint, f"{token}:{options.rdzv_id}" if options.rdzv_id else token)
    if options.pid is None:
        jobs = jobs_of(_processes())
        what = "no job of yours runs on this machine"
    else:
        jobs = jobs_of([options.pid]) or jobs_of(_children(options.pid))
        what = f"process {options.pid} is neither agent nor rank of a job of yours"
    if not jobs:
        raise CommandError(f"status failed: {what}. Name its coordinator: --coordinator HOST:PORT.")
    if len(jobs) > 1:
        listed = ", ".join(f"--pid {pid} ({job.endpoint})" for job, pid in jobs.items())
        raise ValueError(f"several jobs run on this machine; choose one: {listed}")
    return next(iter(jobs))


def jobs_of(pids: Iterable[int]) -> dict[Job, int]:
    """Return the jobs that some processes are ranks of, each with the process id of its agent.

    An agent tells its ranks by their environment, which only their own user can read.
    """
    found: dict[Job, int] = {}
    for pid in pids:
        environment = _environment(pid)
        names = [f"{ENV_PREFIX}{name}" for name in ("COORDINATOR", "TOKEN", "AGENT_PID", "MEMBER")]
        if all(environment.get(name) for name in names):
            endpoint, token, agent, _ = (environment[name] for name in names)
            standbys = environment.get(f"{ENV_PREFIX}STANDBYS", "").split(",")
            found.setdefault(Job(endpoint, token, tuple(filter(None, standbys))), int(agent))
    return found


def _environment(pid: int) -> Mapping[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return {}
    pairs = (entry.partition(b"=")[::2] for entry in text.split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs}


def _processes() -> list[int]:
    """Return this user's processes."""
    own = os.geteuid()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and path.stat().st_uid == own:
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def _children(pid: int) -> list[int]:
    """Return a process's children."""
    found = []
    for child in _processes():
        try:
            stat = Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(child)
    return found


def ask(job: Job) -> dict[str, Any]:
    """Ask a job's coordinator for its status, or whoever has taken its place.

    Raises:
        CommandError: It can't be reached, or does not answer as it should.
    """
    try:
        return _ask(job)
    except CommandError:
        for endpoint in job.standbys:
            with contextlib.suppress(CommandError):  # it is not in office
                return _ask(Job(endpoint, job.token))
        raise


def _ask(job: Job) -> dict[str, Any]:
    host, port = parse_endpoint(job.endpoint)
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", STATUS_PATH, headers={"Authorization": f"Bearer {job.token}"})
        answer = connection.getresponse()
        text = answer.read(_LIMIT_BYTES)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise CommandError(
            f"status failed: the coordinator at {job.endpoint} can't be reached: {str(error) or type(error).__name__}. "
            "Does the job run? Is that its node 0, or has another node taken its place?"
        ) from error
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise CommandError(f"status failed: the token is not that of the job at {job.endpoint} (LIGHTNING_FT_TOKEN).")
    try:
        told = json.loads(text) if answer.status == http.HTTPStatus.OK else None
    except ValueError:
        told = None
    if not isinstance(told, dict) or told.get("version") != 1:
        raise CommandError(
            f"status failed: what answers at {job.endpoint} (HTTP status {answer.status}) is no coordinator, is taking "
            "another's place right now, or is of another version of lightning-ft."
        )
    return told


def shown(told: Mapping[str, Any]) -> str:
    """Return a status as text: a line, the table, who waits, the ring, the tree."""
    reason = f": {told['reason']}" if told["reason"] and told["phase"] != "healthy" else ""
    head = (
        f"generation {told['generation']}, {told['phase']}{reason}; "
        f"{told['num_members']} of {told['target']} members are in the job"
    )
    rows = [
        (
            row["member"],
            row["rank"],
            _address(row),
            row["pid"],
            _state(row),
            row["step"],
            _age(row),
            row["doing"] or None,
        )
        for row in told["members"]
    ]
    rows += [
        (row["member"], None, _address(row), row["pid"], "waits to join", None, _age(row), None)
        for row in told["joiners"]
    ]
    text = table(("MEMBER", "RANK", "ADDRESS", "PID", "STATE", "STEP", "HEARD", "DOING"), rows)
    return f"{head}\n\n{text}\n\nring: {_ring(told)}\n\ntree:\n{_tree(told)}"


def _address(row: Mapping[str, Any]) -> str | None:
    return None if row["host"] is None else f"{row['host']}:{row['port']}"


def _state(row: Mapping[str, Any]) -> str:
    notes = [f"({row['cause']})"] if row["cause"] else []
    notes += ["slow"] if row["is_straggler"] else []
    notes += ["unconnected"] if row["rank"] is not None and row["host"] and not row["is_connected"] else []
    return " ".join([row["state"], *notes])


def _age(row: Mapping[str, Any]) -> str | None:
    age_s = row["heartbeat_age_s"]
    return None if age_s is None else f"{age_s:.1f} s ago"


def _ring(told: Mapping[str, Any]) -> str:
    """Say each host once, where the ring enters it."""
    hosts = {row["member"]: row["host"] for row in told["members"]}
    steps, last = [], None
    for member in told["ring"]:
        host = hosts.get(member)
        steps.append(f"{member} ({host})" if host is not None and host != last else member)
        last = host
    return " -> ".join([*steps, told["ring"][0]])


def _tree(told: Mapping[str, Any]) -> str:
    """Draw the tree, each member below the one that it sends to; say a host where it is entered."""
    hosts = {row["member"]: row["host"] for row in told["members"]}
    members, above = told["ring"], told["tree"]
    below: dict[int | None, list[int]] = {}
    for rank, upper in enumerate(above):
        below.setdefault(upper, []).append(rank)

    def lines(rank: int, stem: str, branch: str) -> Iterator[str]:
        host, upper = hosts.get(members[rank]), above[rank]
        is_entered = host is not None and (upper is None or hosts.get(members[upper]) != host)
        yield f"{stem}{branch}{members[rank]} ({host})" if is_entered else f"{stem}{branch}{members[rank]}"
        stem += {"": "", "|- ": "|  ", "`- ": "   "}[branch]
        for nth in below.get(rank, []):
            yield from lines(nth, stem, "`- " if nth == below[rank][-1] else "|- ")

    return "\n".join(lines(0, "", ""))
