"""A process that will join follows the members, step by step, and holds them up in nothing."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.unit.comm import inner_groups

from lightning_ft.comm import catch_up, pace, replay
from lightning_ft.comm.catch_up import Feed, Follower
from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.pace import Pace
from lightning_ft.comm.replay import Trained, num_bytes

TOKEN = "a secret"
DONORS = ("0/0", "0/1")
PATIENCE_S = 60.0

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, lr_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


class Process:
    """What one process trains: a net with one layer that is not trained and one that not every step uses."""

    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(13, 41), torch.nn.Linear(41, 7), torch.nn.Linear(7, 3))
        self.net[2].requires_grad_(requires_grad=False)
        self.optimizer = make([parameter for parameter in self.net.parameters() if parameter.requires_grad])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def trained(self) -> Trained:
        """Return it as the product sees it."""
        return Trained(list(self.net.parameters()), [self.optimizer], self.replicated)

    def replicated(self) -> Any:
        """Return the state, without what is not stepped."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, number: int) -> None:
        """Do what all members do: step with the same gradients, which are there before or come from a closure."""

        def set_gradients() -> float:
            torch.manual_seed(number)
            for index, parameter in enumerate(self.net.parameters()):
                is_used = parameter.requires_grad and (index > 1 or number % 3 > 0)
                parameter.grad = torch.randn_like(parameter) if is_used else None
            return 0.0

        if number % 2:
            set_gradients()
            self.optimizer.step()
        elif number % 4:
            self.optimizer.step(set_gradients)
        else:
            self.optimizer.step(closure=set_gradients)
        self.schedule.step()


@pytest.fixture(scope="module")
def stores() -> Iterator[list[GlooTransport]]:
    """What processes that will join have."""
    with inner_groups.transports(2) as made:
        yield made


@pytest.fixture
def store(stores: list[GlooTransport]) -> GlooTransport:
    """What one of them has."""
    return stores[0]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, few of them in a step."""
    monkeypatch.setattr(replay, "PIECE_ELEMENTS", 64)
    monkeypatch.setattr(replay, "_STEP_BYTES", 64)
    monkeypatch.setattr(pace, "_FIRST_BYTES", 4096)


@contextlib.contextmanager
def following(store: GlooTransport, joiner: Process) -> Iterator[Follower]:
    """Have a process listen."""
    follower = Follower(joiner.trained(), "127.0.0.1", store.publish_catch_up, TOKEN, PATIENCE_S)
    try:
        yield follower
    finally:
        follower.close()


def feed(stores: list[GlooTransport], process: Process, member: str = DONORS[0], **other: Any) -> Feed:
    """Have a member send to who has these stores."""
    keywords = {
        "donors": DONORS,
        "generation": 1,
        "token": TOKEN,
        "patience_s": PATIENCE_S,
        "pace": Pace(0.1),
        **other,
    }
    return Feed(process.trained(), [store.address for store in stores], member=member, **keywords)


def train(members: list[Process], feeds: list[Feed], until: Callable[[], bool], first: int = 0, least: int = 5) -> int:
    """Train until something has happened. Returns: The number of the next step."""
    deadline_s = time.monotonic() + 60.0
    step = first
    while step < first + least or not until():
        assert time.monotonic() < deadline_s, "it did not happen"
        for one in feeds:
            one.at_boundary()
        for member in members:
            member.step(step)
        step += 1
        time.sleep(0.001)  # a step that takes no time at all is one that nobody can follow
    return step


def equal(one: Any, other: Any) -> bool:
    """Whether two states are bitwise the same, also in the order of what is in them."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joiner_has_bitwise_what_members_have(store: GlooTransport, name: str) -> None:
    """Weights and all that optimizers keep, after steps with changing rates and with gradients that come and go."""
    members = [Process(OPTIMIZERS[name], 0) for _ in DONORS]
    for member in members:
        member.step(1000)
    joiner = Process(OPTIMIZERS[name], 0)
    with following(store, joiner) as follower:
        feeds = [feed([store], process, member) for process, member in zip(members, DONORS, strict=True)]
        train(members, feeds, lambda: all(one.is_over for one in feeds))
        before = copy.deepcopy(joiner.replicated())
        members[0].step(1001)
        members[1].step(1001)
        for one in feeds:
            one.end()
        follower.finish()
    assert not equal(before, joiner.replicated()), "the last step must have come with the end"
    assert equal(joiner.replicated(), members[0].replicated())


