"""States as JSON and streams: what comes back is what was given."""

from __future__ import annotations

import argparse
import collections
import math
import struct
import warnings
from collections import OrderedDict
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from checkpoint_twin import assert_same, tensor_bytes

from lightning_ft.checkpoint.format import dump_json
from lightning_ft.checkpoint.records import Stream
from lightning_ft.checkpoint.tensors import DTYPES, element_bytes, is_dense
from lightning_ft.checkpoint.tree import FlatState, unflatten
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError


def round_trip(state: Any, *, weights_only: bool = True) -> Any:
    flat = FlatState(state)
    contents = [torch.from_numpy(flat.data(index).copy()) for index in range(len(flat.streams))]
    assert [len(content) for content in contents] == [stream.num_bytes for stream in flat.streams]
    return unflatten(flat.streams, contents, "m", weights_only=weights_only)


def kinds(state: Any) -> list[str]:
    return [stream.kind for stream in FlatState(state).streams]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from(
        [10**1000, -(2**63), 2**63, -0.0, math.inf, "\ud800", struct.unpack(">d", b"\x7f\xf0" + b"\1" * 6)[0]]
    )
)
keys = st.integers() | st.text() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(trees)
def test_nested_objects_keep_their_types(state: Any) -> None:
    """Integer keys, tuples, order, big integers, every bit of a NaN and lone surrogates come back; without pickle."""
    assert kinds(state) == ["tree"]
    assert_same(round_trip(state), state)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensor_of_each_dtype_keeps_every_bit(name: str) -> None:
    """All byte patterns come back, NaN payloads included; no dtype needs pickle except the quantized ones."""
    dtype = DTYPES[name]
    raw = torch.arange(256, dtype=torch.uint8).repeat(16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.empty(0, dtype=dtype).set_(
                raw.untyped_storage(), 0, (16, raw.numel() // dtype.itemsize // 16)
            )
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch makes no tensor of it: {error}")
    if tensor.is_quantized:
        pytest.skip("goes through torch.save, with its scale")
    got = round_trip({"t": tensor})["t"]
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert got.untyped_storage().tolist() == raw.tolist()
    assert kinds({"t": tensor}) == ["tensor", "tree"]
    assert element_bytes(name) in (1, 2, 4, 8)


BASE = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int16),
        BASE.transpose(0, 2),
        BASE[:, ::2],
        BASE[1:, 1:, 1:],
        torch.ones(1).expand(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        torch.tensor([True, False]),
        torch.tensor(1.0, requires_grad=True),
        torch.randn(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        torch.randn(3, 4).to_sparse(),
    ],
)
def test_awkward_tensors_come_back(tensor: torch.Tensor) -> None:
    """Zero sizes, views, broadcasts, conjugates, parameters and sparse ones keep value, class and `requires_grad`."""
    assert_same(round_trip([tensor]), [tensor])


def test_order_of_elements_in_memory_is_kept_where_it_is_dense() -> None:
    """channels_last weights come back so; a view with gaps comes back row by row."""
    weights = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got, gaps = round_trip([weights, BASE[:, ::2]])
    assert got.stride() == weights.stride()
    assert gaps.is_contiguous()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch uses it to read quantized tensors
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # told once in a process
def test_what_is_not_plain_goes_through_torch_save() -> None:
    """Sparse and quantized tensors, sets and other objects are blocks, read by torch's own restricted reader."""
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    state = {"s": torch.eye(2).to_sparse(), "q": quantized, "set": {1, 2}, "size": torch.Size([1]), "d": torch.float16}
    assert kinds(state) == ["tree", *["pickle"] * 5]
    got = round_trip(state)
    assert torch.equal(got["q"].int_repr(), quantized.int_repr())
    assert (got["set"], got["size"], got["d"]) == ({1, 2}, torch.Size([1]), torch.float16)
    assert type(got["size"]) is torch.Size


Pair = collections.namedtuple("Pair", "one two")  # noqa: PYI024 - as users have them


def test_block_that_needs_more_than_weights_only_is_refused_by_name() -> None:
    """A class of one's own is not loaded unless the caller says so; the error says where it is and what to do."""
    state = {"hyper_parameters": {"args": argparse.Namespace(a=1)}, "pair": Pair(1, 2)}
    with pytest.raises(UnsupportedCheckpointError, match=r"hyper_parameters/args.*weights_only=False"):
        round_trip(state)
    assert_same(round_trip(state, weights_only=False), state)


def test_object_that_can_not_be_stored_is_named() -> None:
    """What torch.save refuses is an error that says where it is."""
    with pytest.raises(ValueError, match="callbacks/x"):
        FlatState({"callbacks": {"x": lambda: None}})


def test_state_that_contains_itself_is_refused() -> None:
    """A circle is found before anything is written."""
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(ValueError, match="contain itself"):
        FlatState(state)


def test_attributes_of_a_state_dict_are_kept() -> None:
    """`_metadata`, by which modules know the version of what they load, is there."""
    module = torch.nn.BatchNorm1d(3)
    state = module.state_dict()
    assert_same(round_trip(state), state)
    assert round_trip(state)._metadata[""]["version"] == 2


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    """Two names for one weight share memory after loading, too; other views of it are stored by themselves."""
    weight = torch.randn(3, 4)
    flat = FlatState({"a": weight, "b": weight.detach(), "part": weight[1:], "turned": weight.t(), "e": torch.empty(0)})
    assert [stream.kind for stream in flat.streams] == ["tensor"] * 4 + ["tree"]
    got = round_trip({"a": weight, "b": weight.detach(), "part": weight[1:]})
    got["a"][0, 0] = 7
    assert got["b"][0, 0] == 7
    assert torch.equal(got["part"], weight[1:])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.array(3, np.int8),
        np.zeros((0, 2), ">f4"),
        np.array([1 + 2j]),
        np.array([True]),
        np.arange(3, dtype=np.float16),
        np.arange(3, dtype=np.longdouble),
    ],
    ids=lambda array: array.dtype.str,
)
def test_numpy_arrays_need_no_pickle(array: np.ndarray[Any, Any]) -> None:
    """Arrays and scalars of numbers are streams; random state of numpy and Python comes back."""
    assert kinds([array, array.dtype.type(1)]) == ["array", "array", "tree"]
    got, scalar = round_trip([array, array.dtype.type(1)])
    assert_same(got, array)
    assert type(scalar) is array.dtype.type
    got[...] = 0  # it is writable


