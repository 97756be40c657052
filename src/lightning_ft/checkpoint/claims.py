"""Who may write: a generation is claimed once, by creating an object, and whoever finds a newer one stops.

A process that was given up may wake up hours later, when another run has long taken over the directory. No clock tells
the two apart; that `claims/<its generation + 1>` exists does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Iterable

from lightning_ft.checkpoint.stores.base import Store
from lightning_ft.errors import AlreadyThereError, StaleWriterError

_DIRECTORY = "claims/"

_DIGITS = 8
"""Of a generation in a path, so that paths sort as generations do."""


def _content() -> bytes:
    """Return what tells a claim from another writer's, also if its answer is lost; and a person, whose it is."""
    told = {"nonce": secrets.token_hex(16), "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(told).encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The right to publish checkpoints of one generation, until a newer one is claimed.

    Args:
        store: Where.
        generation: Which; whoever holds the claim is its only writer.
    """

    store: Store
    generation: int
    _successor: bytes = dataclasses.field(default_factory=_content, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Make sure that nobody has taken over. Call it before anything is published or deleted.

        It looks for one object, not at a listing, which may be old.

        Raises:
            StaleWriterError: Somebody has.
            StoreError: It can't be told; then publish and delete nothing.
        """
        try:
            self.store.size(claim_path(self.generation + 1))
        except FileNotFoundError:
            return
        raise self._stale()

    def _stale(self) -> StaleWriterError:
        return StaleWriterError(
            f"writing checkpoints to {self.store.url} failed: generation {self.generation + 1} has been claimed by "
            f"another process, this one holds {self.generation}. Another run, or another process of this one, has "
            "taken over: write nothing more. If both should run, give each its own directory.",
            generation=self.generation,
        )

    def publish(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Create the object that makes a checkpoint exist, as the generation's rightful writer.

        A claim made between the check and the creation is not seen: the object is then published a moment late, whole,
        and older by its generation than all that the new writer publishes.

        Raises:
            StaleWriterError: A newer generation is claimed; nothing was created.
            AlreadyThereError: As `Store.create`.
            StoreError: As `Store.create`.
        """
        self.check()
        self.store.create(path, pieces)

    def follow(self) -> Claim:
        """Claim the next generation, if nobody has: for a writer that goes back to an earlier step.

        Raises:
            StaleWriterError: Somebody has.
            StoreError: The store failed; the same call again goes on, and nothing else may.
        """
        try:
            self.store.create(claim_path(self.generation + 1), [self._successor])
        except AlreadyThereError:
            raise self._stale() from None
        return Claim(self.store, self.generation + 1)


def claim_generation(store: Store, *, at_least: int = 0) -> Claim:
    """Claim the generation after all that were claimed, which fences their writers, and clean up after them.

    Args:
        store: Where checkpoints are to be written.
        at_least: Lowest generation to claim, >= 0: one more than that of any checkpoint found there.

    Raises:
        StoreError: The store failed.
    """
    if at_least < 0:
        raise ValueError(f"at_least must be at least 0, got {at_least!r}")
    generation = max([at_least, *(number + 1 for number in claimed_generations(store))])
    content = _content()
    while True:
        try:
            store.create(claim_path(generation), [content])
            break
        except AlreadyThereError:  # somebody was faster, or the listing was old
            generation += 1
    claim = Claim(store, generation)
    claim.check()
    store.recover()
    return claim


def claimed_generations(store: Store) -> list[int]:
    """Return what generations were claimed, ascending.

    Raises:
        StoreError: The listing failed.
    """
    names = (path.removeprefix(_DIRECTORY) for path in store.list(_DIRECTORY))
    return sorted(int(name) for name in names if name.isdecimal())


def claim_path(generation: int) -> str:
    """Return the path of a generation's claim."""
    return f"{_DIRECTORY}{generation:0{_DIGITS}}"
