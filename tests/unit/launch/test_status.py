"""What an agent sees of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from lightning_ft.launch.status import Processor


def wait_until(condition: Callable[[], bool]) -> None:
    """Fail if it does not come."""
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_whether_a_process_computes() -> None:
    """One that holds its interpreter's lock does; one that sleeps, is stopped or has ended does not."""
    programs = ["import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", "import time; time.sleep(1000)"]
    busy, idle = (subprocess.Popen([sys.executable, "-c", program]) for program in programs)
    try:
        of_busy, of_idle = Processor(busy.pid), Processor(idle.pid)
        wait_until(lambda: not of_idle.was_used())  # it has started
        wait_until(of_busy.was_used)
        wait_until(of_busy.was_used)
        assert not of_idle.was_used()
        os.kill(busy.pid, signal.SIGSTOP)
        wait_until(lambda: not of_busy.was_used())
        os.kill(busy.pid, signal.SIGCONT)
        wait_until(of_busy.was_used)
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    assert not of_busy.was_used()
