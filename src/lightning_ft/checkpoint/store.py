"""Where checkpoints are kept: any URL that fsspec knows, each kind with the driver that makes its commits sound."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from lightning_ft.checkpoint.stores.base import Store
from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.checkpoint.stores.remote import ConditionalStore, MemoryStore, PlainStore, RemoteStore, WebHdfsStore
from lightning_ft.checkpoint.stores.s3 import S3Store

__all__ = ["Store", "open_store"]

DEFAULT_TIMEOUT_S = 300.0
"""Longest time an operation may make no progress. A flush of 256 MB may take minutes on a busy network disk."""

_DRIVERS: dict[str, type[RemoteStore]] = {
    "abfs": ConditionalStore,
    "abfss": ConditionalStore,
    "az": ConditionalStore,
    "gcs": ConditionalStore,
    "gs": ConditionalStore,
    "memory": MemoryStore,
    "s3": S3Store,
    "s3a": S3Store,
    "webHDFS": WebHdfsStore,
    "webhdfs": WebHdfsStore,
}

_EXTRAS = {"s3": "pip install 'lightning-ft[s3]'", "s3a": "pip install 'lightning-ft[s3]'"}


def open_store(url: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **storage_options: Any) -> Store:
    """Open the store at a URL. Nothing is made there before the first object is.

    Args:
        url: A directory: a path of this machine, or as fsspec writes it, `s3://bucket/run`.
        timeout_s: Seconds, > 0: what makes no progress for that long fails, after at most twice as long; None: wait.
        storage_options: For the fsspec file system: credentials, `endpoint_url`. None for a path of this machine.

    Raises:
        ValueError: The URL names no directory, or a cache in front of one; or options that are not known.
        ImportError: The package that speaks to this storage is not installed; the message names it.
    """
    if "::" in url:
        raise ValueError(f"a store needs the storage itself, not a file system in front of another one, got {url!r}")
    protocol, path = split_protocol(url)
    if not path.strip("/") and protocol not in {None, "file", "local", "memory"}:
        raise ValueError(f"a store needs a URL with a directory, such as s3://bucket/run, got {url!r}")
    if protocol in {None, "file", "local"}:
        if not url:
            raise ValueError("a store needs a directory, got ''")
        if storage_options:
            raise ValueError(f"a local directory takes no storage options, got {sorted(storage_options)}")
        return LocalStore(LocalFileSystem._strip_protocol(url), timeout_s=timeout_s)
    driver = _DRIVERS.get(protocol, PlainStore)
    if driver is S3Store:
        storage_options = {"use_listings_cache": False, **storage_options}
    try:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **storage_options)
    except ImportError as error:
        advice = _EXTRAS.get(protocol)
        raise ImportError(f"can't open {url}: {error}" + (f" ({advice})" if advice else "")) from error
    return driver(url, fs, root, timeout_s=timeout_s)
