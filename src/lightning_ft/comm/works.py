"""What a collective call returns."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_ft.comm.operations import Operation
from lightning_ft.comm.ring import Ring
from lightning_ft.comm.sequence import CollectiveSequence
from lightning_ft.coordinator.activity import Activity
from lightning_ft.errors import MembershipChangedError


class PendingWork(dist.Work):
    """A numbered collective that may not be final yet; `wait` recovers if it has to."""

    def __init__(self, ring: Ring, sequence: CollectiveSequence, operation: Operation, result: object) -> None:
        super().__init__()
        self._ring = ring
        self._sequence = sequence
        self._operation = operation
        self._result = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the result is there. `timeout` is ignored: the group's own applies."""
        self._ring.finish(self._sequence, self._operation)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Polling repairs a broken collective as waiting does."""
        return self._ring.poll(self._sequence, self._operation)

    def is_success(self) -> bool:
        """Whether it is final and has a result."""
        return self._operation.is_final and self._operation.error is None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future; waits first, since nothing runs behind the caller's back."""
        self.wait()
        return completed(self._result)

    def result(self) -> Any:
        """Return the output tensors."""
        return self._result


class DoneWork(dist.Work):
    """What is finished already."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future."""
        return completed(self._result)


def completed(value: object) -> torch.futures.Future[Any]:
    """Return a future that has its value."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class PointToPointWork(dist.Work):
    """A message on its way; not repeated if it breaks."""

    def __init__(self, work: dist.Work, activity: Activity, make_error: Callable[[], MembershipChangedError]) -> None:
        super().__init__()
        self._work = work
        self._activity = activity
        self._make_error = make_error

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the message has been taken or has arrived.

        Raises:
            MembershipChangedError: The connection broke first.
        """
        self._activity.wait("a message")
        try:
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        except RuntimeError as error:
            raise self._make_error() from error
        finally:
            self._activity.go_on()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._work.is_completed())
