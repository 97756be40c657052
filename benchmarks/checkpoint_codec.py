"""Speed and size of the lossless codec on states of real, small trainings.

    python benchmarks/checkpoint_codec.py [--repeats 5] [--num-steps 100]

For each state: encode its difference to the state some steps before, with hashes and checksums, as `Writer.write` does
but without storage; decode it; and check the stored bytes, as `verify` does. By CPU time of one thread;
GB of decoded bytes
(verify: of stored bytes, base included) per second, the median of the repeats. Size is that of the difference as a
share of the state, and `base` that of the state by itself. Exit status 1: a limit was missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_ft.checkpoint.codec import check_stored, decode
from lightning_ft.checkpoint.format import Buffer
from lightning_ft.checkpoint.records import FRAME_BYTES, NO_REFERENCE, Frame
from lightning_ft.checkpoint.share import Chunks, PackWriter, compared, copied
from lightning_ft.checkpoint.tree import FlatState

LIMITS = {"encode": 0.9, "decode": 1.5, "verify": 10.0}
"""GB/s per core."""


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy what a checkpoint of this training holds."""
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    buffers = [(value, value.clone()) for value in _tensors(state)]
    copies = {id(value): copy for value, copy in buffers}

    def copied_tree(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copies[id(value)]
        if isinstance(value, dict):
            return {key: copied_tree(item) for key, item in value.items()}
        return [copied_tree(item) for item in value] if isinstance(value, list) else value

    return copied_tree(state)  # type: ignore[no-any-return]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def dense() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A network with Adam: every number changes at every step."""
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1536),
        torch.nn.GELU(),
        torch.nn.Linear(1536, 1536),
        torch.nn.GELU(),
        torch.nn.Linear(1536, 16),
    )
    teacher = torch.randn(256, 16)

    def loss() -> torch.Tensor:
        inputs = torch.randn(64, 256)
        return torch.nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))

    return model, torch.optim.Adam(model.parameters(), lr=1e-3), loss


class LoraLinear(torch.nn.Module):
    """A frozen layer with a trained one of rank 8 beside it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(num_in, num_out).requires_grad_(False)  # noqa: FBT003 - torch's signature
        self.down = torch.nn.Linear(num_in, 8, bias=False)
        self.up = torch.nn.Linear(8, num_out, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add what both give."""
        return self.frozen(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]


def lora() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """Frozen layers with small trained ones."""
    model = torch.nn.Sequential(LoraLinear(256, 2048), torch.nn.GELU(), LoraLinear(2048, 2048), LoraLinear(2048, 16))
    teacher = torch.randn(256, 16)

    def loss() -> torch.Tensor:
        inputs = torch.randn(32, 256)
        return torch.nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))

    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3), loss


def sparse() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A large embedding of which a step touches few rows, most often the frequent ones."""
    model = torch.nn.EmbeddingBag(100_000, 64, sparse=True)

    def loss() -> torch.Tensor:
        rows = (torch.rand(32, 8) ** 6 * 100_000).long()
        return model(rows).square().mean()  # type: ignore[no-any-return]

    return model, torch.optim.SparseAdam(list(model.parameters()), lr=1e-3), loss


STATES = {"dense Adam": dense, "LoRA": lora, "sparse embedding": sparse}


def encoded(state: dict[str, Any], base: Chunks | None) -> tuple[list[tuple[Frame, Buffer]], Chunks]:
    """Encode a state; also return the chunks, if it is a base."""
    flat = FlatState(state)
    work = copied(flat, 0, 1, {}) if base is None else compared(flat, 0, 1, base)
    copies: Chunks = {}
    writer = PackWriter(work, copies if base is None else None)
    frames: list[Frame] = []
    stored: list[Buffer] = []
    while writer.has_more():
        pieces = iter(writer.pack(frames))
        next(pieces)
        stored += pieces
    rest = iter(stored)
    return [(frame, next(rest) if frame.stored_bytes else b"") for frame in frames], copies


def decoded(base: list[tuple[Frame, Buffer]], difference: list[tuple[Frame, Buffer]], out: dict[Any, Any]) -> None:
    """Decode a difference over its base, which was decoded into `out` before."""
    held = {frame.place: frame.decoded_hash for frame, _ in base}
    for frame, stored in difference:
        decode(frame, stored, out[frame.place], held.get(frame.place, NO_REFERENCE), "")


def measure(name: str, num_steps: int, repeats: int) -> dict[str, float]:
    """Train, and measure one state."""
    torch.manual_seed(0)
    model, optimizer, loss = STATES[name]()
    snapshots = []
    for _ in range(2):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        snapshots.append(snapshot(model, optimizer))
    base, copies = encoded(snapshots[0], None)
    seconds: dict[str, list[float]] = {"encode": [], "decode": [], "verify": []}
    for _ in range(repeats):
        began = time.thread_time()
        difference, _ = encoded(snapshots[1], copies)
        seconds["encode"].append(time.thread_time() - began)
        out = {frame.place: copies[frame.place[0], frame.place[2]][0].copy() for frame, _ in base}
        for frame, _ in difference:
            if frame.place not in out or out[frame.place].size != frame.num_bytes:
                out[frame.place] = np.empty(frame.num_bytes, np.uint8)
        began = time.thread_time()
        decoded(base, difference, out)
        seconds["decode"].append(time.thread_time() - began)
        began = time.thread_time()
        for frame, stored in (*base, *difference):
            check_stored(frame, stored, "")
        seconds["verify"].append(time.thread_time() - began)
    num_bytes = sum(frame.num_bytes for frame, _ in difference)
    sizes = [sum(FRAME_BYTES + frame.stored_bytes for frame, _ in frames) for frames in (base, difference)]
    gigabytes = {"encode": num_bytes, "decode": num_bytes, "verify": sum(sizes)}
    return {
        "MB": num_bytes / 1e6,
        **{what: gigabytes[what] / 1e9 / statistics.median(took) for what, took in seconds.items()},
        "size": sizes[1] / num_bytes,
        "base": sizes[0] / num_bytes,
    }


def main() -> int:
    """Print the table; return 1 if a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| state | MB | encode, GB/s | decode, GB/s | verify, GB/s | size | base |\n|---|---|---|---|---|---|---|")
    is_slow = False
    for name in STATES:
        found = measure(name, arguments.num_steps, arguments.repeats)
        speeds = " | ".join(f"{found[what]:.2f}" for what in LIMITS)
        print(f"| {name} | {found['MB']:.0f} | {speeds} | {found['size']:.3f} | {found['base']:.3f} |", flush=True)
        is_slow |= any(found[what] < limit for what, limit in LIMITS.items())
    print("limits: " + ", ".join(f"{what} {limit} GB/s" for what, limit in LIMITS.items()))
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
