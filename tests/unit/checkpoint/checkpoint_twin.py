"""A store in a dictionary, and comparison of states bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lightning_ft.checkpoint.stores.base import Attempt, Store


def nothing(operation: str, path: str) -> None:
    """Let the operation happen."""


class DictStore(Store):
    """Keeps objects in `files`; calls `on_change` after each that changes, `before` before each operation."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        super().__init__("dict://", timeout_s=None)
        self.files: dict[str, bytes] = {} if files is None else files
        self.on_change: Callable[[], None] = lambda: None
        self.before: Callable[[str, str], None] = nothing

    def _create(self, path: str, attempt: Attempt) -> None:
        self.before("create", path)
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = b"".join(attempt.source)
        self.on_change()

    def _replace(self, path: str, data: bytes) -> None:
        self.before("replace", path)
        self.files[path] = data
        self.on_change()

    def _read(self, path: str, start: int, end: int | None) -> bytes:
        self.before("read", path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][start:end]

    def _size(self, path: str) -> int:
        self.before("size", path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return len(self.files[path])

    def _list(self, prefix: str) -> Iterable[str]:
        self.before("list", prefix)
        return [path for path in self.files if path.startswith(prefix)]

    def _delete(self, paths: list[str]) -> None:
        for path in paths:
            self.before("delete", path)
            self.files.pop(path, None)
            self.on_change()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements row by row, bit for bit, whatever its dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return b""
    offset = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), offset, (num_bytes,)).numpy().tobytes()


def assert_same(got: Any, expected: Any) -> None:
    """Compare two states: classes, order of keys, and every bit."""
    assert type(got) is type(expected), (type(got), type(expected))
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.layout, got.requires_grad) == (
            expected.dtype,
            expected.shape,
            expected.layout,
            expected.requires_grad,
        )
        if expected.layout is torch.strided:
            assert tensor_bytes(got) == tensor_bytes(expected)
        else:
            assert torch.equal(got.to_dense(), expected.to_dense())
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, dict):
        assert_same(list(got.keys()), list(expected.keys()))
        assert_same(list(got.values()), list(expected.values()))
        if hasattr(expected, "__dict__"):
            assert_same(vars(got), vars(expected))
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert np.float64(got).tobytes() == np.float64(expected).tobytes()
    else:
        assert got == expected
