"""What is said of the first difference between what two processes train."""

from __future__ import annotations

import pytest

from lightning_ft.coordinator import fingerprint
from lightning_ft.coordinator.fingerprint import Fact, Fingerprint, first_difference

FACTS: list[Fact] = [
    ("parameter 0", "layer.weight", "[10, 5] float32"),
    ("parameter 1", "layer.bias", "[10] float32"),
    ("optimizer 0", "optimizer", "SGD"),
]


def with_fact(index: int, *fact: Fact) -> list[Fact]:
    return [*FACTS[:index], *fact, *FACTS[index + 1 :]]


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (FACTS, ""),
        (
            with_fact(0, ("parameter 0", "layer.weight", "[10, 6] float32")),
            "parameter 0: layer.weight is [10, 5] float32 there, [10, 6] float32 here",
        ),
        (
            with_fact(1, ("parameter 1", "layer.gain", "[10] float32")),
            "parameter 1: layer.bias [10] float32 there, layer.gain [10] float32 here",
        ),
        (with_fact(2), "optimizer 0: optimizer SGD is only there"),
        ([*FACTS, ("parameter 2", "x", "[1] float32")], "parameter 2: x [1] float32 is only here"),
        (with_fact(2, ("optimizer 0", "optimizer", "Adam")), "optimizer 0: optimizer is SGD there, Adam here"),
    ],
)
def test_the_first_difference_is_told(here: list[Fact], told: str) -> None:
    """By place, name and value; the digests differ if and only if there is one."""
    mine, other = Fingerprint(here), Fingerprint(FACTS)
    assert first_difference(other.description, mine.description) == told
    assert (mine.digest == other.digest) == (told == "")


@pytest.mark.parametrize("text", ["", "no base64!", "AAAA", "eJxTCkstKs7MzwMADPgDRg=="])
def test_what_is_no_description_tells_nothing(text: str) -> None:
    """One that was too long to be sent, or garbage."""
    assert first_difference(text, Fingerprint(FACTS).description) == ""
    assert first_difference(Fingerprint(FACTS).description, text) == ""


def test_a_description_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names repeat; one that is too long is not sent, but has a digest all the same."""
    many = Fingerprint((f"parameter {i}", f"blocks.{i // 4}.attention.weight", "[64, 64]") for i in range(10_000))
    assert 0 < len(many.description) < 100_000
    monkeypatch.setattr(fingerprint, "_MAX_DESCRIPTION", 1000)
    long = Fingerprint((f"parameter {i}", f"blocks.{i // 4}.attention.weight", "[64, 64]") for i in range(10_000))
    assert (long.digest, long.description) == (many.digest, "")
