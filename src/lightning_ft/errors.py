"""Every exception that lightning_ft raises on purpose.

```
Exception
└── FaultToleranceError          something the job could not repair; the message says what, to whom, what to do
    ├── MembershipChangedError   a collective can't be finished with the members that are left (mine to retry)
    ├── QuorumLostError          the members that are left may not go on (exit, resume later)
    │   └── CoordinatorLostError     perhaps they may, but the coordinator did not answer in time
    ├── RepeatedFailureError     a rank fails with the same exception again and again (mend it, then resume)
    ├── EvictedError             this process is no longer a member (it has ended, or exit, write nothing)
    ├── ProtocolViolationError   a peer broke the protocol (a bug, or two versions in one job)
    └── LaunchError              the job could not be started
ValueError                       a setting is wrong; raised before anything is started
```
"""

from __future__ import annotations

import traceback


class FaultToleranceError(Exception):
    """Base of all errors that concern a failure in the job.

    Args:
        message: What happened, to whom, and what to do next.
        member: Logical id of the member it is about, if there is one.
        generation: Generation in which it happened, if known.
    """

    def __init__(self, message: str, *, member: str | None = None, generation: int | None = None) -> None:
        super().__init__(message)
        self.member = member
        self.generation = generation


class MembershipChangedError(FaultToleranceError):
    """A collective whose meaning depends on the ranks can't be finished with the ranks that are left.

    All surviving members raise it at the same collective number. The group stays usable: read the new rank and
    world size and call again.
    """


class QuorumLostError(FaultToleranceError):
    """Too few members are left (majority, `min_world_size` or `max_failures`): exit and resume later."""


class EvictedError(FaultToleranceError):
    """The others go on without this process: write nothing more and exit."""


class CoordinatorLostError(QuorumLostError):
    """The coordinator did not answer in time while this member had to wait for it: exit and resume later.

    Either it is gone, or this member is on the smaller side of a cut network and the others go on.
    """


class RepeatedFailureError(FaultToleranceError):
    """A rank that was started again failed as before, from the same line: that is a bug, which no restart mends."""


class ProtocolViolationError(FaultToleranceError):
    """A message or a peer's state contradicts the protocol."""


class LaunchError(FaultToleranceError):
    """The processes of the job could not be started."""


def signature_of(error: BaseException) -> str:
    """Return class and origin of an exception, by which it is known again; "" for those of this module."""
    if isinstance(error, FaultToleranceError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__module__}.{type(error).__qualname__}{origin}"
