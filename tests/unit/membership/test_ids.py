"""Logical ids."""

from __future__ import annotations

import pytest

from lightning_ft.membership.ids import in_order, parse_logical_id


def test_order_is_numeric() -> None:
    """Node 10 comes after node 2, slot 10 after slot 2."""
    assert in_order(["10/0", "2/10", "2/2", "0/0"]) == ("0/0", "2/2", "2/10", "10/0")


def test_parse_splits() -> None:
    """Node first, then slot."""
    assert parse_logical_id("3/12") == (3, 12)


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "00/1", "0/01", "-1/0", "0/1 ", "0/1/2", "a/b", "1/1\n", "٣/1"])
def test_parse_rejects_other_spellings(text: str) -> None:
    """A member has one spelling."""
    with pytest.raises(ValueError, match="expected a logical id node/slot"):
        parse_logical_id(text)
