"""Judge the records of programs/collectives.py: one story that explains them all, or none.

The story is a set of members for each call: those among whom it became final. It is looked for from the records alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Slots = tuple[int, ...]
"""Members by slot, in rank order."""

ALWAYS_VOID = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_gather_object", "gather_object", "scatter_object_list"),
    }
)
"""Calls that mean nothing among other members than those they were made for."""

VOID_WITHOUT_ROOT = frozenset({"broadcast", "broadcast_global", "broadcast_object_list"})

MEMBERSHIP = "MembershipChangedError"


@dataclasses.dataclass
class Chain:
    """What the records say of one group's calls.

    Attributes:
        initial: Its members at first.
        calls: For each number, what each member wrote.
        hints: As `seen`, of a lost member's last number; decide between stories that explain the same.
        seen: For each number, (slot, rank, size) as torch told right after it was final.
    """

    initial: Slots
    calls: dict[int, dict[int, dict[str, Any]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    seen: dict[int, set[tuple[int, int, int]]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    hints: dict[int, set[tuple[int, int, int]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(set)
    )


def subsets(members: Slots) -> Iterator[Slots]:
    """Yield what can be left of some members, many first."""
    for size in range(len(members), 0, -1):
        yield from itertools.combinations(members, size)


def read_chain(key: str, initial: Slots, records: Mapping[int, Sequence[Mapping[str, Any]]], lost: set[int]) -> Chain:
    """Collect a group's calls. A lost member's last number is left out: it may be the only one that finished it so."""
    chain = Chain(initial)
    for slot, lines in records.items():
        calls = sorted(
            (dict(line) for line in lines if line["event"] == "call" and line["group"] == key),
            key=lambda line: line["number"],
        )
        numbers = [line["number"] for line in calls]
        if slot not in lost:
            assert numbers == list(range(1, len(numbers) + 1)), f"0/{slot} in {key}: {numbers}"
        last = max((line["before"]["at"] for line in calls), default=0) if slot in lost else len(calls)
        for line in calls:
            for state in (line["before"], line["after"]):
                told = chain.seen if state["at"] <= last else chain.hints
                told[state["at"]].add((slot, state["rank"], state["size"]))
            if line["number"] <= last:
                chain.calls[line["number"]][slot] = line
    return chain


def explain(chain: Chain, key: str = "world", world: Mapping[int, Slots] | None = None) -> dict[int, Slots]:
    """Return the members among whom each number became final.

    Args:
        chain: Of the group.
        key: Name of the group.
        world: What was returned for the group of all members; None: this is it.

    Raises:
        AssertionError: No story explains the records; tells up to which call one does.
    """
    begins = subsets(chain.initial) if world is None else [chain.initial]  # some may have died before the first view
    states: dict[tuple[Slots, Slots], tuple[int, tuple[Slots, ...]]] = {
        (start, start): (0, (start,)) for start in begins if _fits(start, chain.seen[0])
    }
    assert states, f"{key} begins with {chain.seen[0]}"
    for number in range(1, max(chain.calls, default=0) + 1):
        lines, seen, hints = chain.calls[number], chain.seen[number], chain.hints[number]
        following: dict[tuple[Slots, Slots], tuple[int, tuple[Slots, ...]]] = {}
        for (older, old), (score, path) in states.items():
            made_for = old if all(line["before"]["at"] == number - 1 for line in lines.values()) else older
            for new in subsets(old):
                if not lines.keys() <= set(new) or not _fits(new, seen):
                    continue
                if not all(is_explained(line, slot, made_for, new, world) for slot, line in lines.items()):
                    continue
                likely = score + sum(_fits(new, {hint}) for hint in hints)
                if following.get((old, new), (-1, ()))[0] < likely:
                    following[old, new] = likely, (*path, new)
        assert following, (
            f"call {number} of {key} can't be explained: before it {sorted(states)}, seen {seen}\n"
            + "\n".join(f"0/{slot}: {line}" for slot, line in sorted(lines.items()))
        )
        states = following
    _, path = max(states.values())
    return dict(enumerate(path))


def _fits(members: Slots, told: set[tuple[int, int, int]]) -> bool:
    return all(slot in members and members.index(slot) == rank and len(members) == size for slot, rank, size in told)


def is_explained(
    line: Mapping[str, Any], slot: int, made_for: Slots, final: Slots, world: Mapping[int, Slots] | None
) -> bool:
    """Whether a member would write this line of a call made for some members that became final among others."""
    name, ranked = line["name"], made_for
    if name == "broadcast_global" and world is not None:
        ranked = world[line["world_at"]]
    if line["root"] >= len(ranked) or ranked[line["root"]] not in made_for:
        return False
    root = ranked[line["root"]]
    is_void = name in ALWAYS_VOID and final != made_for
    if name in VOID_WITHOUT_ROOT:
        is_void = root not in final or final.index(root) != made_for.index(root)
    if is_void or line["error"] is not None:
        return is_void and line["error"] == MEMBERSHIP
    return bool(line["result"] == expected_result(line, slot, root, final))


def expected_result(line: Mapping[str, Any], slot: int, root: int, final: Slots) -> object:
    """Return what a member must have got."""
    name, size, own = line["name"], len(final), final.index(slot)
    tail = line["number"] % 16
    mask = sum(2**member for member in final)
    sums, slots, is_root = [mask, tail * size, True], [[2**member, tail, True] for member in final], slot == root
    bits = [2**member for member in final]
    results: dict[str, object] = {
        "all_reduce": sums,
        "all_reduce_max": [2 ** max(final), tail, True],
        "all_reduce_avg": [mask / size, tail, True],
        "reduce": sums if is_root else None,
        "broadcast": [2**root, tail, True],
        "broadcast_global": [2**root, tail, True],
        "all_gather": slots,
        "all_gather_into_tensor": slots,
        "gather": slots if is_root else None,
        "scatter": [2**root + own, tail, True],
        "reduce_scatter": [mask + size * own, tail * size, True],
        "reduce_scatter_tensor": [mask + size * own, tail * size, True],
        "barrier": None,
        "all_gather_object": bits,
        "broadcast_object_list": 2**root,
        "gather_object": bits if is_root else None,
        "scatter_object_list": [2**root, own],
        "gather_bytes": bits,
        "broadcast_bytes": bits[0],
    }
    return results[name]
