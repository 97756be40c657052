"""What of the ring can be seen without a ring."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from lightning_ft.comm.ring import Ring


class Gradients:
    """Something large in a variable of the caller."""


class Broken:
    """A sequence whose number fails here."""

    works: Any = ()

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def finish(self) -> None:
        raise RuntimeError("connection closed by peer")

    def note_failure(self, error: Exception) -> None:
        self.failure = error


class Recovering(Ring):
    """A ring that has nothing but a recovery in which another member hands the result over."""

    def __init__(self, sequence: Broken, operation: SimpleNamespace) -> None:
        self.member = "0/0"
        self._views: Any = SimpleNamespace(
            view=SimpleNamespace(generation=1), recover_from_break=self._recover, finalized=lambda *_: None
        )
        self._broken, self._operation = sequence, operation

    def _recover(self) -> None:
        self._operation.is_final = True
        self._broken.failure = None


def test_a_number_that_failed_and_was_handed_over_is_let_go() -> None:
    """Its error refers to the frames of all callers: they must not outlive the call, with what they hold."""
    sequence, operation = Broken(), SimpleNamespace(is_final=False, name="commit")
    ring = Recovering(sequence, operation)

    def step() -> weakref.ref[Gradients]:
        gradients = Gradients()
        ring._finish(sequence, operation)  # type: ignore[arg-type]
        return weakref.ref(gradients)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
