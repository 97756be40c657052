"""What can be counted on any machine, however busy: messages, bytes, collectives, allocations (`counts.json`).

    python benchmarks/counts.py [--update]

One change of the view of 100 members in the pure core, for each reason, and a healthy step of `ft_ddp` in a real job of
one rank, which issues as many collectives as one of many. Exit status 1: a count is larger than in `counts.json`.
`--update` writes it anew. A test runs this too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

BENCHMARKS = pathlib.Path(__file__).parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

import regress  # noqa: E402
import report  # noqa: E402
from tests.integration import jobs  # noqa: E402

from lightning_ft.config import Settings  # noqa: E402
from lightning_ft.membership import effects, events, machine, snapshot, state, wire  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402

KEPT = BENCHMARKS / "counts.json"
NUM_MEMBERS = 100
SETTINGS = Settings(heartbeat_timeout=3600.0, timeout=7200.0)


class Core:
    """The core, and what went to and from its members since `take`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.names = [f"{number // 8}/{number % 8}" for number in range(NUM_MEMBERS)]
        self.state = state.initial(self.names, 0.0, 7200.0)
        self.taken: dict[str, float] = {}
        self.take()

    def feed(self, happened: Iterable[events.Event]) -> list[effects.Effect]:
        """Step through events."""
        todo: list[effects.Effect] = []
        for event in happened:
            self.now_s += 0.001
            before = self.state
            self.state, new = machine.step(SETTINGS, before, event, self.now_s)
            self._count("decisions to keep", snapshot.is_decision(before, self.state))
            if isinstance(event, wire.FROM_MEMBER):
                self._count("messages from members", 1)
                self._count("bytes from members", len(wire.encode(event)))
            for effect in new:
                if isinstance(effect, wire.TO_MEMBER):
                    self._count("messages to members", 1)
                    self._count("bytes to members", len(wire.encode(effect)))
            todo += new
        return todo

    def _count(self, what: str, number: float) -> None:
        self.taken[what] = self.taken.get(what, 0) + number

    def take(self) -> dict[str, float]:
        """Return the counts, and begin anew."""
        taken, self.taken = self.taken, {}
        return taken

    def park_all(self, reason: str, *, admits: bool = False) -> None:
        """Have the members that are left park."""
        view = self.state.view
        running = [name for name in view.members if self.state.members[name].status.value == "running"]
        self.feed(events.Parked(name, 1, view.generation, 7, reason, admits, is_quiet=admits) for name in running)


def count_core() -> dict[str, float]:
    """Return the counts of each change."""
    core = Core()
    core.feed(events.Hello(name, 1, 0, Address("10.0.0.1", 29500), 1) for name in core.names)
    core.feed(events.Parked(name, 1, 0, 0, "start") for name in core.names)
    assert core.state.generation == 1
    counts = {f"start: {what}": number for what, number in core.take().items()}
    core.feed(events.Heartbeat(name, 1, 7, None, 0.001, "training_step") for name in core.names)
    counts |= {f"heartbeats: {what}": number for what, number in core.take().items()}
    core.feed([events.Exited("6/2", 1, -9, "killed by SIGKILL")])
    core.park_all("suspended")
    assert core.state.generation == 2
    counts |= {f"death: {what}": number for what, number in core.take().items()}
    core.feed([events.Ready("6/2", 2, Address("10.0.0.1", 29500), 1)])
    core.park_all("join", admits=True)
    assert core.state.generation == 3
    counts |= {f"return: {what}": number for what, number in core.take().items()}
    counts["kept decision: bytes"] = len(snapshot.dump(core.state))
    return counts


def count_step() -> dict[str, float]:
    """Return what a healthy step of a real job issues and allocates."""
    with tempfile.TemporaryDirectory() as name:
        out = pathlib.Path(name)
        program = [str(BENCHMARKS / "programs" / "counted_loop.py"), "ft"]
        with jobs.running(out, 1, program) as job:
            assert job.finish() == 0, job.output()
        counts: dict[str, float] = json.loads((out / "ft.json").read_text())
    return {f"step: {what}": number for what, number in counts.items()}


def count() -> dict[str, dict[str, Any]]:
    """Return all counts, as `regress.compare` takes them."""
    return {
        f"counts/{name}": {"samples": [float(number)], "is_count": True}
        for name, number in (count_core() | count_step()).items()
    }


def main() -> int:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    counts = count()
    if arguments.update:
        KEPT.write_text(json.dumps(counts, indent=0, sort_keys=True) + "\n")
    kept = json.loads(KEPT.read_text())
    print(f"| count; view changes of {NUM_MEMBERS} members in the core, a step in a real job | now | kept |")
    print("|---|---|---|")
    for name, found in counts.items():
        before = kept.get(name, {"samples": [None]})["samples"][0]
        print(
            f"| {name.removeprefix('counts/')} | {found['samples'][0]:g} | {'' if before is None else f'{before:g}'} |"
        )
        report.figure(name, found["samples"], is_count=True)
    return 1 if regress.compare(kept, counts, tolerance=1.0) else 0


if __name__ == "__main__":
    sys.exit(main())
