"""Logical ids."""

from __future__ import annotations

import pytest

from lightning_ft.membership.ids import as_ranges, from_ranges, in_order, parse_logical_id


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


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (["0/0"], "0/0"),
        (["0/1", "0/0"], "0/0-1"),
        ([f"{node}/{slot}" for node in range(12) for slot in range(8)], "0-11/0-7"),
        (["0/0", "0/1", "1/0", "1/1", "2/0", "4/0", "4/1"], "0-1/0-1,2/0,4/0-1"),
        (["3/0", "3/2", "3/3", "4/0", "4/2", "4/3"], "3-4/0,3-4/2-3"),
    ],
    ids=str,
)
def test_ranges_say_who_is_meant(members: list[str], text: str) -> None:
    """Written short, read as it was."""
    assert as_ranges(members) == text
    assert from_ranges(text) == in_order(members)


@pytest.mark.parametrize("text", ["", "0", "0/0,", "0-/1", "a/0", "0/0-1-2", "0 /0"])
def test_other_texts_are_no_ranges(text: str) -> None:
    """What cannot be read is shown."""
    with pytest.raises(ValueError, match="expected ranges of logical ids"):
        from_ranges(text)
