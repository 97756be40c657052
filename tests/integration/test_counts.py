"""What a step and a change of the view cost in messages, bytes, collectives and allocations does not grow unnoticed."""

from __future__ import annotations

import json
import random

import pytest
from benchmarks import counts, regress


def test_nothing_costs_more_than_it_did() -> None:
    """The counts are those of benchmarks/counts.json or less; who means to raise one runs `counts.py --update`."""
    kept, found = json.loads(counts.KEPT.read_text()), counts.count()
    assert kept.keys() == found.keys(), "run benchmarks/counts.py --update"
    assert regress.compare(kept, found, tolerance=1.0) == {}
    assert regress.compare({name: _less(figure) for name, figure in kept.items()}, found, tolerance=1.0).keys() == {
        name for name, figure in found.items() if figure["samples"] != [0.0]
    }


def _less(figure: dict[str, object]) -> dict[str, object]:
    (value,) = figure["samples"]  # type: ignore[misc]
    return figure | {"samples": [value / 2]}


@pytest.mark.parametrize(("factor", "is_worse"), [(1.0, False), (0.8, False), (1.01, False), (1.2, True)])
def test_a_figure_is_worse_if_it_is_beyond_its_own_noise(factor: float, is_worse: bool) -> None:
    """Of 60 samples with a noise of 10 %, a fifth more is beyond it, a hundredth is not."""
    chance = random.Random(1)
    old, new = ([chance.gauss(1.0, 0.1) for _ in range(60)] for _ in range(2))
    figures = [{"a": {"samples": samples, "is_count": False}} for samples in (old, [factor * value for value in new])]
    assert bool(regress.compare(*figures, tolerance=1.02)) == is_worse


def test_few_samples_and_wide_noise_accuse_nobody() -> None:
    """Of four samples the noise is not known; of wide noise a fifth more is no proof."""
    few = [{"a": {"samples": [value] * 4, "is_count": False}} for value in (1.0, 2.0)]
    assert regress.compare(*few, tolerance=1.02) == {}
    wide = [{"a": {"samples": [0.2, 1.0, 1.0 * by, 5.0, 0.5 * by], "is_count": False}} for by in (1.0, 1.2)]
    assert regress.compare(*wide, tolerance=1.02) == {}
