"""Handing the job's state to members that have joined, striped over all that hold it (PROTOCOL.md#M3a)."""

from __future__ import annotations

import contextlib
import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ft.comm.place import Place, as_bytes, broadcast, gather_now
from lightning_ft.errors import LaunchError
from lightning_ft.membership.settle import SettlePlan

_MAX_PIECE = 64 * 1024 * 1024
"""Bytes of one message: after each the receiver says that it makes progress."""


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
    """

    def __init__(
        self, load: Callable[[], Cargo], take: Callable[[State], None], progress: Callable[[str], None]
    ) -> None:
        self._load = load
        self._take = take
        self._progress = progress

    def run(self, place: Place, plan: SettlePlan) -> None:
        """Take part.

        Raises:
            RuntimeError: A member failed; nothing was taken.
            LaunchError: This process is a joiner, and the state does not fit it.
        """
        is_joiner = place.rank in plan.joiners
        cargo = Cargo(b"", []) if is_joiner else self._load()
        layout = zlib.crc32(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in cargo.tensors]).encode())
        slots = gather_now(place, torch.tensor([layout, len(cargo.skeleton)])).view(torch.int64).tolist()
        holders = [rank for rank in range(place.size) if rank not in plan.joiners]
        first = holders[0]
        donors = [rank for rank in holders if slots[rank][0] == slots[first][0]]
        header = torch.empty(slots[first][1], dtype=torch.uint8)
        if place.rank == first:
            header = torch.frombuffer(bytearray(cargo.skeleton), dtype=torch.uint8)
        place.inner.wait(broadcast(place, header, first))
        if is_joiner:
            with _own_errors(place):
                unpacker = _Unpacker(header.numpy().tobytes())
            self._move(place, unpacker.tensors, donors, (place.rank,))
            with _own_errors(place):
                self._take(unpacker.state())
        elif place.rank in donors:
            self._move(place, [tensor.cpu().contiguous() for tensor in cargo.tensors], donors, plan.joiners)

    def _move(self, place: Place, tensors: Sequence[Tensor], donors: Sequence[int], joiners: Sequence[int]) -> None:
        """Send the own stripe to all joiners, or receive all stripes."""
        works = []
        for tag, (donor, piece) in enumerate(_pieces(tensors, donors)):
            if place.rank == donor:
                works += [place.group.send([piece], joiner, tag) for joiner in joiners]
            elif place.rank in joiners:
                works.append(place.group.recv([piece], donor, tag))
        for index, work in enumerate(works):
            place.inner.wait(work)
            self._progress(f"handing over the state, piece {index + 1} of {len(works)}")


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
    """Cut the tensors' bytes into equal stripes, one for each donor, and these into pieces."""
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
        unpickler = pickle.Unpickler(io.BytesIO(self._replicated))  # noqa: S301
        unpickler.persistent_load = lambda key: self.tensors[key[0]]  # type: ignore[method-assign]
        own = torch.load(io.BytesIO(self._own), map_location="cpu", weights_only=False)
        return State(unpickler.load(), own)
