"""What a catch-up costs the healthy ranks, and how fast the state moves.

    python benchmarks/catch_up.py [--millions 100] [--ranks 3] [--pin] [--accumulate 1] [--slowdown 0.1]
                                  [--mode pipelined] [--skip-rate] [--skip-job]

*Rate*: the hand over of a state of so many million parameters with AdamW (12 bytes each) from two members to a third,
beside a plain Gloo broadcast of the same bytes, in turns, between three processes. *Steps*: all ranks but the last
train on while that one is started again and catches up; the ratio of the median step in that time to the median before
it, and the same for processors' time, which other processes change little. *Blocked*: for how long they waited at its
admission, and with what; then how much longer than the ones after it the first step with it was, since who enters it
late blocks the others, too. With `--pin` each process has processors of its own, as far as there are enough: what is
left is what the protocol costs, not what processes take from each other. Two ranks on two processors are pinned so;
each needs 36 bytes for a parameter while it catches up.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration import jobs  # noqa: E402

from lightning_ft.comm.gloo import GlooTransport  # noqa: E402
from lightning_ft.comm.place import Place, acknowledge, broadcast  # noqa: E402
from lightning_ft.comm.transfer import State, StateTransfer, pack  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402
from lightning_ft.membership.settle import SettlePlan  # noqa: E402

PROGRAM = ROOT / "benchmarks" / "programs" / "wide_loop.py"
LEAST_RATE = 0.8
MOST_BLOCKED_S = 0.2


def measure_rate(rank: int, addresses: Any, millions: int, rounds: int, results: Any) -> None:
    """Be one of three processes that hand over and broadcast the same bytes in turns."""
    torch.set_num_threads(1)
    transport = GlooTransport("127.0.0.1", 30.0)
    addresses[rank] = (transport.address.host, transport.address.store_port)
    while len(addresses) < 3:
        time.sleep(0.01)
    place = Place(transport.build("rate", rank, 3, Address(*addresses[0])).result(), ("0/0", "0/1", "0/2"), rank, 1)
    flat = torch.zeros(3 * millions * 1_000_000)
    tensors = list(flat.split(1_000_000))
    plan = SettlePlan(target=1, donor=None, laggards=(), joiners=(2,), handover_is_void=False)
    for _ in range(rounds):
        for what in ("broadcast", "hand over"):
            place.inner.wait(acknowledge(place))
            began_s = time.monotonic()
            if what == "broadcast":
                place.inner.wait(broadcast(place, flat, 0))
            else:
                StateTransfer(lambda: pack(State(tensors, None)), lambda _: None, lambda _: None).run(place, plan)
            place.inner.wait(acknowledge(place))
            if rank == 0:
                results.put((what, time.monotonic() - began_s))
    transport.close()


def rate(millions: int, rounds: int = 6) -> tuple[float, list[float]]:
    """Return the bytes of a state, and for each round the hand over's rate in terms of the broadcast's."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        addresses, results = manager.dict(), manager.Queue()
        processes = [
            context.Process(target=measure_rate, args=(rank, addresses, millions, rounds, results)) for rank in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        taken: dict[str, list[float]] = {"broadcast": [], "hand over": []}
        while not results.empty():
            what, duration_s = results.get()
            taken[what].append(duration_s)
    pairs = list(zip(taken["broadcast"], taken["hand over"], strict=True))[1:]  # the first touches new memory
    for plain_s, own_s in pairs:
        print(f"  broadcast {plain_s:.3f} s, hand over {own_s:.3f} s")
    return 12e6 * millions, [plain_s / own_s for plain_s, own_s in pairs]


def measure_job(directory: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Kill one of three members, and print what its return costs the others."""
    settings = {
        "LIGHTNING_FT_RESPAWN": "1",
        "LIGHTNING_FT_CATCH_UP": arguments.mode,
        "LIGHTNING_FT_CATCH_UP_SLOWDOWN": str(arguments.slowdown),
    }
    program = [str(PROGRAM), str(arguments.millions), str(arguments.accumulate)]
    ranks, last = arguments.ranks, f"0/{arguments.ranks - 1}"
    if arguments.pin:
        settings["WIDE_LOOP_PINS"] = "1"
    with jobs.running(directory, ranks, program, settings) as job:
        job.wait_until(lambda: len(job.records(last)) > 8, 600)
        os.kill(job.records(last)[-1]["pid"], signal.SIGKILL)
        job.wait_until(lambda: any(event["event"] == "caught_up" for event in job.events()), 1200)
        num_before = len(job.records("0/0"))
        job.wait_until(lambda: len(job.records("0/0")) > num_before + 8, 600)
        lines = [line for line in job.records("0/0") if line["event"] == "step"]
        events = job.events()
    (admitted,) = [event for event in events if event["event"] == "members_admitted"]
    (caught_up,) = [event for event in events if event["event"] == "caught_up"]
    begun = [event["time"] for event in events if event["event"] == "catch_up_begun"]
    alone = [
        (later["time"], later["time"] - earlier["time"], later["cpu_s"] - earlier["cpu_s"])
        for earlier, later in itertools.pairwise(lines)
        if earlier["size"] == later["size"] == ranks - 1
    ]
    since_s = begun_s(begun, admitted)
    quiet = [durations_s for end_s, *durations_s in alone if end_s < since_s]
    busy = [durations_s for end_s, *durations_s in alone if end_s >= since_s]
    before_s, before_cpu_s = map(statistics.median, zip(*quiet, strict=True))
    print(f"  steps before: {len(quiet)}, median {before_s:.3f} s, processors' time {before_cpu_s:.3f} s")
    if busy:
        during_s, during_cpu_s = map(statistics.median, zip(*busy, strict=True))
        print(
            f"  steps during the catch-up: {len(busy)}, median ratio {during_s / before_s:.3f} (limit "
            f"{1 + arguments.slowdown:g}), of processors' time {during_cpu_s / before_cpu_s:.3f}"
        )
    print(f"  blocked at admission: {admitted['latency_s']:.3f} s (limit {MOST_BLOCKED_S:g} s)")
    for event, names in (
        (admitted, ("park_s", "rebuild_s", "settle_s")),
        (caught_up, ("drain_s", "compare_s", "receive_s", "load_s")),
    ):
        print(f"    {event['member']}: {', '.join(f'{name[:-2]} {event.get(name, 0.0):.3f} s' for name in names)}")
    whole = [
        later["time"] - earlier["time"]
        for earlier, later in itertools.pairwise(lines)
        if later["size"] == ranks and earlier["time"] > begun_s(begun, admitted)
    ]
    first_s, after_s = whole[0] - admitted["latency_s"], statistics.median(whole[1:])
    print(f"  the first step with it: {first_s:.3f} s without that; {len(whole) - 1} after it, median {after_s:.3f} s")
    print(f"  missing then: {caught_up['missing_bytes']} of {caught_up['total_bytes']} bytes")


def begun_s(begun: list[float], admitted: dict[str, Any]) -> float:
    """Return when the catch-up began, if it did, or who caught up was admitted."""
    return float(begun[0] if begun else admitted["time"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--slowdown", type=float, default=0.1)
    parser.add_argument("--mode", default="pipelined")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--skip-rate", action="store_true")
    parser.add_argument("--skip-job", action="store_true")
    arguments = parser.parse_args()
    if not arguments.skip_rate:
        num_bytes, ratios = rate(arguments.millions)
        print(
            f"rate of a hand over of {num_bytes / 1e6:.0f} MB to that of a Gloo broadcast: median "
            f"{statistics.median(ratios):.3f} (limit {LEAST_RATE:g})"
        )
    if not arguments.skip_job:
        with tempfile.TemporaryDirectory() as name:
            measure_job(pathlib.Path(name), arguments)


if __name__ == "__main__":
    main()
