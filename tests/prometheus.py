"""Prometheus' own tools, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def program(name: str) -> str:
    """Return where `prometheus` or `promtool` is; where it is not, the test is skipped, but fails in CI."""
    found = shutil.which(name)
    if found is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*arguments: str, text: str = "") -> None:
    """Run it; what it objects to fails the test."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
