"""A disk that loses power: which states it may be found in, given the system calls until then.

Nothing is assumed of a file system but what POSIX promises of fsync: data that was not synced may be there, missing,
torn or zero; names that were not synced may have changed or not, each for itself and in any order. No journaling file
system is as cruel.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_ft.checkpoint.stores.local import Kernel

Directory = dict[str, "Node"]


class PowerLossError(BaseException):
    """The process is dead: not to be caught by anybody but the test."""


@dataclasses.dataclass(eq=False)
class Node:
    """A file or directory: what the kernel shows, what is surely on the disk, and what may be."""

    is_directory: bool
    writes: list[bytes] = dataclasses.field(default_factory=list)
    num_synced: int = 0
    synced: Directory = dataclasses.field(default_factory=dict)
    pending: list[dict[str, Node | None]] = dataclasses.field(default_factory=list)  # each happens whole or not at all

    def contents(self) -> list[bytes]:
        """All that a file may hold after the power is back."""
        synced, rest = b"".join(self.writes[: self.num_synced]), self.writes[self.num_synced :]
        if not rest:
            return [synced]
        *whole, last = rest
        full = synced + b"".join(rest)
        torn = synced + b"".join(whole) + last[: len(last) // 2]
        return [synced, torn, synced + bytes(len(full) - len(synced)), full]


class Recorder(Kernel):
    """Does each system call but the syncs, and keeps what all of them mean for the disk.

    Args:
        base: The directory that is looked at; the rest of the file system is not.
        has_links: Whether the file system has hard links.
        forgets: Names of calls that are not done, as a broken store would.
    """

    def __init__(self, base: Path, *, has_links: bool = True, forgets: frozenset[str] = frozenset()) -> None:
        self._base = str(base)
        self._has_links = has_links
        self._forgets = forgets
        self._root = Node(is_directory=True)
        self._files: dict[int, Node] = {}  # by inode number
        self.dies_at: int | None = None
        self.num_calls = 0
        self.records_trees = True
        self.trees: list[list[dict[str, bytes]]] = []
        """After each call: the trees of files that the disk may hold."""

    def _step(self) -> None:
        if self.dies_at is not None and self.num_calls >= self.dies_at:
            raise PowerLossError
        self.num_calls += 1

    def _done(self) -> None:
        if self.records_trees:
            self.trees.append(list(self.possible_trees()))

    def _directory(self, path: str) -> Node:
        node = self._root
        for name in Path(path).relative_to(self._base).parts:
            node = self._shown(node)[name]
        return node

    @staticmethod
    def _shown(directory: Node) -> Directory:
        """Return the names as the kernel shows them."""
        names: dict[str, Node | None] = dict(directory.synced)
        for change in directory.pending:
            names.update(change)
        return {name: node for name, node in names.items() if node is not None}

    def _change(self, path: str) -> tuple[Node, str]:
        head, name = os.path.split(path)
        return self._directory(head), name

    def open(self, path: str, flags: int) -> int:
        self._step()
        descriptor = super().open(path, flags)
        directory, name = self._change(path)
        node = self._files[os.fstat(descriptor).st_ino] = Node(is_directory=False)
        directory.pending.append({name: node})
        self._done()
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._step()
        written = super().write(descriptor, data)
        self._files[os.fstat(descriptor).st_ino].writes.append(bytes(data[:written]))
        self._done()
        return written

    def fsync(self, descriptor: int) -> None:
        self._step()
        if "fsync" not in self._forgets:
            node = self._files[os.fstat(descriptor).st_ino]
            node.num_synced = len(node.writes)
        self._done()

    def link(self, source: str, target: str) -> None:
        self._step()
        if not self._has_links:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)
        super().link(source, target)
        directory, name = self._change(target)
        directory.pending.append({name: self._shown(directory)[Path(source).name]})
        self._done()

    def rename_noreplace(self, source: str, target: str) -> None:
        self._step()
        super().rename_noreplace(source, target)
        self._renamed(source, target)

    def replace(self, source: str, target: str) -> None:
        self._step()
        super().replace(source, target)
        self._renamed(source, target)

    def _renamed(self, source: str, target: str) -> None:
        directory, name = self._change(target)
        old = Path(source).name
        directory.pending.append({name: self._shown(directory)[old], old: None})
        self._done()

    def unlink(self, path: str) -> None:
        self._step()
        super().unlink(path)
        directory, name = self._change(path)
        directory.pending.append({name: None})
        self._done()

    def mkdir(self, path: str) -> None:
        self._step()
        super().mkdir(path)
        directory, name = self._change(path)
        directory.pending.append({name: Node(is_directory=True)})
        self._done()

    def rmdir(self, path: str) -> None:
        self._step()
        super().rmdir(path)
        directory, name = self._change(path)
        directory.pending.append({name: None})
        self._done()

    def fsync_directory(self, path: str) -> None:
        self._step()
        if not path.startswith(self._base):
            return
        if not Path(path).is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if "fsync_directory" not in self._forgets:
            directory = self._directory(path)
            directory.synced, directory.pending = self._shown(directory), []
        self._done()

    def possible_trees(self) -> Iterator[dict[str, bytes]]:
        """Yield each set of files, by path below the base, that the disk may hold if the power goes now."""
        seen = set()
        for tree in self._trees(self._root, ""):
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                yield tree

    def _trees(self, directory: Node, prefix: str) -> Iterator[dict[str, bytes]]:
        for is_done in itertools.product((False, True), repeat=len(directory.pending)):
            names: dict[str, Node | None] = dict(directory.synced)
            for change in itertools.compress(directory.pending, is_done):
                names.update(change)
            yield from self._fill([(f"{prefix}{name}", node) for name, node in names.items() if node is not None])

    def _fill(self, entries: list[tuple[str, Node]]) -> Iterator[dict[str, bytes]]:
        if not entries:
            yield {}
            return
        (path, node), *rest = entries
        if node.is_directory:
            choices = list(self._trees(node, f"{path}/"))
        else:
            choices = [{path: content} for content in node.contents()]
        for others in self._fill(rest):
            for choice in choices:
                yield {**choice, **others}
