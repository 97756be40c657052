"""The state of a job arrives whole and bit for bit, whoever sends which part of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.unit.comm import inner_groups

from lightning_ft.comm import transfer
from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.place import Place
from lightning_ft.comm.transfer import State, StateTransfer
from lightning_ft.errors import LaunchError
from lightning_ft.membership.settle import SettlePlan

NUM_MEMBERS = 4


@pytest.fixture(scope="module")
def members() -> Iterator[list[GlooTransport]]:
    """Four members."""
    with inner_groups.transports(NUM_MEMBERS) as made:
        yield made


@pytest.fixture(scope="module")
def places(members: list[GlooTransport]) -> list[Place]:
    """Where they run."""
    return inner_groups.places(members)


def state(rank: int) -> State:
    """Return what a member holds: tensors of many kinds, one of them twice."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(37, 11, generator=generator)
    replicated = {
        "weights": [weight, weight, weight.t(), weight[:, ::3]],
        "optimizer": {0: {"step": torch.tensor(7.0), "mean": torch.randn(1001, generator=generator).bfloat16()}},
        "flags": torch.tensor([True, False, True]),
        "counts": torch.arange(5),
        "nothing": torch.empty(0, 3),
        "phase": torch.randn(3, dtype=torch.complex64, generator=generator),
        "lr": 0.125,
    }
    return State(replicated, {"rank": rank, "random": torch.arange(4) + rank})


def equal(found: Any, expected: Any) -> bool:
    """Whether two trees hold the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


def hand_over(
    places: list[Place],
    joiners: tuple[int, ...],
    states: list[State],
    owns: dict[int, Own] | None = None,
    expected: tuple[int, ...] = (),
) -> dict[int, State]:
    """Run a transfer, and return what each joiner took.

    Args:
        places: Of all members.
        joiners: Their ranks.
        states: Of all.
        owns: What members say that they have themselves; all must, for it to count. Then `missing` has what was sent.
        expected: Ranks that find their digests before they meet, and take themselves for all the donors.
    """
    plan = SettlePlan(target=8, donor=None, laggards=(), joiners=joiners, handover_is_void=False)
    taken: dict[int, State] = {}
    runs: list[Callable[[], None]] = []
    transfers: list[StateTransfer] = []
    for place in places:
        own = StateTransfer(
            lambda rank=place.rank: transfer.pack(states[rank]),
            lambda found, rank=place.rank: taken.update({rank: found}),
            lambda _: None,
            own=(owns or {}).get(place.rank),
        )
        if place.rank in expected:
            own.begin_as_donor(expected.index(place.rank), len(expected))
        elif place.rank in joiners and expected:
            own.begin_as_joiner()
        transfers.append(own)
        runs.append(lambda own=own, place=place: own.run(place, plan))
    inner_groups.together(*runs)
    missing.clear()
    missing.update({joiner: (transfers[joiner].sent_bytes, transfers[joiner].total_bytes) for joiner in joiners})
    return taken


missing: dict[int, tuple[int, int]] = {}
"""Of the last `hand_over`: for each joiner, bytes that were sent, and all bytes."""

Own = Callable[[], transfer.Cargo]


def cargo(replicated: Any) -> Own:
    """Say that a process has this itself."""
    return lambda: transfer.pack(State(replicated, None))


@pytest.mark.parametrize("expected", [(), (0, 3), (0,), (0, 1, 3), (3, 0)], ids=str)
def test_a_joiner_is_sent_what_it_has_not(
    places: list[Place], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, from all donors; two joiners need not lack the same, and donors may be others than expected."""
    monkeypatch.setattr(transfer, "_MAX_CHUNK", 64)
    states = [state(rank) for rank in range(NUM_MEMBERS)]
    other = copy.deepcopy(states[2].replicated)
    other["weights"][0][30:] += 1.0
    owns = {0: cargo({}), 3: cargo({}), 1: cargo(states[1].replicated), 2: cargo(other)}
    taken = hand_over(places, (1, 2), states, owns, expected)
    for found in taken.values():
        assert equal(found.replicated, states[0].replicated)
    sent, total = missing[1]
    assert sent == 0
    # The last seven rows of the weight, which is there thrice (itself, transposed, every third column), and no more.
    assert 7 * 11 * 4 <= missing[2][0] < total // 2


