"""The job's event log: one JSON object per line for programs, one sentence on the console for a person.

A line has `time` (Unix seconds), `event`, `generation`, `member` (null for the job as a whole) and the event's own
fields.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from lightning_ft.config import Settings

logger = logging.getLogger("lightning_ft")

DEFAULT_NAME = "ft_events.jsonl"
"""File name inside a run's log directory."""

RECOVERIES = ("recovered", "members_admitted")
"""Events that end an incident. A member may say one twice, with the same fields, if its connection broke since."""

_MAX_BUFFERED = 10_000
"""Lines kept while there is no file yet, or while the disk hangs; the oldest are dropped first and counted."""

_TAIL_BYTES = 1 << 20
"""How far back a line is looked for that may be written already."""

_RESERVED = ("time", "event", "generation", "member")


class EventLog:
    """Appends events to a file; never makes the caller wait for the disk, and never raises because of it.

    Lines are kept in memory until a path is known. A thread of its own writes and flushes them, line by line.

    Args:
        path: File to append to; None: decided later by `open`.
        clock: Gives Unix seconds.

    Threads: any.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: collections.deque[str] = collections.deque()
        self._changed = threading.Condition()
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._writing: tuple[str, ...] = ()
        self._warned: set[str] = set()
        self._followers: list[Callable[[str], None]] = []
        self.num_lost = 0
        if path is not None:
            self.open(path)

    @property
    def path(self) -> Path | None:
        """The file, once it is known."""
        return self._path

    def open(self, path: str | os.PathLike[str]) -> bool:
        """Set the file, creating its directories; what was buffered is written to it.

        Returns: False if a file was already set, which stays.
        """
        with self._changed:
            if self._path is not None or self._is_closed:
                return False
            self._path = Path(path)
            self._thread = threading.Thread(target=self._write_forever, name="lightning_ft-event-log", daemon=True)
            self._thread.start()
        return True

    def write(self, event: str, *, generation: int, member: str | None = None, **fields: Any) -> None:
        """Append one event, and say it on the console.

        Args:
            event: Its name, `snake_case`.
            generation: The view it happened in.
            member: Logical id that it is about; None: the job.
            fields: Anything that JSON can hold; what it can't is written as text. The four common names are ignored.
        """
        self.append(self.line(event, generation=generation, member=member, **fields))

    def line(self, event: str, *, generation: int, member: str | None = None, **fields: Any) -> str:
        """Return what `append` takes: the line of an event that happens now. Arguments as for `write`."""
        fields = {name: value for name, value in fields.items() if name not in _RESERVED}
        values = {"time": self._clock(), "event": event, "generation": generation, "member": member, **fields}
        return json.dumps(values, default=str) + "\n"

    def append(self, line: str) -> None:
        """Append a line, say it on the console, and tell who follows."""
        self._put(line)
        fields = json.loads(line)
        _, event, generation, member = (fields.pop(name) for name in _RESERVED)
        level, sentence = describe(event, fields)
        logger.log(level, "%s %s", _prefix(member, generation), sentence)
        for follower in self._followers:
            follower(line)

    def follow(self, follower: Callable[[str], None]) -> None:
        """Have each line that is appended from now on handed to a function, in the thread that appends it."""
        self._followers.append(follower)

    def resume(self, lines: Iterable[str]) -> None:
        """Append what an earlier writer had not written yet when it ended, as its `unwritten` said, unless it had."""
        known = set() if self._path is None else _tail(self._path)
        for line in lines:
            if line not in known:
                self._put(line)

    def _put(self, line: str) -> None:
        with self._changed:
            if not self._is_closed:
                if len(self._lines) >= _MAX_BUFFERED:
                    self._lines.popleft()
                    self.num_lost += 1
                self._lines.append(line)
                self._changed.notify_all()

    def unwritten(self) -> list[str]:
        """Return the lines that are not known to be in the file, for whoever writes it after this process."""
        with self._changed:
            return [*self._writing, *self._lines]

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything written so far is in the file (or lost to the disk).

        Returns: False if there is no file or the disk did not answer in time.
        """
        with self._changed:
            if self._path is None:
                return False
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, then stop; a hanging disk is given up after `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write_forever(self) -> None:
        file: IO[str] | None = None
        while True:
            with self._changed:
                self._writing = ()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    break
                line = self._lines.popleft()
                self._writing = (line,)
            file = self._write_line(file, line)
        if file is not None:
            file.close()

    def _write_line(self, file: IO[str] | None, line: str) -> IO[str] | None:
        if self._path is None:  # pragma: no cover  (the thread starts after the path is set)
            return file
        try:
            if file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = self._path.open("a", encoding="utf-8")
            file.write(line)
            file.flush()
        except OSError as error:
            self.num_lost += 1
            cause = f"{type(error).__name__}: {error.strerror}"
            if cause not in self._warned:
                self._warned.add(cause)
                logger.warning(
                    "The event log can't be written: %s (%s). Training goes on; the lines are lost. "
                    "Free the disk or set event_log to another path.", self._path, cause,
                )  # fmt: skip
            if file is not None:
                _close_quietly(file)
            return None
        return file


def say_on_console() -> None:
    """Show what the event log says on stderr, unless the program has configured logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s lightning_ft %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def exception_of(traceback: str) -> str:
    """Return what a traceback ends with, in one line: of an exception of many lines, the first and the last."""
    lines = traceback.strip().splitlines() or [""]
    starts = [index for index, line in enumerate(lines) if line == "Traceback (most recent call last):"]
    frames = starts[-1] + 1 if starts else 0
    first = next((line for line in lines[frames:] if line and not line[0].isspace()), lines[-1])
    return first if first == lines[-1] else f"{first} [...] {lines[-1].strip()}"


def describe(event: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Say an event in words for a person.

    Returns: The logging level and the sentence.
    """
    if event == "failed":
        fields = {"exception": exception_of(str(fields.get("exception", "")))}  # the traceback was shown already
    if isinstance(fields.get("settings"), dict):
        fields = {**fields, **_changed(fields["settings"])}
        del fields["settings"]
    level, template = _SENTENCES.get(event, (logging.INFO, event.replace("_", " ")))
    if event == "member_exited" and fields.get("status"):
        level = logging.INFO
    if fields.get("is_scaled"):  # infinite gradients are how a scaler finds its scale
        level = logging.DEBUG
    if event in _TOLD_ONCE and fields.get("count", 1) != 1:
        level = logging.DEBUG
    rest = ", ".join(f"{name}={_brief(value)}" for name, value in fields.items() if f"{{{name}}}" not in template)
    try:
        sentence = template.format_map({name: _brief(value) for name, value in fields.items()})
    except KeyError:
        sentence = event.replace("_", " ")
        rest = ", ".join(f"{name}={_brief(value)}" for name, value in fields.items())
    return level, f"{sentence} ({rest})" if rest else sentence


def _changed(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that are not the defaults."""
    defaults = dataclasses.asdict(Settings())
    return {name: value for name, value in settings.items() if value != defaults.get(name)}


_SENTENCES: dict[str, tuple[int, str]] = {
    "job_started": (logging.INFO, "the job starts with {members}"),
    "training_started": (logging.INFO, "the first step is committed"),
    "job_finished": (logging.INFO, "the job ended with status {status}"),
    "recovered": (logging.INFO, "training goes on in step {step}, {latency_s} s after it was suspended"),
    "evaluation_redealt": (
        logging.WARNING,
        "{missing} died during a {stage}: the others have evaluated all of their share, {num_samples} samples",
    ),
    "evaluation_incomplete": (logging.WARNING, "the {stage} covers {coverage} of the data: {missing} died during it"),
    "checkpoint_saved": (
        logging.INFO,
        "step {step} is saved ({kind}): {bytes} bytes in {duration_s} s; training stood still for {blocked_s} s",
    ),
    "checkpoint_skipped": (logging.WARNING, "the save at step {step} is left out: {reason}"),
    "checkpoint_failed": (logging.WARNING, "step {step} could not be saved: {detail}"),
    "checkpoint_restored": (
        logging.INFO,
        "step {step} is restored from {source} in {duration_s} s; {steps_lost} steps are lost",
    ),
    "rollback_requested": (logging.WARNING, "asks all to go back from step {step}: {exception}"),
    "gradients_compared": (logging.INFO, "the ranks have compared what they have, and it is the same to the last bit"),
    "gradient_mismatch": (
        logging.WARNING,
        "{what} of {members} are wrong at step {step}, by {gradient_divergence}, in {parameters}: {outcome}",
    ),
    "gradient_not_finite": (
        logging.WARNING,
        "{members} had NaN or Inf in step {step}, before it was reduced, in {parameters}",
    ),
    "failed": (logging.WARNING, "the process fails with {exception}"),
    "member_joined": (logging.DEBUG, "joined the job"),
    "join_declined": (logging.WARNING, "can't join: {reason}"),
    "spare_ready": (logging.INFO, "is ready, and waits for a place"),
    "member_left": (logging.INFO, "left the job as it wished"),
    "member_stacks": (logging.WARNING, "its threads were here, the innermost call first:\n{stacks}"),
    "member_exited": (logging.DEBUG, "the process has ended: {detail}"),
    "failure_detected": (logging.WARNING, "is lost: {detail}"),
    "node_silent": (logging.WARNING, "nothing was heard of the agent of node {node} for {late_s} s"),
    "node_heard": (logging.INFO, "the agent of node {node} is back"),
    "straggler_detected": (
        logging.WARNING,
        "holds all others up: {busy_s} s of work for a step, the median is {median_s} s",
    ),
    "straggler_recovered": (logging.INFO, "holds nobody up any more"),
    "view_suspended": (logging.WARNING, "training is suspended: {reason}"),
    "catch_up_begun": (logging.INFO, "sends the state to {num_joiners} that will join ({total_bytes} bytes)"),
    "caught_up": (logging.INFO, "has joined: {missing_bytes} of {total_bytes} bytes were missing when it was admitted"),
    "view_committed": (logging.INFO, "the members are now {members}: {reason}"),
    "quorum_missing": (logging.WARNING, "training can't go on yet: {reason}"),
    "job_stopped": (logging.INFO, "training is over: {reason}"),
}
"""Level and sentence per event; one that isn't here is said by its name. Fields outside the sentence are appended."""


_TOLD_ONCE = {"checkpoint_skipped", "checkpoint_failed"}
"""A person is told the first of many alike; the file has all."""


def _tail(path: Path) -> set[str]:
    """The last lines of a file, whole ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return set(file.read().decode("utf-8", errors="replace").splitlines(keepends=True))
    except OSError:
        return set()


def _prefix(member: str | None, generation: int) -> str:
    return f"[{member or 'job'} g{generation}]"


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:.1e}"
    is_many = isinstance(value, (list, tuple, set, frozenset))
    text = ", ".join(str(item) for item in value) if is_many else str(value)
    return text if len(text) <= 300 or "\n" in text else f"{text[:297]}..."


def _close_quietly(file: IO[str]) -> None:
    try:
        file.close()
    except OSError:  # the same full disk again, already warned about
        return
