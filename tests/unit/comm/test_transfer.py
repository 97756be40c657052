"""The state of a job arrives whole and bit for bit, whoever sends which part of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


def hand_over(places: list[Place], joiners: tuple[int, ...], states: list[State]) -> dict[int, State]:
    """Run a transfer, and return what each joiner took."""
    plan = SettlePlan(target=8, donor=None, laggards=(), joiners=joiners, handover_is_void=False)
    taken: dict[int, State] = {}
    runs = []
    for place in places:
        own = StateTransfer(
            lambda rank=place.rank: transfer.pack(states[rank]),
            lambda found, rank=place.rank: taken.update({rank: found}),
            lambda _: None,
        )
        runs.append(lambda own=own, place=place: own.run(place, plan))
    inner_groups.together(*runs)
    return taken


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
