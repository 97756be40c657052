"""Frames, footers and manifests: bytes and back, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from lightning_ft.checkpoint import format as fmt
from lightning_ft.checkpoint import records
from lightning_ft.checkpoint.records import Footer, Frame, Key, Manifest, Pack, Ref, Stream
from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

HASH = bytes(range(16))
KEY = Key(3, 100)
STREAM = Stream("tensor", "weight", "float32", (2, 3), (1, 2), 24)
TREE = Stream("tree", "", "bytes", (), None, 10)


def make_frame(**changes: Any) -> Frame:
    frame = Frame(0, 0, 0, 24, 5, "float32", "blosc2", records.NO_REFERENCE, HASH, 7)
    return dataclasses.replace(frame, **changes)


FRAMES = (make_frame(), make_frame(stream=1, num_bytes=10, dtype="bytes", codec="raw", stored_bytes=10))
PACK = Pack(0, 0, 2, 8 + 15)


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        KEY,
        0,
        "lossless",
        "bitwise",
        None,
        KEY,
        0,
        1,
        HASH,
        {"torch": "2"},
        {"any": [1]},
        (STREAM, TREE),
        (PACK,),
        FRAMES,
    )
    return dataclasses.replace(manifest, **changes)


def make_footer(**changes: Any) -> Footer:
    footer = Footer(KEY, 1, 0, 2, "lossless", Ref(Key(3, 99), HASH), HASH, (STREAM, TREE), (PACK,), FRAMES)
    return dataclasses.replace(footer, **changes)


def sealed(body: bytes) -> bytes:
    """Give bytes the checksum that they need to be believed so far."""
    return body + fmt.hash_of(body)


def with_fields(change: Any, document: Any = None) -> bytes:
    """A manifest whose JSON was changed, with all checksums right."""
    data = fmt.dump_document(document or make_manifest())
    magic, version, json_bytes, num_frames = struct.unpack_from("<8sIIQ", data)
    contents = zlib.decompress(data[24:-16])
    fields = json.loads(contents[:json_bytes])
    text = change(fields)
    text = json.dumps(fields).encode() if text is None else text
    head = struct.pack("<8sIIQ", magic, version, len(text), num_frames)
    return sealed(head + zlib.compress(text + contents[json_bytes:]))


def with_contents(change: Any, *, claims: int = 0) -> bytes:
    """A manifest whose compressed part was changed; its head claims so many more frames."""
    data = fmt.dump_document(make_manifest())
    magic, version, json_bytes, num_frames = struct.unpack_from("<8sIIQ", data)
    return sealed(struct.pack("<8sIIQ", magic, version, json_bytes, num_frames + claims) + change(data[24:-16]))


def test_keys_are_ordered_by_generation_and_written_in_one_way() -> None:
    """A name parses back; a name that is written in another way is no key."""
    keys = [Key(0, 0), Key(0, 7), Key(1, 3), Key(10**10, 2**63 - 1)]
    assert sorted([keys[2], keys[3], keys[0], keys[1]]) == keys
    assert [Key.parse(str(key)) for key in keys] == keys
    for name in ("", "1-2", "00000000001-000000000002", "0000000001-000000000002x", "9" * 19 + "-" + "0" * 12):
        assert Key.parse(name) is None
    for wrong in ((-1, 0), (0, 2**63), (True, 0), ("1", 0)):
        with pytest.raises(ValueError, match="expected an integer"):
            Key(*wrong)  # type: ignore[arg-type]


def test_paths_tell_whose_they_are() -> None:
    """From a path of a manifest or a pack follows its key; other files are nobody's."""
    assert records.manifest_key(records.manifest_path(KEY)) == KEY
    assert records.manifest_key("manifests/readme") is None
    assert records.manifest_key("data/0000000003-000000000100") is None
    assert records.data_key(records.pack_path(KEY, 1, 2, 3)) == KEY
    assert records.data_key(records.footer_path(KEY, 1, 2)) == KEY
    assert records.data_key("data/other/x") is None
    assert records.data_key("manifests/0000000003-000000000100") is None


names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
frames = st.builds(
    Frame,
    stream=st.integers(0, 2**32 - 1),
    slot=st.integers(0, 2**32 - 1),
    start=st.integers(0, 2**62),
    num_bytes=st.integers(0, records.CHUNK_BYTES),
    stored_bytes=st.integers(0, 2**32 - 1),
    dtype=names,
    codec=names,
    reference=st.binary(min_size=16, max_size=16),
    decoded_hash=st.binary(min_size=16, max_size=16),
    stored_crc=st.integers(0, 2**32 - 1),
)


