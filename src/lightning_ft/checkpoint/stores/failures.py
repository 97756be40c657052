"""What the exceptions of some file system mean: a cause in a word, whether a retry may mend it, what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from lightning_ft.errors import StoreError

_RETRYABLE_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,  # s3fs says so of 503 and SlowDown
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOBUFS,
    errno.EPIPE,
    errno.EREMOTEIO,  # s3fs says so of 500
    errno.ESTALE,  # NFS: the server forgot a handle; a new one is opened with the next call
    errno.ETIMEDOUT,
}

_RETRYABLE_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504}
"""409: S3 answers so if two conditional writes of one object meet."""

_RETRYABLE_CLASSES = {
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ConnectionError",  # built in; requests has its own
    "HTTPClientError",  # botocore: connections and their timeouts
    "IncompleteRead",
    "SSHException",  # paramiko
    "Timeout",  # requests
    "TimeoutError",
    "gaierror",  # the name server does not answer
}
"""By name, since none of these libraries need be installed. Of a class, all its bases count."""

_ADVICE = {
    "ENOSPC": "Free space there, or keep fewer checkpoints.",
    "EDQUOT": "Free space within the quota, have it raised, or keep fewer checkpoints.",
    "EACCES": "Give this user the right to read, write, list and delete there.",
    "EPERM": "Give this user the right to read, write, list and delete there.",
    "EROFS": "The file system is mounted read-only: mount it for writing, or choose another place.",
    "EIO": "The device reports damage: look at the system's log before you trust it further.",
    "ENAMETOOLONG": "Choose a shorter directory.",
}


def store_error(error: BaseException, *, operation: str, path: str, is_in_doubt: bool = False) -> StoreError:
    """Say of an exception what happened, where, why, and what to do.

    Args:
        error: What a file system raised.
        operation: What was tried.
        path: The object, with the store's URL before it.
        is_in_doubt: Whether the object may have been made all the same.
    """
    reason, is_retryable = classify(error)
    advice = _ADVICE.get(reason)
    if advice is None:
        advice = (
            "The same call may succeed later; if it does not, look at the network and at the service."
            if is_retryable
            else "Look at what the storage says of it, then try again."
        )
    doubt = " It may have been made all the same." if is_in_doubt else ""
    described = str(error) or type(error).__name__
    return StoreError(
        f"{operation} of {path} failed: {reason}: {described}.{doubt} {advice}",
        operation=operation,
        path=path,
        reason=reason,
        is_retryable=is_retryable,
        is_in_doubt=is_in_doubt,
    )


def classify(error: BaseException) -> tuple[str, bool]:
    """Return the cause in a word, the same for the same cause, and whether a retry may mend it."""
    status = http_status(error)
    if status is not None and status >= 400:
        return _reason_of_status(status), status in _RETRYABLE_STATUSES
    for each in _with_causes(error):  # what name servers raise has an errno that is none
        names = {base.__name__ for base in type(each).__mro__}
        if isinstance(each, TimeoutError) or names & {"Timeout", "FSTimeoutError"}:
            return "timeout", True
        if isinstance(each, OSError) and each.errno is not None and each.errno in errno.errorcode:
            return errno.errorcode[each.errno], each.errno in _RETRYABLE_ERRNOS
        if isinstance(each, PermissionError):
            return "EACCES", False
        if names & _RETRYABLE_CLASSES:
            return type(each).__name__, True
    return type(error).__name__, False


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an exception of botocore, requests, aiohttp or gcsfs stands for, if it is one."""
    for each in _with_causes(error):
        response = getattr(each, "response", None)  # botocore: a dictionary; requests: an object
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(response, "status_code", None) or getattr(each, "status", None)
            status = status or getattr(each, "code", None)
        if isinstance(status, int):
            return status
    return None


def _reason_of_status(status: int) -> str:
    return {401: "EACCES", 403: "EACCES", 507: "ENOSPC"}.get(status, f"HTTP {status}")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def no_such_object(path: str) -> FileNotFoundError:
    """Return the error that all stores raise for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
