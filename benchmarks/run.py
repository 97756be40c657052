"""Run the benchmarks, and put what they print into RESULTS.md: `make bench`, or `make bench ONLY="recovery growth"`.

    python benchmarks/run.py [--list] [NAME...]

Each script has a budget, 32 minutes in all; one that takes longer is ended, and its section stays as it was. So it does
if a script fails. A section is written as soon as its script has ended, so whoever stops this loses nothing, and goes
on with the names that are missing. `--list` shows them. The exit status is 1 if a script failed or missed a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from report import BENCHMARKS, FIGURES_VARIABLE

RESULTS = BENCHMARKS / "RESULTS.md"
FIGURES = BENCHMARKS / "RESULTS.json"
END = "<!-- end -->"


@dataclasses.dataclass(frozen=True)
class Script:
    """One benchmark, as `make bench` runs it.

    Attributes:
        arguments: That make it fit.
        budget_s: After which it is ended.
        title: Of its section, if RESULTS.md has none yet.
    """

    arguments: tuple[str, ...]
    budget_s: int
    title: str


SCRIPTS = {
    "counts": Script((), 20, "What can be counted"),
    "completion": Script(("--runs", "50"), 130, "Completion rate at 100 ranks, simulated"),
    "side_by_side": Script(("--rounds", "1", "--steps", "700"), 300, "Side by side"),
    "growth_of_cost": Script(
        ("--steps", "16", "--millions", "1", "20", "200", "--failures", "1", "4", "8"), 300, "How cost grows"
    ),
    "step_time": Script(("--slices", "10"), 140, "Step time and memory against Lightning's `ddp`"),
    "recovery": Script(("--kills", "12"), 100, "From SIGKILL to the survivors' next committed step"),
    "rejoin": Script(("--kills", "3"), 80, "From SIGKILL to the full job again"),
    "detection": Script(("--repeats", "2", "--idle-s", "20"), 100, "Detection"),
    "coordinator_scale": Script((), 60, "The coordinator with many members"),
    "core_scale": Script((), 20, "The pure core with many members"),
    "metrics": Script((), 40, "Metrics"),
    "sampler": Script(("--repeats", "2"), 60, "The sampler"),
    "catch_up": Script(("--millions", "50"), 80, "Catching up"),
    "checkpoint_codec": Script(("--repeats", "3"), 90, "The lossless codec of checkpoints"),
    "checkpoint_memory": Script((), 60, "Host memory that saving takes"),
    "checkpoint_sizes": Script((), 110, "The size of checkpoints"),
    "checkpoint_stall": Script(("--rows", "64", "--saves", "2"), 230, "Training that waits for its saves"),
}
"""In order. `snap_validation.py`, an hour, is run by itself."""


def machine() -> str:
    """Say where and with what this is measured."""
    root = BENCHMARKS.parent
    model = next(
        (
            line.split(":")[1].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    git = ["git", "-C", str(root)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=10", "HEAD"], check=False, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], check=False, capture_output=True, text=True).stdout
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning", "lightning-ft")
    )
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    return (
        f"{len(os.sched_getaffinity(0))} cores ({model}), Linux {platform.release().partition('-')[0]}, "
        f"Python {platform.python_version()}, {versions}, commit {commit or 'unknown'}"
        f"{' with changes' if changed else ''}, {when} UTC, load {os.getloadavg()[0]:.1f} at the start."
    )


def run(name: str, script: Script, patience: float) -> tuple[bool, str, list[str]]:
    """Run a script; return whether it kept its limits, what it printed, and its figures, one JSON object a line."""
    with tempfile.TemporaryDirectory() as directory:
        figures = pathlib.Path(directory) / "figures.jsonl"
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *script.arguments]
        environment = os.environ | {FIGURES_VARIABLE: str(figures), "OMP_NUM_THREADS": "1"}
        process = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            printed, _ = process.communicate(timeout=patience * script.budget_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            for one in [*process.children(recursive=True), process]:  # its jobs are sessions of their own
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.communicate()
            if isinstance(reason, KeyboardInterrupt):
                raise
            return False, "", []
        lines = figures.read_text().splitlines() if figures.exists() else []
        return process.returncode == 0, printed.strip(), lines


def replace_section(text: str, name: str, title: str, body: str) -> str:
    """Return RESULTS.md with a section's generated part replaced, or with a new section."""
    begin = f"<!-- {name} -->"
    if begin not in text:
        text = f"{text.rstrip()}\n\n## {title}\n\n{begin}\n{END}\n"
    head, rest = text.split(begin, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{begin}\n{body}\n{END}{tail}"


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all if none is given")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the budgets, for a busy machine")
    parser.add_argument("--list", action="store_true", help="show the names and budgets")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SCRIPTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SCRIPTS)}")
    if arguments.list:
        for name, script in SCRIPTS.items():
            print(f"{script.budget_s:4} s  {name} {' '.join(script.arguments)}")
        print(f"{sum(script.budget_s for script in SCRIPTS.values()):4} s  in all")
        return 0
    failed = []
    for name in arguments.names or SCRIPTS:
        where, begin_s = machine(), time.monotonic()
        is_good, printed, lines = run(name, SCRIPTS[name], arguments.patience)
        print(f"--- {name}: {time.monotonic() - begin_s:.0f} s\n{printed}", flush=True)
        if not is_good:
            failed.append(name)
        if printed:
            verdict = "" if is_good else "\n\n**It failed, or missed a limit.**"
            text = replace_section(RESULTS.read_text(), name, SCRIPTS[name].title, f"{printed}{verdict}\n\n{where}")
            RESULTS.write_text(text)
        figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        figures |= {figure.pop("name"): figure for figure in map(json.loads, lines)}
        FIGURES.write_text(json.dumps(figures, indent=0, sort_keys=True) + "\n")
    if failed:
        print(f"failed, missed a limit, or over budget: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