def test_memory_is_not_copied_where_it_need_not_be() -> None:
    """The bytes of a dense tensor are a view of it."""
    weights = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    data = FlatState([weights]).data(0)
    weights += 1
    assert data.tobytes() == np.ones(120, np.float32).tobytes()


@hypothesis.given(st.lists(st.integers(0, 3), max_size=4), st.data())
def test_dense_is_what_has_no_gaps_and_no_overlap(shape: list[int], data: st.DataObject) -> None:
    """Compared with counting which elements are reached."""
    stride = [data.draw(st.integers(0, 8)) for _ in shape]
    offsets = [
        sum(step * position for step, position in zip(stride, place, strict=True)) for place in np.ndindex(*shape)
    ]
    if offsets:
        assert is_dense(tuple(shape), tuple(stride)) == (sorted(offsets) == list(range(len(offsets))))


TREE = Stream("tree", "", "bytes", (), None, 0)
TENSOR = Stream("tensor", "t", "float32", (2,), None, 8)


@pytest.mark.parametrize(
    "node",
    [
        {"tensor": [1, False]},
        {"tensor": [-1, False]},
        {"tensor": [True, False]},
        {"tensor": 0},
        {"tensor": [0, 1]},
        {"parameter": [0]},
        {"array": 0},
        {"scalar": 0},
        {"pickle": 0},
        {"pickle": -1},
        {"pickle": True},
        {"dict": [1]},
        {"dict": [[], 1]},
        {"dict": 1},
        {"tuple": "ab"},
        {"ordered_dict": []},
        {"ordered_dict": [[], [1, 2]]},
        {"int": 5},
        {"float": "00"},
        {"bytes": "!"},
        {"eval": "1"},
        {},
        {"int": "1", "float": "1"},
    ],
    ids=str,
)
def test_tree_that_makes_no_sense_is_damage(node: Any) -> None:
    """Whatever the JSON holds, it becomes a state or an error, never another exception."""
    text = dump_json([node])
    contents = [torch.zeros(8, dtype=torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    with pytest.raises(CheckpointDamagedError, match="m is damaged: its tree is none"):
        unflatten([TENSOR, TREE], contents, "m", weights_only=True)


@pytest.mark.parametrize(
    "streams",
    [[], [TENSOR], [TREE, TENSOR], [TREE, TREE], [Stream("pickle", "", "bytes", (), None, 0), TREE]],
)
def test_streams_in_another_order_are_damage(streams: list[Stream]) -> None:
    """Tensors, one tree, pickles: an index must mean the same to everybody."""
    contents = [torch.zeros(stream.num_bytes, dtype=torch.uint8) for stream in streams]
    with pytest.raises(CheckpointDamagedError):
        unflatten(streams, contents, "m", weights_only=True)


@pytest.mark.parametrize(
    "stream",
    [
        Stream("tensor", "", "float33", (2,), None, 8),
        Stream("tensor", "", "float32", (3,), None, 8),
        Stream("tensor", "", "float32", (0, 2**63 - 1), None, 0),
        Stream("tensor", "", "float32", (2,), (2**62,), 8),
        Stream("tensor", "", "float32", (1, 2), (0, 0), 8),
        Stream("array", "", "O8", (1,), None, 8),
        Stream("array", "", "<f3", (1,), None, 3),
        Stream("array", "", "<f8", (2,), None, 8),
    ],
    ids=str,
)
def test_stream_that_is_no_tensor_is_damage(stream: Stream) -> None:
    """Shape, stride and dtype must fit the bytes, so nothing outside of them is ever touched."""
    text = dump_json({stream.kind: [0, False] if stream.kind == "tensor" else 0})
    contents = [torch.zeros(8, dtype=torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    with pytest.raises(CheckpointDamagedError):
        unflatten([stream, TREE], contents, "m", weights_only=True)


def test_deep_tree_is_damage() -> None:
    """Nesting without end is neither believed nor followed."""
    text = b'{"tuple":[' * 5000 + b"]}" * 5000
    with pytest.raises(CheckpointDamagedError):
        unflatten([TREE], [torch.frombuffer(bytearray(text), dtype=torch.uint8)], "m", weights_only=True)


def test_twin_compares_bits() -> None:
    """The comparison these tests rely on tells NaNs and negative zeros apart."""
    with pytest.raises(AssertionError):
        assert_same([-0.0], [0.0])
    assert tensor_bytes(torch.tensor(-0.0)) != tensor_bytes(torch.tensor(0.0))


def test_integer_of_any_length_comes_back() -> None:
    """Python refuses to write and read decimal numbers of more than 4300 digits; ours are hexadecimal."""
    assert round_trip([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]
