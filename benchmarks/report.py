"""What the benchmarks share: figures that `regress.py` compares, and the plots' look.

A script prints its tables as Markdown; `run.py` puts them into RESULTS.md. What can be compared with another run is
noted with `figure` as well.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it is only there for `make bench`
    from matplotlib.figure import Figure

BENCHMARKS = pathlib.Path(__file__).parent
PLOTS = BENCHMARKS / "plots"
FIGURES_VARIABLE = "LIGHTNING_FT_BENCH_FIGURES"
"""Names the file that `figure` appends to; it writes nothing if this is not set."""


def figure(name: str, samples: Sequence[float], *, is_count: bool = False) -> None:
    """Note a figure of which less is better.

    Args:
        name: Unique among all benchmarks, `step_time/small/ratio`.
        samples: As often as it was measured, so that a reader knows its noise.
        is_count: Whether it is the same on any machine, however busy.
    """
    path = os.environ.get(FIGURES_VARIABLE)
    if path is not None:
        line: dict[str, Any] = {"name": name, "samples": [float(value) for value in samples], "is_count": is_count}
        with pathlib.Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def save_plot(plot: Figure, name: str) -> pathlib.Path:
    """Write a plot as SVG, the same bytes for the same data."""
    import matplotlib as mpl

    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        plot.savefig(path, metadata={"Date": None})
    lines = (line.rstrip() for line in path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
    return path
