"""Notices when somebody but the optimizer changes what the optimizer owns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from lightning_ft.checkpoint.format import hash_of
from lightning_ft.checkpoint.host_memory import in_threads
from lightning_ft.checkpoint.tensors import Bytes, flat_bytes, version_of

_SAMPLE_BYTES = 4096
"""So much of each chunk of an average is looked at, besides torch's count of what was done to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """A tensor that only the optimizer may change.

    Attributes:
        tensor: It.
        chunks: Start and end of each of this rank's chunks of its bytes, in order.
        is_parameter: Users' code changes parameters, and by ways that torch does not count (`.data`); averages hardly.
    """

    tensor: torch.Tensor
    chunks: Sequence[tuple[int, int]]
    is_parameter: bool


class Guard:
    """Hashes what the optimizer owns after each step, and says whether it is still so.

    A parameter is compared by its hash. Of an average, which is most of the memory, whatever torch did to it counts,
    and a sample of each chunk: it would take somebody who changes single numbers of it behind torch's back not to be
    noticed here. Then its hash is wrong, and whoever reads the checkpoint notices.

    Args:
        owned: By stream.

    Attributes:
        hashes: Of each chunk, by stream and start, as noted.
    """

    def __init__(self, owned: Mapping[int, Owned]) -> None:
        self.owned = owned
        self.hashes: Mapping[tuple[int, int], bytes] = {}
        self._versions: list[int] = []
        self._samples: list[bytes] = []

    def note(self, hashes: Mapping[tuple[int, int], bytes] | None = None) -> None:
        """Take what is there for what the optimizer has made; its hashes may be known."""
        self.hashes = self._hash() if hashes is None else hashes
        self._versions, self._samples = self._watch()

    def is_as_noted(self) -> bool:
        """Whether nothing has changed since `note`."""
        versions, samples = self._watch()
        found = self._hash(only_parameters=versions == self._versions)
        return samples == self._samples and all(self.hashes[place] == value for place, value in found.items())

    def _watch(self) -> tuple[list[int], list[bytes]]:
        averages = [item for item in self.owned.values() if not item.is_parameter]
        samples = [
            hash_of(_on_host(item.tensor, start, min(start + _SAMPLE_BYTES, end)).data)
            for item in averages
            if item.tensor.device.type == "cpu"  # from elsewhere each would take as long as all
            for start, end in item.chunks
        ]
        return [version_of(item.tensor) for item in averages], samples

    def _hash(self, *, only_parameters: bool = False) -> dict[tuple[int, int], bytes]:
        chunks = [
            chunk
            for index, item in self.owned.items()
            if item.is_parameter or not only_parameters
            for chunk in _chunks(index, item)
        ]
        return dict(zip((place for place, _ in chunks), in_threads(_hash_chunk, chunks), strict=True))


def _hash_chunk(chunk: tuple[object, Bytes]) -> bytes:
    return hash_of(chunk[1].data)


def _chunks(index: int, item: Owned) -> Iterator[tuple[tuple[int, int], Bytes]]:
    first, last = item.chunks[0][0], item.chunks[-1][1]
    data = _on_host(item.tensor, first, last)
    for start, end in item.chunks:
        yield (index, start), data[start - first : end - first]


def _on_host(tensor: torch.Tensor, start: int, end: int) -> Bytes:
    data: Bytes = flat_bytes(tensor)[start:end].cpu().numpy()
    return data
