"""What outlives the coordinator's process: its decisions, in files without a name that its agent holds open."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_FILES = 3


def make_files() -> list[int]:
    """Return descriptors of new, empty files. They vanish with the last process that holds them."""
    if hasattr(os, "memfd_create"):
        return [os.memfd_create("lightning_ft coordinator") for _ in range(NUM_FILES)]
    descriptors = []
    for _ in range(NUM_FILES):
        with tempfile.TemporaryFile() as file:
            descriptors.append(os.dup(file.fileno()))
    return descriptors


def open_files(directory: Path) -> list[int]:
    """Return descriptors of files in a directory that outlive this process; they are made if they are not there.

    Raises:
        OSError: They can't be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return [os.open(directory / f"decisions.{number}", os.O_RDWR | os.O_CREAT, 0o600) for number in range(NUM_FILES)]


class Memory:
    """The last saved state, whole whenever the process was killed, and a list that only grows.

    Args:
        descriptors: From `make_files`.

    Threads: one only.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._slots = list(descriptors[:2])
        self._list = descriptors[2]
        found = [(number, slot) for slot in self._slots if (number := _read(slot)[0])]
        self._number, newest = max(found, default=(0, self._slots[1]))
        if newest == self._slots[0]:
            self._slots.reverse()  # the older one is written next

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last; None if nothing was."""
        return _read(self._slots[1])[1] if self._number else None

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state in place of the one before the last.

        Raises:
            OSError: There is no room. The last state is still there.
        """
        slot = self._slots[0]
        os.ftruncate(slot, 0)
        _write(slot, json.dumps([self._number + 1, state]) + "\n", 0)
        self._number += 1
        self._slots.reverse()

    def append(self, item: object) -> None:
        """Add to the list.

        Raises:
            OSError: There is no room.
        """
        _write(self._list, json.dumps(item) + "\n", os.fstat(self._list).st_size)

    def items(self) -> list[Any]:
        """Return the list; an item that was being written when the process was killed is left out."""
        text = os.pread(self._list, os.fstat(self._list).st_size, 0).decode()
        return [json.loads(line) for line in text.split("\n")[:-1]]


def _read(slot: int) -> tuple[int, dict[str, Any] | None]:
    text = os.pread(slot, os.fstat(slot).st_size, 0).decode(errors="replace")
    if not text.endswith("\n"):
        return 0, None
    number, state = json.loads(text)
    return number, state


def _write(descriptor: int, text: str, offset: int) -> None:
    data = text.encode()
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