@hypothesis.given(frames)
def test_frame_round_trips(frame: Frame) -> None:
    """Every row reads as it was written, and has the size that they all have."""
    data = fmt.dump_frame(frame)
    assert len(data) == records.FRAME_BYTES
    assert fmt.load_frame(data, "p") == frame
    assert frame.place == (frame.stream, frame.slot, frame.start)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": ""}, {"codec": "c" * 21}, {"slot": 2**32}, {"stored_bytes": -1}, {"dtype": "d" * 25}],
)
def test_frame_that_does_not_fit_is_not_written(changes: dict[str, Any]) -> None:
    """A name or number outside of the format is an error of the writer."""
    with pytest.raises(ValueError, match="frame"):
        fmt.dump_frame(make_frame(**changes))


def rewritten(offset: int, new: bytes) -> bytes:
    data = bytearray(fmt.dump_frame(make_frame()))
    data[offset : offset + len(new)] = new
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (rewritten(24, b"a b"), "not a name"),
        (rewritten(48, b"\0" * 20), "not a name"),
        (rewritten(16, struct.pack("<I", records.CHUNK_BYTES + 1)), "at most"),
        (rewritten(8, b"\xff" * 8), "at most"),
    ],
)
def test_frame_that_lies_is_refused(data: bytes, text: str) -> None:
    """A row is believed only as far as it makes sense."""
    with pytest.raises(CheckpointDamagedError, match=text):
        fmt.load_frame(data, "a.pack")


def test_pack_begins_with_its_magic() -> None:
    """Anything else is no pack."""
    assert len(fmt.pack_header()) == records.PACK_HEADER_BYTES
    fmt.check_pack_header(fmt.pack_header(), "a.pack")
    with pytest.raises(CheckpointDamagedError, match=r"a\.pack.*begins with"):
        fmt.check_pack_header(b"LFTPACK2", "a.pack")


@pytest.mark.parametrize(
    "manifest",
    [
        make_manifest(),
        make_manifest(
            parent=Ref(Key(2, 500), HASH), base=Key(2, 400), depth=2, frames=(make_frame(reference=HASH), FRAMES[1])
        ),
        make_manifest(streams=(), packs=(), frames=()),
        make_manifest(
            num_ranks=3,
            packs=(Pack(0, 0, 1, 8 + 5), Pack(0, 1, 0, 8), Pack(2, 0, 1, 8 + 10)),
        ),
    ],
)
def test_manifest_round_trips(manifest: Manifest) -> None:
    """A manifest reads as it was written; its hash stands at its end."""
    data = fmt.dump_document(manifest)
    assert fmt.load_manifest(data, "m") == manifest
    assert fmt.document_hash(data) == fmt.hash_of(data[:-16])


def test_footer_round_trips() -> None:
    """A footer reads as it was written."""
    footer = make_footer()
    assert fmt.load_footer(fmt.dump_document(footer), "f") == footer


def test_frames_are_located_by_the_sizes_of_those_before() -> None:
    """A pack has no gaps, so the index needs no offsets."""
    assert [(offset, frame) for _, offset, frame in make_manifest().located()] == [
        (8, FRAMES[0]),
        (8 + 5, FRAMES[1]),
    ]


def test_each_flipped_bit_and_each_truncation_of_a_document_is_detected() -> None:
    """The checksum covers all that is before it; nothing is read from a document that does not match."""
    for document, load in ((make_manifest(), fmt.load_manifest), (make_footer(), fmt.load_footer)):
        data = fmt.dump_document(document)
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CheckpointDamagedError):
                load(bytes(flipped), "d")
        for length in range(len(data)):
            with pytest.raises(CheckpointDamagedError):
                load(data[:length], "d")
        with pytest.raises(CheckpointDamagedError):
            load(data + b"\0", "d")


def test_newer_version_is_refused_only_if_intact() -> None:
    """An intact document of version 2 says so; a damaged one is damaged, whatever its version seems to be."""
    body = bytearray(fmt.dump_document(make_manifest())[:-16])
    body[8] = 2
    with pytest.raises(UnsupportedCheckpointError, match="version 2"):
        fmt.load_manifest(sealed(bytes(body)), "m")
    with pytest.raises(CheckpointDamagedError):
        fmt.load_manifest(bytes(body) + HASH, "m")


