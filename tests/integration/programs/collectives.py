"""All of torch.distributed's collectives in one long schedule; writes down everything a checker needs.

    collectives.py OUT ROUNDS [--seed N] [--backend ft|gloo] [--no-groups] [--no-bytes] [--hold]

Each member appends JSON lines to OUT/<node>-<slot>.jsonl. All members make the same calls in the same order. What a
member contributes is a function of its slot and of the call, so that each result tells who took part. All that a call's
arguments say of ranks is read from torch right before it, as a program should that may lose members. With --hold, the
last round waits for a file OUT/go, so that whoever kills members from outside is sure to do so before they leave.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lightning_ft

SIZES = [2, 3, 7, 600, 40_000]
DTYPES = ["float32", "float64", "int64", "int32", "bfloat16", "uint8"]

Write = Callable[..., None]
Begun = tuple["dist.Work | None", Callable[[], object]]


def mark(tensor: torch.Tensor) -> list[float]:
    """Shorten a tensor that was made by `Channel.fill`: its value, its last element, whether it is intact."""
    flat = tensor.reshape(-1)
    return [flat[0].item(), flat[-1].item(), bool((flat[:-1] == flat[0]).all())]


class Call:
    """A call that was issued and is written down when it is waited for."""

    def __init__(self, channel: Channel, line: dict[str, Any], begun: Begun | None) -> None:
        self.channel = channel
        self.line = line
        self.begun = begun

    def wait(self) -> None:
        """Finish it, and write what came of it."""
        channel, line = self.channel, self.line
        if self.begun is not None:
            work, read = self.begun
            try:
                if work is not None:
                    work.wait()
                line["result"] = read()
            except (lightning_ft.FaultToleranceError, RuntimeError, ValueError) as error:
                line["error"] = type(error).__name__
                line["text"] = str(error)
        channel.shown = max(channel.shown, line["number"])
        channel.write(**line, after=channel.state())


class Channel:
    """The calls on one group.

    Attributes:
        key: Name of the group in the records.
        number: How many calls were issued.
        shown: The last one whose members rank and world size tell.
    """

    def __init__(
        self, key: str, group: dist.ProcessGroup | None, slot: int, write: Write, world: Channel | None = None
    ) -> None:
        self.key = key
        self.world = self if world is None else world
        self.group = group
        self.slot = slot
        self.write = write
        self.number = 0
        self.shown = 0

    def state(self) -> dict[str, int]:
        """Return what torch says of the group, and after which call."""
        return {"at": self.shown, "size": dist.get_world_size(self.group), "rank": dist.get_rank(self.group)}

    def fill(self, numel: int, dtype: str, value: int | None = None) -> torch.Tensor:
        """Return this member's contribution: its bit in each element, the call's number in the last."""
        tensor = torch.full((numel,), 2**self.slot if value is None else value, dtype=getattr(torch, dtype))
        tensor[-1] = (self.number + 1) % 16
        return tensor

    def issue(self, name: str, *draws: int, is_async: bool = False) -> Call:
        """Issue the collective `name`; of what `draws` mean, the arguments are made."""
        numel, dtype = SIZES[draws[0] % len(SIZES)], DTYPES[draws[1] % len(DTYPES)]
        before = self.state()
        root = draws[2] % before["size"]
        line = {"event": "call", "group": self.key, "name": name, "root": root, "before": before, "dtype": dtype}
        line |= {"result": None, "error": None, "world_at": self.world.shown}
        if name == "broadcast_global":
            ranks = dist.get_process_group_ranks(self.group)
            line["root"] = root = ranks[root % len(ranks)]
        begun = None
        try:
            begun = getattr(self, name)(numel, dtype, root, is_async)
        except (lightning_ft.FaultToleranceError, RuntimeError, ValueError) as error:
            line["error"] = type(error).__name__
            line["text"] = str(error)
        self.number += 1
        line["number"] = self.number
        self.shown = max(self.shown, self.number - 1)  # issuing a call finishes the one before
        return Call(self, line, begun)

    def run(self, name: str, *draws: int) -> None:
        """Issue and wait."""
        self.issue(name, *draws).wait()

    def all_reduce(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, dtype)
        return dist.all_reduce(tensor, group=self.group, async_op=is_async), lambda: mark(tensor)

    def all_reduce_max(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, dtype)
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group, is_async), lambda: mark(tensor)

    def all_reduce_avg(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, "float64")
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, self.group, is_async), lambda: mark(tensor)

    def reduce(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, dtype)
        is_root = dist.get_rank(self.group) == root
        work = dist.reduce(tensor, group=self.group, group_dst=root, async_op=is_async)
        return work, lambda: mark(tensor) if is_root else None

    def broadcast(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, dtype)
        return dist.broadcast(tensor, group=self.group, group_src=root, async_op=is_async), lambda: mark(tensor)

    def broadcast_global(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        tensor = self.fill(numel, dtype)
        return dist.broadcast(tensor, root, self.group, is_async), lambda: mark(tensor)

    def all_gather(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        slots = [torch.zeros_like(self.fill(numel, dtype)) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(slots, self.fill(numel, dtype), self.group, is_async)
        return work, lambda: [mark(slot) for slot in slots]

    def all_gather_into_tensor(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        own = self.fill(numel, dtype)
        whole = torch.zeros(dist.get_world_size(self.group) * numel, dtype=own.dtype)
        work = dist.all_gather_into_tensor(whole, own, self.group, is_async)
        return work, lambda: [mark(slot) for slot in whole.view(-1, numel)]

    def gather(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        own = self.fill(numel, dtype)
        is_root = dist.get_rank(self.group) == root
        slots = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))] if is_root else None
        work = dist.gather(own, slots, group=self.group, group_dst=root, async_op=is_async)
        return work, lambda: None if slots is None else [mark(slot) for slot in slots]

    def scatter(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        own = torch.zeros_like(self.fill(numel, dtype))
        slots = None
        if dist.get_rank(self.group) == root:
            slots = [self.fill(numel, dtype, 2**self.slot + rank) for rank in range(dist.get_world_size(self.group))]
        work = dist.scatter(own, slots, group=self.group, group_src=root, async_op=is_async)
        return work, lambda: mark(own)

    def reduce_scatter(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        slots = [self.fill(numel, dtype, 2**self.slot + rank) for rank in range(dist.get_world_size(self.group))]
        own = torch.zeros_like(slots[0])
        return dist.reduce_scatter(own, slots, group=self.group, async_op=is_async), lambda: mark(own)

    def reduce_scatter_tensor(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        slots = [self.fill(numel, dtype, 2**self.slot + rank) for rank in range(dist.get_world_size(self.group))]
        own = torch.zeros_like(slots[0])
        work = dist.reduce_scatter_tensor(own, torch.cat(slots), group=self.group, async_op=is_async)
        return work, lambda: mark(own)

    def barrier(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        return dist.barrier(self.group, async_op=is_async), lambda: None

    def all_gather_object(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, [2**self.slot, "x" * (numel % 1000 * self.slot)], self.group)
        return None, lambda: [entry[0] for entry in found]

    def broadcast_object_list(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        found = [2**self.slot, "x" * (numel * 2)]
        dist.broadcast_object_list(found, group=self.group, group_src=root)
        return None, lambda: found[0]

    def gather_object(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        is_root = dist.get_rank(self.group) == root
        found: list[Any] | None = [None] * dist.get_world_size(self.group) if is_root else None
        dist.gather_object(2**self.slot, found, group=self.group, group_dst=root)
        return None, lambda: found

    def scatter_object_list(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        own: list[Any] = [None]
        size = dist.get_world_size(self.group)
        slots = [[2**self.slot, rank, "x" * rank] for rank in range(size)]
        dist.scatter_object_list(own, slots, group=self.group, group_src=root)
        return None, lambda: own[0][:2]

    def gather_bytes(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        assert isinstance(dist.group.WORLD, lightning_ft.FaultTolerantProcessGroup)
        found = dist.group.WORLD.gather_bytes(str(2**self.slot).encode() + b" " * (self.slot * numel % 1000))
        return None, lambda: [int(entry) for entry in found]

    def broadcast_bytes(self, numel: int, dtype: str, root: int, is_async: bool) -> Begun:
        assert isinstance(dist.group.WORLD, lightning_ft.FaultTolerantProcessGroup)
        found = dist.group.WORLD.broadcast_bytes(lambda: str(2**self.slot).encode() + b" " * (numel * 2))
        return None, lambda: int(found)


ASYNC = [
    *("all_reduce", "all_reduce_max", "all_reduce_avg", "reduce", "broadcast", "all_gather", "gather", "scatter"),
    *("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "barrier"),
]
OBJECTS = ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"]
BYTES = ["gather_bytes", "broadcast_bytes"]


def point_to_point(world: Channel, round_number: int) -> None:
    """Send around the ring; not repeated by the group, so that each member may see a failure or not."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    found = torch.zeros(3)
    line: dict[str, Any] = {"event": "ring", "number": world.number, "round": round_number}
    try:
        if round_number % 2:
            request = dist.isend(torch.full((3,), 2.0**world.slot), (rank + 1) % size)
            dist.recv(found, (rank - 1) % size)
            assert request is not None
            request.wait()
        else:
            operations = [
                dist.P2POp(dist.isend, torch.full((3,), 2.0**world.slot), (rank + 1) % size),
                dist.P2POp(dist.irecv, found, (rank - 1) % size),
            ]
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        line["result"] = found[0].item()
    except lightning_ft.MembershipChangedError as error:
        line["error"] = str(error)
    world.write(**line, size=size)


