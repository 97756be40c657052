"""A transfer of chunks on real inner groups: it outlives a root."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.unit.comm import inner_groups
from tests.unit.comm.test_operations import hand_over, run

from lightning_ft.comm.chunk_transfer import ChunkTransfer
from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.place import as_bytes

NUM_MEMBERS = 3


@pytest.fixture(scope="module")
def members() -> Iterator[list[GlooTransport]]:
    """Three members."""
    with inner_groups.transports(NUM_MEMBERS) as made:
        yield made


def test_a_transfer_gives_all_what_the_holders_have(members: list[GlooTransport]) -> None:
    """From whichever of them is there; bit for bit, of any type; what it was given stays as it was."""
    right = [torch.tensor([1.5, torch.nan]), torch.arange(3), torch.tensor([True])]
    wrong = [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.tensor([False])]
    holders = [frozenset({"0/0", "0/2"}), frozenset({"0/1", "0/2"}), frozenset({"0/2"})]

    def of(member: str) -> ChunkTransfer:
        own = [good if member in who else bad for good, bad, who in zip(right, wrong, holders, strict=True)]
        return ChunkTransfer(list(zip(own, holders, strict=True)))

    transfers = [of(f"0/{rank}") for rank in range(NUM_MEMBERS)]
    run(transfers, inner_groups.places(members))
    late = of("0/1")
    hand_over(transfers[0], late)
    for transfer in (*transfers, late):
        for value, expected in zip(transfer.values, right, strict=True):
            assert value.dtype == expected.dtype
            assert torch.equal(as_bytes(value), as_bytes(expected))
    assert not any(bool(tensor.any()) for tensor in wrong)
    assert transfers[0].is_redoable(("0/2",))
    assert not transfers[0].is_redoable(("0/0", "0/1"))  # the third is right in the last alone
