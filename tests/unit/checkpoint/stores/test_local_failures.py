"""A local store whose system calls fail, hang, or are not to be had."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ft.checkpoint.stores import source
from lightning_ft.checkpoint.stores.local import Kernel, LocalStore
from lightning_ft.checkpoint.stores.paths import is_temporary, temporary_path
from lightning_ft.errors import AlreadyThereError, StoreError

CALLS = ("open", "lock", "write", "fsync", "close", "link", "unlink", "mkdir", "fsync_directory", "replace", "rmdir")

PATH = "data/1-2/r0.pack"
PIECES = [b"one", b"two", b"three"]
WHOLE = b"onetwothree"


class Failing(Kernel):
    """Lets the n-th call fail, among those of some names.

    Args:
        names: Which calls count.
        number: Which of them fails, from 0; None: none.
        code: The errno.
        is_done: Whether the call does its work before it fails, as if its answer were lost.
    """

    def __init__(self, names: tuple[str, ...], number: int | None, code: int, *, is_done: bool = False) -> None:
        self._names, self._code, self._is_done = names, code, is_done
        self.number = number
        self.has_failed = False

    def __getattribute__(self, name: str) -> object:
        call = super().__getattribute__(name)
        if name not in CALLS or name not in self._names:
            return call

        def counted(*arguments: object, **keywords: object) -> object:
            if self.number is None:
                return call(*arguments, **keywords)
            self.number -= 1
            if self.number != -1:
                return call(*arguments, **keywords)
            self.has_failed = True
            if self._is_done or name == "close":  # Linux closes in any case
                call(*arguments, **keywords)
            raise OSError(self._code, os.strerror(self._code))

        return counted


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "done"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_any_call_may_fail(tmp_path: Path, code: int, is_done: bool) -> None:
    """Whichever call of a creation fails, the object is absent or whole, and the same creation succeeds later."""
    for number in range(100):
        root = tmp_path / str(number)
        names = tuple(name for name in CALLS if name not in {"open", "mkdir"} or not is_done)
        kernel = Failing(names, number, code, is_done=is_done)
        store = LocalStore(str(root), kernel=kernel)
        before = _descriptors()
        error = None
        try:
            store.create(PATH, PIECES)
        except StoreError as caught:
            error = caught
        assert _descriptors() == before
        if error is not None:
            assert error.reason == errno.errorcode[code]
            assert error.operation == "create"
            assert PATH in error.path
            assert PATH in str(error)
            assert not error.is_retryable
            assert error.is_in_doubt or not (root / PATH).exists()
        if not kernel.has_failed:
            assert error is None
            assert number > 12
            return
        kernel.number = None
        if (root / PATH).exists():
            assert store.read(PATH) == WHOLE
        assert [path for path in _files(root) if not is_temporary(path)] == store.list("")
        if error is None:  # what failed does not matter: a lock, or the removal of the temporary file
            with pytest.raises(AlreadyThereError):
                store.create(PATH, PIECES)
        else:
            store.create(PATH, PIECES)
        assert store.read(PATH) == WHOLE
        store.recover()
        assert _files(root) == [PATH]
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_hint_is_old_or_new_whatever_fails(tmp_path: Path, code: int) -> None:
    """A hint that could not be replaced is what it was."""
    for number in range(100):
        kernel = Failing(CALLS, None, code)
        store = LocalStore(str(tmp_path / str(number)), kernel=kernel)
        store.replace("LATEST", b"old")
        kernel.number = number
        try:
            store.replace("LATEST", b"new")
            allowed = {b"new"}
        except StoreError:
            allowed = {b"old", b"new"}
        kernel.number = None
        assert store.read("LATEST") in allowed
        if not kernel.has_failed:
            return
    raise AssertionError("it never came to its end")


def test_a_deletion_that_failed_can_be_repeated(tmp_path: Path) -> None:
    """Whichever call fails, the other objects stay, and a second deletion finishes what the first began."""
    for number in range(100):
        kernel = Failing(CALLS, None, errno.EIO)
        store = LocalStore(str(tmp_path / str(number)), kernel=kernel)
        for path in (PATH, "data/1-3/r0.pack", "data/1-3/kept"):
            store.create(path, PIECES)
        kernel.number = number
        try:
            store.delete([PATH, "data/1-3/r0.pack"])
        except StoreError as error:
            assert error.reason == "EIO"  # noqa: PT017 - it need not fail
        kernel.number = None
        store.delete([PATH, "data/1-3/r0.pack"])
        assert store.list("") == ["data/1-3/kept"]
        assert not (tmp_path / str(number) / "data/1-2").exists()
        if not kernel.has_failed:
            return
    raise AssertionError("it never came to its end")


def test_an_answer_that_was_lost_is_no_failure(tmp_path: Path) -> None:
    """NFS repeats a link whose answer was lost and says EEXIST of its own: that is known by the file."""
    kernel = Failing(("link",), 0, errno.EEXIST, is_done=True)
    store = LocalStore(str(tmp_path), kernel=kernel)
    store.create(PATH, PIECES)
    assert kernel.has_failed
    assert store.read(PATH) == WHOLE
    assert _files(tmp_path) == [PATH]


@pytest.mark.parametrize("other", [b"another writer's", b""])
def test_in_doubt_another_writers_bytes_are_not_ours(tmp_path: Path, other: bytes) -> None:
    """What appears after a creation in doubt is only taken for it if the bytes are the same."""
    store = LocalStore(str(tmp_path), kernel=Failing(("link",), 0, errno.EIO))
    with pytest.raises(StoreError) as caught:
        store.create(PATH, PIECES)
    assert caught.value.is_in_doubt
    LocalStore(str(tmp_path)).create(PATH, [other])
    with pytest.raises(AlreadyThereError):
        store.create(PATH, PIECES)
    assert store.read(PATH) == other


class Hanging(Kernel):
    """Hangs in one kind of call until it is released."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.release = threading.Event()
        self.returned = threading.Event()

    def write(self, descriptor: int, data: memoryview) -> int:
        self._hang("write")
        return super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._hang("fsync")
        super().fsync(descriptor)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.returned.set()

    def _hang(self, name: str) -> None:
        if name == self._name:
            assert self.release.wait(60)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_what_was_given_up_is_never_published(tmp_path: Path, name: str) -> None:
    """A creation that hangs fails in time; when the storage wakes up later, it makes no object of reused memory."""
    kernel = Hanging(name)
    store = LocalStore(str(tmp_path), timeout_s=0.05, kernel=kernel)
    memory = bytearray(b"as it should be")
    with pytest.raises(StoreError, match="no progress") as caught:
        store.create(PATH, [memoryview(memory)])
    assert caught.value.reason == "timeout"
    assert caught.value.is_retryable
    assert not caught.value.is_in_doubt
    memory[:] = b"used otherwise."
    kernel.release.set()
    assert kernel.returned.wait(60)
    after = LocalStore(str(tmp_path))
    assert after.list("") == []
    after.create(PATH, [b"again"])
    assert after.read(PATH) == b"again"


