"""Faults happen at the place and time that the environment names, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lightning_ft.faultpoints import parse, reach

PROGRAM = """
from lightning_ft.faultpoints import reach
for step in range(5):
    reach("other.point")
    reach("some.point")
    print(step, flush=True)
"""


def test_parse_takes_the_faults_of_one_member() -> None:
    """Entries are separated by semicolons, points of one entry follow each other; count and action have defaults."""
    faults = parse("0/1=a.enter@3; 0/0=b.done; 0/1=a.enter:stop;0/1=c@2>d>a.b@5:raise;", "0/1")
    assert [(fault.stages, fault.action) for fault in faults] == [
        ([("a.enter", 3)], "kill"),
        ([("a.enter", 1)], "stop"),
        ([("c", 2), ("d", 1), ("a.b", 5)], "raise"),
    ]
    assert parse("0/1=a", "1/1") == []


@pytest.mark.parametrize("text", ["a.enter", "0/1=a@x", "0/1=a:explode", "0/1=a:kill@2", "0/1="])
def test_parse_refuses_what_it_can_not_read(text: str) -> None:
    """A typing error must not make a test that places no fault."""
    with pytest.raises(ValueError, match="LIGHTNING_FT_FAIL_AT entry must be"):
        parse(text, "0/1")


def test_reach_does_nothing_by_default() -> None:
    """Without the variable, a point is passed."""
    reach("some.point")


@pytest.mark.parametrize(
    ("fault", "status", "steps"),
    [
        ("some.point@3", -signal.SIGKILL, 2),
        ("some.point", -signal.SIGKILL, 0),
        ("some.point@2:exit", 1, 1),
        ("some.point@3:terminate", -signal.SIGTERM, 2),
        ("some.point@4:raise", 1, 3),
        ("some.point@6", 0, 5),
        ("some", 0, 5),
        ("some.point@2>other.point@2", -signal.SIGKILL, 3),
        ("other.point@2>some.point", -signal.SIGKILL, 1),
    ],
)
def test_reach_fails_at_that_count(fault: str, status: int, steps: int) -> None:
    """The process fails when it reaches the point for the named time, in the way that was asked for."""
    environ = {"LIGHTNING_FT_FAIL_AT": f"0/2=some.point; 0/1={fault}", "LIGHTNING_FT_MEMBER": "0/1"}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, timeout=60, check=False)
    assert found.returncode == status
    assert found.stdout.decode().split() == [str(step) for step in range(steps)]
    if fault.endswith("raise"):
        assert b"RuntimeError: fault placed at some.point" in found.stderr


def test_reach_stops_until_continued() -> None:
    """A stopped process does nothing, and goes on when it is continued."""
    environ = {"LIGHTNING_FT_FAIL_AT": "0/1=some.point@2:stop", "LIGHTNING_FT_MEMBER": "0/1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        assert b"stop" in process.stderr.readline()
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert output.split() == [b"0", b"1", b"2", b"3", b"4"]
    finally:
        process.kill()
        process.wait()
