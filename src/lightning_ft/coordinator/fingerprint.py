"""What a process trains, in a form that can be compared: a joiner that trains something else is declined (C7a)."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import zlib
from collections.abc import Iterable

Fact = tuple[str, str, str]
"""Where, what it is there, and how: `("parameter 3", "layer.weight", "[10, 5] float32")`. Each place occurs once."""

_MAX_DESCRIPTION = 512 * 1024
"""Longest description that is sent, in characters: half of what a message may hold. A million parameters have more."""

_MAX_UNPACKED_BYTES = 256 * 1024 * 1024


class Fingerprint:
    """Facts of which all must be the same in all processes of a job.

    Args:
        facts: What tells most comes first: the first difference is what a person is told.
    """

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._facts = tuple(facts)

    @functools.cached_property
    def _text(self) -> bytes:
        return json.dumps(self._facts, separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> str:
        """Equal if and only if all facts are."""
        return hashlib.sha256(self._text).hexdigest()[:32]

    @functools.cached_property
    def description(self) -> str:
        """The facts as short text; empty if they are too many."""
        packed = base64.b64encode(zlib.compress(self._text, 9)).decode()
        return packed if len(packed) <= _MAX_DESCRIPTION else ""


def first_difference(there: str, here: str) -> str:
    """Say for a person where two descriptions first differ.

    Args:
        there: Of another process.
        here: Of this one; the order of its facts counts.

    Returns: Empty if nothing can be said: there is no difference, or one of them is no description.
    """
    others, own = _unpack(there), _unpack(here)
    if not others or not own:
        return ""
    for place in dict.fromkeys([*own, *others]):
        mine, other = own.get(place), others.get(place)
        if mine is None or other is None:
            is_only = f"{' '.join(other or mine or ())} is only"
            return f"{place}: {is_only} {'here' if other is None else 'there'}"
        if mine != other and mine[0] == other[0]:
            return f"{place}: {mine[0]} is {other[1]} there, {mine[1]} here"
        if mine != other:
            return f"{place}: {' '.join(other)} there, {' '.join(mine)} here"
    return ""


def _unpack(description: str) -> dict[str, tuple[str, str]]:
    """Read a description; empty if it can't be read."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(description, validate=True), _MAX_UNPACKED_BYTES)
        return {str(place): (str(what), str(value)) for place, what, value in json.loads(text)}
    except (binascii.Error, zlib.error, ValueError, TypeError, RecursionError):
        return {}
