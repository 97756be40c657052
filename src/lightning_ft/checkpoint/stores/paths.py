"""Paths inside a store, and the names of files that are not objects yet."""

from __future__ import annotations

import re
import secrets

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def check_path(path: str) -> None:
    """Raises: ValueError: It leaves the store's directory, or is none that every storage can hold."""
    if not path or any(not name or name.startswith(".") or "\0" in name or "\\" in name for name in path.split("/")):
        raise ValueError(f"a path is names joined by '/', none of them empty or beginning with '.', got {path!r}")


def check_prefix(prefix: str) -> None:
    """Raises: ValueError: No path begins so."""
    if prefix:
        check_path(prefix + "x" if prefix.endswith("/") else prefix)


def temporary_path(path: str) -> str:
    """Return a new name beside a path, which no object can have."""
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}.{name}.{secrets.token_hex(8)}.tmp"


def is_temporary(path: str) -> bool:
    """Whether a path is one of `temporary_path`."""
    return _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None
