"""A child does not outlive its agent, however either of them is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightning_ft import child

DEADLINE_S = 30

WATCHED = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(child.__file__).parent)!r})  # it needs nothing else of the package
from child import watch_agent

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print(watch_agent(), watch_agent(), "LIGHTNING_FT_AGENT_FD" in os.environ, flush=True)
sys.stdin.read()
print("no agent", flush=True)
"""


def start(read_fd: int | None, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        env={**os.environ, **environment},
        pass_fds=() if read_fd is None else (read_fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_child_ends_when_the_pipe_does() -> None:
    """Whatever signals it ignores; the second call does nothing, and the variable is not inherited."""
    read_fd, write_fd = os.pipe()
    process = start(read_fd, LIGHTNING_FT_AGENT_FD=str(read_fd))
    assert process.stdout is not None
    assert process.stdout.readline() == "True False False\n"
    assert process.poll() is None
    os.close(write_fd)
    assert process.wait(DEADLINE_S) == child.ORPHAN_STATUS
    os.close(read_fd)
    process.communicate()


def test_child_whose_agent_died_before_it_looked_ends() -> None:
    """The pipe is at its end from the start."""
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    process = start(read_fd, LIGHTNING_FT_AGENT_FD=str(read_fd))
    assert process.wait(DEADLINE_S) == child.ORPHAN_STATUS
    os.close(read_fd)
    process.communicate()


def test_process_without_an_agent_is_left_alone() -> None:
    """Nothing is watched if there is no variable, or if the number is not a pipe (a process started by a child)."""
    for environment in ({}, {"LIGHTNING_FT_AGENT_FD": "77"}, {"LIGHTNING_FT_AGENT_FD": "x"}):
        process = start(None, **environment)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert output.splitlines()[0].startswith("False False")
        assert output.splitlines()[1] == "no agent"
        assert process.returncode == 0


def test_bootstrap_keeps_process_id_and_arguments() -> None:
    """The command takes the place of the few lines that tie it to its agent."""
    command = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
    script = "import os, sys; print(os.getpid(), sys.argv[1:], sys.flags.isolated)"
    process = subprocess.Popen(
        [*command, sys.executable, "-c", script, "a b", "--c"], stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert output == f"{process.pid} ['a b', '--c'] 0\n"


def test_bootstrap_of_a_dead_agent_starts_nothing() -> None:
    """An agent that died in between leaves no child behind."""
    command = [sys.executable, "-I", "-S", child.__file__, "999999999", sys.executable, "-c", "print('started')"]
    process = subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    assert process.stdout == b""
    assert process.returncode == child.ORPHAN_STATUS


def test_process_that_ends_at_once_runs_nothing_more(tmp_path: Path) -> None:
    """Not its other threads, not its exit handlers, whatever signals come; and it says why."""
    out = tmp_path / "counted"
    script = f"""
import atexit, os, signal, sys, threading, time
sys.path.insert(0, {str(Path(child.__file__).parent)!r})
from child import end_at_once

atexit.register(print, "at exit", flush=True)
signal.signal(signal.SIGTERM, lambda *_: print("signal", flush=True))
out = open({str(out)!r}, "w", buffering=1)

def end():
    time.sleep(0.05)
    os.write(1, f"{{out.tell()}}\\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    end_at_once("it was given up")

threading.Thread(target=end).start()
while True:
    out.write("x" * 100 + "\\n")
    time.sleep(0)
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "it was given up"
    told, *rest = process.stdout.splitlines()
    assert set(rest) <= {"signal"}, "the handler may run before the end, nothing after it"
    assert out.stat().st_size - int(told) < 5_000_000, "a turn or two of the other thread, not a second of it"
