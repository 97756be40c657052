"""How long an all-reduce takes along the tree, in parts of what it takes around the ring.

    python benchmarks/topology.py [--members 4 8 16] [--per-host 2] [--delays-ms 0 0.1 0.5] [--rounds 200]

Light processes, without a job, a coordinator or training: inner groups alone. With a delay each host is a network
namespace whose card sends everything so much later (`tc netem`: root and iproute2); hop by hop on one host there is
none. For each size the ways take turns, one all-reduce after the other; of each the median of the slowest member is
taken. Processes share what cores there are, so the ratios count, and those with a delay more than those without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from tests.integration import networks  # noqa: E402

SIZES_BYTES = (8, 1024, 16 * 1024, 64 * 1024, 1024 * 1024)


def work(directory: pathlib.Path, members: list[str], rank: int, host: str, num_rounds: int) -> None:
    """Be one member: write what each size took, both ways."""
    import torch

    from lightning_ft.comm.gloo import GlooTransport
    from lightning_ft.comm.measuring import measure
    from lightning_ft.comm.place import Place
    from lightning_ft.comm.topology import RING_ONLY, Choice, choose
    from lightning_ft.config import AUTO
    from lightning_ft.membership.events import Address

    transport = GlooTransport(host, 120.0)
    meeting = directory / "meeting"
    if rank == 0:
        meeting.with_suffix(".new").write_text(json.dumps([host, transport.address.store_port]))
        meeting.with_suffix(".new").rename(meeting)
    while not meeting.exists():
        time.sleep(0.05)
    inner = transport.build("g1", rank, len(members), Address(*json.loads(meeting.read_text()))).result()
    place = Place(inner, tuple(members), rank, 1)
    chosen = choose(AUTO, members, measure(place)).exact_bytes
    took_us: dict[int, tuple[float, float]] = {}
    for num_bytes in SIZES_BYTES:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        of: dict[bool, list[float]] = {False: [], True: []}
        for nth in range(2 * max(10, num_rounds * 8 // max(8, num_bytes // 8192))):
            place.choice = Choice(is_all=True) if nth % 2 else RING_ONLY
            began_s = time.perf_counter()
            inner.wait(place.allreduce(tensor))
            of[bool(nth % 2)].append(1e6 * (time.perf_counter() - began_s))
        took_us[num_bytes] = (statistics.median(of[False]), statistics.median(of[True]))
    (directory / f"{rank}.json").write_text(json.dumps({"chosen": chosen, "took_us": took_us}))
    place.choice = RING_ONLY
    inner.wait(place.allreduce(torch.zeros(1)))
    os._exit(0)


@contextlib.contextmanager
def delayed_hosts(num: int, delay_ms: float) -> Iterator[list[networks.Host]]:
    """Make hosts whose cards send everything later."""
    with networks.hosts(num) as made:
        for host in made:
            command = host.command(["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{delay_ms}ms"])
            subprocess.run(command, check=True, capture_output=True)
        yield made


def can_delay() -> bool:
    """Whether this kernel has `netem`, and one may use it."""
    try:
        with delayed_hosts(1, 0.1):
            return True
    except (OSError, subprocess.CalledProcessError, pytest.skip.Exception, pytest.fail.Exception):
        return False


def run(num_members: int, per_host: int, delay_ms: float, num_rounds: int) -> None:
    """Measure one group, and print a line for each size."""
    names = [f"{index // per_host}/{index % per_host}" for index in range(num_members)]
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(delayed_hosts((num_members - 1) // per_host + 1, delay_ms)) if delay_ms else []
        processes = []
        for rank in range(num_members):
            address = hosts[rank // per_host].address if hosts else "127.0.0.1"
            command = [sys.executable, __file__, "--worker", str(directory), ",".join(names), str(rank), address]
            command = [*command, "--rounds", str(num_rounds)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
            process = subprocess.Popen(hosts[rank // per_host].command(command) if hosts else command, env=environment)
            processes.append(process)
            stack.callback(process.kill)
        for process in processes:
            if process.wait(300):
                raise RuntimeError(f"a member ended with status {process.returncode}")
        found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_members)]
    assert len({member["chosen"] for member in found}) == 1, "the members have not agreed"
    for num_bytes in SIZES_BYTES:
        ring_us, tree_us = (max(member["took_us"][str(num_bytes)][way] for member in found) for way in (0, 1))
        print(
            f"{num_members:3} members, {per_host} on a host, {delay_ms:g} ms between hosts, {num_bytes:8} bytes: "
            f"ring {ring_us:9.0f} us, tree {tree_us / ring_us:5.2f} of it",
            flush=True,
        )
    print(f"    auto sends exact sums of up to {found[0]['chosen']} bytes along the tree", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 0.1, 0.5])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        directory, names, rank, host = options.worker
        work(pathlib.Path(directory), names.split(","), int(rank), host, options.rounds)
    for delay_ms in options.delays_ms:
        if delay_ms and not can_delay():
            print(f"{delay_ms:g} ms between hosts: not measured, the network can't be slowed down here (root, netem)")
            continue
        for num_members in options.members:
            run(num_members, options.per_host, delay_ms, options.rounds)


if __name__ == "__main__":
    main()
