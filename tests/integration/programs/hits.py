"""How the fault matrix tells its program what to do; for both of them."""

from __future__ import annotations

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True)
class Hit:
    """One argument of the program's command line."""

    fault: str
    moment: str
    members: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `FAULT@MOMENT=MEMBER[,MEMBER]...`."""
        what, _, members = text.partition("=")
        fault, _, moment = what.partition("@")
        return cls(fault, moment, tuple(members.split(",")))
