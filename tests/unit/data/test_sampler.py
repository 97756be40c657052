"""The sampler, against DistributedSampler and through torch's DataLoader."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import json
import logging
import pickle
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.sequence import CollectiveSequence
from lightning_ft.data import sampler as sampler_module
from lightning_ft.data.cursor import Member
from lightning_ft.data.sampler import ElasticDistributedSampler


class Numbers(Dataset[int]):
    """A data set whose samples are their indices, and whose length may change."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return index


def samplers(length: int, num_members: int, **kwargs: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(Numbers(length), num_members, rank, **kwargs) for rank in range(num_members)]


def take(sampler: ElasticDistributedSampler, count: int) -> list[int]:
    return [*itertools.islice(sampler, count)]


class Job:
    """A sampler for each member; counts what the contributors of each step were given."""

    def __init__(self, length: int, num_members: int, **kwargs: Any) -> None:
        self.members = dict(enumerate(samplers(length, num_members, **kwargs)))
        self.seen: collections.Counter[int] = collections.Counter()

    @property
    def one(self) -> ElasticDistributedSampler:
        return next(iter(self.members.values()))

    def step(self, count: int, dead: Sequence[int] = ()) -> None:
        count = min(count, self.one.num_left)
        for rank in dead:
            del self.members[rank]
        for sampler in self.members.values():
            self.seen.update(take(sampler, count))
        for sampler in self.members.values():
            sampler.record_batch(count, self.members)

    def redeal(self, joiners: Sequence[int] = ()) -> None:
        state = json.dumps(self.one.state_dict())
        members = [*self.members, *joiners]
        for sampler in self.members.values():
            sampler.redeal(members)
        for rank in joiners:
            joiner = ElasticDistributedSampler(self.one.dataset, 1, 0, self.one.shuffle)
            joiner.load_state_dict(json.loads(state))
            assert joiner.redeal(members, member=rank)
            self.members[rank] = joiner
        assert len({json.dumps(sampler.state_dict()) for sampler in self.members.values()}) == 1
        assert len({len(sampler) for sampler in self.members.values()}) == 1

    def run(self, count: int) -> None:
        while self.one.num_left:
            self.step(count)


# -- as DistributedSampler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 1003, 10_007])
def test_indices_are_those_of_distributed_sampler(length: int, shuffle: bool, drop_last: bool) -> None:
    """For every world size, rank and epoch, and so are all public attributes."""
    for num_members in (1, 2, 3, 4, 7, 16):
        arguments = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
        for rank, ours in enumerate(samplers(length, num_members, **arguments)):
            theirs = DistributedSampler(Numbers(length), num_members, rank, **arguments)
            for epoch in (0, 1, 5):
                theirs.set_epoch(epoch)
                ours.set_epoch(epoch)
                assert [*ours] == [*theirs]
                assert [*ours] == [*theirs], "also the second time"
            assert len(ours) == len(theirs)
            for name in ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed"):
                assert getattr(ours, name) == getattr(theirs, name), name


def test_indices_are_those_of_distributed_sampler_while_steps_are_recorded() -> None:
    """Recording changes neither what an iterator yields nor the length, and the next epoch is a whole one."""
    ours, theirs = samplers(1003, 4)[2], DistributedSampler(Numbers(1003), 4, 2)
    for epoch in range(3):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        got = []
        for batch in BatchSampler(ours, 32, drop_last=False):
            got += batch
            ours.record_batch(len(batch))
            assert len(ours) == len(theirs)
        assert got == [*theirs]
        assert ours.num_left == 0


def test_without_a_process_group_the_ranks_must_be_given() -> None:
    """As with DistributedSampler."""
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ElasticDistributedSampler(Numbers(10))
    with pytest.raises(ValueError, match="Invalid rank 3"):
        ElasticDistributedSampler(Numbers(10), 3, 3)


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are looked up block by block; the length of a block doesn't show."""
    monkeypatch.setattr(sampler_module, "_BLOCK", 7)
    for length in (6, 7, 8, 14, 50):
        assert [*samplers(length, 1)[0]] == [*DistributedSampler(Numbers(length), 1, 0)]


def test_lightning_takes_it_for_a_distributed_sampler() -> None:
    """Any other sampler it wraps into one of its own, which would shard the shares once more."""
    assert isinstance(samplers(10, 2)[0], DistributedSampler)


# -- recording and dealing again --------------------------------------------------------------------------------------


