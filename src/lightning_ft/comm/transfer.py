"""Handing the job's state to members that have joined, striped over all that hold it (PROTOCOL.md#M3a)."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lightning_ft.comm.place import Place, as_bytes, broadcast, gather_now
from lightning_ft.errors import LaunchError
from lightning_ft.faultpoints import reach
from lightning_ft.membership.settle import SettlePlan

_log = logging.getLogger("lightning_ft")

_MAX_PIECE = 64 * 1024 * 1024
"""Bytes of one message: after each the receiver says that it makes progress."""

_MAX_CHUNK = 4 * 1024 * 1024
"""Bytes that are compared, and sent or not, as a whole."""

_DIGEST_BYTES = 16

_MOST_THREADS = 4
"""Find the digests of what a joiner has: all of it, where each member has its share."""

_DIGESTS_TAG, _WANTED_TAG, _FIRST_PIECE_TAG = range(3)


class State(NamedTuple):
    """What a joiner is handed. Both parts are trees of whatever can be pickled.

    Attributes:
        replicated: Bitwise the same on all members: parameters, optimizers. Its tensors are striped over the donors.
        own: All else, as the first donor has it.
    """

    replicated: Any
    own: Any


class Cargo(NamedTuple):
    """A state that is ready to be sent.

    Attributes:
        skeleton: All of it but the tensors of the replicated part, pickled.
        tensors: These.
    """

    skeleton: bytes
    tensors: list[Tensor]


class StateTransfer:
    """Both ends of a transfer; run by all members of a view that holds joiners, as often as it fails.

    Args:
        load: Returns what a donor sends; it must not change until the transfer has ended.
        take: Called on a joiner with the state, once it has arrived whole.
        progress: Called after each piece.
        own: Returns what a joiner has itself, and is not sent then. None, on any member: joiners are sent all.

    Attributes:
        sent_bytes: Of the tensors, what was sent to this joiner.
        total_bytes: Of all tensors.
        durations_s: For how long this joiner got its own state ready (`drain`), found what it lacks (`compare`),
            received that (`receive`) and loaded the state (`load`).
    """

    def __init__(
        self,
        load: Callable[[], Cargo],
        take: Callable[[State], None],
        progress: Callable[[str], None],
        *,
        own: Callable[[], Cargo] | None = None,
    ) -> None:
        self._load = load
        self._take = take
        self._progress = progress
        self._own = own
        self._known: Future[_Known] | None = None
        self._ahead: tuple[int, int, Digests] | None = None
        self.sent_bytes = self.total_bytes = 0
        self.durations_s = dict.fromkeys(("drain", "compare", "receive", "load"), 0.0)

    def begin_as_joiner(self) -> None:
        """Begin to find the digests of what this process has, while its group is made. It must not change any more.

        In a thread: it may take longer than members wait for one of them when they make a group.
        """
        pool = ThreadPoolExecutor(1, "lightning_ft own state")
        self._known = pool.submit(self._know)
        pool.shutdown(wait=False)

    def _know(self) -> _Known:
        with self._measured("drain"):
            cargo = self._load_own()
        return _Known(cargo)

    def begin_as_donor(self, rank: int, num_donors: int) -> None:
        """Begin to find the digests that this one tells, if the donors are these. What it sends must not change."""
        if self._own is not None:
            chunks = cut(_on_cpu(self._load().tensors))
            self._ahead = num_donors, rank, Digests(chunks[rank::num_donors], 1)

    def run(self, place: Place, plan: SettlePlan) -> None:
        """Take part.

        Raises:
            RuntimeError: A member failed; nothing was taken.
            LaunchError: This process is a joiner, and the state does not fit it.
        """
        is_joiner = place.rank in plan.joiners
        if is_joiner and self._known is None:
            self.begin_as_joiner()
        known = self._known.result() if is_joiner and self._known is not None else None
        cargo = self._load() if known is None else known.cargo
        row = torch.tensor([_crc(cargo.tensors), len(cargo.skeleton), int(self._own is not None)])
        slots = gather_now(place, row).view(torch.int64).tolist()
        holders = [rank for rank in range(place.size) if rank not in plan.joiners]
        first = holders[0]
        donors = [rank for rank in holders if slots[rank][0] == slots[first][0]]
        header = torch.empty(slots[first][1], dtype=torch.uint8)
        if place.rank == first:
            header = torch.frombuffer(bytearray(cargo.skeleton), dtype=torch.uint8)
        place.inner.wait(broadcast(place, header, first))
        compares = all(row[2] for row in slots)
        if is_joiner:
            with _own_errors(place):
                unpacker = _Unpacker(header.numpy().tobytes())
            self._receive(place, donors, unpacker, known if compares else None)
            reach("transfer.load")
            with _own_errors(place), self._measured("load"):
                self._take(unpacker.state())
        elif place.rank in donors:
            self._send(place, donors, plan.joiners, _on_cpu(cargo.tensors), compares=compares)

    def _load_own(self) -> Cargo:
        """What this joiner has itself; nothing if that can't be told, since it may be sent everything."""
        if self._own is not None:
            try:
                return self._own()
            except Exception:  # noqa: BLE001 - it is sent all then
                _log.debug("what this process has can't be compared", exc_info=True)
        return Cargo(b"", [])

    def _send(
        self, place: Place, donors: Sequence[int], joiners: Sequence[int], tensors: Sequence[Tensor], *, compares: bool
    ) -> None:
        """Send the own stripe of what each joiner wants."""
        chunks = cut(tensors)
        wanted = {joiner: torch.ones(len(chunks), dtype=torch.bool) for joiner in joiners}
        if compares and chunks:
            own = self._digests_of_share(chunks, donors, donors.index(place.rank))
            works = [place.group.send([own], joiner, _DIGESTS_TAG) for joiner in joiners if own.numel()]
            works += [place.group.recv([as_bytes(wanted[joiner])], joiner, _WANTED_TAG) for joiner in joiners]
            self._wait(place, works, "comparing the state with a joiner's")
        reach("transfer.send")
        works = []
        for joiner in joiners:
            for tag, (donor, piece) in enumerate(_pieces(_select(chunks, wanted[joiner]), donors), _FIRST_PIECE_TAG):
                if donor == place.rank:
                    works.append(place.group.send([piece], joiner, tag))
        self._wait(place, works, "handing over the state")

    def _digests_of_share(self, chunks: Sequence[Tensor], donors: Sequence[int], index: int) -> Tensor:
        if self._ahead is not None and self._ahead[:2] == (len(donors), index):
            return self._ahead[2].wait()
        return Digests(chunks[index :: len(donors)], 1).wait()

    def _receive(self, place: Place, donors: Sequence[int], unpacker: _Unpacker, known: _Known | None) -> None:
        """Receive all stripes of what this joiner has not."""
        chunks = cut(unpacker.tensors)
        wanted = torch.ones(len(chunks), dtype=torch.bool)
        if known is not None and chunks:
            with self._measured("compare"):
                wanted = self._compare(place, donors, unpacker, known)
            chunks = cut(unpacker.tensors)
        missing = _select(chunks, wanted)
        self.sent_bytes = sum(chunk.nbytes for chunk in missing)
        self.total_bytes = sum(chunk.nbytes for chunk in chunks)
        works = [
            place.group.recv([piece], donor, tag)
            for tag, (donor, piece) in enumerate(_pieces(missing, donors), _FIRST_PIECE_TAG)
        ]
        with self._measured("receive"):
            self._wait(place, works, "being handed the state")

    def _compare(self, place: Place, donors: Sequence[int], unpacker: _Unpacker, known: _Known) -> Tensor:
        """Put what this joiner has where it belongs, and ask for the rest. Returns: As `_Known.fill`."""
        num_chunks = len(cut(unpacker.tensors))
        rows = {
            donor: torch.empty(len(range(num_chunks)[index :: len(donors)]), _DIGEST_BYTES, dtype=torch.uint8)
            for index, donor in enumerate(donors)
        }
        works = [place.group.recv([row], donor, _DIGESTS_TAG) for donor, row in rows.items() if row.numel()]
        self._wait(place, works, "comparing the state with the job's")
        digests = [b""] * num_chunks
        for index, row in enumerate(rows.values()):
            digests[index :: len(donors)] = [digest.tobytes() for digest in row.numpy()]
        wanted = known.fill(unpacker, digests)
        works = [place.group.send([as_bytes(wanted)], donor, _WANTED_TAG) for donor in donors]
        self._wait(place, works, "asking for the state")
        return wanted

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.durations_s[name] = round(time.monotonic() - started_s, 6)

    def _wait(self, place: Place, works: Sequence[dist.Work], what: str) -> None:
        if works:
            place.inner.wait_messages(works, lambda num: self._progress(f"{what}, piece {num} of {len(works)}"))


