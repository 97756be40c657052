"""What a checkpoint consists of: keys and paths, frames, streams, packs, footers, manifests. Pure; see FORMAT.md."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from lightning_ft.membership.wire_fields import short

VERSION = 1
"""Of everything here. A reader refuses what is newer."""

CHUNK_BYTES = 1 << 20
"""A stream is cut into chunks of this size, the last may be shorter; part of the format, since hashes are of chunks."""

MAX_PACK_BYTES = 256_000_000
"""One object of this size can be uploaded again, or held in memory, without harm."""

MAX_DEPTH = 64
"""How far a checkpoint may be from its base: a chain that claims more is a loop or a mistake."""

LOSSLESS = "lossless"
GRADLOG = "gradlog"
SNAP = "snap"
BOUNDED = "bounded"
BITWISE = "bitwise"
CONTRACTS = {LOSSLESS: BITWISE, GRADLOG: BITWISE, SNAP: BITWISE, BOUNDED: "bounded"}
"""By mode, what a reader may rely on."""

REPLAYED = "replayed"
"""The codec of chunks of which nothing is stored: the optimizer makes them of the parent's; see `log`."""

MAX_INT = 2**63 - 1
PACK_HEADER_BYTES = 8
FRAME_BYTES = 104
HASH_BYTES = 16
NO_REFERENCE = bytes(HASH_BYTES)


# -- names ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which checkpoint: ordered by generation, then step; never by a clock.

    Attributes:
        generation: Of who wrote it; a later run of the job has a higher one. 0 to 2**63-1.
        step: After how many optimizer steps. 0 to 2**63-1.
    """

    generation: int
    step: int

    def __post_init__(self) -> None:
        for name in ("generation", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT:
                raise ValueError(f"{name}: expected an integer from 0 to 2**63-1, got {short(value)}")

    def __str__(self) -> str:
        return f"{self.generation:010d}-{self.step:012d}"

    @classmethod
    def parse(cls, name: str) -> Key | None:
        """Return the key that is written so; None if none is (there is one way to write each)."""
        match = re.fullmatch(r"([0-9]{10,19})-([0-9]{12,19})", name)
        if not match or max(numbers := (int(match[1]), int(match[2]))) > MAX_INT:
            return None
        key = cls(*numbers)
        return key if str(key) == name else None


MANIFESTS = "manifests/"
DATA = "data/"
LATEST = "LATEST"


def manifest_path(key: Key) -> str:
    """Return where the manifest is; that it is there is the commit."""
    return f"{MANIFESTS}{key}"


def manifest_key(path: str) -> Key | None:
    """Return whose manifest is at this path; None if it is no manifest's."""
    return Key.parse(path.removeprefix(MANIFESTS)) if path.startswith(MANIFESTS) else None


def data_key(path: str) -> Key | None:
    """Return which checkpoint's directory a file is in; None if in none."""
    return Key.parse(path.removeprefix(DATA).partition("/")[0]) if path.startswith(DATA) else None


def pack_path(key: Key, attempt: int, rank: int, number: int) -> str:
    """Return where a rank's pack is."""
    return f"{DATA}{key}/a{attempt}.r{rank}.{number}.pack"


def footer_path(key: Key, attempt: int, rank: int) -> str:
    """Return where a rank's footer is."""
    return f"{DATA}{key}/a{attempt}.r{rank}.footer"