def test_new_iterator_starts_at_what_was_recorded() -> None:
    """What was drawn ahead does not count."""
    sampler = samplers(100, 4)[1]
    whole = [*sampler]
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(12)] == whole[:12]
    sampler.record_batch(5)
    assert [*sampler] == whole[5:]
    assert [*iterator] == whole[12:], "the old one goes on where it was"


def test_drawn_ahead_and_not_recorded_is_dealt_to_others() -> None:
    """Batches that were prefetched when the members changed are owed."""
    job = Job(1000, 4)
    job.step(10)
    ahead = {rank: take(sampler, 50) for rank, sampler in job.members.items()}
    job.step(10, dead=[3])
    job.redeal()
    job.run(10)
    assert set(itertools.chain(*ahead.values())) <= set(job.seen)
    assert set(job.seen) == set(range(1000))
    assert job.seen.total() - 1000 == -(1000 - 40 - 30) % 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_four_three_four_members_over_1003(shuffle: bool) -> None:
    """A rank dies and another joins: each sample once, and one of padding."""
    job = Job(1003, 4, shuffle=shuffle)
    for _ in range(5):
        job.step(16)
    job.step(16, dead=[2])
    job.redeal()
    for _ in range(5):
        job.step(16)
    job.redeal(joiners=[4])
    job.run(16)
    assert set(job.seen) == set(range(1003))
    assert job.seen.total() == 1004


def test_joiner_and_death_at_the_same_boundary() -> None:
    """The joiner is given its share of what the dead rank had."""
    job = Job(101, 3)
    job.step(4, dead=[0])
    job.redeal(joiners=[0])
    job.run(4)
    assert set(job.seen) == set(range(101))
    assert job.seen.total() == 101 + -(101 - 8) % 3


def test_death_in_the_last_step_prolongs_the_epoch() -> None:
    """Lengths grow by what is owed, for all survivors alike."""
    job = Job(64, 4)
    job.step(12)
    job.step(4, dead=[1])
    assert len(job.one) == 16
    assert not [*job.one]
    job.redeal()
    assert len(job.one) == 16 + 2  # 4 samples for 3 members
    job.run(4)
    assert set(job.seen) == set(range(64))
    assert job.seen.total() == 66


def test_redeal_tells_whether_anything_changed() -> None:
    """Only then are iterators to be made anew."""
    sampler = samplers(20, 2)[0]
    iterator = iter(sampler)
    assert not sampler.redeal([0, 1])
    next(iterator)
    sampler.record_batch(1, [0])
    assert sampler.redeal([0, 1])
    assert sampler.redeal([1, 0])
    assert sampler.rank == 1
    assert sampler.redeal([1, 0], member=1)
    assert sampler.rank == 0


def test_redeal_refuses_members_without_the_own() -> None:
    """A member to whom nothing is dealt has no business here; nothing changed."""
    sampler = samplers(20, 2)[0]
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=r"\['1', '2'\], got 0"):
        sampler.redeal([1, 2])
    with pytest.raises(ValueError, match="got 7"):
        sampler.redeal([0, 1], member=7)
    with pytest.raises(ValueError, match=r"expected the members, got None.*Pass the members"):
        sampler.redeal()
    assert sampler.state_dict() == before
    assert sampler.member == 0


def test_record_batch_refuses_more_than_is_left() -> None:
    """A batch that is counted twice is found at the end of the epoch at the latest."""
    sampler = samplers(20, 2)[0]
    sampler.record_batch(10)
    with pytest.raises(ValueError, match=r"from 0 to 0.*got 1 \(taken=10\)"):
        sampler.record_batch(1)


@pytest.mark.parametrize("num_drawn", [0, 1, 10])
@pytest.mark.parametrize("change", ["redeal", "epoch", "load"])
def test_old_iterator_raises_once_the_samples_are_dealt_again(num_drawn: int, change: str) -> None:
    """At its very next sample, even within a block, before its first and after its last."""
    sampler = samplers(20, 2)[0]
    state = sampler.state_dict()
    iterator = iter(sampler)
    for _ in range(num_drawn):
        next(iterator)
    if change == "redeal":
        sampler.redeal([0])
    elif change == "epoch":
        sampler.set_epoch(1)
    else:
        sampler.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"dealt again after this iterator was made.*Make a new iterator"):
        next(iterator)
    assert [*sampler] == [*sampler]


