"""Chromium without a window. Debian's package `chromium` will do."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

DEADLINE_S = 120.0


class Browser:
    """A browser whose profile is gone with the test.

    Args:
        home: A directory of its own.
    """

    def __init__(self, home: pathlib.Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            refuse = pytest.fail if os.environ.get("CI") else pytest.skip
            refuse("needs Chromium (Debian: apt-get install chromium)")
        self._home = home
        self._program = program

    def dom(self, address: str, *, is_live: bool = False) -> str:
        """Return a page as HTML, once it is loaded; a live one after three seconds of its own time."""
        waiting = ["--virtual-time-budget=3000"] if is_live else []
        return self._run(["--dump-dom", "--window-size=1400,1000", *waiting, address])

    def screenshot(self, address: str, out: pathlib.Path, *, is_dark: bool) -> None:
        """Write a picture of a page."""
        scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
        self._run([f"--screenshot={out}", "--window-size=1280,1400", "--hide-scrollbars", *scheme, address])

    def _run(self, arguments: list[str]) -> str:
        command = [self._program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={self._home}", "--no-first-run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
