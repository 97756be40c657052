"""Several nodes: how they find each other, and what becomes of the job when one goes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tests.integration import jobs
from tests.integration.test_agent import CLI, DEADLINE_S, MEMBER, PATIENT, Stage, cli, stage

__all__ = ["stage"]

TOKEN = "shared-secret"

LEAVE = """
    while not Path(os.environ["NOTES"], "over").exists():
        time.sleep(0.01)
    client.leave(0)
    note("left", " ".join(client.view.members))
    client.close()
"""


def free_endpoint() -> str:
    """Return an address on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_nodes_without_numbers_find_each_other(stage: Stage) -> None:
    """As under torchrun: whoever is first at the endpoint is node 0; the last call is waited for."""
    options = [*PATIENT, "--nnodes", "2:4", "--rdzv_endpoint", free_endpoint(), "--rdzv_id", "a", "--rdzv-backend=c10d"]
    options += ["--rdzv_conf", "last_call_timeout=2,join_timeout=60"]
    script = stage.script(MEMBER, LEAVE)
    nodes = [stage.run(script, *options, num_slots=slots, LIGHTNING_FT_TOKEN=TOKEN) for slots in (1, 1, 1)]
    stage.wait_for_notes("view1", "0/0")
    stranger = stage.run(script, *options, num_slots=1, LIGHTNING_FT_TOKEN=TOKEN)
    assert stranger.wait(DEADLINE_S) == 1
    assert "there is no room: the job has at most 3 members" in stage.outputs[-1].read_text()
    (stage.notes / "over").touch()
    assert [node.wait(DEADLINE_S) for node in nodes] == [0, 0, 0]
    members = "0/0 1/0 2/0"
    assert [stage.noted(member, "left") for member in members.split()] == [members] * 3


def test_too_few_nodes_come(stage: Stage) -> None:
    """The job does not begin, and says how many came."""
    options = ["--nnodes", "3:4", "--rdzv-endpoint", free_endpoint(), "--rdzv-conf", "join_timeout=1"]
    script = stage.script(MEMBER)
    nodes = [stage.run(script, *options, LIGHTNING_FT_TOKEN=TOKEN) for _ in range(2)]
    assert [node.wait(DEADLINE_S) for node in nodes] == [1, 1]
    assert all("of 3 nodes came within 1 s" in output.read_text() for output in stage.outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2", "--rdzv-endpoint", "localhost"], "needs the environment variable LIGHTNING_FT_TOKEN"),
        (["--nnodes", "3:2"], "expected MIN <= MAX, got '3:2'"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:port"], "expected host:port"),
    ],
)
def test_wrong_nodes_are_explained(arguments: list[str], message: str) -> None:
    """Status 2, before anything is started."""
    result = cli("run", *arguments, "x.py")
    assert result.returncode == 2
    assert message in result.stderr


def test_one_node_is_asked_to_leave(tmp_path: pathlib.Path) -> None:
    """A script on two nodes with Lightning's own variables; SIGTERM to an agent has its ranks leave the others."""
    address, _, port = free_endpoint().partition(":")
    program = ["lightning_fit.py", "--devices", "1", "--num-nodes", "2", "--epochs", "6"]
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "LIGHTNING_FT_TOKEN": TOKEN,
        "LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.1",
    }
    with contextlib.ExitStack() as agents:
        nodes = [
            agents.enter_context(
                jobs._running(
                    tmp_path,
                    [sys.executable, str(jobs.PROGRAMS / program[0]), str(tmp_path), *program[1:]],
                    {**variables, "NODE_RANK": str(node)},
                    f"output{node}.txt",
                )
            )
            for node in range(2)
        ]
        job = nodes[0]
        job.wait_until(lambda: len(job.records("1/0")) > 20)
        os.kill(nodes[1].process.pid, signal.SIGTERM)
        assert nodes[1].finish() == 0, nodes[1].output()
        assert job.finish() == 0, job.output()
        events = job.events()
        assert [event["member"] for event in events if event["event"] == "member_left"] == ["1/0"]
        assert not {"failure_detected", "failed"} & {event["event"] for event in events}, job.output()
        assert job.records("0/0")[-1]["event"] == "end", job.output()


SRUN = """#!/bin/bash
# Starts the command once on each node, as srun does; all nodes are this machine.
while [[ $1 == --* ]]; do echo "$1" >> srun_options; shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" &
    echo $! > agent$node
done
wait
"""

SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