class Program:
    """The schedule.

    Args:
        seed: Of the schedule, the same on all members.
        write: Writes a record.
        has_groups: Whether sub-groups are made.
        has_bytes: Whether calls are made that torch does not have.
    """

    def __init__(self, seed: int, write: Write, *, has_groups: bool, has_bytes: bool) -> None:
        self.has_groups = has_groups
        self.slot = int(os.environ["LIGHTNING_FT_MEMBER"].split("/")[1])
        self.write = write
        self.random = random.Random(seed)
        self.world = Channel("world", None, self.slot, write)
        self.groups: list[tuple[Channel | None, dist.ProcessGroup]] = []
        self.num_groups = 0
        self.kinds = [*ASYNC, "broadcast_global", *OBJECTS, *(BYTES if has_bytes else [])]

    def draws(self) -> list[int]:
        """Return what a call's arguments are made of."""
        return [self.random.randrange(1 << 20) for _ in range(3)]

    def open_group(self) -> Channel | None:
        """Make a sub-group; None: this member is not in it."""
        size = dist.get_world_size()
        bits, is_reversed = self.random.randrange(1 << 20), self.random.random() < 0.2
        ranks = [rank for rank in range(size) if bits >> rank & 1] or [bits % size]
        if is_reversed:
            ranks.reverse()
        self.num_groups += 1
        key = f"g{self.num_groups}"
        self.write(event="group", key=key, at=self.world.shown, ranks=sorted(ranks))
        group = dist.new_group(ranks)
        is_in = dist.get_rank() in ranks
        channel = Channel(key, group, self.slot, self.write, self.world) if is_in else None
        self.groups.append((channel, group))
        return channel

    def close_group(self) -> None:
        """Destroy the oldest sub-group."""
        channel, group = self.groups.pop(0)
        if channel is not None:
            self.write(event="destroyed", key=channel.key)
            dist.destroy_process_group(group)

    def overlapping(self) -> None:
        """Have several asynchronous calls outstanding, on WORLD and in sub-groups, waited for in any order."""
        calls: list[tuple[float, Call]] = []
        for _ in range(4):
            kind, order, draws = self.random.choice(ASYNC), self.random.random(), self.draws()
            calls.append((order, self.world.issue(kind, *draws, is_async=True)))
            for channel, _ in self.groups:
                kind, is_sync, draws, order = (
                    self.random.choice(ASYNC),
                    self.random.random() < 0.5,
                    self.draws(),
                    self.random.random(),
                )
                if channel is not None and is_sync:
                    channel.run(kind, *draws)
                elif channel is not None:
                    calls.append((order, channel.issue(kind, *draws, is_async=True)))
        for _, call in sorted(calls, key=lambda item: item[0]):
            call.wait()

    def round(self, number: int) -> None:
        """Make every kind of call at least once."""
        kinds = self.kinds.copy()
        self.random.shuffle(kinds)
        opens, closes, overlaps, sends = self.random.sample(range(len(kinds)), 4)
        for index, kind in enumerate(kinds):
            self.world.run(kind, *self.draws())
            if index == opens and self.has_groups:
                is_used, draws = self.random.random() < 0.5, self.draws()
                channel = self.open_group()
                if channel is not None and is_used:
                    channel.run("all_reduce", *draws)
            if index == closes and len(self.groups) > 2:
                self.close_group()
            if index == overlaps:
                self.overlapping()
            if index == sends:
                point_to_point(self.world, number)
            for channel, _ in self.groups:
                used, draws = self.random.choice([*ASYNC, *OBJECTS, "broadcast_global"]), self.draws()
                if self.random.random() < 0.3 and channel is not None:
                    channel.run(used, *draws)


def main() -> None:
    """Run the schedule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="ft")
    parser.add_argument("--no-groups", action="store_true")
    parser.add_argument("--no-bytes", action="store_true")
    parser.add_argument("--hold", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    log = (arguments.out / f"{member.replace('/', '-')}.jsonl").open("a")

    def write(**line: object) -> None:
        log.write(json.dumps({"time": time.time(), **line}) + "\n")
        log.flush()

    write(event="start", pid=os.getpid())
    dist.init_process_group(arguments.backend)
    program = Program(arguments.seed, write, has_groups=not arguments.no_groups, has_bytes=not arguments.no_bytes)
    write(event="state", **program.world.state())
    for number in range(arguments.rounds):
        while arguments.hold and number == arguments.rounds - 1 and not (arguments.out / "go").exists():
            time.sleep(0.01)
        program.round(number)
    write(event="end")
    if arguments.backend != "ft":  # which leaves by itself; Gloo's threads may abort an interpreter that ends
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
