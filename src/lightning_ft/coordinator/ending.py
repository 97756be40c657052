"""When a job is over, and with which status."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from lightning_ft.membership import events

Identity = tuple[str, int]
"""A member's logical id and incarnation."""


class Ending:
    """How the job's processes ended, and who says that no other will.

    Attributes:
        exits: Every process that ended, in order, as its agent said.
        released: The members that were in the job to its end.

    Threads: the event loop's.
    """

    def __init__(self, released: Iterable[Identity] = ()) -> None:
        self.exits: list[events.Exited] = []
        self.released: set[Identity] = set(released)

    def note(self, exited: events.Exited) -> bool:
        """Take an exit in. Returns: False if it was said before, as an agent that reconnects does."""
        if any((seen.member, seen.incarnation) == (exited.member, exited.incarnation) for seen in self.exits):
            return False
        self.exits.append(exited)
        return True

    def status(self, members: Container[Identity]) -> int:
        """The job's exit status, as far as it has ended; arguments as `job_status`."""
        return job_status(
            [ended for ended in self.exits if (ended.member, ended.incarnation) in members], self.released
        )


def job_status(exits: Sequence[events.Exited], released: Iterable[Identity]) -> int:
    """Exit status of a job.

    Args:
        exits: How its members ended, in order of time. Not those that were started again and came too late: how they
            end says nothing about the job.
        released: The members that were let go when all were leaving. Whoever left before, with the others going on, is
            no reason to call the job failed.

    Returns: 0 if a released member succeeded and none failed; else the last failure's status, 128 + n for signal n.
    """
    known = set(released)
    finished = [ended.status for ended in exits if (ended.member, ended.incarnation) in known]
    if finished and not any(finished):
        return 0
    failed = [ended.status for ended in exits if ended.status != 0]
    if not failed:
        return 0
    return failed[-1] if failed[-1] > 0 else 128 - failed[-1]
