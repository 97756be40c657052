"""Named places where a test can make a process fail. Off unless `LIGHTNING_FT_FAIL_AT` is set.

`LIGHTNING_FT_FAIL_AT="0/1=commit.enter@3; 0/0=recover.settle:stop"`: member `0/1` is killed the third time it reaches
`commit.enter`, member `0/0` is stopped (SIGSTOP) the first time it reaches `recover.settle`. Actions: `kill` (default),
`stop`, `raise` (RuntimeError), `exit` (sys.exit(1)).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys

_ENTRY = re.compile(r"^(?P<member>[^=]+)=(?P<point>[\w.]+)(@(?P<count>\d+))?(:(?P<action>kill|stop|raise|exit))?$")


@dataclasses.dataclass(slots=True)
class _Fault:
    remaining: int
    action: str


def parse(text: str, member: str) -> dict[str, list[_Fault]]:
    """Read the faults of one member.

    Raises:
        ValueError: An entry is not `member=point[@count][:action]`.
    """
    faults: dict[str, list[_Fault]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.match(entry)
        if match is None:
            raise ValueError(f"LIGHTNING_FT_FAIL_AT entry must be member=point[@count][:action], got {entry!r}")
        if match["member"] == member:
            faults.setdefault(match["point"], []).append(_Fault(int(match["count"] or 1), match["action"] or "kill"))
    return faults


def _from_environment() -> dict[str, list[_Fault]]:
    text = os.environ.get("LIGHTNING_FT_FAIL_AT", "")
    return parse(text, os.environ.get("LIGHTNING_FT_MEMBER", "")) if text else {}


_faults = _from_environment()


def reach(point: str) -> None:
    """Mark that the process is at `point`; fails there if the environment asked for it."""
    if _faults:
        for fault in _faults.get(point, ()):
            fault.remaining -= 1
            if fault.remaining == 0:
                _fail(point, fault.action)


def _fail(point: str, action: str) -> None:
    if action == "raise":
        raise RuntimeError(f"fault placed at {point}")
    if action == "exit":
        sys.exit(1)
    print(f"fault placed at {point}: {action}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
