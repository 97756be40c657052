"""The agent with real children: no orphan, no lost status, no lost signal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 30.0
CLI = (sys.executable, "-m", "lightning_ft.cli")

QUICK = ("--heartbeat-interval", "0.05", "--heartbeat-timeout", "1", "--timeout", "60")
PATIENT = ("--heartbeat-interval", "0.05", "--heartbeat-timeout", "20", "--timeout", "60")

MEMBER = """
    import os, socket, sys, threading, time, signal
    from lightning_ft.config import Settings
    from lightning_ft.coordinator.client import MembershipClient
    from lightning_ft.errors import FaultToleranceError
    from lightning_ft.child import watch_agent
    from lightning_ft.membership.events import Address
    from lightning_ft.membership.ids import from_ranges

    assert "torch" not in sys.modules
    watch_agent()
    member = os.environ["LIGHTNING_FT_MEMBER"]
    store = socket.create_server(("127.0.0.1", 0))
    suspended = threading.Event()
    client = MembershipClient(
        endpoint=os.environ["LIGHTNING_FT_COORDINATOR"], token=os.environ["LIGHTNING_FT_TOKEN"], member=member,
        incarnation=int(os.environ["LIGHTNING_FT_INCARNATION"]), settings=Settings.resolve(),
        expected=from_ranges(os.environ["LIGHTNING_FT_EXPECTED"]),
        address=Address("127.0.0.1", store.getsockname()[1]), on_suspend=lambda _: suspended.set(),
    )
    client.start()
    view = client.park(0, "start").view
    note(f"view{view.generation}", " ".join(view.members))

    def next_view():
        suspended.wait()
        view = client.park(0, "suspended").view
        note(f"view{view.generation}", " ".join(view.members))
"""

OUTLIVE = """
    if member == "0/1":
        os.kill(os.getpid(), signal.SIGKILL)
    next_view()
    client.leave(0)
    client.close()
"""

NOTE = """
    import os
    from pathlib import Path

    def note(name, text=""):
        # Renamed into place: whoever sees it sees all of it.
        directory = Path(os.environ["NOTES"])
        path = directory / (os.environ["LIGHTNING_FT_MEMBER"].replace("/", "-") + "." + name)
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").rename(path)
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition of another process."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.002)
    return value


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Stage:
    """Agents that a test starts; at its end they are killed, and what they said is printed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes = directory / "notes"
        self.notes.mkdir()
        self.events = directory / "events.jsonl"
        self.agents: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []

    def script(self, *parts: str) -> Path:
        path = self.directory / "script.py"
        path.write_text("\n".join(textwrap.dedent(part) for part in (NOTE, *parts)))
        return path

    def start(self, arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
        output = self.directory / f"output{len(self.agents)}.txt"
        self.outputs.append(output)
        with output.open("wb") as file:
            agent = subprocess.Popen(
                arguments,
                env={**os.environ, "NOTES": str(self.notes), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def run(self, script: Path | str, *options: str, num_slots: int = 2, **env: str) -> subprocess.Popen[bytes]:
        log = ["--event-log", str(self.events)]
        slots = ["--nproc-per-node", str(num_slots)]
        return self.start([*CLI, "run", *slots, *log, *options, str(script)], **env)

    def noted(self, member: str, name: str) -> str | None:
        path = self.notes / f"{member.replace('/', '-')}.{name}"
        return path.read_text() if path.exists() else None

    def wait_for_notes(self, name: str, *members: str) -> list[str]:
        def all_notes() -> list[str] | None:
            notes = [self.noted(member, name) for member in members]
            return None if None in notes else [str(note) for note in notes]

        return until(all_notes, f"{members} noted {name}")  # type: ignore[no-any-return]

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()] if self.events.exists() else []
        return [line for line in lines if line["event"] == event]

    def kill_all(self) -> None:
        for agent in self.agents:
            agent.kill()  # their children die with them

    def end(self) -> None:
        self.kill_all()
        for agent, output in zip(self.agents, self.outputs, strict=True):
            agent.wait(DEADLINE_S)
            print(f"--- {output.name}\n{output.read_text(errors='replace')}")
        print("--- notes", *sorted(note.name for note in self.notes.iterdir()))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Ends what the test started, also when its deadline passes."""
    stage = Stage(tmp_path)
    timer = threading.Timer(2 * DEADLINE_S, stage.kill_all)
    timer.start()
    try:
        yield stage
    finally:
        timer.cancel()
        stage.end()