def test_a_joiner_steps_while_members_do(store: GlooTransport) -> None:
    """It has their gradients before they have stepped themselves: at its admission they do not wait for its step."""
    process, joiner = Process(OPTIMIZERS["sgd"], 0), Process(OPTIMIZERS["sgd"], 0)
    with following(store, joiner):
        one = feed([store], process, donors=DONORS[:1])
        there, here = joiner.net[1].weight, process.net[1].weight
        step = train([process], [one], lambda: one.is_over and torch.equal(there, here))
        before, deadline_s = there.detach().clone(), time.monotonic() + 60.0

        def wait(*_: object) -> None:
            while torch.equal(there, before):
                assert time.monotonic() < deadline_s, "the joiner has not stepped"
                time.sleep(0.001)
            assert torch.equal(here, before)

        process.optimizer.register_step_pre_hook(wait)
        one.at_boundary()
        process.step(step - step % 2 + 1)


def test_one_that_dies_does_not_hold_up_another(stores: list[GlooTransport]) -> None:
    """Two follow; the connections of one break in the middle, and the other has it all."""
    process = Process(OPTIMIZERS["adamw"], 0)
    joiners = [Process(OPTIMIZERS["adamw"], 0) for _ in stores]
    with following(stores[0], joiners[0]) as dying, following(stores[1], joiners[1]) as follower:
        one = feed(stores, process, donors=DONORS[:1])
        step = train([process], [one], lambda: True, least=2)
        dying.close()
        train([process], [one], lambda: one.is_over and one._outlets[0].is_broken, first=step)
        one.end()
        follower.finish()
    assert equal(joiners[1].replicated(), process.replicated())


def test_members_of_a_newer_view_send_anew(store: GlooTransport) -> None:
    """A donor that dies takes its connection with it; what the others send from then on is whole."""
    members = [Process(OPTIMIZERS["adamw"], 0) for _ in DONORS]
    joiner = Process(OPTIMIZERS["adamw"], 5)
    joiner.net[2].load_state_dict(members[0].net[2].state_dict())
    with following(store, joiner) as follower:
        feeds = [feed([store], process, member) for process, member in zip(members, DONORS, strict=True)]
        step = train(members, feeds, lambda: True, least=3)
        feeds[1].give_up()
        feeds[0].give_up()
        one = feed([store], members[0], donors=DONORS[:1], generation=2)
        train(members[:1], [one], lambda: one.is_over, first=step)
        one.end()
        follower.finish()
    assert equal(joiner.replicated(), members[0].replicated())


def test_a_joiner_that_reads_nothing_is_given_up(store: GlooTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded, and the members have nothing to wait for."""
    monkeypatch.setattr(catch_up, "_SLACK_BYTES", 1024)
    process = Process(OPTIMIZERS["adamw"], 0)
    joiner = Process(OPTIMIZERS["adamw"], 0)
    with following(store, joiner) as follower, follower._inlet._taking:  # it is stopped in the middle of a frame
        one = feed([store], process)
        most_bytes = 0

        def is_over() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, *(outlet.backlog_bytes for outlet in one._outlets))
            return one.is_over

        train([process], [one], is_over)
        assert all(outlet.is_broken for outlet in one._outlets)
        assert 0 < most_bytes < 20 * num_bytes(process.trained())


def test_who_has_not_the_token_sends_nothing(store: GlooTransport) -> None:
    """Its connection is ended at its first word."""
    process, joiner = Process(OPTIMIZERS["sgd"], 0), Process(OPTIMIZERS["sgd"], 3)
    before = copy.deepcopy(joiner.replicated())
    with following(store, joiner) as follower:
        one = feed([store], process, token="a guess")
        train([process], [one], lambda: one.is_over)
        one.end()
        follower.finish()
    assert equal(joiner.replicated(), before)


def test_an_optimizer_that_can_not_be_replayed_ends_it_alone(store: GlooTransport) -> None:
    """LBFGS keeps lists of tensors; its members go on, and hand the state over when they admit."""
    process = Process(OPTIMIZERS["sgd"], 0)
    process.optimizer.state[next(process.net.parameters())] = {"old_dirs": [torch.zeros(3)]}
    with following(store, Process(OPTIMIZERS["sgd"], 0)):
        one = feed([store], process)
        one.at_boundary()
        assert one.is_over
        assert all(outlet.is_broken for outlet in one._outlets)


def test_gradients_that_fill_the_budget_end_it_before_the_state_is_whole(store: GlooTransport) -> None:
    """What can't be kept up to date is not sent ahead: it would be sent twice."""
    small = Pace(0.1)
    small.budget_bytes = 1500  # the gradients of what a donor has are more
    members = [Process(OPTIMIZERS["sgd"], 0) for _ in DONORS]
    joiner = Process(OPTIMIZERS["sgd"], 5)
    with following(store, joiner) as follower:
        feeds = [feed([store], process, member, pace=small) for process, member in zip(members, DONORS, strict=True)]
        train(members, feeds, lambda: all(one.is_over for one in feeds))
        for one in feeds:
            one.end()
        follower.finish()
    same = [torch.equal(*pair) for pair in zip(joiner.net.parameters(), members[0].net.parameters(), strict=True)]
    assert same == [False, True, True, True, False, False]
