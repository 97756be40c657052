"""Programs in fresh interpreters, for tests of what is imported when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

_CHEAPER = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n"
"""Looking again and again through what torch and Lightning import is two fifths of such a program's time."""


def run(program: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed, and its status."""
    return subprocess.run(
        [sys.executable, "-c", _CHEAPER + program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
