"""What soak_check.py reads in the logs of a soaked job, and that it misses nothing that may be wrong in them."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import soak_check

Logs = dict[str, list[dict[str, Any]]]

NUM_SAMPLES = 12


def logs() -> Logs:
    """Two epochs of three steps of two ranks, of which the second dies in step 3 and is back at step 5."""
    members: Logs = {"0-0": [{"event": "start", "pid": 1}], "0-1": [{"event": "start", "pid": 2}]}
    for step in range(7):
        epoch = int(step >= 3)
        alone = step in (3, 4)
        who = ["0/0"] if alone else ["0/0", "0/1"]
        if step == 5:
            members["0-1"].append({"event": "start", "pid": 3})
        for rank, name in enumerate(("0-0", "0-1")):
            index = [(step * 4 + 2 * rank + part - 12 * epoch - 2 * (step >= 4) - 2 * (step >= 5)) for part in range(2)]
            if name == "0-1" and alone:
                continue
            members[name] += [
                {"event": "draws", "step": step, "epoch": epoch, "index": index},
                {"event": "commit", "step": step, "contributors": who},
                {"event": "step", "step": step, "epoch": epoch, "hash": f"w{step}"},
            ]
    for lines in members.values():
        lines.extend([{"event": "usage", "memory_kb": 9, "descriptors": 5, "threads": 2, "all_threads": 2}] * 9)
        lines.append({"event": "end", "hash": "w6", "score": 0.9, "num_samples": NUM_SAMPLES})
    return members


def found(directory: pathlib.Path, members: Logs) -> list[str]:
    """Check these logs; the last line of one is unfinished, as a killed process leaves it."""
    for name, lines in members.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')
    return soak_check.check(directory)


def test_good_logs_are_good(tmp_path: pathlib.Path) -> None:
    """A death, a return, and each sample once in each epoch."""
    assert found(tmp_path, logs()) == []


def lines_of(members: Logs, name: str, event: str) -> list[dict[str, Any]]:
    return [line for line in members[name] if line["event"] == event]


WRONGS: dict[str, tuple[str, Callable[[Logs], object]]] = {
    "other weights": ("S1", lambda m: lines_of(m, "0-1", "step")[1].update(hash="x")),
    "a step twice": ("S1", lambda m: lines_of(m, "0-0", "step")[2].update(step=1, hash="w1")),
    "a commit twice": ("S2", lambda m: lines_of(m, "0-0", "commit")[2].update(step=1)),
    "a step that nobody took": ("S2", lambda m: [m["0-0"].remove(lines_of(m, "0-0", "step")[3])]),
    "other contributors": ("S2", lambda m: lines_of(m, "0-1", "commit")[0].update(contributors=["0/1"])),
    "a sample twice, another not": ("S3", lambda m: lines_of(m, "0-0", "draws")[1].update(index=[0, 1])),
    "many samples twice": ("S3", lambda m: lines_of(m, "0-0", "draws")[0].update(index=[0, 1, 5, 6, 7])),
    "a batch of nobody": ("S3", lambda m: [m["0-1"].remove(lines_of(m, "0-1", "draws")[0])]),
    "no end": ("S3", lambda m: [m[name].pop() for name in m]),
    "other ends": ("S4", lambda m: m["0-1"][-1].update(hash="x")),
    "memory": ("S5", lambda m: [m["0-0"].insert(-1, {**m["0-0"][-2], "memory_kb": 90_000}) for _ in range(9)]),
    "descriptors": ("S5", lambda m: [m["0-0"].insert(-1, {**m["0-0"][-2], "descriptors": 50}) for _ in range(9)]),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_each_wrong_is_found(tmp_path: pathlib.Path, wrong: str) -> None:
    """One change in the logs is named under its promise."""
    promise, change = WRONGS[wrong]
    members = copy.deepcopy(logs())
    change(members)
    told = found(tmp_path, members)
    assert any(text.startswith(promise) for text in told), told
