"""A directory of this machine, or of a network file system that is mounted here.

An object is written to a temporary file beside it, fsynced, and given its name by a hard link, which unlike a rename
never replaces anything; then its directory and those above it are fsynced. fsspec's own local commit is a rename that
overwrites, without any fsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator

from lightning_ft.checkpoint.stores.base import Attempt, Paths, Store
from lightning_ft.checkpoint.stores.paths import is_temporary, temporary_path
from lightning_ft.checkpoint.stores.source import Source

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What link(2) says where the file system has none: FAT, some FUSE and parallel file systems."""

_CAN_T_REMOVE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY, errno.EACCES, errno.EPERM}
"""What rmdir(2) says of a directory that is in use, or not ours."""

_RENAME_NOREPLACE, _AT_FDCWD = 1, -100  # linux/fs.h, fcntl.h


class Kernel:
    """What the store asks of the kernel to change anything: the seam at which tests record and fail each call."""

    def open(self, path: str, flags: int) -> int:
        """Open or make a file; return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def lock(self, descriptor: int, *, wait: bool) -> None:
        """Lock a file against all other openings of it, as flock(2)."""
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the data; return how many bytes."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Make a file's data durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close; on network file systems this may report that earlier writes failed."""
        os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fail with EEXIST if there is such a name."""
        os.link(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        """As rename(2), but fail with EEXIST instead of replacing anything. Source: renameat2(2), Linux 3.15."""
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    def replace(self, source: str, target: str) -> None:
        """Give a file another name, in place of whatever had it."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Take a file's name away."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove a directory if it is empty."""
        os.rmdir(path)

    def fsync_directory(self, path: str) -> None:
        """Make durable which names a directory has."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such thing, and orders by itself
                raise
        finally:
            os.close(descriptor)


