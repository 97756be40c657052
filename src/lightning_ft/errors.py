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
    ├── LaunchError              the job could not be started
    └── CheckpointError          a checkpoint could not be written, found or read
        ├── StoreError               the storage failed an operation (whether a retry may mend it is in `is_retryable`)
        │   └── AlreadyThereError        what should be created is there, from another writer
        ├── StaleWriterError         another process writes these checkpoints now (write nothing more)
        ├── CheckpointDamagedError   a piece of one is damaged or missing (use an older one)
        ├── UnsupportedCheckpointError   a newer program wrote it (use that), or it needs pickle (say so)
        │   └── ReplayError              the optimizer here makes something else of it (use the machine that wrote it)
        └── CheckpointNotFoundError  there is none, or none that is intact
ValueError                       a setting is wrong; raised before anything is started
SystemExit
└── StopRequested                all ranks were asked to stop, and do so at the same boundary (save, raise it again)
```
"""

from __future__ import annotations

import signal
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


class CheckpointError(FaultToleranceError):
    """A checkpoint could not be written, found or read."""


class StoreError(CheckpointError):
    """The storage of the checkpoints failed an operation.

    Attributes:
        operation: What was tried: `create`, `replace`, `read`, `size`, `list`, `delete` or `recover`.
        path: Of the object, with the store's URL before it.
        reason: The cause in a word, the same for the same cause: `ENOSPC`, `HTTP 503`, `timeout`, a class's name.
        is_retryable: Whether the same call may succeed later without anybody doing something.
        is_in_doubt: Whether a `create` that failed may have made the object, or may make it yet. Whatever that object
            refers to must be left alone until `create` of the same bytes, which is safe to call again, has an answer.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        path: str,
        reason: str,
        is_retryable: bool = False,
        is_in_doubt: bool = False,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.path = path
        self.reason = reason
        self.is_retryable = is_retryable
        self.is_in_doubt = is_in_doubt


class AlreadyThereError(StoreError):
    """An object that should be created is there already, written by somebody else; it was left as it is."""


class StaleWriterError(CheckpointError):
    """A newer generation has been claimed: this process must publish nothing more and delete nothing."""


class CheckpointDamagedError(CheckpointError):
    """A piece of a checkpoint is missing, or is not what was written: an older checkpoint is needed.

    Args:
        message: What is wrong.
        piece: Path of the damaged file.
    """

    def __init__(self, message: str, piece: str) -> None:
        super().__init__(f"{piece} is damaged: {message}")
        self.piece = piece


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint is intact, but this program can't or must not read it."""


class ReplayError(UnsupportedCheckpointError):
    """A log of gradients is intact, but the optimizer here makes something else of it: it is for another machine."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint, or none that is intact; the message names what is damaged."""


class StopRequested(SystemExit):
    """All ranks were asked to stop: `ElasticState.boundary()` raises it on all of them, between the same two steps.

    Save then, and raise it again. Where nobody catches it the process ends with status 143, as after SIGTERM.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


FINAL = (
    QuorumLostError,
    EvictedError,
    RepeatedFailureError,
    ProtocolViolationError,
    LaunchError,
    CheckpointError,
)
"""After these a process can't go on at all, whatever state it goes back to."""


def signature_of(error: BaseException) -> str:
    """Return class and origin of an exception, by which it is known again; "" for those of this module."""
    if isinstance(error, FaultToleranceError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__module__}.{type(error).__qualname__}{origin}"