# Orphans.

STUBBORN = """
    import signal, time
    member = os.environ["LIGHTNING_FT_MEMBER"]
    if member == "0/1":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    note("pid", str(os.getpid()))
    if member == "0/2":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(60)
"""


def test_killed_agent_leaves_no_orphan(stage: Stage) -> None:
    """SIGKILL to the agent ends children that never heard of lightning_ft, that ignore SIGTERM, that are stopped."""
    agent = stage.run(stage.script(STUBBORN), num_slots=3)
    pids = [int(pid) for pid in stage.wait_for_notes("pid", "0/0", "0/1", "0/2")]
    assert all(map(is_running, pids))
    agent.kill()
    agent.wait(DEADLINE_S)
    until(lambda: not any(map(is_running, pids)), "no child runs")


def test_agent_that_is_killed_while_it_starts_children_leaves_no_orphan(stage: Stage) -> None:
    """At whatever point of the start it dies: the children that exist end."""
    for delay_s in (0.0, 0.01, 0.02, 0.04):
        agent = stage.run(stage.script(STUBBORN), num_slots=4, RUN=f"orphan{delay_s}")
        until((stage.notes / "0-0.pid").exists, "the first child runs")
        time.sleep(delay_s)  # sweeps the moment of death over the start of the others
        agent.kill()
        agent.wait(DEADLINE_S)
        marker = f"RUN=orphan{delay_s}\0".encode()
        until(lambda marker=marker: not processes_with(marker), "no child runs")
        for note in stage.notes.iterdir():
            note.unlink()


