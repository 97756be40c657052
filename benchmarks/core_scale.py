"""What a change of the view costs the coordinator's pure core with 10,000 members, in virtual time.

    python benchmarks/core_scale.py [--members 10000]

All say hello and park; one dies; the others park and are given the next view: one event after the other, no sockets.
The messages are written, and the parks read, apart from that. There is no limit to miss: the exit status is 0.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import time
import tracemalloc
import types
from collections.abc import Iterable

package = types.ModuleType("lightning_ft")  # without what its __init__ imports: torch, which takes seconds
package.__path__ = [str(pathlib.Path(__file__).parents[1] / "src" / "lightning_ft")]
sys.modules["lightning_ft"] = package

from lightning_ft.config import Settings  # noqa: E402
from lightning_ft.membership import effects, events, machine, state, wire  # noqa: E402
from lightning_ft.membership.events import Address  # noqa: E402

NUM_SLOTS = 8
SETTINGS = Settings(heartbeat_timeout=3600.0, timeout=7200.0)


class Core:
    """The pure core and its clock, one millisecond for each event."""

    def __init__(self, num: int) -> None:
        names = [f"{number // NUM_SLOTS}/{number % NUM_SLOTS}" for number in range(num)]
        self.state = state.initial(names, 0.0, 7200.0)
        self.now_s = 0.0

    def feed(self, happened: Iterable[events.Event]) -> list[effects.Effect]:
        """Step through events, and return what is to be done."""
        todo: list[effects.Effect] = []
        for event in happened:
            self.now_s += 0.001
            self.state, new = machine.step(SETTINGS, self.state, event, self.now_s)
            todo += new
        return todo

    def begin(self) -> list[effects.Effect]:
        """All members say hello, and park."""
        members = self.state.view.members
        todo = self.feed(
            events.Hello(name, 1, 0, Address(f"10.0.{number >> 8}.{number & 255}", 29500), 1)
            for number, name in enumerate(members)
        )
        todo += self.feed(events.Parked(name, 1, 0, 0, "start") for name in members)
        assert self.state.generation == 1, "all have their first view"
        return todo


def measure(num: int) -> None:
    """Print a table of one change."""
    tracemalloc.start()
    core = Core(num)
    core.begin()
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0] / num
    tracemalloc.stop()

    core, begin_s = Core(num), time.process_time()
    core.begin()
    first_s = time.process_time() - begin_s
    victim = core.state.view.members[num // 2]
    begin_s = time.process_time()
    todo = core.feed([events.Disconnected(victim, 1), events.ProbeRefused(victim, 1)])
    told = [effect.member for effect in todo if isinstance(effect, effects.Suspend)]
    parks = [events.Parked(name, 1, 1, 7, "suspended") for name in told]
    todo += core.feed(parks)
    change_s = time.process_time() - begin_s
    assert core.state.generation == 2, "all have their next view"
    assert len(told) == len(core.state.view.members) == num - 1

    frames = [wire.encode(park) for park in parks]
    begin_s = time.process_time()
    sent = [wire.encode(effect) for effect in todo if isinstance(effect, wire.TO_MEMBER)]
    for name, frame in zip(told, frames, strict=True):
        wire.decode(frame, expect=wire.FROM_MEMBER, peer=wire.Peer(name, 1))
    messages_s = time.process_time() - begin_s
    print(f"| {num} members in virtual time, one death | figure | limit |")
    print("|---|---|---|")
    print(f"| CPU time of the core, a death to the next view, s | {change_s:.2f} | |")
    print(f"| CPU time of the messages (writing, and reading the parks), s | {messages_s:.2f} | |")
    print(f"| bytes to each member | {sum(map(len, sent)) / len(told):.0f} | |")
    print(f"| bytes from each member | {sum(map(len, frames)) / len(told):.0f} | |")
    print(f"| CPU time of the core, hello to the first view, s | {first_s:.2f} | |")
    print(f"| memory of the core for each member, bytes | {memory:.0f} | |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=10_000)
    measure(parser.parse_args().members)


if __name__ == "__main__":
    main()
