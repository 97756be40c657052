"""Named places where a test can make a process fail. Off unless `LIGHTNING_FT_FAIL_AT` is set.

`LIGHTNING_FT_FAIL_AT="0/1=commit.enter@3; 0/0=commit.done@9>recover.confirm:stop"`: member `0/1` is killed the third
time it reaches `commit.enter`; member `0/0` is stopped (SIGSTOP) the first time that it reaches `recover.confirm` after
it reached `commit.done` nine times. `0/1#2` is the second process of that member, `0/1` its first. Actions: `kill`
(default), `stop`, `terminate` (SIGTERM), `raise` (RuntimeError), `exit` (sys.exit(1)).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_STAGE, _ACTION = r"[\w.]+(?:@\d+)?", "|".join([*_SIGNALS, "raise", "exit"])
_ENTRY = re.compile(rf"^(?P<member>[^=]+)=(?P<stages>{_STAGE}(?:>{_STAGE})*)(?::(?P<action>{_ACTION}))?$")


@dataclasses.dataclass(slots=True)
class _Fault:
    """What is still to be reached, in order: (point, how often)."""

    stages: list[tuple[str, int]]
    action: str

    def is_due(self, point: str) -> bool:
        expected, count = self.stages[0]
        if point != expected:
            return False
        self.stages[0] = (expected, count - 1)
        if count == 1:
            self.stages.pop(0)
        return not self.stages


def parse(text: str, member: str) -> list[_Fault]:
    """Read the faults of one member.

    Raises:
        ValueError: An entry is not `member=point[@count][>point[@count]...][:action]`.
    """
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.match(entry)
        if match is None:
            raise ValueError(
                f"LIGHTNING_FT_FAIL_AT entry must be member=point[@count][>point[@count]...][:action], got {entry!r}"
            )
        if match["member"] == member:
            stages = [stage.partition("@") for stage in match["stages"].split(">")]
            faults.append(_Fault([(point, int(count or 1)) for point, _, count in stages], match["action"] or "kill"))
    return faults


def _from_environment() -> list[_Fault]:
    text = os.environ.get("LIGHTNING_FT_FAIL_AT", "")
    member, incarnation = os.environ.get("LIGHTNING_FT_MEMBER", ""), os.environ.get("LIGHTNING_FT_INCARNATION", "1")
    return parse(text, member if incarnation == "1" else f"{member}#{incarnation}") if text else []


_faults = _from_environment()


def reach(point: str) -> None:
    """Mark that the process is at `point`; fails there if the environment asked for it."""
    if _faults:
        for fault in list(_faults):
            if fault.is_due(point):
                _faults.remove(fault)
                _fail(point, fault.action)


def _fail(point: str, action: str) -> None:
    if action == "raise":
        raise RuntimeError(f"fault placed at {point}")
    if action == "exit":
        sys.exit(1)
    print(f"fault placed at {point}: {action}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), _SIGNALS[action])
