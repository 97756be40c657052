"""Pipelined catch-up: both ends of what happens before others join (PROTOCOL.md#M3c)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_ft.comm.pace import Pace
from lightning_ft.comm.replay import Recorder, Replayer, Trained
from lightning_ft.comm.sockets import Descriptor
from lightning_ft.comm.stream import Frame, Inlet, Outlet
from lightning_ft.faultpoints import reach
from lightning_ft.membership.events import Address

_log = logging.getLogger("lightning_ft")

SMALL_BYTES = 32 * 1024 * 1024
"""A state up to here is handed over at once: that takes less than the steps that a catch-up would."""

_SLACK_BYTES = 64 * 1024 * 1024
"""So much more than two steps' worth may wait to be sent before a joiner is given up."""

_STARVED = 64
"""After so many steps without room for more of it no more of the state is sent; if gradients fill one, it counts 8.

Steps in which no joiner has answered do not count: there may be no connection yet.
"""

_FAREWELL_S = 2.0

_NUM_CLOSE = 4
"""For so many steps members wait for a joiner to lack nothing at all; then it may be a step behind."""

_NUM_LAST = 16
"""After so many steps in which a joiner that answers has not come nearer, it is as near as it gets."""


class Feed:
    """A member's end: sends its share of what optimizers change to those that will join.

    Args:
        trained: Here.
        joiners: Where their stores listen.
        donors: The members that send, in the same order on all of them.
        member: Which of them this is.
        generation: Of their view.
        token: The job's secret.
        pace: What a step may send.
        patience_s: After so long without a sign of a joiner it is given up.

    Attributes:
        generation: As given.

    Threads: the training thread's.
    """

    def __init__(
        self,
        trained: Trained,
        joiners: Sequence[Address],
        *,
        donors: Sequence[str],
        member: str,
        generation: int,
        token: str,
        pace: Pace,
        patience_s: float,
    ) -> None:
        self.generation = generation
        self._pace = pace
        self._recorder = Recorder(trained, donors.index(member), len(donors))
        hello = {"generation": generation, "donor": member, "donors": list(donors)}
        self._outlets = [Outlet(joiner, token, hello, patience_s) for joiner in joiners]
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in trained.optimizers]
        self._sent_bytes = 0
        self._starved = 0
        self._num_whole = 0  # boundaries since all was sent that will be
        self._num_answers = [0] * len(self._outlets)  # at the last boundary: one that is stopped gives none

    @property
    def descriptors(self) -> Iterable[Descriptor]:
        """Sockets that a forked child must not hold."""
        return [found for outlet in self._outlets for found in outlet.descriptors]

    @property
    def is_over(self) -> bool:
        """Whether nothing would be gained by waiting longer before they join."""
        return all(
            (outlet.is_caught_up and outlet.num_marks <= int(self._num_whole > _NUM_CLOSE))
            or (self._num_whole > _NUM_LAST and outlet.num_answers > num_answers)
            for outlet, num_answers in zip(self._outlets, self._num_answers, strict=True)
            if not outlet.is_broken
        )

    @property
    def _live(self) -> list[Outlet]:
        return [outlet for outlet in self._outlets if not outlet.is_broken]

    def at_boundary(self) -> int:
        """Send what this step may; never waits. Returns: Bytes that the step before has sent."""
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        recorder, budget_bytes = self._recorder, self._pace.budget_bytes
        backlog_bytes = max((outlet.backlog_bytes for outlet in self._live), default=0)
        limit_bytes = 2 * (budget_bytes + recorder.gradient_bytes) + _SLACK_BYTES
        for outlet in self._live:
            if outlet.backlog_bytes > limit_bytes:
                outlet.give_up()
        if not self._live:
            self._unhook()
            return sent_bytes
        before, self._num_answers = self._num_answers, [outlet.num_answers for outlet in self._outlets]
        room_bytes = budget_bytes - recorder.gradient_bytes - backlog_bytes
        weight = 8 if recorder.gradient_bytes >= budget_bytes else int(self._num_answers != before)
        self._starved = self._starved + weight if room_bytes <= 0 else 0
        is_done = recorder.is_whole or self._starved >= _STARVED
        while room_bytes > 0 and not is_done and self._live:
            room_bytes -= self._send(lambda: [recorder.piece()])
            is_done = recorder.is_whole
        self._num_whole += is_done
        self._put(Frame({"type": "mark", "is_complete": is_done}))
        return sent_bytes

    def end(self) -> None:
        """Send what is left, and no more: they join now."""
        self._unhook()
        self._send(lambda: [self._recorder.rest()])
        for outlet in self._live:
            outlet.end()

    def give_up(self) -> None:
        """Send nothing more."""
        self._unhook()
        for outlet in self._live:
            outlet.give_up()

    def wait_closed(self, timeout_s: float) -> None:
        """Wait for the connections' threads: one that is in C++ when the interpreter ends would abort it."""
        for outlet in self._outlets:
            outlet.wait_closed(timeout_s)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send the gradients before the members step with them, so that the joiners do so at the same time.

        Returns: What the optimizer is called with instead. If it calls a closure, the gradients are that one's.
        """
        itself, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if not callable(closure):
            self._send(lambda: self._recorder.gradients(optimizer))
            return None

        def with_gradients() -> Any:
            result = closure()
            self._send(lambda: self._recorder.gradients(optimizer))
            return result

        return (
            ((itself, with_gradients, *others[1:]), kwargs) if others else (args, {**kwargs, "closure": with_gradients})
        )

    def _send(self, take: Callable[[], Iterable[Frame]]) -> int:
        """Send what is taken, frame by frame. An optimizer that keeps what can't be sent ends nothing but this.

        Returns: Bytes.
        """
        before_bytes = self._sent_bytes
        try:
            if self._live:
                reach("catch_up.send")
                for frame in take():
                    self._put(frame)
        except Exception:  # noqa: BLE001
            _log.debug("catching up ends: the state can't be sent ahead", exc_info=True)
            self.give_up()
        return self._sent_bytes - before_bytes

    def _put(self, frame: Frame) -> None:
        self._sent_bytes += frame.num_bytes
        for outlet in self._live:
            outlet.put(frame)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class Follower:
    """The end of a process that will join: has what members send, as of their last step.

    Args:
        trained: Here; changed by what arrives, in threads of its own.
        host: Address to listen at.
        publish: Told the port.
        token: The job's secret.
        patience_s: After so long without a sign of a member in the middle of a frame it is given up.
    """

    def __init__(
        self, trained: Trained, host: str, publish: Callable[[int], object], token: str, patience_s: float
    ) -> None:
        self._replayer = Replayer(trained)
        self._generation = 0
        self._is_complete: dict[str, bool] = {}
        self._inlet = Inlet(host, publish, token, self._take, patience_s)

    @property
    def descriptors(self) -> Iterable[Descriptor]:
        """Sockets that a forked child must not hold."""
        return self._inlet.descriptors

    def finish(self) -> None:
        """Take in what members have still sent, and no more."""
        self._inlet.finish()
        self._replayer.settle()

    def close(self) -> None:
        """Take nothing more."""
        self._inlet.close()

    def _take(self, header: dict[str, Any], data: Tensor, hello: dict[str, Any]) -> bool:
        generation, donor = int(hello["generation"]), str(hello["donor"])
        if generation > self._generation:  # the members of a newer view send all anew
            self._generation = generation
            self._is_complete = dict.fromkeys(map(str, hello["donors"]), False)
        if generation < self._generation:
            raise ValueError(f"{donor} sends from generation {generation}, which is over")
        kind = header["type"]
        if kind in ("end", "broken"):
            self._is_complete[donor] = True
        elif kind == "mark":
            self._is_complete[donor] = bool(header["is_complete"])
        else:
            reach("catch_up.take")
            self._replayer.take(header, data)
        return all(self._is_complete.values())


class CatchUp:
    """What a process has of it, on either end; outlives each of them.

    Args:
        slowdown: By which part of its time a step may be longer.
    """

    def __init__(self, slowdown: float) -> None:
        self.feed: Feed | None = None
        self.follower: Follower | None = None
        self.pace = Pace(slowdown)
        self._last: Feed | None = None
        self._boundary_s: float | None = None

    @property
    def descriptors(self) -> list[Descriptor]:
        """Sockets that a forked child must not hold."""
        return [found for part in (self.feed, self.follower) if part is not None for found in part.descriptors]

    def is_due(self, generation: int) -> bool:
        """Whether the members of a view have something to agree on if somebody waits to join: to begin, or to admit."""
        return self.feed is None or self.feed.generation != generation or self.feed.is_over

    def at_boundary(self, generation: int) -> None:
        """Learn how long steps take, and send what the next one may."""
        now_s = time.monotonic()
        sent_bytes = 0
        if self.feed is not None and self.feed.generation != generation:
            self.stop()
        if self.feed is not None:
            sent_bytes = self.feed.at_boundary()
        if self._boundary_s is not None:
            self.pace.stepped(now_s - self._boundary_s, sent_bytes)
        self._boundary_s = now_s

    def end(self) -> None:
        """Let a feed send what is left: those that follow it join now."""
        feed = self._let_go()
        if feed is not None:
            feed.end()

    def stop(self) -> None:
        """Give up."""
        feed = self._let_go()
        if feed is not None:
            feed.give_up()
        if self.follower is not None:
            self.follower.close()

    def close(self) -> None:
        """Give up, since the process is about to end."""
        self.stop()
        if self._last is not None:
            self._last.give_up()
            self._last.wait_closed(_FAREWELL_S)

    def _let_go(self) -> Feed | None:
        feed, self.feed, self._boundary_s = self.feed, None, None
        self._last = feed or self._last
        return feed