def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut contiguous tensors into chunks of bytes, each of one tensor."""
    return [chunk for tensor in tensors if tensor.nbytes for chunk in as_bytes(tensor).split(_MAX_CHUNK)]


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu().contiguous() for tensor in tensors]


def _select(chunks: Sequence[Tensor], wanted: Tensor) -> list[Tensor]:
    return [chunk for chunk, is_wanted in zip(chunks, wanted.tolist(), strict=True) if is_wanted]


class Digests:
    """The digests of chunks: threads of their own find them from now on.

    Args:
        chunks: They must not change before `wait`.
        num_threads: How many.
    """

    def __init__(self, chunks: Sequence[Tensor], num_threads: int) -> None:
        arrays: list[Any] = [chunk.numpy() for chunk in chunks]
        pool = ThreadPoolExecutor(num_threads, "lightning_ft digests")
        self._found = [pool.submit(xxhash.xxh3_128_digest, array) for array in arrays]
        pool.shutdown(wait=False)

    def wait(self) -> Tensor:
        """Return them, uint8, shape [number of chunks, _DIGEST_BYTES]."""
        found = b"".join(future.result() for future in self._found)
        flat = torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
        return flat.view(-1, _DIGEST_BYTES)


def _crc(tensors: Sequence[Tensor]) -> int:
    return zlib.crc32(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode())


class _Known:
    """What a joiner has already, by what it is: chunks that it need not be sent.

    Args:
        cargo: Its own state. Its tensors are compared on the CPU; they must not change.

    Attributes:
        cargo: As given.
    """

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo
        self._tensors = _on_cpu(cargo.tensors)
        self._chunks = cut(self._tensors)
        self._digests = Digests(self._chunks, min(_MOST_THREADS, len(os.sched_getaffinity(0))))

    @functools.cached_property
    def _found(self) -> list[bytes]:
        return [row.tobytes() for row in self._digests.wait().numpy()]

    def fill(self, unpacker: _Unpacker, digests: Sequence[bytes]) -> Tensor:
        """Put what is known where it belongs. Returns: Which chunks are not known, bool, shape [number of chunks].

        If the whole tree is as the job's, a tensor that is the job's stays where it is, and costs no copy. Otherwise
        it is copied, since what is equal now may be another thing, and change later.
        """
        is_same_tree = self.cargo.skeleton != b"" and unpacker.has_tree_of(self.cargo.skeleton)
        chunk_of = dict(zip(self._found, self._chunks, strict=True))
        wanted, start = [], 0
        for index, tensor in enumerate(unpacker.tensors):
            end = start + len(cut([tensor]))
            job = digests[start:end]
            if is_same_tree and self._found[start:end] == job:
                unpacker.tensors[index] = self._tensors[index]
                wanted += [False] * len(job)
            else:
                for chunk, digest in zip(cut([tensor]), job, strict=True):
                    known = chunk_of.get(digest)
                    is_known = known is not None and known.numel() == chunk.numel()
                    if known is not None and is_known:
                        chunk.copy_(known)
                    wanted.append(not is_known)
            start = end
        return torch.tensor(wanted, dtype=torch.bool)


@contextlib.contextmanager
def _own_errors(place: Place) -> Iterator[None]:
    """Whatever a joiner can't do with the state is its own error: it is not the ring that broke.

    That of a disk or network may pass, so that another process of this member may join.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise LaunchError(
            f"joining the job failed: its state does not fit this process: {error}. Do all start the same script with "
            "the same arguments?",
            member=place.members[place.rank],
            generation=place.generation,
        ) from error


