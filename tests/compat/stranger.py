"""A reader of version 1, written from FORMAT.md alone: it uses what that page names, and nothing of this package.

Errors are not its strong side: what is damaged ends in an assertion.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pathlib
import struct
import zlib
from collections import OrderedDict
from typing import Any

import blosc2
import crc32c
import numpy as np
import torch
import xxhash

CHUNK_BYTES = 1 << 20
NO_REFERENCE = bytes(16)
ROW = struct.Struct("<IIQII24s20s16s16sI")


def read_document(path: pathlib.Path) -> tuple[dict[str, Any], list[tuple[Any, ...]], bytes]:
    """Return a manifest's JSON, its index, and the hash that others refer to it by."""
    data = path.read_bytes()
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    magic, version, json_bytes, num_frames = struct.unpack_from("<8sIIQ", data)
    assert (magic, version) == (b"LFTMANIF", 1)
    stream = zlib.decompressobj()
    body = stream.decompress(data[24:-16], json_bytes + ROW.size * num_frames)
    assert len(body) == json_bytes + ROW.size * num_frames
    assert not stream.decompress(stream.unconsumed_tail, 1)
    assert stream.eof
    assert not stream.unused_data
    fields = json.loads(body[:json_bytes].decode("ascii"))
    assert fields["key"] == path.name
    index = [
        (*numbers, dtype.rstrip(b"\0").decode(), codec.rstrip(b"\0").decode(), reference, decoded, crc)
        for *numbers, dtype, codec, reference, decoded, crc in ROW.iter_unpack(body[json_bytes:])
    ]
    return fields, index, data[-16:]


def read(run: pathlib.Path, key: str) -> Any:
    """Return the state of a checkpoint."""
    chain = [read_document(run / "manifests" / key)]
    while (parent := chain[-1][0]["parent"]) is not None:
        chain.append(read_document(run / "manifests" / parent["key"]))
        assert parent["hash"] == chain[-1][2].hex()
        assert chain[-1][0]["depth"] == chain[-2][0]["depth"] - 1
    contents: dict[tuple[int, int], tuple[np.ndarray[Any, Any], bytes]] = {}
    for manifest, index, _ in reversed(chain):
        contents = decode(run, manifest, index, contents)
    streams = chain[0][0]["streams"]
    whole = xxhash.xxh3_128()
    joined = []
    for number, row in enumerate(streams):
        whole.update(json.dumps(row, separators=(",", ":")).encode("ascii"))
        chunks = [contents[number, start] for start in range(0, row[5], CHUNK_BYTES)]
        for _, decoded in chunks:
            whole.update(decoded)
        joined.append(np.concatenate([data for data, _ in chunks]) if chunks else np.empty(0, np.uint8))
    assert whole.hexdigest() == chain[0][0]["state_hash"]
    return Tree(streams, joined).state()


def decode(
    run: pathlib.Path, manifest: dict[str, Any], index: list[tuple[Any, ...]], parent: dict[tuple[int, int], Any]
) -> dict[tuple[int, int], Any]:
    """Return the chunks of a checkpoint with their hashes, by stream and start, given its parent's."""
    found: dict[tuple[int, int], Any] = {}
    gradients: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
    replayed = []
    rows = iter(index)
    for rank, number, num_frames, num_bytes in manifest["packs"]:
        name = f"data/{manifest['key']}/a{manifest['attempt']}.r{rank}.{number}.pack"
        pack = (run / name).read_bytes()
        assert len(pack) == num_bytes
        assert pack[:8] == b"LFTPACK1"
        position = 8
        for _ in range(num_frames):
            stream, slot, start, length, stored_bytes, _, codec, reference, decoded, crc = next(rows)
            stored, position = pack[position : position + stored_bytes], position + stored_bytes
            assert crc32c.crc32c(stored) == crc
            before, held = (None, NO_REFERENCE) if slot else parent.get((stream, start), (None, NO_REFERENCE))
            assert reference in (NO_REFERENCE, held)
            if codec == "replayed":
                replayed.append((stream, start, decoded))
                continue
            data = decode_chunk(codec, stored, length, before)
            assert xxhash.xxh3_128_digest(data.tobytes()) == decoded
            if slot:
                gradients.setdefault((slot, stream), []).append((start, data))
            else:
                found[stream, start] = data, decoded
    if replayed:
        after = replay(manifest, parent, gradients)
        for stream, start, decoded in replayed:
            data = after[stream][start : start + CHUNK_BYTES]
            assert xxhash.xxh3_128_digest(data.tobytes()) == decoded
            found[stream, start] = data, decoded
    return found


def decode_chunk(codec: str, stored: bytes, length: int, before: Any) -> np.ndarray[Any, Any]:
    """Return a chunk's bytes."""
    if codec == "raw":
        return np.frombuffer(stored, np.uint8)
    if codec == "unchanged":
        return before
    assert blosc2.get_cbuffer_sizes(stored)[:2] == (length, len(stored))
    data = np.frombuffer(blosc2.decompress2(stored), np.uint8)
    if codec == "xor-blosc2":
        return data ^ before
    if codec == "add-blosc2":
        return (before.view(np.float32) + data.view(np.float32)).view(np.uint8)
    assert codec == "blosc2"
    return data


