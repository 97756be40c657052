"""The bytes of tensors and arrays, without pickle and without a copy where the memory allows it."""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_ft.checkpoint.records import Stream

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""One dimension, contiguous; a view of a tensor's memory, or memory of its own."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""By torch's name."""

_ARRAY_DTYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")


def is_plain_tensor(value: object) -> bool:
    """Whether it is a tensor whose value is its bytes: not sparse, quantized, nested, without data, of a subclass."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
        and value.device.type != "meta"
    )


def is_plain_array(value: object) -> bool:
    """Whether it is a numpy array or scalar of numbers or truth values."""
    if not isinstance(value, np.generic) and type(value) is not np.ndarray:
        return False
    return bool(_ARRAY_DTYPE.fullmatch(value.dtype.str))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements lie in memory without gaps and without overlap, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def describe_tensor(tensor: torch.Tensor, name: str) -> Stream:
    """Return the stream that holds a plain tensor's bytes."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    num_bytes = tensor.numel() * tensor.element_size()
    keeps_order = num_bytes > 0 and not tensor.is_contiguous() and is_dense(shape, stride)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stream("tensor", name, dtype, shape, stride if keeps_order else None, num_bytes)


def describe_array(array: np.ndarray[Any, Any], name: str) -> Stream:
    """Return the stream that holds a plain array's bytes."""
    return Stream("array", name, array.dtype.str, array.shape, None, array.nbytes)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what two tensors have in common if they are the same bytes read in the same way; None: it has no bytes."""
    if not tensor.numel():
        return None
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.device
    return (*where, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def version_of(tensor: torch.Tensor) -> int:
    """Return how often torch has changed a tensor in place: autograd's count; it sees nothing of `.data` and numpy."""
    return tensor._version  # read in torch 2.13


def bytes_of_tensor(tensor: torch.Tensor) -> Bytes:
    """Return a plain tensor's bytes in the host's memory: a view of the tensor's if it is there and dense."""
    view: Bytes = flat_bytes(tensor).cpu().numpy()
    return view


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's bytes where it is: uint8, one dimension, a view if it is dense.

    In the order of its memory if it is dense, else row by row.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(tuple(tensor.shape), tuple(tensor.stride())):
        tensor = tensor.contiguous()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return flat
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (num_bytes,), (1,))


def bytes_of_array(array: np.ndarray[Any, Any]) -> Bytes:
    """Return a plain array's bytes, row by row; a view if it is so already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def element_bytes(dtype: str) -> int:
    """Return how many bytes belong together when bytes are sorted by significance: 1 to 8."""
    if dtype in DTYPES:
        kind = DTYPES[dtype]
        return kind.itemsize // 2 if kind.is_complex else kind.itemsize
    if _ARRAY_DTYPE.fullmatch(dtype):
        size = int(dtype[2:])
        size = size // 2 if dtype[1] == "c" else size
        return size if size in (1, 2, 4, 8) else 1
    return 1


def check_stream(stream: Stream) -> None:
    """Make sure that a tensor or an array can be made of a stream.

    Raises:
        ValueError: It can't.
    """
    itemsize: int
    if stream.kind == "tensor":
        if stream.dtype not in DTYPES:
            raise ValueError(f"torch {torch.__version__} has no dtype {stream.dtype!r}")
        itemsize = DTYPES[stream.dtype].itemsize
    else:
        if not _ARRAY_DTYPE.fullmatch(stream.dtype):
            raise ValueError(f"expected a plain numpy dtype, got {stream.dtype!r}")
        try:
            itemsize = np.dtype(stream.dtype).itemsize
        except TypeError as error:
            raise ValueError(str(error)) from None
    if math.prod(stream.shape) * itemsize != stream.num_bytes:
        raise ValueError(f"{stream.dtype} of shape {stream.shape} does not have {stream.num_bytes} bytes")
    if max(stream.shape, default=0) > 2**62 or (stream.stride and not is_dense(stream.shape, stream.stride)):
        raise ValueError(f"no tensor has shape {stream.shape} and stride {stream.stride}")


def tensor_from(data: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Return the tensor whose bytes are `data` (uint8, one dimension); it shares its memory.

    Raises:
        ValueError: The stream describes none.
    """
    check_stream(stream)
    empty = torch.empty(0, dtype=DTYPES[stream.dtype])
    stride = _row_major(stream.shape) if stream.stride is None else stream.stride
    try:
        return empty.set_(data.untyped_storage(), 0, stream.shape, stride)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def array_from(data: torch.Tensor, stream: Stream) -> np.ndarray[Any, Any]:
    """Return the array whose bytes are `data`; errors as for `tensor_from`."""
    check_stream(stream)
    raw: Bytes = data.numpy()
    return raw.view(np.dtype(stream.dtype)).reshape(stream.shape)
