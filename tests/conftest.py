"""What holds for all tests: reproducible examples in CI, a docstring for each test, no process left behind."""

from __future__ import annotations

import gc
import inspect
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

# No deadline for a single example: the machine may be busy. pytest-timeout has one for the whole test.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI", "").lower() not in ("", "0", "false") else "dev")

# Each of the many processes that tests start would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parents[1] / "src")

# Until all tests are collected: what they import stays, and looking through it was two thirds of the collection's time.
gc.disable()

LIGHT = (
    "test_agent.py",
    "test_collectives.py",
    "test_coordinator.py",
    "test_data.py",
    "test_delta_checkpoint.py",
    "test_examples.py",
    "test_fabric.py",
    "test_growth.py",
    "test_kill_points.py",
    "test_launch_ways.py",
    "test_metrics.py",
    "test_nodes.py",
    "test_page.py",
    "test_rejoin.py",
    "test_store_processes.py",
)
"""Their members are few, or start without Lightning."""


class HeavyJobsInOneWorker(LoadScopeScheduling):
    """Lets one worker run all jobs of many ranks, one after the other: they leave half of two cores to other tests."""

    def _split_scope(self, nodeid: str) -> str:
        folder, _, rest = nodeid.partition("tests/integration/")
        return nodeid if folder or not rest or rest.startswith(LIGHT) else "heavy jobs"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> HeavyJobsInOneWorker:
    """Used with `-n 3`."""
    return HeavyJobsInOneWorker(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Have the garbage collector look at what the tests make, and never again at the modules."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that does not say in a docstring which behaviour it shows."""
    silent = sorted(
        {
            item.nodeid.partition("[")[0]
            for item in items
            if type(item) is pytest.Function and not inspect.getdoc(item.function)  # hypothesis makes others
        }
    )
    if silent:
        raise pytest.UsageError(f"tests need a one-sentence docstring that tells the behaviour: {', '.join(silent)}")


@pytest.fixture(autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Kill the processes that a test started and did not end, and fail it."""
    here = psutil.Process()
    before = set(here.children(recursive=True))
    yield
    left = [child for child in here.children(recursive=True) if child not in before and _is_running(child)]
    for child in left:
        child.kill()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not left, f"the test left {left} running" + (f", and {alive} can't be killed" if alive else "")


def _is_running(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # Serves all of this Python process, until its end.
        return "multiprocessing.resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