def pack(state: State) -> Cargo:
    """Make a state ready to be sent; its tensors are not copied.

    Raises:
        Exception: Whatever something in it says that can't be pickled.
    """
    replicated, own = io.BytesIO(), io.BytesIO()
    packer = _Packer(replicated)
    packer.dump(state.replicated)
    torch.save(state.own, own)
    tensors = [tensor.detach() for tensor in packer.tensors]
    layout = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
    return Cargo(pickle.dumps((replicated.getvalue(), own.getvalue(), layout)), tensors)


def _pieces(tensors: Sequence[Tensor], donors: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Cut the bytes of contiguous tensors into equal stripes, one for each donor, and these into pieces."""
    total = sum(tensor.nbytes for tensor in tensors)
    pieces, done, index = [], 0, 0
    for tensor in tensors:
        raw, start = as_bytes(tensor), 0
        while start < raw.numel():
            end_of_stripe = total * (index + 1) // len(donors)
            if done == end_of_stripe:
                index += 1
                continue
            size = min(raw.numel() - start, end_of_stripe - done, _MAX_PIECE)
            pieces.append((donors[index], raw[start : start + size]))
            start, done = start + size, done + size
    return pieces


class _Packer(pickle.Pickler):
    """Leaves the tensors of the replicated part out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._number_of: dict[int, int] = {}

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return None
        number = self._number_of.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # itself: the number of one that is gone would be given again
        return number, str(obj.dtype).removeprefix("torch."), tuple(obj.shape)


class _Unpacker:
    """Makes the tensors into which the pieces are received, and the state out of them.

    Attributes:
        tensors: On the CPU.
    """

    def __init__(self, header: bytes) -> None:
        self._replicated, self._own, layout = pickle.loads(header)  # noqa: S301 - the ranks of one job trust each other
        self.tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in layout]

    def state(self) -> State:
        own = torch.load(io.BytesIO(self._own), map_location="cpu", weights_only=False)
        return State(_unpickle(self._replicated, lambda key: self.tensors[key[0]]), own)

    def has_tree_of(self, skeleton: bytes) -> bool:
        """Whether another state's replicated part is this one's, but for what the tensors hold."""
        try:
            replicated = pickle.loads(skeleton)[0]  # noqa: S301
            return bool(_unpickle(replicated, _Place) == _unpickle(self._replicated, _Place))
        except Exception:  # noqa: BLE001 - whatever objects say when they are compared
            return False


class _Place(tuple[Any, ...]):
    """Stands for a tensor where a tree is compared."""

    __slots__ = ()


def _unpickle(data: bytes, persistent_load: Callable[[Any], Any]) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(data))  # noqa: S301
    unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
    return unpickler.load()
