"""Which store a command line means, and which checkpoint in it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from lightning_ft.cli.common import CommandError

if TYPE_CHECKING:
    from lightning_ft.checkpoint.records import Key
    from lightning_ft.checkpoint.store import Store


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the storage is reached."""
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="for fsspec's file system; VALUE is JSON, or else text; may be repeated",
    )
    parser.add_argument("--endpoint-url", metavar="URL", help="of an S3 server that is not Amazon's")


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def storage_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return what goes to fsspec's file system."""
    found = dict(options.storage_option)
    return {**found, "endpoint_url": options.endpoint_url} if options.endpoint_url else found


def open_place(options: argparse.Namespace) -> tuple[Store, Key | None]:
    """Open the store, whose URL may be that of a manifest in it, and return which checkpoint is meant then.

    Raises:
        ValueError: The URL or an option is wrong.
        ImportError: The package for that storage is not installed.
    """
    from lightning_ft.checkpoint.records import MANIFESTS, manifest_key
    from lightning_ft.checkpoint.store import open_store

    root, _, name = options.url.rstrip("/").rpartition(f"/{MANIFESTS}")
    key = manifest_key(f"{MANIFESTS}{name}") if root else None
    try:
        return open_store(options.url if key is None else root, **storage_options(options)), key
    except TypeError as error:  # of fsspec's file system, for what it does not know
        raise ValueError(f"a storage option is wrong: {error}") from error


def choose(store: Store, key: Key | None, step: int | None) -> Key | None:
    """Return which checkpoint is meant: by its manifest's URL, by its step, or None: the newest.

    Raises:
        CommandError: There is none of that step.
    """
    from lightning_ft.checkpoint.manifests import published_keys

    if key is not None or step is None:
        return key
    found = [one for one in published_keys(store) if one.step == step]
    if not found:
        raise CommandError(f"{store.url} has no checkpoint of step {step}")
    return found[0]
