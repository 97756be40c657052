"""The strategy's arguments."""

from __future__ import annotations

import datetime

import pytest

from lightning_ft import FaultTolerantDDPStrategy


@pytest.mark.parametrize("name", ["min_world_sizee", "enable", "bucket_cap"])
def test_an_unknown_argument_is_named(name: str) -> None:
    """A misspelt setting is told before anything is started, not by DDP in each rank."""
    with pytest.raises(ValueError, match=f"'{name}' is no setting of FaultTolerantDDPStrategy"):
        FaultTolerantDDPStrategy(**{name: 1})


def test_arguments_of_ddp_are_taken() -> None:
    """What DistributedDataParallel knows is passed on; what DDPStrategy knows too, as LightningCLI gives all of it."""
    given = {"bucket_cap_mb": 1, "static_graph": True}
    assert FaultTolerantDDPStrategy(**given, model_averaging_period=3, start_method="popen")._ddp_kwargs == {
        "bucket_cap_mb": 1,
        "static_graph": True,
    }


def test_timeout_may_be_a_timedelta() -> None:
    """As for DDPStrategy."""
    assert FaultTolerantDDPStrategy(timeout=datetime.timedelta(minutes=1)).settings.timeout == 60.0