# -- what it is made of ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One chunk of a stream: its row in the index. Its stored bytes are in a pack.

    Attributes:
        stream: Index into the checkpoint's streams.
        slot: Which of the stream's values: 0 is its bytes; what others mean is the mode's affair.
        start: Position of the chunk in the slot, in bytes.
        num_bytes: Its length when decoded, 0 to `CHUNK_BYTES`.
        stored_bytes: Its length in the pack.
        dtype: Of the stream; what the codec took as the width of an element.
        codec: Name of the way from the stored bytes to the decoded ones.
        reference: Hash of the decoded bytes that the codec needs of the parent; `NO_REFERENCE`: it needs none.
        decoded_hash: xxh3-128 of the decoded bytes.
        stored_crc: crc32c of the stored bytes.
    """

    stream: int
    slot: int
    start: int
    num_bytes: int
    stored_bytes: int
    dtype: str
    codec: str
    reference: bytes
    decoded_hash: bytes
    stored_crc: int

    @property
    def place(self) -> tuple[int, int, int]:
        """By which a chunk is the same chunk in another checkpoint."""
        return self.stream, self.slot, self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A string of bytes that the checkpoint holds: a tensor's, or another object's.

    Attributes:
        kind: "tensor" (torch), "array" (numpy), "tree" (JSON) or "pickle" (a torch.save block).
        name: Where in the state, for people.
        dtype: torch's name, numpy's `dtype.str`, or "bytes".
        shape: Of a tensor or an array; () for others.
        stride: In elements, if the tensor's elements are stored in an order other than the row-major one; else None.
        num_bytes: Length.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """One of a rank's packs, `number` from 0 on; its frames are the next `num_frames` of the document."""

    rank: int
    number: int
    num_frames: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """Another checkpoint, and the hash of its manifest, so that it is that one and no other of the same key."""

    key: Key
    hash: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Footer:
    """What one rank has written.

    Attributes:
        key: Of the checkpoint.
        attempt: How many saves of this key have failed before.
        rank: Of the writer.
        num_ranks: How many share the work.
        mode: By which rules the frames were made.
        parent: What their references are in; None: they have none.
        tensors_hash: Hash of the description of all streams that are tensors or arrays: all ranks must have the same.
        extra: For modes to fill.
        streams: All streams, from rank 0; empty from others.
        packs: Of this rank.
        frames: Of all these packs, in order.
    """

    key: Key
    attempt: int
    rank: int
    num_ranks: int
    mode: str
    parent: Ref | None
    tensors_hash: bytes
    streams: tuple[Stream, ...]
    packs: tuple[Pack, ...]
    frames: tuple[Frame, ...]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    magic: ClassVar[bytes] = b"LFTFOOTR"


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint; once it is stored, the checkpoint exists.

    Attributes:
        key: Of the checkpoint.
        attempt: The part of the packs' names that tells this save from failed ones.
        mode: By which rules it was made.
        contract: What a reader may rely on, in a word.
        parent: What the frames' references are in; None: this is a base.
        base: Where the chain of parents ends.
        depth: How many parents there are on the way.
        num_ranks: How many wrote it.
        state_hash: Of the whole decoded state; see `state_hash`.
        versions: Of the programs that wrote it, for people.
        extra: For modes to fill; readers ignore what they do not know in it.
        streams: Of which the state consists: tensors and arrays first, then one tree, then the pickles.
        packs: By rank and number.
        frames: Of all packs, in order.
    """

    key: Key
    attempt: int
    mode: str
    contract: str
    parent: Ref | None
    base: Key
    depth: int
    num_ranks: int
    state_hash: bytes
    versions: Mapping[str, str]
    extra: Mapping[str, Any]
    streams: tuple[Stream, ...]
    packs: tuple[Pack, ...]
    frames: tuple[Frame, ...]
    magic: ClassVar[bytes] = b"LFTMANIF"

    def located(self) -> Iterator[tuple[Pack, int, Frame]]:
        """Yield each frame with its pack and the offset of its stored bytes there."""
        return located(self.packs, self.frames)


def data_paths(manifest: Manifest) -> Iterator[str]:
    """Yield the paths of a checkpoint's own packs and footers."""
    for pack in manifest.packs:
        yield pack_path(manifest.key, manifest.attempt, pack.rank, pack.number)
    for rank in range(manifest.num_ranks):
        yield footer_path(manifest.key, manifest.attempt, rank)


def located(packs: Iterable[Pack], frames: Iterable[Frame]) -> Iterator[tuple[Pack, int, Frame]]:
    """Yield each frame with its pack and the offset of its bytes there; packs have as many frames as there are."""
    rest = iter(frames)
    for pack in packs:
        offset = PACK_HEADER_BYTES
        for _ in range(pack.num_frames):
            frame = next(rest)
            yield pack, offset, frame
            offset += frame.stored_bytes