def test_iterators_are_forgotten_with_their_last_reference() -> None:
    """An iterator that is dropped half way is not kept by the sampler."""
    sampler = samplers(20, 2)[0]
    iterators = [iter(sampler) for _ in range(3)]
    for iterator in iterators:
        next(iterator)
    assert len(sampler._open_blocks) == 3
    del iterator
    iterators.clear()
    assert not sampler._open_blocks


# -- epochs -----------------------------------------------------------------------------------------------------------


def test_same_epoch_goes_on_and_another_begins() -> None:
    """Loops that resume call `set_epoch` of the epoch they resume."""
    sampler = samplers(20, 2)[0]
    whole = [*sampler]
    sampler.record_batch(4)
    sampler.set_epoch(0)
    assert [*sampler] == whole[4:]
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert [*sampler] == whole


def test_finished_epoch_yields_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Samples are not repeated behind the loop's back; a loop without `set_epoch` learns why it ends."""
    sampler = samplers(20, 2)[0]
    sampler.record_batch(10)
    with caplog.at_level(logging.WARNING, logger="lightning_ft"):
        assert not [*sampler]
    assert caplog.messages == ["[0] nothing is left of this share of epoch 0: call set_epoch"]


def test_share_at_its_end_with_holes_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that forgets to deal again would lose the samples of lost members."""
    sampler = samplers(20, 2)[0]
    sampler.record_batch(10, [0])
    with caplog.at_level(logging.WARNING, logger="lightning_ft"):
        assert not [*sampler]
    assert "samples of lost members are owed, call redeal" in caplog.text


def test_next_epoch_is_dealt_to_the_members_of_the_last_deal() -> None:
    """Who died in one epoch is dealt nothing in the next."""
    job = Job(60, 3)
    job.step(20, dead=[1])
    job.redeal()
    for position, sampler in enumerate(job.members.values()):
        sampler.set_epoch(1)
        expected = DistributedSampler(Numbers(60), 2, position)
        expected.set_epoch(1)
        assert [*sampler] == [*expected]


def test_length_of_the_data_set_is_read_when_an_epoch_begins() -> None:
    """It may change between epochs, and before the first step of one; an epoch under way keeps what it began with."""
    data = Numbers(20)
    sampler = ElasticDistributedSampler(data, 2, 0)
    data.length = 24
    sampler.set_epoch(0)
    assert [*sampler] == [*DistributedSampler(Numbers(24), 2, 0)]
    sampler.record_batch(1)
    data.length = 30
    sampler.set_epoch(0)
    assert [*sampler] == [*DistributedSampler(Numbers(24), 2, 0)][1:]
    sampler.set_epoch(1)
    assert len(sampler) == 15
    sampler.set_epoch(0)
    assert [*sampler] == [*DistributedSampler(Numbers(30), 2, 0)]


def test_data_set_that_shrinks_during_an_epoch_is_refused() -> None:
    """Its last samples are owed, and gone."""
    data = Numbers(20)
    sampler = ElasticDistributedSampler(data, 2, 0)
    data.length = 19
    with pytest.raises(ValueError, match="at least the 20 samples with which epoch 0 began, got 19"):
        iter(sampler)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_members", [1, 2, 3, 5])
def test_resumed_job_of_any_size_trains_on_the_rest(num_members: int) -> None:
    """All processes are lost; what no recorded step consumed is dealt to the new ones."""
    job = Job(203, 3, seed=9)
    for sampler in job.members.values():
        sampler.set_epoch(4)
    job.step(7)
    job.step(7, dead=[1])
    state = json.dumps(job.one.state_dict())
    resumed = Job(203, num_members, seed=9)
    for sampler in resumed.members.values():
        sampler.load_state_dict(json.loads(state))
        sampler.set_epoch(4)
    resumed.seen = job.seen
    resumed.run(8)
    assert set(resumed.seen) == set(range(203))
    assert resumed.seen.total() == 203 + -(203 - 21 - 14) % num_members
    assert len(resumed.one) == 14 + -(-(203 - 21 - 14) // num_members)


def test_joiner_counts_what_was_taken_before_it_came() -> None:
    """Its length is everybody's, so that its loop ends with theirs."""
    job = Job(100, 2)
    job.step(10)
    job.redeal(joiners=[2])
    assert [len(sampler) for sampler in job.members.values()] == [10 + 27] * 3
    assert [len([*sampler]) for sampler in job.members.values()] == [27] * 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"seed": 1}, "seed 1, which this sampler has, got 0 in"),
        ({"shuffle": False}, "shuffle False, which this sampler has, got True in"),
        ({"drop_last": True}, "drop_last True, which this sampler has, got False in"),
        ({"length": 21}, "data set length 21, which this sampler has, got 20 in"),
    ],
)
def test_state_of_another_sampler_is_refused(arguments: dict[str, Any], problem: str) -> None:
    """Another order would repeat samples and miss others; both values are named, and nothing changed."""
    state = samplers(20, 2)[0].state_dict() | {"epoch": 3}
    sampler = samplers(**{"length": 20, "num_members": 2} | arguments)[0]
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=f"load_state_dict failed: expected {problem}"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "expected version 1, .*got 2"),
        ({"epoch": 0.5}, "field 'epoch': expected an integer, got 0.5"),
        ({"seed": True}, "field 'seed': expected an integer, got True"),
        ({"shuffle": 1}, "field 'shuffle': expected true or false, got 1"),
        ({"cursor": {}}, "field 'cursor': cursor's state: expected the fields"),
        ({"more": 1}, "sampler's state: expected the fields"),
    ],
)
def test_bad_state_is_refused(change: dict[str, Any], problem: str) -> None:
    """The error names the field."""
    sampler = samplers(20, 2)[0]
    with pytest.raises(ValueError, match=problem):
        sampler.load_state_dict(sampler.state_dict() | change)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])  # noqa: S301
