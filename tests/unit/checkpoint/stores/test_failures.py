"""What an error of some file system is taken for."""

from __future__ import annotations

import errno
import socket

import aiohttp
import botocore.exceptions
import fsspec.exceptions
import pytest
import requests
import s3fs.errors

from lightning_ft.checkpoint.stores.failures import classify, store_error
from lightning_ft.errors import CheckpointError, FaultToleranceError


def _of_s3(status: int, code: str) -> OSError:
    """Return what s3fs raises for an answer of the server."""
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = s3fs.errors.translate_boto_error(botocore.exceptions.ClientError(answer, "PutObject"))
    assert isinstance(error, OSError)
    return error


def _of_requests(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


RETRYABLE = [
    (TimeoutError("late"), "timeout"),
    (fsspec.exceptions.FSTimeoutError(), "timeout"),
    (requests.ReadTimeout(), "timeout"),
    (OSError(errno.ETIMEDOUT, "late"), "timeout"),
    (ConnectionResetError(errno.ECONNRESET, "gone"), "ECONNRESET"),
    (ConnectionError("gone"), "ConnectionError"),
    (requests.ConnectionError("gone"), "ConnectionError"),
    (aiohttp.ServerDisconnectedError(), "ServerDisconnectedError"),
    (socket.gaierror(socket.EAI_AGAIN, "who?"), "gaierror"),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), "EndpointConnectionError"),
    (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), "timeout"),
    (OSError(errno.ESTALE, "stale"), "ESTALE"),
    (_of_s3(503, "SlowDown"), "HTTP 503"),
    (_of_s3(500, "InternalError"), "HTTP 500"),
    (_of_s3(409, "ConditionalRequestConflict"), "HTTP 409"),
    (_of_requests(429), "HTTP 429"),
]

FINAL = [
    (OSError(errno.ENOSPC, "full"), "ENOSPC"),
    (OSError(errno.EDQUOT, "full"), "EDQUOT"),
    (OSError(errno.EIO, "damaged"), "EIO"),
    (OSError(errno.EROFS, "read-only"), "EROFS"),
    (PermissionError(errno.EACCES, "no"), "EACCES"),
    (PermissionError("no"), "EACCES"),
    (_of_s3(403, "AccessDenied"), "EACCES"),
    (_of_s3(403, "SomethingElse"), "EACCES"),
    (_of_s3(404, "NoSuchBucket"), "HTTP 404"),
    (_of_requests(507), "ENOSPC"),
    (RuntimeError("quota exceeded"), "RuntimeError"),
]


@pytest.mark.parametrize(("error", "reason"), RETRYABLE)
def test_what_a_retry_may_mend(error: Exception, reason: str) -> None:
    """Networks and busy services are told by a word that is the same each time."""
    assert classify(error) == (reason, True)


@pytest.mark.parametrize(("error", "reason"), FINAL)
def test_what_somebody_has_to_mend(error: Exception, reason: str) -> None:
    """A full disk or a missing right does not go away by itself."""
    assert classify(error) == (reason, False)


def test_an_error_says_all_that_is_needed() -> None:
    """It names the operation, the object, the cause and what to do; the same facts are attributes."""
    error = store_error(
        OSError(errno.ENOSPC, "No space left"), operation="create", path="/run/data/x", is_in_doubt=True
    )
    assert str(error) == (
        "create of /run/data/x failed: ENOSPC: [Errno 28] No space left. It may have been made all the same. "
        "Free space there, or keep fewer checkpoints."
    )
    assert (error.operation, error.path, error.reason) == ("create", "/run/data/x", "ENOSPC")
    assert error.is_in_doubt
    assert not error.is_retryable
    assert isinstance(error, CheckpointError)
    assert isinstance(error, FaultToleranceError)
