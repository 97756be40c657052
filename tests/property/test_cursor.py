"""Any schedule of steps, deaths, joins, checkpoints and resumptions, against lists of what everybody was given."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.utils.data import DistributedSampler

from lightning_ft.data.cursor import Cursor
from lightning_ft.data.sampler import ElasticDistributedSampler

IDS = range(7)
counts = st.integers(1, 6)
members_lists = st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True)


@dataclasses.dataclass
class Sample:
    """One entry of a share."""

    position: int
    is_padding: bool


class NaiveEpoch:
    """The rules of `data/cursor.py` word by word, on explicit lists."""

    def __init__(self, length: int, members: Sequence[int], *, drop_last: bool) -> None:
        self.length = length
        self.drop_last = drop_last
        self.taken = 0
        self.done: collections.Counter[int] = collections.Counter()
        self.num_padding = 0
        self.padding_bound = 0
        self.deal(members, [*range(length)])

    def deal(self, members: Sequence[int], owed: Sequence[int] | None = None) -> None:
        """D1, D3."""
        owed = self.owed() if owed is None else owed
        dealt = [Sample(position, is_padding=False) for position in owed]
        self.left_out: list[int] = []
        if self.drop_last:
            while len(dealt) % len(members):
                self.left_out.insert(0, dealt.pop().position)
        else:
            beginning = itertools.cycle(range(self.length))
            while len(dealt) % len(members):
                dealt.append(Sample(next(beginning), is_padding=True))
        self.shares = {member: dealt[rank :: len(members)] for rank, member in enumerate(members)}
        self.holes: dict[int, list[int]] = {member: [] for member in members}

    def owed(self) -> list[int]:
        """Holes by rank, then what was not taken, row by row."""
        rows = zip(*self.shares.values(), strict=True)
        rest = [sample.position for sample in itertools.chain(*rows) if not sample.is_padding]
        return [*itertools.chain(*self.holes.values()), *rest, *self.left_out]

    def commit(self, count: int, contributors: Iterable[int]) -> None:
        """D2."""
        self.taken += count
        if count and count == self.num_left:
            self.padding_bound += len(self.shares) - 1
        for member, share in self.shares.items():
            for sample in share[:count]:
                if member in contributors:
                    self.done[sample.position] += not sample.is_padding
                    self.num_padding += sample.is_padding
                elif not sample.is_padding:
                    self.holes[member].append(sample.position)
            del share[:count]

    @property
    def num_left(self) -> int:
        return len(next(iter(self.shares.values())))

    def check(self) -> None:
        """Every position is done with once, or owed once."""
        assert all(count <= 1 for count in self.done.values())
        assert sorted([*(+self.done).elements(), *self.owed()]) == [*range(self.length)]
        assert self.num_padding <= self.padding_bound


class Process:
    """A member's sampler, its iterator, and what it has drawn ahead."""

    def __init__(self, sampler: ElasticDistributedSampler) -> None:
        self.sampler = sampler
        self.start_anew()

    def start_anew(self) -> None:
        self.iterator: Iterator[int] = iter(self.sampler)
        self.is_at_its_end = False
        self.drawn: list[int] = []

    def draw_ahead(self, count: int) -> None:
        drawn = [*itertools.islice(self.iterator, count)]
        self.is_at_its_end |= len(drawn) < count
        self.drawn += drawn

    def batch(self, count: int) -> list[int]:
        self.draw_ahead(max(0, count - len(self.drawn)))
        batch, self.drawn = self.drawn[:count], self.drawn[count:]
        return batch


