"""What outlives the coordinator's process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lightning_ft.coordinator.memory import Memory, make_files


@pytest.fixture
def files() -> Iterator[list[int]]:
    descriptors = make_files()
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_nothing_was_saved_at_first(files: list[int]) -> None:
    """A new coordinator starts a job."""
    assert Memory(files).load() is None
    assert Memory(files).items() == []


def test_the_last_state_is_found_by_the_next_process(files: list[int]) -> None:
    """However often it was saved, by however many processes."""
    for number in range(5):
        memory = Memory(files)
        memory.save({"value": number, "text": "x" * (100 - 20 * number)})
        loaded = Memory(files).load()
        assert loaded is not None
        assert loaded["value"] == number
        memory.save({"value": number + 100})
        assert Memory(files).load() == {"value": number + 100}


@pytest.mark.parametrize("length", [0, 1, 10, 29])
def test_a_state_that_was_cut_off_is_not_found(files: list[int], length: int) -> None:
    """A process that is killed while it saves leaves the state before."""
    memory = Memory(files)
    memory.save({"value": 1})
    memory.save({"value": 2})
    memory.save({"value": 3, "long": "x" * 50})
    newest = max(files[:2], key=lambda slot: os.fstat(slot).st_size)
    os.ftruncate(newest, length)
    again = Memory(files)
    assert again.load() == {"value": 2}
    again.save({"value": 4})
    assert Memory(files).load() == {"value": 4}


def test_items_are_kept_in_order_and_whole(files: list[int]) -> None:
    """One that was cut off is left out."""
    memory = Memory(files)
    memory.append([1, "one"])
    memory.append([2, "two"])
    assert Memory(files).items() == [[1, "one"], [2, "two"]]
    os.ftruncate(files[2], os.fstat(files[2]).st_size - 1)
    assert Memory(files).items() == [[1, "one"]]


def test_a_state_that_can_not_be_saved_leaves_the_last(files: list[int]) -> None:
    """The caller hears of it."""
    memory = Memory(files)
    memory.save({"value": 1})
    read_only = [os.open(f"/proc/self/fd/{slot}", os.O_RDONLY) for slot in files]
    try:
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
            Memory(read_only).save({"value": 2})
    finally:
        for descriptor in read_only:
            os.close(descriptor)
    assert Memory(files).load() == {"value": 1}