class LocalStore(Store):
    """Objects as files below a directory.

    Args:
        root: The directory, absolute; made with the first object.
        timeout_s: As `Store`.
        kernel: Makes the system calls.
    """

    def __init__(self, root: str, *, timeout_s: float | None = None, kernel: Kernel | None = None) -> None:
        super().__init__(root, timeout_s=timeout_s)
        self._root = os.path.normpath(root)
        self._kernel = Kernel() if kernel is None else kernel
        self._is_root_durable = False

    def _create(self, path: str, attempt: Attempt) -> None:
        target = self._full(path)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        with self._temporary(target, attempt.source) as temporary:
            attempt.begin_commit()
            try:
                self._name(temporary, target)
            except FileExistsError:
                attempt.was_refused()
                raise
        self._confirm(path)

    def _confirm(self, path: str) -> None:
        self._sync_directories(os.path.dirname(self._full(path)))

    def _replace(self, path: str, data: bytes) -> None:
        target = self._full(path)
        with self._temporary(target, Source([data])) as temporary:
            self._kernel.replace(temporary, target)
        self._sync_directories(os.path.dirname(target))

    def _read(self, path: str, start: int, end: int | None) -> bytes:
        with open(self._full(path), "rb", buffering=0) as file:
            left = (os.fstat(file.fileno()).st_size if end is None else end) - start
            parts = []
            while left > 0 and (part := os.pread(file.fileno(), left, start)):
                parts.append(part)
                start, left = start + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _size(self, path: str) -> int:
        status = os.stat(self._full(path))
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return status.st_size

    def _list(self, prefix: str) -> Iterable[str]:
        _, files = self._tree(prefix.rpartition("/")[0])
        return [path for path in files if path.startswith(prefix) and not is_temporary(path)]

    def _delete(self, paths: Paths) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._kernel.unlink(self._full(path))
        # Also of what was missing: whoever deleted it may have died before this.
        for directory in sorted({os.path.dirname(self._full(path)) for path in paths}, key=len, reverse=True):
            self._sync_deletion(directory)

    def _recover(self) -> None:
        directories, files = self._tree("")
        for path in files:
            if is_temporary(path):
                self._remove_if_abandoned(self._full(path))
        for directory in reversed(directories):
            with contextlib.suppress(FileNotFoundError):
                self._sync_directories(self._full(directory))

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def _tree(self, top: str) -> tuple[Paths, Paths]:
        """Return the paths of a directory and those below it, and of their files. What vanishes meanwhile has none."""
        directories: Paths = [top]
        files: Paths = []
        for directory in directories:
            try:
                with os.scandir(self._full(directory)) as entries:
                    for entry in entries:
                        path = f"{directory}/{entry.name}" if directory else entry.name
                        (directories if entry.is_dir() else files).append(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
        return directories, files

    # A temporary file is locked as long as its writer lives: the lock goes with the process, however it ends, and holds
    # across containers and, on most network file systems, hosts. Process ids tell neither.

    @contextlib.contextmanager
    def _temporary(self, target: str, source: Source) -> Iterator[str]:
        """Write a source durably to a new file beside a target; remove it afterwards if it still has that name."""
        temporary, lock = self._open_temporary(target)
        try:
            descriptor = os.dup(lock)  # to be closed, which may report errors, before the lock goes
            try:
                for piece in source:
                    self._write(descriptor, piece)
                self._kernel.fsync(descriptor)
            finally:
                self._kernel.close(descriptor)
            yield temporary
        finally:
            try:
                with contextlib.suppress(OSError):  # renamed, or left for `recover`
                    self._kernel.unlink(temporary)
            finally:
                os.close(lock)

    def _open_temporary(self, target: str) -> tuple[str, int]:
        """Return a new, locked file that has a name."""
        while True:
            temporary = temporary_path(target)
            try:
                descriptor = self._kernel.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:
                # Not there yet, or it was empty and another process has just deleted it.
                self._make_directories(os.path.dirname(target))
                continue
            try:
                with contextlib.suppress(OSError):  # a file system without locks: nothing is cleaned up there
                    self._kernel.lock(descriptor, wait=True)
                if os.fstat(descriptor).st_nlink:
                    return temporary, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # removed by `recover` before it was locked

    def _remove_if_abandoned(self, temporary: str) -> None:
        """Remove a temporary file, unless its writer lives or it can't be told. What stays does no harm."""
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._kernel.lock(descriptor, wait=False)
                self._kernel.unlink(temporary)
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int, piece: memoryview) -> None:
        while piece:
            piece = piece[self._kernel.write(descriptor, piece) :]

    def _name(self, temporary: str, target: str) -> None:
        """Make a file visible under its name, unless there is one."""
        try:
            self._kernel.link(temporary, target)
        except FileExistsError:
            # NFS repeats a request whose answer was lost, and then meets its own link.
            if not os.path.samefile(temporary, target):
                raise
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            self._kernel.rename_noreplace(temporary, target)

    def _make_directories(self, directory: str) -> None:
        if os.path.isdir(directory):
            return
        self._make_directories(os.path.dirname(directory))
        try:
            self._kernel.mkdir(directory)
        except FileExistsError as error:
            if os.path.lexists(directory) and not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from error

    def _sync_directories(self, directory: str) -> None:
        """Make durable that a directory has the entries it has, and that it is itself where it is.

        Whoever made a directory may have died before its fsync, or be about to do it: so all up to the root are synced,
        each time, and once those above the root, where nobody deletes and makes anew.
        """
        while True:
            self._kernel.fsync_directory(directory)
            if directory == self._root:
                break
            directory = os.path.dirname(directory)
        if not self._is_root_durable:
            while not os.path.ismount(directory):
                directory = os.path.dirname(directory)
                try:
                    self._kernel.fsync_directory(directory)
                except PermissionError:
                    break  # not ours, so we have made nothing in it
            self._is_root_durable = True

    def _sync_deletion(self, directory: str) -> None:
        """Make durable that something is not in a directory any more, and remove those that have become empty."""
        while True:
            try:
                if directory == self._root:
                    self._kernel.fsync_directory(directory)
                    return
                self._kernel.rmdir(directory)
            except FileNotFoundError:
                if directory == self._root:
                    return
            except OSError as error:
                if error.errno not in _CAN_T_REMOVE:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self._kernel.fsync_directory(directory)
                    return
            directory = os.path.dirname(directory)
