"""A compilation counts as progress."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_ft.comm import backend, compiling
from lightning_ft.coordinator.activity import Activity


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activity]:
    """That of this process, for as long as the test runs."""
    found = Activity()
    monkeypatch.setattr(backend, "_ring", types.SimpleNamespace(activity=found))
    yield found
    torch._dynamo.reset()  # which forgets our callbacks too


def test_a_compilation_is_progress(activity: Activity) -> None:
    """While torch compiles, that is what the process does; afterwards, nobody has said yet what it does."""
    seen = []

    def compile_graph(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(activity.told()[2])
        return graph.forward

    compiling.report_compilations()
    compiling.report_compilations()
    compiled = torch.compile(lambda x: x + 1, backend=compile_graph)
    activity.progress("training_step")
    assert compiled(torch.ones(1)).item() == 2.0
    assert seen == ["compiling a graph"]
    assert activity.told()[2] == "after compiling a graph"
    activity.progress("training_step")
    compiled(torch.zeros(1))
    assert activity.told()[2] == "training_step", "nothing was compiled again"
    assert len(torch._dynamo.callback.callback_handler.start_callbacks) == 1