def test_slow_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation may take many times its bound as long as pieces come."""
    looked, moved = threading.Semaphore(0), threading.Semaphore(0)

    class Looks(threading.Event):
        """Each time it is waited for a piece moves, and time is up."""

        def wait(self, timeout: float | None = None) -> bool:
            looked.release()
            moved.acquire()
            return self.is_set()

        def set(self) -> None:
            super().set()
            moved.release()

    def pieces() -> Iterator[bytes]:
        for _ in range(8):
            looked.acquire()
            yield b"x"
            moved.release()

    store = LocalStore(str(tmp_path), timeout_s=1)
    monkeypatch.setattr(source, "Event", Looks)
    store.create(PATH, pieces())
    monkeypatch.undo()
    assert store.size(PATH) == 8


def test_only_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    """Recovery takes a temporary file nobody holds, not that of a writer at work, who then finishes."""
    other = LocalStore(str(tmp_path))
    abandoned = tmp_path / temporary_path("data/1-2/r1.pack")

    def pieces() -> Iterator[bytes]:
        yield b"first half, "
        abandoned.write_bytes(b"half")
        other.recover()
        assert not abandoned.exists()
        assert len(_files(tmp_path)) == 1
        yield b"second half"

    LocalStore(str(tmp_path)).create(PATH, pieces())
    assert other.read(PATH) == b"first half, second half"
    assert _files(tmp_path) == [PATH]


def test_a_file_removed_before_it_is_locked_is_made_anew(tmp_path: Path) -> None:
    """Recovery may take a temporary file in the moment between its making and its lock."""

    class Unlucky(Kernel):
        num_removed = 0

        def lock(self, descriptor: int, *, wait: bool) -> None:
            if self.num_removed < 3:
                self.num_removed += 1
                LocalStore(str(tmp_path)).recover()
            super().lock(descriptor, wait=wait)

    kernel = Unlucky()
    LocalStore(str(tmp_path), kernel=kernel).create(PATH, PIECES)
    assert kernel.num_removed == 3
    assert LocalStore(str(tmp_path)).read(PATH) == WHOLE
    assert _files(tmp_path) == [PATH]


def test_a_directory_removed_under_the_writer_is_made_anew(tmp_path: Path) -> None:
    """Another process deletes the last object of a directory just before the first of the next is written there."""

    class Unlucky(Kernel):
        num_removed = 0

        def open(self, path: str, flags: int) -> int:
            if self.num_removed < 3 and (tmp_path / "data/1-2").exists():
                self.num_removed += 1
                LocalStore(str(tmp_path)).delete(["data/1-2/gone"])
            return super().open(path, flags)

    kernel = Unlucky()
    LocalStore(str(tmp_path), kernel=kernel).create(PATH, PIECES)
    assert kernel.num_removed == 3
    assert LocalStore(str(tmp_path)).read(PATH) == WHOLE


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    """A file or a dangling link where a directory should be is said, not waited for."""
    (tmp_path / "data").write_bytes(b"a file")
    with pytest.raises(StoreError, match="ENOTDIR"):
        LocalStore(str(tmp_path)).create(PATH, PIECES)
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="ENOTDIR"):
        LocalStore(str(tmp_path / "run")).create(PATH, PIECES)


def test_a_creation_without_permission_says_so(tmp_path: Path) -> None:
    """The error names the object, the cause and what to do."""
    store = LocalStore(str(tmp_path), kernel=Failing(("open",), 0, errno.EACCES))
    with pytest.raises(StoreError, match=r"create of .*r0.pack failed: EACCES: .* Give this user the right") as caught:
        store.create(PATH, PIECES)
    assert not caught.value.is_retryable
