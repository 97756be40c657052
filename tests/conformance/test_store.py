"""What every store promises, tried on each kind of storage."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ft.checkpoint import Writer
from lightning_ft.checkpoint.claims import claim_generation, claimed_generations
from lightning_ft.checkpoint.store import Store, open_store
from lightning_ft.checkpoint.stores import s3
from lightning_ft.cli import main
from lightning_ft.errors import AlreadyThereError, StaleWriterError, StoreError
from tests.conformance.servers import Network, WebHdfs, s3_server, serve

pytestmark = pytest.mark.usefixtures("s3_url")  # started before the check of each test for processes it left

CREDENTIALS = {"key": "nobody", "secret": "nothing", "client_kwargs": {"region_name": "us-east-1"}}


ONCE_MORE = {"retries": {"max_attempts": 1}}


class PlainFiles(LocalFileSystem):
    """A file system that can rename, but not refuse to overwrite: as SFTP and SMB."""

    protocol = "plainfiles"


class PlainObjects(MemoryFileSystem):
    """A store of whole objects without a rename and without conditions."""

    protocol = "plainobjects"


class RefusingObjects(MemoryFileSystem):
    """A store of whole objects that refuses to overwrite, if asked to: as Google's and Azure's."""

    protocol = "gs"


for _kind in (PlainFiles, PlainObjects, RefusingObjects):
    fsspec.register_implementation(_kind.protocol, _kind, clobber=True)

EXACT = ("local", "memory", "s3", "webhdfs", "conditional")
WEAK = ("plain files", "plain objects")


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server with a bucket."""
    with s3_server(tmp_path_factory.mktemp("s3") / "server.log") as url:
        fs = fsspec.filesystem("s3", endpoint_url=url, skip_instance_cache=True, **CREDENTIALS)
        fs.call_s3("create_bucket", Bucket="bucket")
        yield url


@pytest.fixture
def opener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Store]]:
    """Opens the same empty place again and again, each time as another process would."""
    kind = request.param
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        name = uuid.uuid4().hex
        if kind == "s3":
            options = {"endpoint_url": request.getfixturevalue("s3_url"), **CREDENTIALS}
            monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
            url = f"s3://bucket/{name}/run"
        elif kind == "webhdfs":
            address = stack.enter_context(serve(WebHdfs, root=tmp_path))
            url = f"webhdfs://{address.removeprefix('http://')}/user/run"
        elif kind == "conditional":
            url = f"gs://{name}/run"
        else:
            url = {
                "local": str(tmp_path / "some" / "run"),
                "memory": f"memory://{name}/run",
                "plain files": f"plainfiles://{tmp_path}/run",
                "plain objects": f"plainobjects://{name}/run",
            }[kind]

        def make(**more: Any) -> Store:
            with warnings.catch_warnings():
                if kind in WEAK:
                    warnings.simplefilter("ignore", UserWarning)  # it has a test of its own
                return open_store(url, **options, **more)

        yield make


@pytest.fixture
def store(opener: Callable[..., Store]) -> Store:
    """An empty store."""
    return opener()


every_store = pytest.mark.parametrize("opener", [*EXACT, *WEAK], indirect=True)
exact_stores = pytest.mark.parametrize("opener", EXACT, indirect=True)


@every_store
def test_an_object_is_read_as_it_was_created(store: Store, opener: Callable[..., Store]) -> None:
    """Another process sees all bytes, each range of them, and the size."""
    store.create("data/1-2/r0.pack", [b"ab", memoryview(b"cde"), b"", memoryview(b"fghijklm").cast("H")])
    other = opener()
    assert other.read("data/1-2/r0.pack") == b"abcdefghijklm"
    assert other.size("data/1-2/r0.pack") == 13
    for start, end in itertools.combinations_with_replacement((0, 1, 4, 12, 13), 2):
        assert other.read("data/1-2/r0.pack", start, end) == b"abcdefghijklm"[start:end]
        assert other.read("data/1-2/r0.pack", start) == b"abcdefghijklm"[start:]


