"""Real processes on a local store: killed while they write, and racing for the same names."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "store_writers.py"


MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of its own is made there


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory where there is one: it is the processes that die here, and a disk would slow them down."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name) / "run"


def _run(what: str, directory: Path, rounds: int) -> Any:
    command = [sys.executable, str(PROGRAM), what, str(directory), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_writer_may_be_killed_at_any_moment(directory: Path) -> None:
    """After kill -9 all that is visible is whole, what was acknowledged is there, and the next writer goes on."""
    report = _run("kill", directory, 30)
    assert report["published"] > 100
    assert report["claims"] > 5
    assert report["leftovers"] > 0, "it was never killed while it wrote: choose other moments"


def test_of_processes_that_create_the_same_object_one_wins(directory: Path) -> None:
    """They come to the decisive system call together, many times, by link and by rename."""
    assert sum(_run("race", directory, 40)["winners"]) == 40
