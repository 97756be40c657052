"""The member's side: a monitor thread that holds the connection, and a blocking interface for the training thread."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from lightning_ft.config import AUTO, Settings
from lightning_ft.coordinator.activity import Activity
from lightning_ft.coordinator.channel import MEMBER_PATH
from lightning_ft.coordinator.enrolment import Enrolment, Left, NextView, Resync, Sever, checked
from lightning_ft.coordinator.fingerprint import Fingerprint
from lightning_ft.coordinator.lease import Lease
from lightning_ft.coordinator.link import Link
from lightning_ft.coordinator.patience import Patience
from lightning_ft.errors import CoordinatorLostError, EvictedError, FaultToleranceError, ProtocolViolationError
from lightning_ft.event_log import RECOVERIES
from lightning_ft.membership import effects, events, wire
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import View

__all__ = ["MembershipClient", "NextView"]

logger = logging.getLogger("lightning_ft")

_MAX_REPORTS = 256
"""Reports kept while the coordinator can't be reached; the oldest are dropped first."""

_MAX_TEXT = 64 * 1024
"""Longest text in a report: a traceback's end, far below the longest message."""

_FAREWELL_S = 2.0


class MembershipClient:
    """One member's membership.

    The training thread calls `park`, `leave`, `report`, `fail`; the monitor thread keeps the connection, says that this
    process is alive, and calls the two callbacks the moment a message comes, whatever the training thread does.

    Args:
        endpoint: `host:port` of the coordinator.
        token: The job's secret.
        member: Logical id of this member.
        incarnation: Which start of that id this process is.
        address: Where this member's store listens.
        expected: Logical ids of the members that the job starts with, in rank order.
        settings: The job's settings.
        is_joiner: Whether this process asks to join a job that runs.
        on_suspend: Called in the monitor thread when the view of this generation must be severed.
        on_leaving: Called in the monitor thread with (member, completed) of a member that will leave.
        on_evicted: Called in the monitor thread when this process is out of the job.
        standbys: Where else a coordinator may be.

    Attributes:
        step: Gradient steps committed so far; the next heartbeat tells it. None: a joiner, without the job's state.
        activity: What this process is doing; as well.

    Threads: any, except that only one at a time may be in `park`, `join` or `leave`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        token: str,
        member: str,
        incarnation: int,
        address: Address,
        expected: Sequence[str],
        settings: Settings,
        on_suspend: Callable[[int], None] = lambda _generation: None,
        on_leaving: Callable[[str, int], None] = lambda _member, _completed: None,
        on_evicted: Callable[[], None] = lambda: None,
        is_joiner: bool = False,
        standbys: Sequence[str] = (),
    ) -> None:
        self.member = member
        self.incarnation = incarnation
        self.on_suspend = on_suspend
        self.on_leaving = on_leaving
        self.on_evicted = on_evicted
        self.step: int | None = None if is_joiner else 0
        self.activity = Activity(
            Patience(settings.least_timeout, settings.longest_timeout) if settings.timeout == AUTO else None
        )
        self._settings = settings
        self._lease = Lease(settings.heartbeat_timeout)
        self._changed = threading.Condition()
        hello = events.Hello(member, incarnation, 0, address, os.getpid())
        self._enrolment = Enrolment(hello, tuple(expected), is_joiner=is_joiner)
        self._sent: events.Parked | events.Leaving | None = None
        self._described: events.Described | None = None
        self._log_directory: str | None = None
        self._recovery = "", -math.inf
        self._reports: collections.deque[str] = collections.deque(maxlen=_MAX_REPORTS)
        self._link = Link(
            endpoint,
            MEMBER_PATH,
            token,
            settings,
            greet=self._greet,
            on_frame=self._on_frame,
            on_change=self._on_change,
            heartbeat=self._heartbeat,
        )
        self._link.add_endpoints(standbys)
        self._term = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def view(self) -> View:
        """The last view that was given; generation 0 before the first."""
        return self._enrolment.view

    @property
    def leavers(self) -> dict[str, int]:
        """Members of the view that will leave, each with the last number that it finishes."""
        return dict(self._enrolment.leavers)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is being heard."""
        return self._link.is_connected

    @property
    def error(self) -> FaultToleranceError | None:
        """Why this member is out of the job, if it is."""
        return self._enrolment.error

    @property
    def is_released(self) -> bool:
        """Whether the coordinator said that nobody needs this member any more."""
        return self._enrolment.is_released

    @property
    def is_join_pending(self) -> bool:
        """Whether joiners wait to be admitted."""
        return bool(self._enrolment.joiners)

    @property
    def needs_joiners(self) -> bool:
        """Whether the view has too few members, and is to admit others at its first boundary."""
        return self._enrolment.needs_joiners

    @property
    def joiners(self) -> tuple[Address, ...]:
        """Where the stores of those listen that wait to be admitted, as the first member was told."""
        return self._enrolment.joiners

    def fileno(self) -> int:
        """Descriptor of the connection's socket, which forked processes must close; -1 without one."""
        return self._link.fileno()

    def start(self) -> None:
        """Start the monitor thread; returns at once. The connection is made, and made again, in the background."""
        if self._thread is not None:
            return
        ready = threading.Event()
        self._thread = threading.Thread(target=self._monitor, args=(ready,), name="lightning_ft-monitor", daemon=True)
        self._thread.start()
        ready.wait()

    def park(
        self,
        completed: int | None,
        reason: str,
        *,
        admits: bool = False,
        suspects: tuple[str, ...] = (),
        is_quiet: bool = False,
    ) -> NextView:
        """Stop in the current view, and wait for a newer one.

        Args:
            completed: Number of the last collective that is final here; None: it joined, and holds no state yet.
            reason: `start`, `connection`, `unreachable`, `suspended`, `leave` or `join`.
            admits: Whether this is a boundary where joiners may be admitted.
            suspects: Members whose connection broke, or that could not be reached.
            is_quiet: Whether the view is whole still, at a boundary that nobody has passed: see `events.Parked`.

        Returns: The view to establish; this member is in it.

        Raises:
            ValueError: An argument is no valid number or reason.
            EvictedError: This process is no member any more: write nothing more and exit.
            QuorumLostError: The members that are left may not go on: exit, resume later.
            CoordinatorLostError: Nothing was heard of the coordinator for `timeout` seconds: exit, resume later.
            ProtocolViolationError: The coordinator broke the protocol or refused this process.
        """
        with self._changed:
            self._raise_if_over()
            self._enrolment.park(completed, reason, admits=admits, suspects=suspects, is_quiet=is_quiet)
            self._post(self._send_request)
            while True:
                following = self._enrolment.collect()
                if following is not None:
                    return following
                self._raise_if_over()
                self._wait_for_change(self._settings.longest_timeout)

    def join(self) -> NextView | None:
        """Wait until the members admit this process, which has said that it is ready when it connected.

        Returns: The view to establish; None if the job has ended without it.

        Raises:
            FaultToleranceError: It will not be admitted; as `park`.
        """
        with self._changed:
            while True:
                following = self._enrolment.collect()
                if following is not None or self._enrolment.is_released:
                    return following
                self._raise_if_over()
                self._wait_for_change(self._settings.longest_timeout)

    def describe(self, fingerprint: Fingerprint) -> None:
        """Say what this process trains: before `join`, to be compared; of a member, for others to be. Never waits."""
        with self._changed:
            self._enrolment.fingerprint = fingerprint
        self._post(self._send_description)

    def confirm(self) -> None:
        """Make sure that this process is a member still, before it does what only a member may: write a checkpoint.

        Returns at once if a heartbeat sent less than `heartbeat_timeout` ago was answered; else it waits for one.

        Raises:
            FaultToleranceError: It is none any more, or can't find out; as `park`.
        """
        with self._changed:
            self._raise_if_over()
            while not self._lease.is_valid:
                self._wait_for_change(self._settings.longest_timeout)
                self._raise_if_over()

    def confirm_if_in_doubt(self) -> None:
        """The same, but only if this process itself was away: for what may not wait for the coordinator."""
        if self._lease.is_in_doubt:
            self.confirm()

    def leave(self, completed: int) -> NextView | None:
        """Say that this member enters no number larger than `completed`, and wait until nobody needs it any more.

        Returns: A view to establish if somebody still needs this member's last result; call again after that. None to
            end: this member was released (`is_released`), or that can't be expected any more because it is out of the
            job, the coordinator is gone (not heard for
            `heartbeat_timeout`, four times that if it may have successors), or `timeout` is over.

        Raises:
            ValueError: `completed` is no number.
        """
        deadline_s = time.monotonic() + self._settings.longest_timeout
        with self._changed:
            if self._thread is None or self._is_out():
                return None
            self._enrolment.leave(completed)
            self._post(self._send_request)
            while not self._enrolment.is_released:
                following = self._enrolment.collect()
                if following is not None:
                    return following
                remaining_s = deadline_s - time.monotonic()
                is_lost = self._link.silent_s() > self._link.succession_s
                if self._is_out() or is_lost or remaining_s <= 0:
                    return None
                self._wait_for_change(min(self._settings.heartbeat_timeout, remaining_s))
            return None

    def report(self, event: str, **fields: Any) -> None:
        """Have the coordinator log an event; sent later if it can't be reached. Never waits, never raises.

        Args:
            event: Its name, `snake_case`.
            fields: Scalars or sequences of them; anything else is written as text.
        """
        plain = tuple((name, _plain(value)) for name, value in fields.items())
        try:
            frame = checked(wire.Report(self.member, self.incarnation, event, plain))
        except ValueError as error:
            logger.warning("[%s] the report %r was dropped: %s", self.member, event, error)
            return
        with self._changed:
            if event == "log_directory" and self._log_directory is None:
                self._log_directory = frame
            self._reports.append(frame)
            if event in RECOVERIES:
                self._recovery = frame, time.monotonic()
        self._post(self._send_reports)

    def fail(self, exception: str, signature: str = "") -> None:
        """Report why this process is about to die, and wait briefly until that was sent.

        Args:
            exception: The traceback; of a very long one the end is kept.
            signature: As in `events.Failed`.
        """
        generation = self.view.generation
        self.report("failed", generation=generation, exception=exception[-_MAX_TEXT:], signature=signature)
        self._flush()

    def close(self) -> None:
        """Send what is queued, close the connection, end the monitor thread. Whoever is in `park` is freed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        thread, task = self._thread, self._task
        if thread is None or task is None or thread is threading.current_thread():
            return
        self._post(task.cancel)
        thread.join(2 * _FAREWELL_S)

    # The training thread's half.

    def _is_out(self) -> bool:
        return self._enrolment.error is not None or self._link.refusal is not None or self._is_closed

    def _raise_if_over(self) -> None:
        enrolment, link = self._enrolment, self._link
        if self._thread is None:
            raise RuntimeError("MembershipClient.start() must be called before park()")
        if enrolment.error is not None:
            raise enrolment.error
        if link.refusal is not None:
            raise enrolment.violation(f"the coordinator at {link.endpoint} refused this process: {link.refusal}")
        if self._is_closed:
            raise self._lost("the client was closed")
        if link.silent_s() >= self._settings.longest_timeout:
            raise self._lost(f"no contact for timeout={self._settings.longest_timeout:g} s ({link.cause})")

    def _lost(self, cause: str) -> CoordinatorLostError:
        generation = self.view.generation
        return CoordinatorLostError(
            f"waiting for the next view failed: the coordinator at {self._link.endpoint} is lost: {cause} "
            f"(member={self.member}, generation={generation}). Exit; the run can be resumed from its last checkpoint.",
            member=self.member,
            generation=generation,
        )

    def _wait_for_change(self, patience_s: float) -> None:
        """Wait until something happened, but not past `patience_s` without contact."""
        self._changed.wait(max(0.0, patience_s - self._link.silent_s()) + 0.001)

    def _post(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is the client
                self._loop.call_soon_threadsafe(callback)

    def _flush(self) -> None:
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            return
        coroutine: Coroutine[Any, Any, bool] = self._link.flush()
        try:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_FAREWELL_S)
        except (TimeoutError, RuntimeError) as error:
            coroutine.close()
            logger.debug("[%s] the last report could not be sent: %r", self.member, error)

    # The monitor thread's half.

    def _monitor(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._run(ready))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            logger.exception("[%s] the monitor thread failed", self.member)
            self._fail_enrolment(self._lost(f"the monitor thread failed: {error!r}"))
        finally:
            self._loop = None
            ready.set()

    async def _run(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._link.run())
        ready.set()
        await self._task

    def _greet(self) -> Iterable[str]:
        with self._changed:
            self._sent = self._enrolment.request
            frames = [wire.encode(self._enrolment.hello())]
            self._described = self._enrolment.description()
            if self._described is not None:  # the last coordinator may have died with it
                frames.append(wire.encode(self._described))
            if self._sent is not None:
                frames.append(wire.encode(self._sent))
        if self._log_directory is not None:  # the last coordinator may not have kept it
            frames.append(self._log_directory)
        reports = self._take_reports()
        frame, said_s = self._recovery
        if frame not in reports and time.monotonic() - said_s < self._settings.heartbeat_timeout:
            frames.append(frame)  # it may have died with it, and the incident would never end
        return [*frames, *reports]

    def _heartbeat(self) -> str:
        told = self.activity.told()
        return wire.encode(events.Heartbeat(self.member, self.incarnation, self.step, *told, self._lease.beat()))

    def _send_request(self) -> None:
        with self._changed:
            request = self._enrolment.request
            if request is not None and request is not self._sent and self._link.is_connected:
                self._sent = request
                self._link.send(wire.encode(request))

    def _send_description(self) -> None:
        with self._changed:
            described = self._enrolment.description()
            if described is not None and described != self._described and self._link.is_connected:
                self._described = described
                self._link.send(wire.encode(described))

    def _send_reports(self) -> None:
        if self._link.is_connected:
            for frame in self._take_reports():
                self._link.send(frame)

    def _take_reports(self) -> list[str]:
        with self._changed:
            frames = list(self._reports)
            self._reports.clear()
            return frames

    def _on_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_frame(self, text: str) -> bool:
        """Take a frame. Returns: False if the connection must be made anew."""
        try:
            message = wire.decode(text, expect=wire.TO_MEMBER, peer=self._enrolment.peer)
            if isinstance(message, wire.Welcome):
                if message.term < self._term:
                    return False  # it has a successor, and does not know it
                self._term = message.term
                self._link.interval_s = message.heartbeat_interval_s or self._link.interval_s
            if isinstance(message, wire.Standbys):
                self._link.add_endpoints(message.endpoints)
            if isinstance(message, effects.Acknowledge):
                self._lease.renew(message.sent_s)
            with self._changed:
                advice = self._enrolment.take(message)
                self._changed.notify_all()
        except wire.WireError as error:
            self._fail_enrolment(self._enrolment.violation(str(error)))
            return True
        except ProtocolViolationError as error:
            self._fail_enrolment(error)
            return True
        is_in_step = True
        for item in advice:
            is_in_step = self._follow(item) and is_in_step
        if isinstance(message, effects.Evict) and isinstance(self.error, EvictedError):
            self.on_evicted()  # else it has another reason to end, and says which
        if isinstance(message, effects.CommitView):
            self._send_description()
        return is_in_step

    def _follow(self, advice: Sever | Left | Resync) -> bool:
        if isinstance(advice, Resync):
            logger.warning("[%s g%d] connecting anew: %s", self.member, self.view.generation, advice.reason)
            return False
        try:
            if isinstance(advice, Sever):
                self.on_suspend(advice.generation)
            else:
                self.on_leaving(advice.member, advice.completed)
        except Exception:  # a callback's bug must not silence this process's heartbeats
            logger.exception("[%s g%d] a callback failed on %s", self.member, self.view.generation, advice)
        return True

    def _fail_enrolment(self, error: FaultToleranceError) -> None:
        logger.error("%s", error)
        with self._changed:
            if self._enrolment.error is None:
                self._enrolment.error = error
            generation = self.view.generation
            self._changed.notify_all()
        self._follow(Sever(generation))


def _plain(value: object) -> object:
    """What a report can hold."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_scalar(item) for item in value)
    return _scalar(value)


def _scalar(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**63:
        return value
    return str(value).encode(errors="backslashreplace").decode()  # file names may hold what is no valid Unicode