def test_copy_goes_on_by_itself(duplicate: Any) -> None:
    """A DataLoader is copied with its sampler, and sent to other processes."""
    sampler = samplers(20, 2)[0]
    iterator = iter(sampler)
    next(iterator)
    sampler.record_batch(1)
    twin = duplicate(sampler)
    twin.record_batch(1)
    assert [*twin] == [*sampler][1:]


def test_one_permutation_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once an epoch, after the last one has gone; an old iterator doesn't keep it."""
    made: list[weakref.ref[torch.Tensor]] = []
    randperm = torch.randperm

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        gc.collect()
        assert not any(permutation() is not None for permutation in made)
        permutation = randperm(*args, **kwargs)
        made.append(weakref.ref(permutation))
        return permutation

    monkeypatch.setattr(torch, "randperm", counted)
    sampler = samplers(20, 2)[0]
    old = [iter(sampler) for _ in range(2)]
    for iterator in old:
        next(iterator)
    sampler.redeal([0])
    assert len([*sampler]) == 20
    sampler.set_epoch(1)
    assert len([*sampler]) == 20
    assert len(made) == 2
    assert not [*samplers(20, 2, shuffle=False)[0]][10:]
    assert len(made) == 2


# -- with the resilient group -----------------------------------------------------------------------------------------


class Ring:
    """What the sampler needs of a ring."""

    def __init__(self, member: str) -> None:
        self.member = member


@pytest.fixture
def world() -> Iterator[FaultTolerantProcessGroup]:
    """A default group of backend `ft` of three members, of which this process is the second."""
    sequence = CollectiveSequence("world", ("0/0", "0/1", "1/0"))
    ring: Any = Ring("0/1")
    dist.group.WORLD = group = FaultTolerantProcessGroup(ring, sequence)
    yield group
    dist.group.WORLD = None


def renumber(world: FaultTolerantProcessGroup, members: Iterable[str]) -> None:
    world.sequence.visible = tuple(members)


@pytest.mark.parametrize("arguments", [{}, {"num_replicas": 3, "rank": 1}, {"num_replicas": 3}])
def test_members_go_by_their_logical_ids(world: FaultTolerantProcessGroup, arguments: dict[str, int]) -> None:
    """If the ranks given, or none, are those of the resilient group."""
    sampler = ElasticDistributedSampler(Numbers(100), **arguments)
    assert sampler.members == ("0/0", "0/1", "1/0")
    assert sampler.member == "0/1"
    assert [*sampler] == [*DistributedSampler(Numbers(100), 3, 1)]


def test_other_ranks_than_the_groups_stay_ranks(world: FaultTolerantProcessGroup) -> None:
    """Who shards otherwise is not renumbered with the group."""
    sampler = ElasticDistributedSampler(Numbers(100), 2, 1)
    renumber(world, ["0/0", "0/1"])
    sampler.set_epoch(1)
    assert sampler.members == (0, 1)