def processes_with(marker: bytes) -> list[int]:
    """Running processes that have this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes() and is_running(int(entry.name)):
                    found.append(int(entry.name))
    return found


# Status.


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"], ids=["killed", "done"])
def test_what_a_member_leaves_behind_is_ended(stage: Stage, end: str) -> None:
    """A fork that outlives its member, as a DataLoader worker may, does not outlive the job."""
    script = stage.script(f"""
    import signal, sys, time
    if (fork := os.fork()) == 0:
        time.sleep(600)
    note("fork", str(fork))
    {end}
    """)
    stage.run(script, num_slots=1).wait(DEADLINE_S)
    (fork,) = stage.wait_for_notes("fork", "0/0")
    until(lambda: not is_running(int(fork)), "the fork has ended")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3 * (os.environ['RANK'] == '1'))", 3),
        ("raise RuntimeError('boom')", 1),
        ("os.kill(os.getpid(), 15)", 143),
        ("os.kill(os.getpid(), 9)", 137),
    ],
    ids=["success", "one-fails", "exception", "SIGTERM", "SIGKILL"],
)
def test_status_of_a_plain_script_is_the_jobs(stage: Stage, code: str, status: int) -> None:
    """A script that does not use the coordinator at all."""
    assert stage.run(stage.script(code)).wait(DEADLINE_S) == status
    (finished,) = stage.logged("job_finished")
    assert finished["status"] == status
    (started,) = stage.logged("job_started")
    assert started["members"] == ["0/0", "0/1"]
    assert started["settings"]["min_world_size"] == 1


def test_job_that_survives_a_death_succeeds(stage: Stage) -> None:
    """One of three is killed; the others go on, leave and are released: status 0."""
    assert stage.run(stage.script(MEMBER, OUTLIVE), *PATIENT, num_slots=3).wait(DEADLINE_S) == 0
    assert stage.wait_for_notes("view2", "0/0", "0/2") == ["0/0 0/2"] * 2
    (failure,) = stage.logged("failure_detected")
    assert failure["member"] == "0/1"
    assert [line["event"] for line in stage.logged("job_finished")] == ["job_finished"]


def test_running_job_tells_its_status(stage: Stage) -> None:
    """Found by the agent's process id, by a rank's, and by endpoint and secret; no more when it has ended."""
    wait = """
    note("pid", str(os.getpid()))
    while not (Path(os.environ["NOTES"]) / "go").exists():
        time.sleep(0.002)
    client.leave(0)
    client.close()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agent = stage.run(
        stage.script(MEMBER, wait), *PATIENT, "--coordinator", endpoint, LIGHTNING_FT_TOKEN="shared-secret"
    )
    rank = stage.wait_for_notes("pid", "0/0", "0/1")[1]
    token = {**os.environ, "LIGHTNING_FT_TOKEN": "shared-secret"}
    asked = [
        cli("status", "--json", "--pid", str(agent.pid)),
        cli("status", "--json", "--pid", rank),
        cli("status", "--json", "--coordinator", endpoint, env=token),
    ]
    for answer in asked:
        told = json.loads(answer.stdout)
        assert answer.returncode == 0
        assert (told["phase"], told["ring"]) == ("healthy", ["0/0", "0/1"])
        assert [(row["rank"], row["state"], row["host"]) for row in told["members"]] == [
            (0, "running", "127.0.0.1"),
            (1, "running", "127.0.0.1"),
        ]
    (stage.notes / "go").touch()
    assert agent.wait(DEADLINE_S) == 0
    over = cli("status", "--coordinator", endpoint, env=token)
    assert over.returncode == 3
    assert "can't be reached" in over.stderr
    assert "is neither agent nor rank" in cli("status", "--pid", str(os.getpid())).stderr


def test_released_member_that_fails_afterwards_fails_the_job(stage: Stage) -> None:
    """What a member does after its last collective counts too."""
    failure = """
    client.leave(0)
    client.close()
    sys.exit(7 if member == "0/1" else 0)
    """
    assert stage.run(stage.script(MEMBER, failure), *PATIENT).wait(DEADLINE_S) == 7


def test_lost_quorum_is_the_jobs_failure(stage: Stage) -> None:
    """The survivor is told, raises, and its status is the job's."""
    death = """
    if member == "0/1":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        next_view()
    except FaultToleranceError as error:
        note("error", f"{type(error).__name__}: {error}")
        sys.exit(75)
    """
    agent = stage.run(stage.script(MEMBER, death), *PATIENT, "--min-world-size", "2", "--max-restarts", "0")
    assert agent.wait(DEADLINE_S) == 75
    assert "min_world_size is 2" in str(stage.noted("0/0", "error"))


def test_nobody_waits_for_others_when_all_were_asked_to_stop(stage: Stage) -> None:
    """Too few are left, and wait for one that comes back; a signal to the agent ends that one, and so the wait."""
    comes_back = """
    import os, time
    if os.environ["LIGHTNING_FT_INCARNATION"] == "2":
        note("back")
        time.sleep(600)
    """
    stays = """
    if member == "0/1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        next_view()
    except FaultToleranceError:
        sys.exit(75)
    """
    agent = stage.run(stage.script(comes_back, MEMBER, stays), *PATIENT, "--min-world-size", "2")
    stage.wait_for_notes("back", "0/1")
    until(lambda: "quorum_missing" in stage.events.read_text(), "the other waits")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(DEADLINE_S) == 75
    assert '"event": "job_stopped"' in stage.events.read_text()