def test_slurm_starts_an_agent_on_each_node_and_requeues(tmp_path: pathlib.Path) -> None:
    """The batch script of the examples, with two nodes; at SLURM's signal all save at the same step, once."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    address, _, port = free_endpoint().partition(":")
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "lightning-ft",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": address,
        "MASTER_PORT": port,
    }
    program = [str(jobs.PROGRAMS / "lightning_fit.py"), str(tmp_path), "--devices", "1", "--num-nodes", "2"]
    script = ["bash", str(jobs.ROOT / "examples" / "slurm.sbatch"), *program, "--epochs", "1000"]
    with contextlib.chdir(tmp_path), jobs._running(tmp_path, script, variables) as job:
        job.wait_until(lambda: all(len(job.records(member)) > 10 for member in ("0/0", "1/0")))
        for node in range(2):
            os.kill(int((tmp_path / f"agent{node}").read_text()), signal.SIGUSR1)
        assert job.finish() == 0, job.output()
        last = [[line for line in job.records(member) if line["event"] == "batch"][-1] for member in ("0/0", "1/0")]
        assert last[0]["step"] == last[1]["step"], job.output()
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert len(list(tmp_path.rglob("hpc_ckpt_1.ckpt"))) == 1
    assert "--kill-on-bad-exit=0" in (tmp_path / "srun_options").read_text()


POD = """
    import os, socket, time, threading
    from lightning_ft.config import Settings
    from lightning_ft.coordinator.client import MembershipClient
    from lightning_ft.child import watch_agent
    from lightning_ft.membership.events import Address
    from lightning_ft.membership.ids import from_ranges

    watch_agent()
    member, incarnation = os.environ["LIGHTNING_FT_MEMBER"], int(os.environ["LIGHTNING_FT_INCARNATION"])
    store = socket.create_server(("127.0.0.1", 0))
    changed = threading.Event()
    client = MembershipClient(
        endpoint=os.environ["LIGHTNING_FT_COORDINATOR"], token=os.environ["LIGHTNING_FT_TOKEN"], member=member,
        incarnation=incarnation, settings=Settings.resolve(), is_joiner=incarnation > 1,
        expected=from_ranges(os.environ["LIGHTNING_FT_EXPECTED"]), on_suspend=lambda _: changed.set(),
        address=Address("127.0.0.1", store.getsockname()[1]),
    )
    client.start()
    following = client.join() if incarnation > 1 else client.park(0, "start")
    while True:
        note(f"view{following.view.generation}", " ".join(following.view.members))
        while not (changed.wait(0.01) or client.is_join_pending):
            if Path(os.environ["NOTES"], "over").exists():
                client.leave(0)
                client.close()
                raise SystemExit
        changed.clear()
        following = client.park(0, "join", admits=True)
"""


def commands() -> list[list[str]]:
    """Return the command lines of the manifests' containers: coordinator, agent."""
    documents = yaml.safe_load_all((jobs.ROOT / "examples" / "kubernetes.yaml").read_text())
    return [
        document["spec"]["template"]["spec"]["containers"][0]["command"]
        for document in documents
        if document["kind"] == "Job"
    ]


def test_kubernetes_manifests_are_valid() -> None:
    """Against Kubernetes' own schema, which knows all fields."""
    documents = list(yaml.safe_load_all((jobs.ROOT / "examples" / "kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    assert [document["kind"] for document in documents] == ["Service", "PersistentVolumeClaim", "Job", "Job"]


def test_pods_are_started_again(stage: Stage) -> None:
    """The manifests' commands: a new agent's rank joins as the successor of the lost one; so does the coordinator."""
    endpoint = free_endpoint()
    places = {"4": "2", "/state": str(stage.directory / "state"), "fit-coordinator:29400": endpoint}
    places["train.py"] = str(stage.script(POD))
    service, agent = ([places.get(word, word) for word in command] for command in commands())
    quick = {"LIGHTNING_FT_TOKEN": TOKEN, "LIGHTNING_FT_EVENT_LOG": str(stage.events)}
    quick |= {"LIGHTNING_FT_HEARTBEAT_INTERVAL": "0.05", "LIGHTNING_FT_HEARTBEAT_TIMEOUT": "20"}

    def start(command: list[str], index: int = 0) -> subprocess.Popen[bytes]:
        words = [str(index) if word == "$(JOB_COMPLETION_INDEX)" else word for word in command]
        return stage.start([*CLI, *words[1:]], **quick)

    service += ["--listen", endpoint]
    coordinator = start(service)
    pods = [start(agent, index) for index in range(2)]
    assert stage.wait_for_notes("view1", "0/0", "1/0") == ["0/0 1/0"] * 2
    pods[1].kill()
    assert stage.wait_for_notes("view2", "0/0") == ["0/0"]
    coordinator.terminate()
    assert coordinator.wait(DEADLINE_S) == 128 + signal.SIGTERM, "the job is not over"
    coordinator = start(service)
    pods[1] = start(agent, 1)
    assert stage.wait_for_notes("view3", "0/0", "1/0") == ["0/0 1/0"] * 2
    (stage.notes / "over").touch()
    assert [process.wait(DEADLINE_S) for process in (*pods, coordinator)] == [0, 0, 0]
