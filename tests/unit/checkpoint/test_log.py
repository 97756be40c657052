"""What a manifest says of optimizer steps: written, read, and refused if it contradicts itself."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from lightning_ft.checkpoint.log import Clip, Log, Step, Trained, check_gradients, dump_log, expected_chunks, load_log
from lightning_ft.checkpoint.records import CHUNK_BYTES, GRADLOG, LOSSLESS, Frame, Key, Manifest, Ref, Stream

STREAMS = (
    Stream("tensor", "w", "float32", (300_000,), None, 1_200_000),
    Stream("tensor", "m", "float32", (300_000,), None, 1_200_000),
    Stream("array", "a", "<f8", (), None, 8),
)
LOG = Log(
    "AdamW",
    "cpu",
    "torch 2",
    ((Trained(0, {"exp_avg": 1}),),),
    (
        Step(({"lr": 0.1, "betas": [0.9, 0.99]},), Clip(1.0, 2.5), is_skipped=False, gradients=((0, "bfloat16"),)),
        Step(({"lr": 0.1},), None, is_skipped=True, gradients=()),
        Step(({"lr": 0.1},), None, is_skipped=False, gradients=((0, "float32"),)),
    ),
)


def manifest(extra: Any, mode: str = GRADLOG, *, is_base: bool = False) -> Manifest:
    """Return a manifest with this log."""
    parent = None if is_base else Ref(Key(0, 1), bytes(16))
    return Manifest(
        Key(0, 2), 0, mode, "bitwise", parent, Key(0, 1), 1, 1, bytes(16), {}, extra, STREAMS, packs=(), frames=()
    )


def frames(log: Log) -> list[Frame]:
    """Return the frames of its gradients."""
    return [
        Frame(stream, slot, start, size, 1, dtype, "raw", bytes(16), bytes(16), 0)
        for (stream, slot, start), size, dtype in expected_chunks(log, STREAMS)
    ]


def test_a_log_is_read_as_it_was_written() -> None:
    """Of a manifest that is no base and of the mode; its gradients have a slot for each step."""
    assert load_log(manifest(dump_log(LOG))) == LOG
    assert load_log(manifest({}, LOSSLESS)) is None
    assert load_log(manifest({}, is_base=True)) is None
    assert LOG.replayed() == {0, 1}
    places = [frame.place for frame in frames(LOG)]
    assert places == [(0, 1, 0), (0, 3, 0), (0, 3, CHUNK_BYTES)]
    check_gradients(LOG, STREAMS, frames(LOG))
    check_gradients(None, STREAMS, [])


def test_gradients_must_be_there_once() -> None:
    """None is missing, twice there, of another length or where there is no log."""
    there = frames(LOG)
    for wrong in (
        there[1:],
        [*there, there[0]],
        [dataclasses.replace(there[0], num_bytes=4), *there[1:]],
        [dataclasses.replace(there[0], dtype="float16"), *there[1:]],
    ):
        with pytest.raises(ValueError, match="of its log"):
            check_gradients(LOG, STREAMS, wrong)
    with pytest.raises(ValueError, match="not the 0 of its log"):
        check_gradients(None, STREAMS, there)


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """Return a log's JSON with one value changed."""
    found = copy.deepcopy(dict(dump_log(LOG)))
    at: Any = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "expected the fields"),
        (changed("groups", value=[[[2, {}]]]), "no tensor"),
        (changed("groups", value=[[[3, {}]]]), "no tensor"),
        (changed("groups", value=[[[0, {"exp_avg": 9}]]]), "no tensor"),
        (changed("groups", value=[[[0, []]]]), "expected an object"),
        (changed("groups", value=[[[0]]]), "expected a list"),
        (changed("groups", value=7), "expected a list"),
        (changed("steps", 0, "options", value=[]), "options of 1 groups"),
        (changed("steps", 0, "options", value=[1]), "expected an object"),
        (changed("steps", 0, "clip", "max_norm", value=1), "expected a number"),
        (changed("steps", 0, "skipped", value=0), "true or false"),
        (changed("steps", 0, "skipped", value=True), "what is not trained"),
        (changed("steps", 0, "gradients", value=[[1, "float32"]]), "what is not trained"),
        (changed("steps", 0, "gradients", value=[[0, "int64"]]), "dtype of gradients"),
        (changed("steps", value=[dump_log(LOG)["steps"][0]] * 1001), "at most 1000"),
    ],
)
def test_a_log_that_lies_is_refused(extra: dict[str, Any], message: str) -> None:
    """Whatever contradicts the manifest or itself is named."""
    with pytest.raises(ValueError, match=message):
        load_log(manifest(extra))
