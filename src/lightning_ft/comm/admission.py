"""A boundary where others may join: what is handed over there, and taken (PROTOCOL.md#M3a)."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from lightning_ft.comm.recovery import Recovery
from lightning_ft.comm.transfer import Cargo, State, StateTransfer, pack
from lightning_ft.comm.views import Views
from lightning_ft.coordinator.activity import Activity
from lightning_ft.coordinator.client import NextView
from lightning_ft.errors import FaultToleranceError

_log = logging.getLogger("lightning_ft")


class Carrier(Protocol):
    """A part of a process that keeps what the others' have agreed on since the job began: DDP's buckets."""

    def prepare(self) -> None:
        """Called on all members before a boundary where others may join; may run numbered collectives."""

    def give(self) -> Any:
        """Return what it is."""

    def take(self, part: Any) -> None:
        """Take it over from another member."""


class Admission:
    """What this process hands over at boundaries, or is handed.

    Args:
        views: Of this process.
        activity: Where progress is said.
        member: Own logical id.

    Attributes:
        why_closed: Why nobody may join from now on; None: somebody may.
    """

    def __init__(self, views: Views, activity: Activity, member: str) -> None:
        self.why_closed: str | None = None
        self._views = views
        self._activity = activity
        self._member = member
        self._carriers: list[weakref.ref[Carrier]] = []

    def carry(self, carrier: Carrier) -> None:
        """Have something of a part of this process handed to joiners, for as long as that part lives."""
        self._carriers.append(weakref.ref(carrier))

    def forget(self, carrier: Carrier) -> None:
        """Have it handed over no more. All members must do so alike: what the collector frees, it frees at any time."""
        self._carriers = [reference for reference in self._carriers if reference() is not carrier]

    def run(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        own: Callable[[], Cargo] | None,
        following: NextView | None = None,
    ) -> None:
        """Go to the next view with whoever joins.

        Args:
            give: Returns the state for those that join.
            take: Called with the job's state, if this process does.
            own: Returns what this process has itself, if it joins; None: it is sent all.
            following: The view that this process was admitted to; None: it is a member.

        Raises:
            FaultToleranceError: This member can't go on.
        """
        carriers = [carrier for reference in self._carriers if (carrier := reference()) is not None]
        for carrier in carriers:
            carrier.prepare()

        def load() -> Cargo:
            state = give()
            carried = [carrier.give() for carrier in carriers]
            return pack(State(state.replicated, (self._views.step, carried, state.own)))

        def take_all(state: State) -> None:
            self._activity.go_on()  # from here on the others wait for this process
            step, carried, own = state.own
            for carrier, part in zip(carriers, carried, strict=True):
                carrier.take(part)
            take(State(state.replicated, own))
            self._views.start_at(step)
            self._activity.wait("a boundary")

        # Before anybody waits: what a user's hooks do in it may fail, or take collectives of their own.
        cargo = self._load_or_close(load) if following is None else None
        views = self._views
        transfer = StateTransfer(load if cargo is None else lambda: cargo, take_all, self._say_progress, own=own)
        views.admit = transfer.run
        views.recovery = Recovery(time.monotonic(), before=() if views.live is None else views.live.members)
        self._activity.wait("a boundary")
        try:
            if following is not None:
                transfer.begin_as_joiner()
            elif cargo is not None:
                transfer.begin_as_donor(views.view.members.index(self._member), len(views.view.members))
            views.recover("join", following=following, admits=cargo is not None or following is not None)
        finally:
            views.admit = None
            self._activity.go_on()
        if following is not None:
            durations_s = transfer.durations_s
            views.report(
                "caught_up",
                total_bytes=transfer.total_bytes,
                missing_bytes=transfer.sent_bytes,
                drain_s=durations_s["drain"],
                compare_s=durations_s["compare"],
                receive_s=durations_s["receive"],
                load_s=durations_s["load"],
            )

    def _load_or_close(self, load: Callable[[], Cargo]) -> Cargo | None:
        try:
            return load()
        except FaultToleranceError:
            raise
        except Exception as error:  # noqa: BLE001 - a joiner is no reason for those that train to end
            generation = self._views.view.generation
            _log.exception("[%s g%d] nobody can join: the state can't be handed over", self._member, generation)
            self.why_closed = self.why_closed or f"its state can't be handed over ({error})"
            return None

    def _say_progress(self, what: str) -> None:
        self._activity.progress(what)
        self._activity.start_anew()
