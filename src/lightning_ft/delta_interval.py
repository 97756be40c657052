"""How often `DeltaCheckpoint` saves."""

from __future__ import annotations

import dataclasses
import datetime

from lightning_ft.config import checkpoint_interval


@dataclasses.dataclass(frozen=True)
class Interval:
    """One of the three is not 0.

    Attributes:
        steps: Optimizer steps.
        seconds: Time.
        epochs: Epochs.
    """

    steps: int = 0
    seconds: float = 0.0
    epochs: int = 0

    @classmethod
    def of(
        cls,
        steps: int | None,
        time_between: datetime.timedelta | None,
        epochs: int | None,
        default_steps: int,
    ) -> Interval:
        """Return what is asked for by arguments, or by the environment, or a default: so many steps, or an epoch.

        Raises:
            ValueError: More than one is given, or one that is not above 0; the message names it.
        """
        seconds = None if time_between is None else time_between.total_seconds()
        given = [
            (name, value)
            for name, value in (
                ("every_n_train_steps", steps),
                ("train_time_interval", seconds),
                ("every_n_epochs", epochs),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{given[0][0]} and {given[1][0]} exclude each other")
        for name, value in given:
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        if not given:
            found = checkpoint_interval()
            default = cls(default_steps) if default_steps else cls(epochs=1)
            return default if found is None else cls(*found)
        return cls(steps or 0, seconds or 0.0, epochs or 0)
