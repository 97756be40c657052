"""One line of an event log, and what its fields may be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


class DamagedError(Exception):
    """A field is missing, or is none that this version writes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line whose common fields are sound."""

    time_s: float
    event: str
    generation: int
    member: str | None
    values: Mapping[str, Any]

    def own(self) -> dict[str, Any]:
        """The event's own fields."""
        return {name: value for name, value in self.values.items() if name not in _COMMON}

    @property
    def subject(self) -> str:
        """The member that it is about."""
        if self.member is None:
            raise DamagedError
        return self.member

    def number(self, name: str) -> float | None:
        """A number >= 0 that may be missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MAX:
            raise DamagedError
        return float(value)

    def count(self, name: str) -> int | None:
        """An integer >= 0 that may be missing."""
        value = self.number(name)
        if value is not None and not value.is_integer():
            raise DamagedError
        return None if value is None else int(value)

    def text(self, name: str) -> str:
        """A text; "" if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise DamagedError
        return value or ""

    def names(self, name: str) -> tuple[str, ...]:
        """A list of different logical ids."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise DamagedError
        if len(set(value)) != len(value):
            raise DamagedError
        return tuple(value)


_COMMON = ("time", "event", "generation", "member")

_MAX = 1e18
"""No number in a log is as large; floats hold integers below exactly enough."""

_LAST_S = 253402300800.0
"""The year 10000: what a calendar can show."""


def read(line: str | bytes) -> Line | None:
    """Return what a line says; None: it is damaged."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    time_s, event, generation, member = (values.get(name) for name in _COMMON)
    if isinstance(time_s, bool) or not isinstance(time_s, (int, float)) or not 0 <= time_s < _LAST_S:
        return None
    if not isinstance(event, str) or isinstance(generation, bool) or not isinstance(generation, int):
        return None
    if generation < 0 or not isinstance(member, (str, type(None))):
        return None
    return Line(float(time_s), event, generation, member, values)


def is_start(line: str | bytes) -> bool:
    """Whether another run of the job begins with this line."""
    if "job_started" not in (line if isinstance(line, str) else line.decode(errors="replace")):
        return False  # at once, for nearly all lines
    found = read(line)
    return found is not None and found.event == "job_started"