def test_what_a_joiner_has_stays_where_it_is_if_it_is_the_same_thing(places: list[Place]) -> None:
    """Of a tree that is equal, tensors are not copied; one that is equal by chance elsewhere in the tree is."""
    zeros = {"mean": torch.zeros(5), "square": torch.zeros(5), "other": torch.zeros(5)}
    states = [State(copy.deepcopy(zeros), None) for _ in range(NUM_MEMBERS)]
    same, swapped = states[1].replicated, {"mean": torch.zeros(5), "square": torch.zeros(5)}
    owns = {0: cargo({}), 3: cargo({}), 1: cargo(same), 2: cargo(swapped)}
    taken = hand_over(places, (1, 2), states, owns)
    assert missing[1] == missing[2] == (0, 60)
    found = taken[1].replicated
    assert [found[name].data_ptr() for name in zeros] == [same[name].data_ptr() for name in zeros]
    pointers = {taken[2].replicated[name].data_ptr() for name in zeros}
    assert len(pointers) == 3
    assert pointers.isdisjoint(tensor.data_ptr() for tensor in swapped.values())


def test_if_one_member_does_not_compare_all_is_sent(places: list[Place]) -> None:
    """Or nobody would say what the others wait for; a joiner that can't tell what it has is sent all as well."""

    def fail() -> transfer.Cargo:
        raise RuntimeError("not to be pickled")

    states = [state(rank) for rank in range(NUM_MEMBERS)]
    own = cargo(states[3].replicated)
    assert equal(hand_over(places, (3,), states, {0: own, 1: own, 3: own})[3].replicated, states[0].replicated)
    assert missing[3][0] == missing[3][1] > 0
    assert equal(hand_over(places, (3,), states, {0: own, 1: own, 2: own, 3: fail})[3].replicated, states[0].replicated)
    assert missing[3][0] == missing[3][1] > 0


@pytest.mark.parametrize("joiners", [(3,), (1, 3), (0,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("max_piece", [64 * 1024 * 1024, 7], ids=["large pieces", "small pieces"])
def test_joiners_get_all_of_it(
    places: list[Place], joiners: tuple[int, ...], max_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stripes that cut tensors anywhere; what is a member's own is the first donor's."""
    monkeypatch.setattr(transfer, "_MAX_PIECE", max_piece)
    taken = hand_over(places, joiners, [state(rank) for rank in range(NUM_MEMBERS)])
    assert sorted(taken) == list(joiners)
    first = min(set(range(NUM_MEMBERS)) - set(joiners))
    for found in taken.values():
        assert equal(found.replicated, state(0).replicated)
        assert found.replicated["weights"][0] is found.replicated["weights"][1]
        assert equal(found.own, state(first).own)


def test_every_donor_sends_an_equal_part() -> None:
    """So that the more there are, the sooner it is done."""
    pieces = transfer._pieces([torch.zeros(1000), torch.zeros(3), torch.zeros(997)], [4, 2, 7])
    sent = {donor: sum(piece.nbytes for who, piece in pieces if who == donor) for donor in (4, 2, 7)}
    assert sum(sent.values()) == 8000
    assert max(sent.values()) - min(sent.values()) <= 1
    assert [donor for donor, _ in pieces] == sorted((donor for donor, _ in pieces), key=[4, 2, 7].index)


def test_a_donor_whose_tensors_are_others_sends_nothing(places: list[Place]) -> None:
    """The stripes of one layout and those of another would not fit together."""
    states = [state(rank) for rank in range(NUM_MEMBERS)]
    states[1] = State({"weights": torch.zeros(3)}, None)
    taken = hand_over(places, (3,), states)
    assert equal(taken[3].replicated, state(0).replicated)


def test_a_state_that_does_not_fit_is_the_joiners_own_error(places: list[Place]) -> None:
    """It is told from a broken ring, which would be tried again."""
    plan = SettlePlan(target=8, donor=None, laggards=(), joiners=(2,), handover_is_void=False)
    errors: list[BaseException] = []
    done = threading.Semaphore(0)

    def refuse(_: State) -> None:
        raise RuntimeError("size mismatch for net.weight")

    def run(place: Place) -> None:
        try:
            StateTransfer(lambda: transfer.pack(state(0)), refuse, lambda _: None).run(place, plan)
        except LaunchError as error:
            errors.append(error)
        done.release()

    inner_groups.together(*(lambda place=place: run(place) for place in places))
    (error,) = errors
    assert "its state does not fit this process: size mismatch for net.weight" in str(error)