RUNNER = """
    import asyncio, sys
    from lightning_ft.config import Settings
    from lightning_ft.launch.agent import run_agent

    sys.exit(
        run_agent(
            lambda slot: [sys.executable, sys.argv[1]],
            lambda slot: {"SLOT": str(slot)},
            node=0, num_slots=2, settings=Settings.resolve(), expected_members=["0/0", "0/1"],
            host_coordinator=True, termination_grace_time=0.3,
        )
    )
"""


def test_children_that_stay_after_the_job_stopped_are_ended(stage: Stage) -> None:
    """They get the grace time to exit by themselves, then SIGTERM, then SIGKILL."""
    stubborn = """
    signal.signal(signal.SIGTERM, lambda *_: note("asked"))
    note("pid", str(os.getpid()))
    if member == "0/1":
        sys.exit(9)
    try:
        next_view()
    except FaultToleranceError:
        while True:
            time.sleep(60)
    """
    script = stage.script(MEMBER, stubborn)
    runner = stage.directory / "runner.py"
    runner.write_text(textwrap.dedent(RUNNER))
    agent = stage.start(
        [sys.executable, str(runner), str(script)],
        LIGHTNING_FT_MIN_WORLD_SIZE="2",
        LIGHTNING_FT_MAX_RESTARTS="0",
        LIGHTNING_FT_HEARTBEAT_INTERVAL="0.05",
    )
    assert agent.wait(DEADLINE_S) == 128 + signal.SIGKILL  # the last that failed
    assert stage.noted("0/0", "asked") is not None
    assert not is_running(int(str(stage.noted("0/0", "pid"))))


def test_hung_member_is_killed_and_the_job_goes_on(stage: Stage) -> None:
    """A stopped process is given up by its silence; its agent kills it; the rest finishes."""
    hang = """
    note("pid", str(os.getpid()))
    if member == "0/1":
        os.kill(os.getpid(), signal.SIGSTOP)
    next_view()
    client.leave(0)
    client.close()
    """
    assert stage.run(stage.script(MEMBER, hang), *QUICK, num_slots=3).wait(DEADLINE_S) == 0
    assert stage.wait_for_notes("view2", "0/0", "0/2") == ["0/0 0/2"] * 2
    assert not is_running(int(str(stage.noted("0/1", "pid"))))


# The coordinator's own death.

POINTS = [
    *(f"decision.{point}@{count}" for point in ("made", "saved") for count in (1, 2, 3)),
    *(f"member.told@{count}" for count in (3, 5)),
]


@pytest.mark.parametrize("point", POINTS)
def test_coordinator_is_killed_at_any_point(stage: Stage, point: str) -> None:
    """Whatever it had decided, kept or told: the next one goes on from there, and nobody notices but by the wait."""
    agent = stage.run(stage.script(MEMBER, OUTLIVE), *PATIENT, num_slots=3, LIGHTNING_FT_FAIL_AT=f"coordinator={point}")
    assert agent.wait(DEADLINE_S) == 0
    assert f"fault placed at {point.partition('@')[0]}" in stage.outputs[0].read_text()
    assert stage.wait_for_notes("view2", "0/0", "0/2") == ["0/0 0/2"] * 2
    assert {line["member"] for line in stage.logged("failure_detected")} == {"0/1"}
    (finished,) = stage.logged("job_finished")
    assert finished["status"] == 0