@every_store
def test_an_empty_object_is_an_object(store: Store) -> None:
    """Nothing written is not nothing there."""
    store.create("empty", [])
    store.create("pieces", [b"", b""])
    for path in ("empty", "pieces"):
        assert store.read(path) == b""
        assert store.size(path) == 0
        with pytest.raises(AlreadyThereError):
            store.create(path, [b"full"])
    assert store.list("") == ["empty", "pieces"]


@every_store
@pytest.mark.parametrize("size", [5 << 20, (5 << 20) + 1, (21 << 20) + 7])
def test_a_large_object_is_whole(store: Store, size: int) -> None:
    """The sizes lie around those of an upload's parts, and the pieces fit none of them."""
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    view = memoryview(data)
    store.create("large", (view[start : start + 1_000_003] for start in range(0, size, 1_000_003)))
    assert store.size("large") == size
    assert store.read("large") == data
    assert store.read("large", size - 5) == data[-5:]


@every_store
def test_create_never_overwrites(store: Store, opener: Callable[..., Store]) -> None:
    """What is there stays, whoever comes with whatever bytes, and the error says which object it was."""
    store.create("manifests/1-2", [b"first"])
    for other in (store, opener()):
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyThereError, match="manifests/1-2") as caught:
                other.create("manifests/1-2", [data])
            assert caught.value.operation == "create"
            assert not caught.value.is_retryable
            assert not caught.value.is_in_doubt
    assert store.read("manifests/1-2") == b"first"
    assert store.list("") == ["manifests/1-2"]