def replay(manifest: dict[str, Any], parent: dict[tuple[int, int], Any], gradients: dict[Any, Any]) -> dict[int, Any]:
    """Return the bytes of the streams that the optimizer changes, after the steps of the log."""
    streams, extra = manifest["streams"], manifest["extra"]
    items = [item for group in extra["groups"] for item in group]
    owned = {at for number, state in items for at in (number, *state.values())}
    parts: dict[int, list[Any]] = {number: [] for number in owned}
    for (number, start), (data, _) in parent.items():
        if number in owned:
            parts[number].append((start, data))
    tensors = {number: joined(parts[number], streams[number][2], streams[number]) for number in owned}
    parameters = {number: torch.nn.Parameter(tensors[number]) for number, _ in items}
    groups = [{"params": [parameters[number] for number, _ in group]} for group in extra["groups"]]
    optimizer = getattr(torch.optim, extra["optimizer"])(groups)
    for number, state in items:
        optimizer.state[parameters[number]] = {name: tensors[at] for name, at in state.items()}
    for slot, step in enumerate(extra["steps"], 1):
        if not step["skipped"]:
            own = {
                number: joined(gradients[slot, number], dtype, streams[number]) for number, dtype in step["gradients"]
            }
            take(optimizer, parameters, step, own)
    after = {number: parameter.detach() for number, parameter in parameters.items()}
    for number, state in items:
        after |= {at: optimizer.state[parameters[number]][name] for name, at in state.items()}
    return {number: bytes_of(value) for number, value in after.items()}


def take(
    optimizer: torch.optim.Optimizer,
    parameters: dict[int, torch.nn.Parameter],
    step: dict[str, Any],
    gradients: dict[int, torch.Tensor],
) -> None:
    """Take one step."""
    for group, options in zip(optimizer.param_groups, step["options"], strict=True):
        group.update({name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})
    optimizer.zero_grad()
    for number, gradient in gradients.items():
        parameters[number].grad = gradient
        if step["clip"] is not None:
            factor = torch.tensor(step["clip"]["max_norm"]) / (torch.tensor(step["clip"]["total_norm"]) + 1e-6)
            gradient.mul_(factor.clamp(max=1.0))
    optimizer.step()


def joined(parts: list[Any], dtype: str, stream: list[Any]) -> torch.Tensor:
    """Return the tensor of some chunks, each with its start."""
    data = np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])])
    return as_tensor(data, dtype, stream[3], stream[4])


def as_tensor(data: np.ndarray[Any, Any], dtype: str, shape: list[int], stride: list[int] | None) -> torch.Tensor:
    """Return the tensor of some bytes."""
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.from_numpy(data.copy()).view(getattr(torch, dtype))
    return flat.reshape(shape) if stride is None else flat.as_strided(shape, stride)


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's bytes in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


class Tree:
    """Puts a state together from its streams."""

    def __init__(self, streams: list[Any], contents: list[np.ndarray[Any, Any]]) -> None:
        self.streams = streams
        self.contents = contents
        self.made: dict[int, torch.Tensor] = {}
        self.tree = next(number for number, row in enumerate(streams) if row[0] == "tree")

    def state(self) -> Any:
        """Return it."""
        return self.node(json.loads(self.contents[self.tree].tobytes().decode("ascii")))

    def node(self, node: Any) -> Any:
        """Return what a node of the tree stands for."""
        if isinstance(node, list):
            return [self.node(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        return getattr(self, f"of_{kind}")(value)

    def of_dict(self, items: list[Any]) -> dict[Any, Any]:
        return {self.node(key): self.node(value) for key, value in zip(items[::2], items[1::2], strict=True)}

    def of_ordered_dict(self, value: list[Any]) -> OrderedDict[Any, Any]:
        found = OrderedDict(self.of_dict(value[0]))
        vars(found).update(self.of_dict(value[1]))
        return found

    def of_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self.node(item) for item in items)

    def of_int(self, text: str) -> int:
        return int(text, 16)

    def of_float(self, text: str) -> float:
        return float(struct.unpack(">d", bytes.fromhex(text))[0])

    def of_bytes(self, text: str) -> bytes:
        return base64.b64decode(text)

    def of_tensor(self, value: list[Any]) -> torch.Tensor:
        number, requires_grad = value
        _, _, dtype, shape, stride, num_bytes = self.streams[number]
        assert math.prod(shape) * getattr(torch, dtype).itemsize == num_bytes
        if number not in self.made:
            self.made[number] = as_tensor(self.contents[number], dtype, shape, stride)
        return self.made[number].detach().requires_grad_(requires_grad)

    def of_parameter(self, value: list[Any]) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.of_tensor([value[0], False]), value[1])

    def of_array(self, number: int) -> np.ndarray[Any, Any]:
        return self.contents[number].view(np.dtype(self.streams[number][2])).reshape(self.streams[number][3])

    def of_scalar(self, number: int) -> Any:
        return self.of_array(number)[()]

    def of_pickle(self, number: int) -> Any:
        return torch.load(io.BytesIO(self.contents[self.tree + 1 + number].tobytes()), weights_only=True)
