"""Readers of single fields of a message: each takes what JSON gave and returns it checked, or raises ValueError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from lightning_ft.membership.events import Address
from lightning_ft.membership.ids import parse_logical_id

_MAX_INT = 2**63 - 1


def short(value: object) -> str:
    """`repr` of what came in, cut so that it fits into an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reject(expected: str, value: object) -> NoReturn:
    raise ValueError(f"expected {expected}, got {short(value)}")


def read_natural(value: object) -> int:
    """A whole number from 0 to 2**63-1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INT:
        _reject("an integer from 0 to 2**63-1", value)
    return value


def read_small(value: object) -> int:
    """A whole number from 0 to 65535."""
    if read_natural(value) > 65535:
        _reject("an integer from 0 to 65535", value)
    return read_natural(value)


def read_optional_small(value: object) -> int | None:
    """A small number as above, or null."""
    return None if value is None else read_small(value)


def read_optional_natural(value: object) -> int | None:
    """A whole number as above, or null."""
    return None if value is None else read_natural(value)


def read_status(value: object) -> int:
    """An exit code, or minus a signal number."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**32:
        _reject("an exit code or minus a signal number", value)
    return value


def read_port(value: object) -> int:
    """A TCP port."""
    if read_natural(value) not in range(1, 65536):
        _reject("a port from 1 to 65535", value)
    return read_natural(value)


def read_seconds(value: object) -> float:
    """A finite duration."""
    # An integer may be too large for a float: compare before converting.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value > _MAX_INT:
        _reject("finite seconds >= 0", value)
    return float(value)


def read_optional_seconds(value: object) -> float | None:
    """A finite duration, or null."""
    return None if value is None else read_seconds(value)


def read_flag(value: object) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        _reject("true or false", value)
    return value


def read_text(value: object) -> str:
    """A string, perhaps empty."""
    if not isinstance(value, str):
        _reject("a string", value)
    if any("\ud800" <= character <= "\udfff" for character in value):
        _reject("valid Unicode", value)
    return value


def read_name(value: object) -> str:
    """A string that is not empty."""
    if not read_text(value):
        raise ValueError("expected a string that is not empty")
    return read_text(value)


def read_member(value: object) -> str:
    """A logical id."""
    parse_logical_id(read_text(value))
    return read_text(value)


def read_members(value: object) -> tuple[str, ...]:
    """A list of different logical ids."""
    if not isinstance(value, list):
        _reject("a list of logical ids", value)
    members = tuple(read_member(item) for item in value)
    if len(set(members)) != len(members):
        raise ValueError("a logical id is given twice")
    return members


def read_naturals(value: object) -> tuple[int, ...]:
    """A list of whole numbers."""
    if not isinstance(value, list):
        _reject("a list of integers", value)
    return tuple(read_natural(item) for item in value)


def read_names(value: object) -> tuple[str, ...]:
    """A list of strings that are not empty."""
    if not isinstance(value, list):
        _reject("a list of strings", value)
    return tuple(read_name(item) for item in value)


def read_addresses(value: object) -> tuple[Address, ...]:
    """A list of objects with `host` and `store_port`."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        _reject("a list of objects", value)
    for item in value:
        if set(item) != {"host", "store_port"}:
            _reject("an object with host and store_port", item)
    return tuple(Address(read_name(item["host"]), read_port(item["store_port"])) for item in value)


def read_incarnations(value: object) -> tuple[tuple[str, int], ...]:
    """An object from logical id to incarnation."""
    if not isinstance(value, Mapping):
        _reject("an object of incarnations by logical id", value)
    return tuple((read_member(member), read_natural(incarnation)) for member, incarnation in value.items())


def read_log_fields(value: object) -> tuple[tuple[str, object], ...]:
    """An object of scalars and lists of scalars."""
    if not isinstance(value, Mapping):
        _reject("an object", value)
    return tuple((read_name(name), _log_value(item)) for name, item in value.items())


def _log_value(value: object) -> object:
    if isinstance(value, list):
        return tuple(_log_scalar(item) for item in value)
    return _log_scalar(value)


def _log_scalar(value: object) -> object:
    if isinstance(value, str):
        return read_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    if value is not None and not isinstance(value, bool | int | float):
        _reject("a scalar or a list of scalars", value)
    return value
