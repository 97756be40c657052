"""Silent agents are reported once, until they are heard again."""

from __future__ import annotations

from lightning_ft.coordinator.nodes import Nodes


def test_silence_is_reported_once() -> None:
    """With how long it was; again only after a sign of life."""
    nodes = Nodes(10.0)
    assert not nodes.hear(0, 100.0)
    assert not nodes.hear(1, 105.0)
    assert nodes.newly_silent(109.9) == {}
    assert nodes.newly_silent(111.0) == {0: 11.0}
    assert nodes.newly_silent(120.0) == {1: 15.0}
    assert nodes.hear(0, 121.0)
    assert not nodes.hear(0, 122.0)
    assert nodes.newly_silent(131.9) == {}
    assert nodes.newly_silent(132.0) == {0: 10.0}


def test_agent_that_is_done_may_be_silent() -> None:
    """Nothing is expected of it."""
    nodes = Nodes(10.0)
    nodes.hear(0, 100.0)
    nodes.forget(0)
    assert nodes.newly_silent(200.0) == {}
