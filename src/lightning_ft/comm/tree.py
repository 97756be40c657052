"""All-reduces along a tree: partial sums go up to the root, the sum comes down. Made of Gloo's sends and receives.

Latency is twice the tree's levels, where Gloo's ring takes as many hops as twice its members less two; in return the
root sends and receives everything several times. Gloo's own `reduce` is no tree (a ring, and a gather to the root).

Whoever has the sum knows that all have contributed: it is made at the root, of what came up from everybody.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ft.faultpoints import reach

FIRST_TAG = 1 << 30
"""Tags from here on are the tree's; below, a caller's own messages'."""

_AHEAD_BYTES = 64 * 1024
"""Up to this size all that comes up is received at once, each into memory of its own; above, one after the other."""

_FOREVER = datetime.timedelta(days=365)  # a message that is waited for with a timeout breaks all connections

Combine = Callable[[Tensor, Tensor], object]
"""Changes its first argument."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_ARITHMETIC: tuple[tuple[Any, Combine], ...] = (
    (dist.ReduceOp.SUM, lambda tensor, other: tensor.add_(other)),
    (dist.ReduceOp.PRODUCT, lambda tensor, other: tensor.mul_(other)),
)
_OF_INTEGERS: tuple[tuple[Any, Combine], ...] = (
    *_ARITHMETIC,
    (dist.ReduceOp.MIN, lambda tensor, other: torch.minimum(tensor, other, out=tensor)),
    (dist.ReduceOp.MAX, lambda tensor, other: torch.maximum(tensor, other, out=tensor)),
    (dist.ReduceOp.BAND, lambda tensor, other: tensor.bitwise_and_(other)),
    (dist.ReduceOp.BOR, lambda tensor, other: tensor.bitwise_or_(other)),
    (dist.ReduceOp.BXOR, lambda tensor, other: tensor.bitwise_xor_(other)),
)


def is_exact(dtype: torch.dtype) -> bool:
    """Whether a reduction comes out the same in whatever order it is done."""
    return dtype in _INTEGERS


def combiner(op: object, dtype: torch.dtype) -> Combine | None:
    """Return how two contributions are made one as Gloo does it; None if that is left to Gloo."""
    known = _OF_INTEGERS if dtype in _INTEGERS else _ARITHMETIC if dtype in _FLOATS else ()
    return next((combine for name, combine in known if op == name), None)  # `in` would ask torch's names the wrong way


class TreeWork(dist.Work):
    """One all-reduce, in place.

    Args:
        group: Gloo's.
        above: Rank of the member above; None at the root.
        below: Ranks of those below.
        tensor: Contiguous, not empty.
        combine: Of its reduction.
        tag: Of its messages; the same on all members, and no other's that may be under way.

    Attributes:
        is_done: It has ended or failed.
        failure: What it failed with.
    """

    def __init__(  # noqa: PLR0917 - made at one place
        self, group: Any, above: int | None, below: Sequence[int], tensor: Tensor, combine: Combine, tag: int
    ) -> None:
        super().__init__()
        self.is_done = threading.Event()
        self.failure: str | None = None
        self._group = group
        self._above = above
        self._below = below
        self._tensor = tensor
        self._combine = combine
        self._tag = tag
        self._sent: list[dist.Work] = []
        self._arriving: list[tuple[dist.Work, Tensor]] = []
        self._num_received = 0

    def begin(self) -> None:
        """Send and receive what can be before anything has arrived; never waits."""
        num_ahead = len(self._below) if self._tensor.nbytes <= _AHEAD_BYTES else min(1, len(self._below))
        try:
            for _ in range(num_ahead):
                self._receive_next(torch.empty_like(self._tensor))
            if not self._below and self._above is not None:
                self._send(self._above)
        except RuntimeError as error:
            self._fail(error)

    def run(self) -> None:
        """Do the rest. Returns when nothing is written into what was given any more."""
        if self.failure is None:
            try:
                self._gather_up()
                self._pass_down()
            except RuntimeError as error:
                self._fail(error)
        self.is_done.set()
        for message, _ in self._arriving:  # until the group is severed it may come still
            with contextlib.suppress(RuntimeError):
                message.wait(_FOREVER)

    @override
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until it has ended.

        Raises:
            RuntimeError: It failed, or the time is over, which does nothing to it.
        """
        if not self.is_done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("an all-reduce along the tree has not ended yet")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    @override
    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.is_done.is_set()

    def _fail(self, error: RuntimeError) -> None:
        self.failure = f"an all-reduce along the tree failed: {error}"

    def _gather_up(self) -> None:
        for _ in self._below:
            partial = self._next_arrived()
            self._combine(self._tensor, partial)
            if self._num_received < len(self._below):
                self._receive_next(partial)
        reach("tree.gathered")
        if self._above is not None:
            if self._below:
                self._send(self._above)
            # What went up has been sent wholly before the sum, which it is a part of, can come down in its place. So
            # it is not waited for: Gloo might have lost it (see `InnerGroup.wait`).
            self._receive(self._above, self._tensor)
            self._next_arrived()

    def _pass_down(self) -> None:
        reach("tree.received")
        for rank in reversed(self._below):  # those first who pass it on to most
            self._send(rank)
        for message in self._sent:
            message.wait(_FOREVER)
        reach("tree.passed")

    def _send(self, rank: int) -> None:
        self._sent.append(self._group.send([self._tensor], rank, self._tag))

    def _receive_next(self, into: Tensor) -> None:
        self._num_received += 1
        self._receive(self._below[self._num_received - 1], into)

    def _receive(self, rank: int, into: Tensor) -> None:
        self._arriving.append((self._group.recv([into], rank, self._tag), into))

    def _next_arrived(self) -> Tensor:
        message, into = self._arriving[0]
        message.wait(_FOREVER)
        self._arriving.pop(0)
        return into


class TreeRunner:
    """Runs a group's all-reduces along its tree, in a thread, one after the other as they were begun.

    All members begin the same in the same order (PROTOCOL.md#I9), so what one waits for another is coming to.

    Args:
        group: Gloo's.
        rank: Own.
        above: For each member the rank of the one above.
    """

    def __init__(self, group: Any, rank: int, above: Sequence[int | None]) -> None:
        self._group = group
        self._above = above[rank]
        self._below = [other for other, upper in enumerate(above) if upper == rank]
        self._num_begun = 0
        self._works: queue.SimpleQueue[TreeWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def allreduce(self, tensor: Tensor, combine: Combine) -> TreeWork:
        """Start to reduce a contiguous tensor, in place."""
        tag = FIRST_TAG + self._num_begun % FIRST_TAG
        self._num_begun += 1
        work = TreeWork(self._group, self._above, self._below, tensor, combine, tag)
        work.begin()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_ft tree", daemon=True)
            self._thread.start()
        self._works.put(work)
        return work

    def close(self, patience_s: float) -> bool:
        """End the thread, once the group is severed. Returns: Whether it has ended; else Gloo has lost a message."""
        if self._thread is None:
            return True
        self._works.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    @torch.inference_mode()  # what a caller made in that mode may be changed in no other
    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.run()
