"""A nested state as JSON and streams of bytes, and back. FORMAT.md, The tree.

What JSON knows is itself. An object with one entry stands for what JSON does not know, so a dictionary is one too:
`{"dict": [key, value, ...]}`. Tensors and arrays are streams; what is left is a block of `torch.save`.

What is kept: types of keys, order, tuples, every bit of a float, `Parameter`, `requires_grad`, the order of a tensor's
elements in memory, and attributes of an OrderedDict (a state_dict's `_metadata`). Tensors that are the same bytes read
in the same way are stored once and share their memory again, as tied weights do. Other views of common memory become
tensors of their own. Every tensor comes back in the host's memory.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_ft.checkpoint.format import dump_json, parse_json
from lightning_ft.checkpoint.records import Stream
from lightning_ft.checkpoint.tensors import (
    Bytes,
    array_from,
    bytes_of_array,
    bytes_of_tensor,
    describe_array,
    describe_tensor,
    is_plain_array,
    is_plain_tensor,
    memory_of,
    tensor_from,
)
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

_JSON_INT = 2**63


class FlatState:
    """A state, taken apart: `streams[i]` describes the bytes that `data(i, start, end)` returns.

    Args:
        state: Dictionaries, lists, tuples, tensors and whatever else, nested.

    Raises:
        ValueError: It contains itself, is nested too deeply, or an object in it can't be pickled.
    """

    def __init__(self, state: object) -> None:
        self._values: list[torch.Tensor | np.ndarray[Any, Any] | None] = []
        self._held: dict[int, tuple[Bytes, int]] = {}
        self._streams: list[Stream] = []
        self._pickles: list[tuple[str, bytes]] = []
        self._known: dict[tuple[object, ...], int] = {}
        try:
            tree = self._encode(state, ())
            text = dump_json(tree)
        except RecursionError:
            raise ValueError("a checkpoint's state must not contain itself or be nested hundreds deep") from None
        self._blobs = [text, *(data for _, data in self._pickles)]
        names = ["", *(name for name, _ in self._pickles)]
        for kind, name, data in zip(["tree", *["pickle"] * len(self._pickles)], names, self._blobs, strict=True):
            self._streams.append(Stream(kind, name, "bytes", (), None, len(data)))

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Tensors and arrays in the order of the tree, then the tree, then the pickles."""
        return tuple(self._streams)

    def data(self, index: int, start: int = 0, end: int | None = None) -> Bytes:
        """Return a stream's bytes, or some of them; a view where the memory allows it."""
        end = self._streams[index].num_bytes if end is None else end
        if index in self._held:
            held, first = self._held[index]
            return held[start - first : end - first]
        return self._whole(index)[start:end]

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return the tensor that a stream was made of; None if it was none."""
        value = self._values[index] if index < len(self._values) else None
        return value if isinstance(value, torch.Tensor) else None

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the stream that holds this tensor's bytes; None: it is not in the state, or has none."""
        memory = memory_of(tensor)
        return None if memory is None else self._known.get(memory)

    def hold(self, index: int, start: int, data: Bytes) -> None:
        """Have `data` answer for a part of a stream from now on, whatever becomes of the rest of it."""
        self._held[index] = data, start

    def let_go(self) -> None:
        """Forget the objects that the state was made of; what is not held can't be read any more."""
        self._values = [None] * len(self._values)

    def _whole(self, index: int) -> Bytes:
        if index >= len(self._values):
            return np.frombuffer(self._blobs[index - len(self._values)], np.uint8)
        value = self._values[index]
        assert value is not None, "what was not held is asked for"
        return bytes_of_tensor(value) if isinstance(value, torch.Tensor) else bytes_of_array(value)

    def _encode(self, value: object, path: tuple[object, ...]) -> object:
        """Turn an object into JSON; its exact class decides, since a subclass may hold more than its base."""
        encoder = _ENCODERS.get(type(value))
        return encoder(self, value, path) if encoder else self._encode_stream(value, path)

    def _encode_int(self, value: int, path: tuple[object, ...]) -> object:
        return value if -_JSON_INT <= value < _JSON_INT else {"int": hex(value)}

    def _encode_float(self, value: float, path: tuple[object, ...]) -> object:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}

    def _encode_bytes(self, value: bytes, path: tuple[object, ...]) -> object:
        return {"bytes": base64.b64encode(value).decode("ascii")}

    def _encode_tuple(self, value: tuple[object, ...], path: tuple[object, ...]) -> object:
        return {"tuple": self._encode_all(value, path)}

    def _encode_dict(self, value: dict[Any, Any], path: tuple[object, ...]) -> object:
        return {"dict": self._encode_items(value, path)}

    def _encode_ordered_dict(self, value: OrderedDict[Any, Any], path: tuple[object, ...]) -> object:
        return {"ordered_dict": [self._encode_items(value, path), self._encode_items(vars(value), path)]}

    def _encode_all(self, values: Iterable[object], path: tuple[object, ...]) -> list[object]:
        return [self._encode(value, (*path, index)) for index, value in enumerate(values)]

    def _encode_items(self, items: dict[Any, Any], path: tuple[object, ...]) -> list[object]:
        encoded: list[object] = []
        for key, value in items.items():
            encoded += (self._encode(key, (*path, "key")), self._encode(value, (*path, key)))
        return encoded

    def _encode_stream(self, value: object, path: tuple[object, ...]) -> object:
        name = "/".join(str(step) for step in path).encode("ascii", "backslashreplace").decode("ascii")
        if is_plain_tensor(value):
            assert isinstance(value, torch.Tensor)
            memory = memory_of(value)
            index = None if memory is None else self._known.get(memory)
            if index is None:
                index = self._add(value, describe_tensor(value, name))
                if memory is not None:
                    self._known[memory] = index
            return {"parameter" if type(value) is torch.nn.Parameter else "tensor": [index, value.requires_grad]}
        if is_plain_array(value):
            assert isinstance(value, np.ndarray | np.generic)
            array = np.asarray(value)
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {kind: self._add(array, describe_array(array, name))}
        return self._encode_pickle(value, name)

    def _add(self, value: torch.Tensor | np.ndarray[Any, Any], stream: Stream) -> int:
        self._values.append(value)
        self._streams.append(stream)
        return len(self._streams) - 1

    def _encode_pickle(self, value: object, name: str) -> object:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
        except RecursionError:
            raise
        except Exception as error:
            raise ValueError(f"a checkpoint can't hold {type(value)} at {name!r}: {error}") from error
        self._pickles.append((name, buffer.getvalue()))
        return {"pickle": len(self._pickles) - 1}


