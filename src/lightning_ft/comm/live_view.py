"""A view, and the inner groups that were made for it."""

from __future__ import annotations

import threading

from lightning_ft.comm.gloo import Build, InnerGroup
from lightning_ft.membership.events import Address


class LiveView:
    """What this process has of one view; breaks as a whole.

    Attributes:
        generation: Of the view.
        members: Logical ids in rank order.
        meeting: The store of the first, where inner groups meet.
        is_severed: Whether it is broken; final.

    Threads: any; one makes groups, another may sever.
    """

    def __init__(self, generation: int, members: tuple[str, ...], meeting: Address) -> None:
        self.generation = generation
        self.members = members
        self.meeting = meeting
        self._builds: list[Build] = []
        self._lock = threading.Lock()
        self.is_severed = False

    def add(self, build: Build) -> InnerGroup:
        """Make an inner group of this view.

        Raises:
            RingBrokenError: A member is gone or the view was severed.
        """
        with self._lock:
            self._builds.append(build)
            is_severed = self.is_severed
        if is_severed:
            build.cancel()
        return build.result()

    def sever(self) -> None:
        """Break every group of the view, from any thread; idempotent."""
        with self._lock:
            self.is_severed = True
            builds = list(self._builds)
        for build in builds:
            build.cancel()

    def forget(self, inner: InnerGroup) -> None:
        """Let go of a group that was freed."""
        with self._lock:
            self._builds = [build for build in self._builds if not build.has_made(inner)]
