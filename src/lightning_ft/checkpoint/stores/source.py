"""The pieces of an object on their way into a store, and a bound on how long they may be stuck there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from typing import TypeVar

import xxhash

T = TypeVar("T")


class RevokedError(Exception):
    """The operation was given up by its caller: whoever still works on it must stop and make nothing visible."""


class Source:
    """Hands an object's pieces to a driver, once, and knows their size and digest when all were taken.

    After `revoke` it hands out nothing more. Until a driver has been told that there are no more pieces it has made
    nothing visible, so what it read from a buffer that its caller uses again by then is never published.

    Args:
        pieces: The object's bytes in order, each piece C-contiguous.

    Attributes:
        size: Bytes handed out so far.
        num_taken: Grows as long as the driver makes progress.
        failure: What the pieces' own iterator raised.

    Threads: `revoke` any; the rest one at a time.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = iter(pieces)
        self._hash = xxhash.xxh3_128()
        self._is_revoked = False
        self._is_finished = False
        self.size = 0
        self.num_taken = 0
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the rest of the pieces, as bytes.

        Raises:
            RevokedError: The caller has given up.
        """
        while not self._is_finished:
            self.num_taken += 1
            self.check()
            try:
                piece = memoryview(next(self._pieces)).cast("B")
            except StopIteration:
                self._is_finished = True
                return
            except BaseException as error:
                self.failure = error
                raise
            self._hash.update(piece)
            self.size += len(piece)
            yield piece

    def digest(self) -> bytes:
        """Take what pieces are left and return the digest of all."""
        for _ in self:
            pass
        return self._hash.digest()

    def revoke(self) -> None:
        """Let the driver stop at its next piece, or before it makes the object visible."""
        self._is_revoked = True

    def check(self) -> None:
        """Raises: RevokedError: The caller has given up."""
        if self._is_revoked:
            raise RevokedError


def bounded(function: Callable[[], T], source: Source, timeout_s: float) -> T:
    """Run a function in a thread of its own and give it up when it is stuck.

    A call that hangs in the kernel, say on a network file system whose server is gone, can't be interrupted. Its thread
    is left behind, a daemon that keeps no process from ending; the source is revoked, so that it publishes nothing
    later, unless it is in the very operation that publishes.

    Args:
        function: What may hang.
        source: Tells by its `num_taken` whether there is progress.
        timeout_s: Longest time without progress; what is stuck is given up after at most twice as long.

    Raises:
        TimeoutError: It was given up.
    """
    done = Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            errors.append(error)
        finally:
            done.set()

    Thread(target=run, name="lightning_ft store", daemon=True).start()
    seen = -1
    try:
        while not done.wait(timeout_s):
            num_taken = source.num_taken
            if num_taken == seen:
                break
            seen = num_taken
    finally:
        if not done.is_set():  # it is stuck, or the user interrupts
            source.revoke()
    if not done.is_set():
        raise TimeoutError(f"no progress for {timeout_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