_ENCODERS: dict[type, Callable[[FlatState, Any, tuple[object, ...]], object]] = {
    type(None): lambda _, value, __: value,
    bool: lambda _, value, __: value,
    str: lambda _, value, __: value,
    int: FlatState._encode_int,
    float: FlatState._encode_float,
    bytes: FlatState._encode_bytes,
    list: FlatState._encode_all,
    tuple: FlatState._encode_tuple,
    dict: FlatState._encode_dict,
    OrderedDict: FlatState._encode_ordered_dict,
}


def unflatten(streams: Sequence[Stream], contents: Sequence[torch.Tensor], piece: str, *, weights_only: bool) -> Any:
    """Put a state together.

    Args:
        streams: As `FlatState` made them.
        contents: The bytes of each (uint8, one dimension); the tensors take over their memory.
        piece: The manifest's path, for errors.
        weights_only: Whether blocks of `torch.save` may only hold what `torch.load(weights_only=True)` allows.

    Raises:
        CheckpointDamagedError: They do not make a state.
        UnsupportedCheckpointError: A block needs more than `weights_only` allows.
    """
    trees = [index for index, stream in enumerate(streams) if stream.kind == "tree"]
    if len(trees) != 1 or any(stream.kind not in ("tensor", "array") for stream in streams[: trees[0]]):
        raise CheckpointDamagedError("there is not one tree after the tensors", piece)
    if any(stream.kind != "pickle" for stream in streams[trees[0] + 1 :]):
        raise CheckpointDamagedError("after the tree there is more than pickles", piece)
    decoder = _Decoder(streams, contents, trees[0] + 1, weights_only=weights_only)
    try:
        return decoder.decode(parse_json(contents[trees[0]].numpy().tobytes()))
    except (ValueError, TypeError, LookupError, RuntimeError, struct.error) as error:
        raise CheckpointDamagedError(f"its tree is none: {error!r}", piece) from error


class _Decoder:
    """Turns JSON back into what it stands for; raises ValueError and its like where it stands for nothing."""

    def __init__(
        self, streams: Sequence[Stream], contents: Sequence[torch.Tensor], first_pickle: int, *, weights_only: bool
    ) -> None:
        self._streams = streams
        self._contents = contents
        self._first_pickle = first_pickle
        self._weights_only = weights_only
        self._kinds = {
            "int": lambda value: int(value, 16),
            "float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
            "bytes": lambda value: base64.b64decode(value, validate=True),
            "tuple": lambda value: tuple(map(self.decode, _list(value))),
            "dict": lambda value: dict(self._items(value)),
            "ordered_dict": self._ordered_dict,
            "tensor": self._tensor,
            "parameter": self._parameter,
            "array": self._array,
            "scalar": lambda value: self._array(value)[()],
            "pickle": self._pickle,
        }

    def decode(self, node: object) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        return self._kinds[kind](value)

    def _items(self, value: object) -> Iterable[tuple[Any, Any]]:
        items = _list(value)
        return zip(map(self.decode, items[::2]), map(self.decode, items[1::2]), strict=True)

    def _ordered_dict(self, value: object) -> OrderedDict[Any, Any]:
        items, attributes = _list(value)
        found = OrderedDict(self._items(items))
        for name, attribute in self._items(attributes):
            setattr(found, name, attribute)
        return found

    def _index(self, value: object, kind: str) -> int:
        if type(value) is not int or not 0 <= value < len(self._streams) or self._streams[value].kind != kind:
            raise ValueError(f"no {kind} is stream {value!r}")
        return value

    def _tensor(self, value: object) -> torch.Tensor:
        number, requires_grad = _list(value)
        index = self._index(number, "tensor")
        return tensor_from(self._contents[index], self._streams[index]).requires_grad_(_flag(requires_grad))

    def _parameter(self, value: object) -> torch.nn.Parameter:
        tensor = self._tensor(value)
        return torch.nn.Parameter(tensor.detach(), tensor.requires_grad)

    def _array(self, value: object) -> np.ndarray[Any, Any]:
        index = self._index(value, "array")
        return array_from(self._contents[index], self._streams[index])

    def _pickle(self, value: object) -> Any:
        if type(value) is not int or value < 0:
            raise ValueError(f"no pickle is {value!r}")
        index = self._index(self._first_pickle + value, "pickle")
        buffer = io.BytesIO(self._contents[index].numpy().tobytes())
        try:
            return torch.load(buffer, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            if not self._weights_only:
                raise ValueError(str(error)) from None
            raise UnsupportedCheckpointError(
                f"the checkpoint's {self._streams[index].name!r} is a pickle that weights_only=True does not allow. "
                f"If you trust who wrote it, load with weights_only=False. {error}"
            ) from error


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {value!r}")  # noqa: TRY004 - it is data, not an argument
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")  # noqa: TRY004 - it is data, not an argument
    return value