def test_redeal_takes_the_groups_members(world: FaultTolerantProcessGroup) -> None:
    """Contributors and members are what the group and its commits say."""
    sampler = ElasticDistributedSampler(Numbers(100))
    sampler.record_batch(4, ("0/1", "1/0"))
    renumber(world, ["0/1", "1/0"])
    assert sampler.redeal()
    assert sampler.redeal(), "until the iterators are made anew"
    iter(sampler)
    assert not sampler.redeal()
    assert (sampler.rank, sampler.num_replicas) == (0, 2)
    assert len(sampler) == 4 + 46


def test_joiner_made_before_the_group_takes_its_id_from_it(world: FaultTolerantProcessGroup) -> None:
    """It is rank 0 of 1 until it is admitted."""
    donor = ElasticDistributedSampler(Numbers(100))
    donor.record_batch(4)
    donor.redeal(("0/1", "1/0"))  # before it came
    dist.group.WORLD = None
    joiner = ElasticDistributedSampler(Numbers(100), 1, 0)
    joiner.load_state_dict(donor.state_dict())
    dist.group.WORLD = world
    assert joiner.redeal()
    assert donor.redeal()
    assert joiner.state_dict() == donor.state_dict()
    assert (joiner.member, joiner.rank) == ("0/1", 1)


def test_new_epoch_is_dealt_to_the_groups_members(world: FaultTolerantProcessGroup) -> None:
    """Also if a member went after the last step of the epoch."""
    sampler = ElasticDistributedSampler(Numbers(100))
    renumber(world, ["0/1", "1/0"])
    sampler.set_epoch(0)
    assert len(sampler) == 34
    sampler.set_epoch(1)
    assert (len(sampler), sampler.members) == (50, ("0/1", "1/0"))


def test_resumed_state_is_dealt_to_the_groups_members(world: FaultTolerantProcessGroup) -> None:
    """A checkpoint of other members is dealt to those that are there now."""
    state = ElasticDistributedSampler(Numbers(100)).state_dict()
    sampler = ElasticDistributedSampler(Numbers(100))
    renumber(world, ["5/0", "0/1"])
    sampler.load_state_dict(state)
    assert (sampler.rank, sampler.members) == (1, ("5/0", "0/1"))


# -- through a DataLoader ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_batches_cover_the_epoch(num_workers: int) -> None:
    """What workers had prefetched of the old deal goes with its iterator; nothing is lost or repeated."""
    job: dict[Member, ElasticDistributedSampler] = dict(enumerate(samplers(50, 2)))
    workers: Any = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    options = {0: workers if num_workers else {}, 1: {}}  # fresh interpreters: this process may have Gloo's threads
    loaders = {rank: DataLoader(Numbers(50), 4, sampler=job[rank], **options[rank]) for rank in (0, 1)}
    seen: list[int] = []
    num_steps = num_deals = 0
    while job[0].num_left:
        num_deals += 1
        for batches in zip(*(loaders[rank] for rank in job), strict=True):
            num_steps += 1
            if num_steps == 3:
                del job[1]
            for rank, sampler in job.items():
                seen += batches[rank].tolist()
                sampler.record_batch(len(batches[rank]), job)
            if job[0].redeal(job):
                break
    assert num_deals == 2
    assert sorted(seen) == [*range(50)]


def test_loaders_length_is_the_whole_epochs() -> None:
    """A loop that counts batches from the start of the epoch ends with it."""
    sampler = samplers(100, 2)[0]
    loader: DataLoader[int] = DataLoader(Numbers(100), batch_size=8, sampler=sampler)
    assert len(loader) == 7
    sampler.record_batch(16)
    sampler.redeal([0])
    assert len(loader) == 2 + 9  # 68 samples are left
    assert len([*loader]) == 9


def test_worker_loader_raises_after_a_new_deal() -> None:
    """A loader that is used on gives out what it had drawn, and then says what is wrong."""
    sampler = samplers(100, 2)[0]
    iterator = iter(DataLoader(Numbers(100), batch_size=2, sampler=sampler))
    next(iterator)
    sampler.redeal([0])
    with pytest.raises(RuntimeError, match="dealt again"):
        next(iterator)


def test_a_loaded_state_makes_iterators_stale() -> None:
    """Whoever joins has drawn from a deal of its own: even if the members are the same, it must draw anew."""
    donor, joiner = (ElasticDistributedSampler(Numbers(100), 2, rank) for rank in range(2))
    iter(joiner)
    donor.record_batch(8)
    joiner.load_state_dict(donor.state_dict())
    assert joiner.redeal((0, 1))
    iter(joiner)
    assert not joiner.redeal((0, 1))
