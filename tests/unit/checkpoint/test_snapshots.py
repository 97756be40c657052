"""Shares of a state that are put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_ft.checkpoint.records import CHUNK_BYTES
from lightning_ft.checkpoint.snapshots import Snapshots, num_share_bytes, put_share
from lightning_ft.checkpoint.tree import unflatten


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_all_shares_are_the_state(num_ranks: int) -> None:
    """Bit for bit, as it was when they were taken: of several chunks, of none, tensors, arrays and the rest."""
    state: dict[str, Any] = {
        "long": torch.randn(CHUNK_BYTES // 2 + 3),
        "none": torch.empty(0),
        "array": np.arange(1000),
        "last": torch.randn(5, 7).t(),
        "step": 3,
        "other": {1, 2},
    }
    kept = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    shares = [Snapshots(rank, num_ranks).take(state) for rank in range(num_ranks)]
    for name in kept:
        state[name].zero_()
    streams = shares[0].flat.streams
    contents = [torch.full((stream.num_bytes,), 255, dtype=torch.uint8) for stream in streams]
    for index, data in shares[-1].rest().items():
        contents[index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for share in shares:
        assert share.data.numel() == num_share_bytes(streams, share.rank, num_ranks)
        put_share(streams, share.rank, num_ranks, share.data, contents)
    found = unflatten(streams, contents, "it", weights_only=False)
    assert (found["step"], found["other"], found["array"].tolist()) == (3, {1, 2}, list(range(1000)))
    for name, value in kept.items():
        assert torch.equal(found[name], value)