def changed(name: str, value: object) -> Any:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = value

    return change


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (fmt.dump_document(make_footer()), "begins with"),
        (with_contents(lambda data: data + b"\0"), "that its head says"),
        (with_contents(lambda data: data[:-1]), "that its head says"),
        (with_contents(lambda data: data, claims=1), "that its head says"),
        (with_contents(lambda data: data, claims=-1), "that its head says"),
        (with_contents(lambda data: data, claims=2**50), "can't be"),
        (with_contents(lambda data: b"no" + data), "can't be decompressed"),
        (with_fields(lambda _: b"[1]"), "expected an object"),
        (with_fields(lambda _: b"[" * 100_000), "nested too deeply"),
        (with_fields(lambda _: b'{"key": NaN}'), "no NaN"),
        (with_fields(lambda _: '{"é": 1}'.encode()), "ascii"),
        (with_fields(lambda _: b"{"), "Expecting"),
        (with_fields(lambda fields: fields.pop("base") and None), "expected the fields"),
        (with_fields(changed("key", "3-100")), "expected generation and step"),
        (with_fields(changed("state_hash", "xx")), "32 hexadecimal"),
        (with_fields(changed("streams", {})), "expected a list"),
        (with_fields(changed("streams", [[1]])), "expected 6 values"),
        (with_fields(changed("streams", [["tensor", "n", "d", [1], [1, 1], 4]])), "as many strides"),
        (with_fields(changed("streams", [["tensor", "n", "d", [1] * 65, None, 4]])), "at most 64"),
        (with_fields(changed("streams", [["code", "n", "d", [], None, 4]])), "expected tensor"),
        (with_fields(changed("streams", [["tensor", "n", "d", [-1], None, 4]])), "integer"),
        (with_fields(changed("versions", [])), "expected an object"),
        (with_fields(changed("extra", 1)), "expected an object"),
        (with_fields(changed("packs", [[0, 0, 10**15, 8]])), "do not have"),
        (with_fields(changed("packs", [[0, 0, 2, 8]])), "bytes of its frames"),
        (with_fields(changed("packs", [[0, 1, 2, 23]])), "out of order"),
        (with_fields(changed("packs", [[0, 0, 2, 23], [0, 0, 0, 8]])), "out of order"),
        (with_fields(changed("packs", [[0, 0, 2, 23], [1, 0, 0, 8]])), "none of the 1"),
        (with_fields(changed("depth", 1)), "contradict"),
        (with_fields(changed("base", str(Key(3, 99)))), "contradict"),
        (fmt.dump_document(make_manifest(parent=Ref(KEY, HASH), base=Key(1, 1), depth=1)), "not older"),
        (fmt.dump_document(make_manifest(parent=Ref(Key(1, 1), HASH), base=Key(2, 1), depth=1)), "not older"),
        (fmt.dump_document(make_manifest(parent=Ref(Key(1, 1), HASH), base=Key(1, 1), depth=65)), "65 > 64"),
        (fmt.dump_document(make_manifest(frames=(make_frame(reference=HASH), FRAMES[1]))), "there is none"),
    ],
)
def test_manifest_that_lies_is_refused(data: bytes, text: str) -> None:
    """With right checksums, too, a manifest is believed only as far as it makes sense."""
    with pytest.raises(CheckpointDamagedError, match=text):
        fmt.load_manifest(data, "m")


def test_pack_above_the_limit_is_refused() -> None:
    """A pack of more than 256 MB is none, whatever its frames say."""
    frames = (make_frame(stored_bytes=300_000_000),)
    packs = (Pack(0, 0, 1, 8 + 300_000_000),)
    with pytest.raises(CheckpointDamagedError, match="bytes of its frames"):
        fmt.load_manifest(fmt.dump_document(make_manifest(frames=frames, packs=packs)), "m")


@pytest.mark.parametrize("changes", [{"rank": 2}, {"rank": 1}])
def test_footer_of_another_rank_is_refused(changes: dict[str, Any]) -> None:
    """A footer's packs are its rank's, and its rank is one of the ranks."""
    with pytest.raises(CheckpointDamagedError, match="packs of another"):
        fmt.load_footer(fmt.dump_document(make_footer(**changes)), "f")


def test_hash_of_the_state_depends_on_what_and_in_which_order() -> None:
    """Descriptions and chunks count, the names of codecs and packs do not."""
    one, other = fmt.hash_of(b"1"), fmt.hash_of(b"2")
    large = dataclasses.replace(STREAM, num_bytes=records.CHUNK_BYTES + 1)
    chunks = {(0, 0): one, (0, records.CHUNK_BYTES): other}
    whole = fmt.state_hash([large], chunks)
    assert whole == fmt.state_hash([large], dict(reversed(chunks.items())))
    assert whole != fmt.state_hash([large], {(0, 0): other, (0, records.CHUNK_BYTES): one})
    assert whole != fmt.state_hash([dataclasses.replace(large, dtype="int32")], chunks)
    assert fmt.tensors_hash([STREAM, TREE]) == fmt.tensors_hash([STREAM])
    assert fmt.tensors_hash([STREAM]) != fmt.tensors_hash([large])


def test_json_has_one_form() -> None:
    """Names are sorted, so equal objects have equal hashes; NaN is not JSON."""
    assert fmt.dump_json({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'
    with pytest.raises(ValueError, match="JSON"):
        fmt.dump_json(float("nan"))