def coordinator_of(agent: subprocess.Popen[bytes]) -> int | None:
    """Process id of the coordinator that an agent keeps."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == agent.pid and b"lightning_ft.coordinator.standalone" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
    return None


def test_coordinator_is_killed_again_and_again(stage: Stage) -> None:
    """While nothing else happens; the members that were there stay members, and the port stays the same."""
    wait = """
    while not (Path(os.environ["NOTES"]) / "go").exists():
        time.sleep(0.002)
    """
    agent = stage.run(stage.script(MEMBER, wait, OUTLIVE), *PATIENT, num_slots=3)
    stage.wait_for_notes("view1", "0/0", "0/1", "0/2")
    killed = set()
    for _ in range(3):
        pid = until(lambda: (found := coordinator_of(agent)) not in killed and found, "there is another coordinator")
        until(lambda: len(stage.logged("coordinator_restarted")) == len(killed), "it has begun")
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
    (stage.notes / "go").touch()
    assert agent.wait(DEADLINE_S) == 0
    assert stage.wait_for_notes("view2", "0/0", "0/2") == ["0/0 0/2"] * 2
    assert len(stage.logged("coordinator_restarted")) == 3


def test_coordinator_ends_with_its_agent(stage: Stage) -> None:
    """No orphan is left of it either."""
    agent = stage.run(stage.script(STUBBORN), num_slots=1)
    pid = until(lambda: coordinator_of(agent), "there is a coordinator")
    agent.kill()
    agent.wait(DEADLINE_S)
    until(lambda: not is_running(pid), "it has ended")


# Signals.

LISTENER = """
    import signal, time
    arrived = []

    def on_signal(number, frame):
        note("got", signal.Signals(number).name)
        if number != signal.SIGINT or "STUBBORN" not in os.environ:
            raise SystemExit(0)
        note("stays")

    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(getattr(signal, name), on_signal)
    note("ready", str(os.getpid()))
    while True:
        time.sleep(0.05)  # a signal that comes just before a sleep is handled after it
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_signal_is_passed_on(stage: Stage, name: str) -> None:
    """Each child gets it, and the agent stays until they have ended."""
    agent = stage.run(stage.script(LISTENER))
    stage.wait_for_notes("ready", "0/0", "0/1")
    agent.send_signal(getattr(signal, name))
    assert agent.wait(DEADLINE_S) == 0
    assert [stage.noted(member, "got") for member in ("0/0", "0/1")] == [name, name]


def test_children_that_do_not_end_when_asked_are_made_to(stage: Stage) -> None:
    """All have left their last collective, a stop is asked for, and one does not listen: it gets the grace time."""
    deaf = """
    client.leave(0)
    client.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("left")
    if member == "0/1":
        while True:
            time.sleep(60)
    """
    runner = stage.directory / "runner.py"
    runner.write_text(textwrap.dedent(RUNNER))
    agent = stage.start([sys.executable, str(runner), str(stage.script(MEMBER, deaf))])
    stage.wait_for_notes("left", "0/0", "0/1")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_second_interrupt_kills(stage: Stage) -> None:
    """Whoever did not end on Ctrl-C is killed on the next."""
    agent = stage.run(stage.script(LISTENER), STUBBORN="1")
    stage.wait_for_notes("ready", "0/0", "0/1")
    agent.send_signal(signal.SIGINT)
    stage.wait_for_notes("stays", "0/0", "0/1")
    assert agent.poll() is None
    agent.send_signal(signal.SIGINT)
    assert agent.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_signal_during_the_start_reaches_all(stage: Stage) -> None:
    """Also the children that did not exist yet when it came."""
    runner = stage.directory / "runner.py"
    early = 'lambda slot: {"SLOT": str(slot)}'
    assert early in RUNNER
    signalling = 'lambda slot: os.kill(os.getpid(), 15) or {"SLOT": str(slot)} if slot == 0 else {}'
    runner.write_text("import os" + textwrap.dedent(RUNNER.replace(early, signalling)))
    agent = stage.start([sys.executable, str(runner), str(stage.script(LISTENER))])
    assert agent.wait(DEADLINE_S) in (0, 128 + signal.SIGTERM)


# Starting.


