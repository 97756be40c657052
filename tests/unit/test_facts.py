"""What is said of a model, its optimizer and its script, by which joiners are judged."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from lightning_ft.elastic import ElasticState
from lightning_ft.facts import facts_of_module, facts_of_optimizer, facts_of_script


def test_parameters_are_named_in_order() -> None:
    """With shapes and types; buffers and values are no part of it."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    assert list(facts_of_module(module, " of net")) == [
        ("parameter 0 of net", "0.weight", "[2, 3] float64"),
        ("parameter 1 of net", "0.bias", "[2] float64"),
        ("parameter 2 of net", "1.weight", "[2] float64"),
        ("parameter 3 of net", "1.bias", "[2] float64"),
    ]


def test_the_script_is_known_by_its_contents(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies; what is no file says nothing."""
    found = []
    for directory, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        script = tmp_path / directory / "train.py"
        script.parent.mkdir()
        script.write_text(text)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        found += facts_of_script()
    assert found[0] == found[1] != found[2]
    assert [(place, what) for place, what, _ in found] == [("the script", "train.py")] * 3
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert list(facts_of_script()) == []


def test_a_state_tells_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules by their parameters, optimizers and what has a state by its class; plain values may differ."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    module = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = ElasticState(step=3, optimizer=optimizer, schedule=schedule, model=module)
    assert list(state._facts()) == [
        ("parameter 0 of model", "weight", "[1, 1] float32"),
        ("part step", "it", "a value"),
        *facts_of_optimizer("optimizer", optimizer),
        ("part schedule", "it", "torch.optim.lr_scheduler.ConstantLR"),
    ]
    assert list(facts_of_optimizer("optimizer", optimizer)) == [("optimizer optimizer", "it", "torch.optim.sgd.SGD")]
