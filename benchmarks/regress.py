"""Compare the figures of two runs of the benchmarks: `regress.py OLD.json NEW.json`; exit status 1 if one got worse.

Of every figure less is better. A count may not grow at all. Anything else was measured several times in each run; both
are resampled, and it got worse if the ratio of the medians, new to old, is above `--tolerance` in 99 % of the resampled
pairs. So the noise that counts is that of these very runs, and who measures more often can show less. Compare ratios
taken side by side (`.../ratio`) between machines, and seconds on the same machine only. What only one run has is named,
and is no failure.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

NUM_RESAMPLED = 1000
CERTAINTY = 0.99
FEWEST = 5
"""Of fewer samples the noise is not known."""


def least_ratio(old: Sequence[float], new: Sequence[float]) -> float:
    """Return what the ratio of the medians, new to old, is above of, almost certainly."""
    chance = random.Random(0)
    ratios = sorted(
        statistics.median(chance.choices(new, k=len(new))) / statistics.median(chance.choices(old, k=len(old)))
        for _ in range(NUM_RESAMPLED)
    )
    return ratios[int((1 - CERTAINTY) * NUM_RESAMPLED)]


def worse(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> str | None:
    """Say how a figure got worse; None: it did not, as far as can be told."""
    before, after = old["samples"], new["samples"]
    if old["is_count"]:
        grown = statistics.median(after) - statistics.median(before)
        return f"{statistics.median(before):g} became {statistics.median(after):g}" if grown > 0 else None
    if min(len(before), len(after)) < FEWEST or min(before) <= 0:
        return None
    ratio = least_ratio(before, after)
    if ratio <= tolerance:
        return None
    median = statistics.median(after) / statistics.median(before)
    return f"{median:.3f} times what it was, more than {ratio:.3f} almost certainly"


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> dict[str, str]:
    """Return what got worse, and how."""
    told = {name: worse(old[name], new[name], tolerance) for name in sorted(old.keys() & new.keys())}
    return {name: how for name, how in told.items() if how is not None}


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=1.02, help="a ratio that is nobody's concern")
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    for name in sorted(old.keys() ^ new.keys()):
        print(f"only {'before' if name in old else 'now'}: {name}")
    found = compare(old, new, arguments.tolerance)
    for name, how in found.items():
        print(f"worse: {name}: {how}")
    print(f"{len(old.keys() & new.keys())} figures compared, {len(found)} got worse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