@exact_stores
def test_of_many_creators_one_wins(opener: Callable[..., Store]) -> None:
    """However they meet, the object is that of the one who was told so."""
    stores = [opener() for _ in range(3)]
    for number in range(4):
        barrier = threading.Barrier(len(stores))
        winners: list[bytes] = []
        losers: list[bytes] = []

        def create(store: Store, data: bytes, path: str, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                store.create(path, [data])
            except AlreadyThereError:
                losers.append(data)  # noqa: B023 - joined within this round
            else:
                winners.append(data)  # noqa: B023

        threads = [
            threading.Thread(target=create, args=(store, f"writer {index}".encode(), f"race/{number}"))
            for index, store in enumerate(stores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert len(losers) == len(stores) - 1
        assert opener().read(f"race/{number}") == winners[0]


@every_store
def test_pieces_that_fail_leave_nothing(store: Store) -> None:
    """The caller's own exception comes out as it is, no object is made, and the path is free."""

    def pieces() -> Iterator[bytes]:
        yield b"half" * (2 << 20)
        raise FileExistsError("the codec's own")

    with pytest.raises(FileExistsError, match="the codec's own"):
        store.create("data/x", pieces())
    assert store.list("") == []
    with pytest.raises(FileNotFoundError):
        store.read("data/x")
    store.create("data/x", [b"whole"])
    assert store.read("data/x") == b"whole"


@every_store
def test_replace_puts_the_newest_in_place(store: Store, opener: Callable[..., Store]) -> None:
    """A hint is made and overwritten, and another process sees the newest."""
    reader = opener()
    for data in (b"1-2", b"1-3 and longer", b""):
        store.replace("LATEST", data)
        assert reader.read("LATEST") == data
        assert reader.size("LATEST") == len(data)
    assert reader.list("") == ["LATEST"]


@every_store
def test_what_is_missing_is_not_found(store: Store) -> None:
    """A missing object, one beside an existing one and a directory are no objects; an empty place lists nothing."""
    assert store.list("") == []
    assert store.list("manifests/") == []
    store.create("data/1/pack", [b"x"])
    for path in ("data/1/other", "data/1", "data", "else", "data/1/pack/below"):
        for call in (store.read, store.size, lambda path: store.read(path, 0, 0), lambda path: store.read(path, 2, 9)):
            with pytest.raises(FileNotFoundError) as caught:
                call(path)
            assert path in str(caught.value)
    assert store.list("data/1/pack/") == []


@every_store
def test_a_short_read_is_an_error(store: Store) -> None:
    """Of an object that was cut short nobody gets fewer bytes than asked for."""
    store.create("cut", [b"12345"])
    for start, end in [(0, 6), (3, 6), (5, 6), (6, 6), (6, None), (6, 9), (7, 9)]:
        with pytest.raises(StoreError, match="cut short") as caught:
            store.read("cut", start, end)
        assert caught.value.reason == "short read"


@every_store
def test_listing_is_fresh_sorted_and_by_prefix(store: Store, opener: Callable[..., Store]) -> None:
    """What another process made or deleted a moment ago is seen at once; prefixes are text."""
    other = opener()
    assert other.list("") == []
    paths = ["data/1-10/r0", "data/1-10/r1", "data/1-9/r0", "LATEST", "manifests/1-10", "manifests/1-9", "manifests2"]
    for number, path in enumerate(paths):
        store.create(path, [b"x"])
        assert other.list("") == sorted(paths[: number + 1])
    assert other.list("manifests/") == ["manifests/1-10", "manifests/1-9"]
    assert other.list("manifests/1-1") == ["manifests/1-10"]
    assert other.list("manifests") == ["manifests/1-10", "manifests/1-9", "manifests2"]
    assert other.list("data/1-10/") == ["data/1-10/r0", "data/1-10/r1"]
    assert other.list("data/1") == ["data/1-10/r0", "data/1-10/r1", "data/1-9/r0"]
    store.delete(["manifests/1-10", "data/1-9/r0"])
    assert other.list("") == sorted(set(paths) - {"manifests/1-10", "data/1-9/r0"})
    with pytest.raises(FileNotFoundError):
        other.size("data/1-9/r0")


@every_store
def test_delete_takes_what_is_there(store: Store) -> None:
    """Missing objects are fine, others stay, and a deleted path can be used again."""
    for path in ("a/b/c", "a/b/d", "e"):
        store.create(path, [path.encode()])
    store.delete([])
    store.delete(["a/b/c", "a/b/missing", "nowhere/x", "a/b/c/below"])
    assert store.list("") == ["a/b/d", "e"]
    store.delete(path for path in ["a/b/d", "e"])
    assert store.list("") == []
    store.create("a/b/c", [b"again"])
    assert store.read("a/b/c") == b"again"


@every_store
def test_recover_changes_no_object(store: Store) -> None:
    """It may be called on an empty place and between any two operations."""
    store.recover()
    store.create("a/b", [b"1"])
    store.recover()
    assert store.list("") == ["a/b"]
    assert store.read("a/b") == b"1"


@pytest.mark.parametrize("opener", ["memory"], indirect=True)
@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b.tmp", "a\\b", "a\0b"])
def test_a_bad_path_is_refused_before_anything_happens(store: Store, path: str) -> None:
    """Nothing outside the store's directory can be named, and nothing that would be hidden in a listing."""
    store.create("kept", [b"x"])
    calls: list[Callable[[], object]] = [
        lambda: store.create(path, [b"x"]),
        lambda: store.replace(path, b"x"),
        lambda: store.read(path),
        lambda: store.size(path),
        lambda: store.delete(["kept", path]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a path is names"):
            call()
    assert store.list("") == ["kept"]


@every_store
def test_a_newer_claim_fences_the_older_writer(opener: Callable[..., Store]) -> None:
    """Whoever wakes up late can publish nothing more, though it has not been told of its successor."""
    old = claim_generation(opener())
    old.check()
    old.publish("manifests/0-1", [b"old"])
    new = claim_generation(opener())
    assert new.generation == old.generation + 1
    with pytest.raises(StaleWriterError, match=f"generation {new.generation} has been claimed"):
        old.publish("manifests/0-2", [b"late"])
    with pytest.raises(StaleWriterError):
        old.check()
    new.publish("manifests/1-2", [b"new"])
    assert opener().list("manifests/") == ["manifests/0-1", "manifests/1-2"]
    assert claimed_generations(opener()) == [old.generation, new.generation]


@exact_stores
def test_no_generation_is_claimed_twice(opener: Callable[..., Store]) -> None:
    """Runs that start at the same time get a generation each; only the one with the newest may go on."""
    claims = []
    lock = threading.Lock()
    barrier = threading.Barrier(4)

    def claim(store: Store) -> None:
        barrier.wait()
        try:
            mine = claim_generation(store, at_least=7)
        except StaleWriterError:
            return
        with lock:
            claims.append(mine)

    threads = [threading.Thread(target=claim, args=(opener(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claimed_generations(opener()) == [7, 8, 9, 10]
    generations = [claim.generation for claim in claims]
    assert len(set(generations)) == len(generations)
    for claim in claims:
        with pytest.raises(StaleWriterError) if claim.generation < 10 else contextlib.nullcontext():
            claim.check()


@pytest.mark.parametrize("opener", WEAK, indirect=True)
def test_a_weaker_store_is_written_to_with_a_warning(opener: Callable[..., Store], tmp_path: Path) -> None:
    """Whoever uses a storage without create-only is told once what that means."""
    url = opener().url
    with pytest.warns(UserWarning, match="overwrite each other") as caught:
        store = open_store(url)
    store.create("a", [b"x"])
    assert len(caught) == 1
    assert caught[0].filename == __file__


# What only a network does.


@pytest.fixture
def network() -> Network:
    """A network that works until it is told otherwise."""
    return Network()


@pytest.fixture
def far_store(s3_url: str, network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store on S3 behind that network, whose client repeats a request once by itself."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    with network.to(s3_url) as url:
        yield open_store(f"s3://bucket/{uuid.uuid4().hex}", endpoint_url=url, config_kwargs=ONCE_MORE, **CREDENTIALS)


SIZES = pytest.mark.parametrize("size", [5, 6 << 20], ids=["one request", "in parts"])


def _commits(method: str, path: str) -> bool:
    """Whether a request makes an object visible."""
    return (method == "PUT" and "partNumber" not in path) or (method == "POST" and "uploadId" in path)


@SIZES
def test_an_answer_that_was_lost_is_no_failure(network: Network, far_store: Store, size: int) -> None:
    """The client repeats the request, the server refuses because the object is there, and it is known as our own."""
    lost: list[str] = []

    def fault(method: str, path: str) -> str | None:
        if _commits(method, path) and not lost:
            lost.append(path)
            return "answer lost"
        return None

    network.fault = fault
    far_store.create("manifest", [b"x" * size])
    assert lost
    assert far_store.read("manifest") == b"x" * size
    with pytest.raises(AlreadyThereError):
        far_store.create("manifest", [b"x" * size])


@SIZES
def test_a_create_in_doubt_is_repeated_safely(
    network: Network, far_store: Store, s3_url: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no answer ever comes the error says so, and the same call later finds out that it had succeeded."""
    monkeypatch.setattr(far_store._fs, "retries", 1)  # type: ignore[attr-defined]
    network.fault = lambda method, path: "answer lost" if _commits(method, path) else None
    with pytest.raises(StoreError) as caught:
        far_store.create("manifest", [b"x" * size])
    assert caught.value.is_in_doubt
    assert caught.value.is_retryable
    network.fault = lambda method, path: None
    assert far_store.size("manifest") == size
    far_store.create("manifest", [b"x" * size])
    with pytest.raises(AlreadyThereError):
        far_store.create("manifest", [b"x" * size])


@pytest.mark.parametrize("theirs", [b"same bytes", b"othr bytes", b"longer than ours"])
def test_another_writers_object_is_never_taken_for_ours(
    network: Network, far_store: Store, s3_url: str, theirs: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a create in doubt that did not happen another writer's object is known as such, even if it is equal."""
    monkeypatch.setattr(far_store._fs, "retries", 1)  # type: ignore[attr-defined]
    network.fault = lambda method, path: "503" if _commits(method, path) else None
    with pytest.raises(StoreError, match="503") as caught:
        far_store.create("manifest", [b"same bytes"])
    assert caught.value.is_retryable
    assert caught.value.is_in_doubt
    open_store(far_store.url, endpoint_url=s3_url, **CREDENTIALS).create("manifest", [theirs])
    network.fault = lambda method, path: None
    with pytest.raises(AlreadyThereError):
        far_store.create("manifest", [b"same bytes"])
    assert far_store.read("manifest") == theirs


@SIZES
def test_a_hung_upload_is_given_up(network: Network, s3_url: str, size: int) -> None:
    """The call comes back as a timeout within its bound, and what hung never makes an object."""
    network.fault = lambda method, path: "hang" if method in {"PUT", "POST"} else None
    with network.to(s3_url) as url:
        store = open_store(f"s3://bucket/{uuid.uuid4().hex}", endpoint_url=url, timeout_s=0.5, **CREDENTIALS)
        with pytest.raises(StoreError) as caught:
            store.create("pack", [b"x" * size])
        assert caught.value.reason == "timeout"
        assert caught.value.is_retryable
        network.fault = lambda method, path: None
        network.release.set()
        again = open_store(store.url, endpoint_url=url, **CREDENTIALS)
        again.create("pack", [b"x" * size])
        assert again.size("pack") == size


def test_a_failed_upload_leaves_no_parts(network: Network, far_store: Store, s3_url: str) -> None:
    """Parts cost money until somebody removes them: what could not be completed is aborted."""
    network.fault = lambda method, path: "503" if "partNumber=2" in path else None
    with pytest.raises(StoreError, match="503"):
        far_store.create("pack", [b"x" * (12 << 20)])
    fs = fsspec.filesystem("s3", endpoint_url=s3_url, skip_instance_cache=True, **CREDENTIALS)
    assert not fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
    assert far_store.list("") == []


def test_a_server_without_conditions_is_found_out(network: Network, far_store: Store) -> None:
    """A server that ignores `If-None-Match` is not trusted silently."""
    network.fault = lambda method, path: "unconditional"
    with pytest.warns(UserWarning, match="ignores If-None-Match"):
        far_store.create("a", [b"x"])
    far_store.create("b", [b"x"])  # said once


def test_a_missing_bucket_is_not_an_empty_one(s3_url: str) -> None:
    """A misspelt bucket is an error, not a place without checkpoints."""
    store = open_store("s3://missing/run", endpoint_url=s3_url, **CREDENTIALS)
    with pytest.raises(StoreError) as caught:
        store.list("")
    assert caught.value.reason == "HTTP 404"
    with pytest.raises(StoreError):
        store.create("a", [b"x"])


def test_command_line_works_on_s3(s3_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its options reach fsspec: verified, exported here and there, pruned."""
    url = f"s3://bucket/{uuid.uuid4().hex}/run"
    saves = Writer(url, base_every=1, endpoint_url=s3_url, **CREDENTIALS)
    for step in (1, 2, 3):
        saves.save(step, {"weight": torch.full((3,), float(step))})
    given = [f"--storage-option={name}={json.dumps(value)}" for name, value in CREDENTIALS.items()]

    def call(verb: str, *arguments: str) -> int:
        return main(["checkpoint", verb, url, *arguments, "--endpoint-url", s3_url, *given])

    assert call("verify", "--deep") == 0
    assert call("export", str(tmp_path / "here.ckpt")) == 0
    assert call("export", f"{url}.ckpt") == 0
    assert call("export", f"{url}.ckpt") == 3, "it is there"
    assert call("prune", "--keep", "1") == 0
    capsys.readouterr()
    assert call("list", "--json") == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [3, 2]
    assert torch.equal(torch.load(tmp_path / "here.ckpt")["weight"], torch.full((3,), 3.0))
    with fsspec.open(f"{url}.ckpt", endpoint_url=s3_url, **CREDENTIALS) as file:
        assert file.read() == (tmp_path / "here.ckpt").read_bytes()