class SamplerMachine(RuleBasedStateMachine):
    """Runs the samplers of all members of a job in lockstep."""

    @initialize(length=st.integers(0, 40), members=members_lists, shuffle=st.booleans(), drop_last=st.booleans())
    def start(self, length: int, members: list[int], shuffle: bool, drop_last: bool) -> None:
        """A job at the start of its first epoch."""
        self.data = range(length)
        self.arguments = {"shuffle": shuffle, "drop_last": drop_last, "seed": 11}
        self.epoch = 0
        self.naive = NaiveEpoch(length, members, drop_last=drop_last)
        self.processes = {member: Process(self.sampler(member, members)) for member in members}
        self.saved = self.checkpoint_now()

    def sampler(self, member: int, members: Sequence[int]) -> ElasticDistributedSampler:
        data: Any = self.data
        sampler = ElasticDistributedSampler(data, len(members), members.index(member), **self.arguments)
        sampler.redeal(members, member=member)
        return sampler

    def indices(self, positions: Iterable[int]) -> list[int]:
        whole: Any = DistributedSampler(self.data, 1, 0, **self.arguments)  # type: ignore[arg-type]
        whole.set_epoch(self.epoch)
        order = [*whole]
        return [order[position] for position in positions]

    def step(self, count: int, dead: set[int]) -> None:
        """Those to die draw their batches, too, but only the others' are in the step."""
        count = min(count, self.naive.num_left)
        batches = {member: process.batch(count) for member, process in self.processes.items()}
        for member, batch in batches.items():
            assert batch == self.indices(sample.position for sample in self.naive.shares[member][:count])
        for member in dead:
            del self.processes[member]
        for process in self.processes.values():
            process.sampler.record_batch(count, self.processes)
        self.naive.commit(count, set(self.processes))

    def redeal(self, members: Sequence[int]) -> None:
        """Survivors deal again, joiners load a survivor's state and do the same."""
        donor = next(iter(self.processes.values())).sampler.state_dict()
        processes = {}
        for member in members:
            process = self.processes.get(member)
            if process is None:
                process = Process(self.sampler(member, [member]))
                process.sampler.load_state_dict(donor)
                process.sampler.redeal(members)
                process.start_anew()
            elif process.sampler.redeal(members):
                with pytest.raises(StopIteration if process.is_at_its_end else RuntimeError):
                    next(process.iterator)
                process.start_anew()
            processes[member] = process
        self.processes = processes
        self.naive.deal(members)

    def checkpoint_now(self) -> tuple[str, NaiveEpoch, int]:
        state = next(iter(self.processes.values())).sampler.state_dict()
        return json.dumps(state), copy.deepcopy(self.naive), self.epoch

    def begin_epoch(self, epoch: int) -> None:
        for process in self.processes.values():
            process.sampler.set_epoch(epoch)
            process.start_anew()
        self.epoch = epoch
        members = [*self.naive.shares]
        self.naive = NaiveEpoch(len(self.data), members, drop_last=self.naive.drop_last)

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(count=counts)
    def train(self, count: int) -> None:
        """A step of everybody."""
        self.step(count, set())

    @rule(count=counts, data=st.data())
    def die(self, count: int, data: st.DataObject) -> None:
        """A step in which any members but one die; the others may go on in the old deal."""
        dead = data.draw(st.sets(st.sampled_from([*self.processes]), max_size=len(self.processes) - 1))
        self.step(count, dead)

    @rule(data=st.data())
    def die_in_the_last_step(self, data: st.DataObject) -> None:
        """The same in the step that ends the deal."""
        dead = data.draw(st.sets(st.sampled_from([*self.processes]), max_size=len(self.processes) - 1))
        self.step(self.naive.num_left, dead)

    @rule(count=counts, data=st.data())
    def draw_ahead(self, count: int, data: st.DataObject) -> None:
        """One member's workers are ahead of the others'."""
        self.processes[data.draw(st.sampled_from([*self.processes]))].draw_ahead(count)

    @rule(data=st.data(), joiners=st.lists(st.sampled_from(IDS), max_size=2, unique=True))
    def change_members(self, data: st.DataObject, joiners: list[int]) -> None:
        """Some leave, others join, in any order of ranks; perhaps nobody does."""
        stayers = data.draw(st.lists(st.sampled_from([*self.processes]), min_size=1, unique=True))
        self.redeal(stayers + [joiner for joiner in joiners if joiner not in self.processes])

    @rule()
    def go_on_with_the_survivors(self) -> None:
        """What follows a death, as a rule."""
        self.redeal([*self.processes])

    @rule()
    def checkpoint(self) -> None:
        """A state is saved."""
        self.saved = self.checkpoint_now()

    @rule(size=st.integers(1, 5))
    def resume(self, size: int) -> None:
        """All processes are lost; others resume from the state that was saved last."""
        state, naive, self.epoch = self.saved
        self.naive = copy.deepcopy(naive)
        self.naive.deal(range(size))
        self.processes = {}
        for member in range(size):
            sampler = self.sampler(member, range(size))
            sampler.load_state_dict(json.loads(state))
            sampler.set_epoch(self.epoch)
            self.processes[member] = Process(sampler)

    @rule()
    def abandon_the_epoch(self) -> None:
        """The next one begins with what is left of this one untouched."""
        self.redeal([*self.processes])
        self.begin_epoch(self.epoch + 1)

    @rule(count=counts)
    def finish_the_epoch(self, count: int) -> None:
        """Without another failure, it ends with every position done with."""
        self.redeal([*self.processes])
        while self.naive.num_left:
            self.step(count, set())
        num_missing = len(self.data) - self.naive.done.total()
        assert num_missing < len(self.processes) if self.naive.drop_last else not num_missing
        assert all(next(process.iterator, None) is None for process in self.processes.values())
        self.begin_epoch(self.epoch + 1)

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_repeated(self) -> None:
        """Of real positions; padding is bounded."""
        self.naive.check()

    @invariant()
    def samplers_agree_with_the_lists(self) -> None:
        """All members have the same state, and the shares of the naive deal."""
        assert len({json.dumps(process.sampler.state_dict()) for process in self.processes.values()}) == 1
        for member, process in self.processes.items():
            share = self.naive.shares[member]
            assert [*process.sampler] == self.indices(sample.position for sample in share)
            assert len(process.sampler) == self.naive.taken + len(share)
            cursor = Cursor.from_state(process.sampler.state_dict()["cursor"])
            assert [*itertools.chain(*cursor.owed)] == self.naive.owed()


TestSamplers = SamplerMachine.TestCase
TestSamplers.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@given(
    length=st.integers(0, 10_000_000),
    num_members=st.integers(2, 16),
    count=st.integers(1, 64),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_ranges_are_bounded_by_what_one_step_takes(length: int, num_members: int, count: int, seed: Any) -> None:
    """However many failures follow each other, a state has no more ranges than a step has samples."""
    cursor = Cursor.begin(length, range(num_members))
    for _ in range(100):
        num_dead = seed.randrange(num_members)
        contributors = seed.sample(range(num_members), num_members - num_dead)
        cursor = cursor.commit(min(count, cursor.num_left), contributors).redeal(range(num_members))
        again = [piece for piece in cursor.rest if piece.stop != length]
        assert sum(map(len, again)) <= (num_members - 1) * count
        assert len(cursor.rest) <= (num_members - 1) * count + 1
