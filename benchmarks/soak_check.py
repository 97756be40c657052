"""Check from the logs alone that a soaked job kept every promise: `soak_check.py OUT` prints what it found.

S1 All ranks have bitwise the same weights after each step; who comes back goes on at the very next step.
S2 Each step was committed once, with contributors on whom all ranks agree.
S3 In each epoch the contributors of its steps drew each sample once, but for the padding of its deals.
S4 Whoever ends has the same weights (buffers are each rank's own, as under DDP).
S5 What lives long uses no more memory, descriptors or threads as time goes on.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LIMITS = {"memory_kb": (1.15, 20_000), "descriptors": (1.0, 16), "threads": (1.0, 4), "all_threads": (1.0, 4)}
"""By which factor, and by how much more, what is used at the end may exceed what was used before.

A coordinator has a connection of each member and agent, twelve in all; a rank a few more or fewer with each view.
"""

Lines = Sequence[Mapping[str, Any]]


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read JSON lines; one that a killed process did not finish is left out."""
    found = []
    for text in path.read_text().split("\n"):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found.append(line)
    return found


def lives(lines: Lines) -> Iterator[Lines]:
    """Split a member's lines into those of its processes."""
    starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start:end]


def check_order(members: Mapping[str, Lines]) -> Iterator[str]:
    """S1, S2: one after the other, in each process."""
    for member, lines in members.items():
        for life in lives(lines):
            for promise, what in (("S1", "step"), ("S2", "commit")):
                steps = [line["step"] for line in life if line["event"] == what]
                if not is_gapless(steps):
                    yield f"{promise}: {member} has not one {what} after the other: {gaps(steps)}"


def check_agreed(members: Mapping[str, Lines]) -> Iterator[str]:
    """S1, S2: the same on all ranks."""
    agreed: dict[tuple[str, int], tuple[str, object]] = {}
    for member, lines in members.items():
        for line in lines:
            promise, what = {"step": ("S1", "hash"), "commit": ("S2", "contributors")}.get(line["event"], ("", ""))
            if promise:
                other, found = agreed.setdefault((what, line["step"]), (member, line[what]))
                if found != line[what]:
                    yield f"{promise}: step {line['step']} has {what} {line[what]} at {member}, {found} at {other}"
    steps = sorted(step for what, step in agreed if what == "hash")
    if steps != list(range(len(steps))):
        yield f"S2: steps are missing: {gaps(steps)}"


def is_gapless(steps: Sequence[int]) -> bool:
    """Whether each goes on by one from the last."""
    return not steps or list(steps) == list(range(steps[0], steps[0] + len(steps)))


def gaps(steps: Sequence[int]) -> str:
    """Say where a sequence does not go on by one."""
    found = [f"{one} to {other}" for one, other in itertools.pairwise(steps) if other != one + 1]
    return f"from {steps[0]}, then {', '.join(found[:5])}" if found else f"from {steps[0]}"


def of(members: Mapping[str, Lines], event: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the lines of one kind, with their members."""
    for member, lines in members.items():
        yield from ((member, line) for line in lines if line["event"] == event)


def check_samples(members: Mapping[str, Lines]) -> Iterator[str]:
    """S3."""
    ends = [line for _, line in of(members, "end")]
    if not ends:
        yield "S3: nobody has come to the end"
        return
    length = ends[0]["num_samples"]
    drawn = {(member, line["step"]): line for member, line in of(members, "draws")}  # the last, if dealt anew before it
    contributors = {line["step"]: line["contributors"] for _, line in of(members, "commit")}
    epochs = {line["step"]: line["epoch"] for line in drawn.values()}
    seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    changes: collections.Counter[int] = collections.Counter()
    before: list[str] | None = None
    for step, who in sorted(contributors.items()):
        changes[epochs[step]] += who != (before or who)
        before = who
        for member in who:
            if (member, step) not in drawn:
                yield f"S3: {member} contributed to step {step}, and its log has no batch of it"
            else:
                seen[epochs[step]].update(drawn[member, step]["index"])
    most = max((len(who) for who in contributors.values()), default=0)
    for epoch, counts in sorted(seen.items()):
        if missing := sorted(set(range(length)) - set(counts)):
            yield f"S3: epoch {epoch} lacks {len(missing)} samples: {missing[:5]} ..."
        num_more = counts.total() - len(counts)
        if num_more > (most - 1) * (1 + changes[epoch]):
            yield f"S3: epoch {epoch} has {num_more} samples twice, with {changes[epoch]} changes of the members"


def check_ends(members: Mapping[str, Lines]) -> Iterator[str]:
    """S4."""
    hashes = {member: line["hash"] for member, line in of(members, "end")}
    if len(set(hashes.values())) > 1:
        yield f"S4: not one end but {hashes}"


def check_usage(name: str, usages: Lines) -> Iterator[str]:
    """S5, of one process."""
    if len(usages) < 9:
        return
    third = len(usages) // 3
    for what, (factor, more) in LIMITS.items():
        if what not in usages[0]:
            continue
        before = statistics.median(usage[what] for usage in usages[third : 2 * third])
        after = statistics.median(usage[what] for usage in usages[-third:])
        if after > factor * before + more:
            yield f"S5: {name} uses more and more {what}: {before:g} became {after:g}"


def check(out: pathlib.Path) -> list[str]:
    """Return all that is wrong."""
    paths = [path for path in sorted(out.glob("*-*.jsonl")) if path.stem.replace("-", "").isdigit()]
    members = {path.stem.replace("-", "/"): read(path) for path in paths}
    wrong = [*check_order(members), *check_agreed(members), *check_samples(members), *check_ends(members)]
    for member, lines in members.items():
        for life in lives(lines):
            usages = [line for line in life if line["event"] == "usage"]
            wrong += check_usage(f"{member} (process {life[0]['pid']})", usages)
    watched = out / "watched.jsonl"
    if watched.exists():
        by_process: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
        for line in read(watched):
            by_process[f"{line['name']} (process {line['pid']})"].append(line)
        for name, usages in by_process.items():
            wrong += check_usage(name, usages)
    return wrong


def main() -> int:
    """Check, and print."""
    wrong = check(pathlib.Path(sys.argv[1]))
    print("\n".join(wrong) or "all promises were kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