def test_environment_of_a_child(stage: Stage) -> None:
    """The names of torchrun, the coordinator's, and the settings as the agent resolved them."""
    show = """
    import json
    note("env", json.dumps(dict(os.environ)))
    """
    agent = stage.run(stage.script(show), "--max-failures", "1", LIGHTNING_FT_MIN_WORLD_SIZE="2")
    assert agent.wait(DEADLINE_S) == 0
    for slot in range(2):
        environment = json.loads(str(stage.noted(f"0/{slot}", "env")))
        expected = {
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "NODE_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "LIGHTNING_FT_MEMBER": f"0/{slot}",
            "LIGHTNING_FT_INCARNATION": "1",
            "LIGHTNING_FT_EXPECTED": "0/0-1",
            "LIGHTNING_FT_MIN_WORLD_SIZE": "2",
            "LIGHTNING_FT_MAX_FAILURES": "1",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert int(environment["MASTER_PORT"]) > 0
        assert environment["LIGHTNING_FT_COORDINATOR"].startswith("127.0.0.1:")
        assert len(environment["LIGHTNING_FT_TOKEN"]) > 30
        assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_program_that_does_not_exist_is_named(stage: Stage) -> None:
    """Nothing is left running, and the message says what to check."""
    runner = stage.directory / "runner.py"
    runner.write_text(textwrap.dedent(RUNNER).replace("sys.executable, sys.argv[1]", "'no-such-program'"))
    agent = stage.start([sys.executable, str(runner)])
    assert agent.wait(DEADLINE_S) == 1
    assert "starting 0/0 failed: ['no-such-program'] is no program" in stage.outputs[0].read_text()


def test_two_agents_make_one_job(stage: Stage) -> None:
    """Node 0 hosts the coordinator and stays as long as node 1 needs it."""
    last = """
    if member == "1/0":
        while not list(Path(os.environ["NOTES"]).glob("0-0.left")):
            time.sleep(0.002)
    client.leave(0)
    note("left")
    client.close()
    """
    death = """
    if member == "0/0":
        note("left")
        os.kill(os.getpid(), signal.SIGKILL)
    next_view()
    """
    script = stage.script(MEMBER, death, last)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = [*PATIENT, "--nnodes", "2", "--coordinator", endpoint]
    nodes = [
        stage.run(script, *options, "--node-rank", str(node), num_slots=1, LIGHTNING_FT_TOKEN="shared-secret")
        for node in range(2)
    ]
    assert [node.wait(DEADLINE_S) for node in nodes] == [0, 0]
    assert stage.noted("1/0", "view1") == "0/0 1/0"
    assert stage.noted("1/0", "view2") == "1/0"
    assert not any("could not be reported" in path.read_text() for path in stage.outputs)


# Command line.


def cli(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_module_and_its_arguments(tmp_path: Path) -> None:
    """`-m` runs a module; what follows it is its own."""
    (tmp_path / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    result = cli("run", "--nproc-per-node", "1", "-m", "a_module", "--nproc-per-node", "9", "x", cwd=tmp_path)
    assert result.stdout == "__main__ ['--nproc-per-node', '9', 'x']\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--nproc-per-node", "0", "x.py"], "expected at least 1, got 0"),
        (["run", "--timeout", "soon", "x.py"], "expected seconds or 'auto', got 'soon'"),
        (["run", "--timeout", "1", "x.py"], "heartbeat_interval < heartbeat_timeout < timeout"),
        (["run", "--coordinator", "nowhere", "x.py"], "expected host:port"),
        (["run", "--nnodes", "2", "x.py"], "needs --rdzv-endpoint"),
        (["run", "--nnodes", "2", "--node-rank", "2", "x.py"], "must be from 0 to 1, got 2"),
        (["run", "--join", "x.py"], "needs --rdzv-endpoint"),
        (["run", "--max-world-size", "1", "--nproc-per-node", "2", "x.py"], "at least the number of members, 2, got 1"),
        (["run"], "SCRIPT"),
    ],
)
def test_wrong_command_line_is_explained(arguments: list[str], message: str) -> None:
    """Status 2 and the value that is wrong; nothing is started."""
    result = cli(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_version() -> None:
    """One line, status 0."""
    result = cli("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("lightning-ft ")
