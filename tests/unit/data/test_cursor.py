"""What is owed, and to whom it is dealt."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from lightning_ft.data.cursor import Cursor, Member


def positions(pieces: Iterable[range]) -> list[int]:
    return [*itertools.chain(*pieces)]


def shares(cursor: Cursor) -> list[list[int]]:
    return [positions(cursor.share(member)) for member in cursor.members]


class Tally:
    """Counts what contributors trained on, from the shares that they were given."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.seen: collections.Counter[int] = collections.Counter()

    def step(self, count: int, dead: Iterable[Member] = ()) -> None:
        """All take `count` samples, or what is left; the dead don't contribute."""
        count = min(count, self.cursor.num_left)
        contributors = [member for member in self.cursor.members if member not in set(dead)]
        for member in contributors:
            self.seen.update(positions(self.cursor.share(member))[:count])
        self.cursor = self.cursor.commit(count, contributors)

    def redeal(self, members: Iterable[Member]) -> None:
        self.cursor = self.cursor.redeal(members)

    def run(self, count: int) -> None:
        """Step until nothing is left of the deal."""
        while self.cursor.num_left:
            self.step(count)

    @property
    def num_extra(self) -> int:
        """Samples beyond one of each position; fails if a position is missing."""
        assert set(self.seen) == set(range(self.cursor.length))
        return self.seen.total() - self.cursor.length


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 12, 1003])
@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5, 8])
def test_first_deal_pads_with_the_beginning(length: int, num_members: int) -> None:
    """Every W-th position, padded with the first ones again, as often as need be."""
    padded = [*range(length)]
    while len(padded) % num_members:
        padded.append((len(padded) - length) % length)
    cursor = Cursor.begin(length, range(num_members))
    assert shares(cursor) == [padded[rank::num_members] for rank in range(num_members)]
    assert cursor.num_left == len(padded) // num_members


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 1003])
@pytest.mark.parametrize("num_members", [1, 2, 4])
def test_drop_last_leaves_the_rest_of_the_division_out(length: int, num_members: int) -> None:
    """With `drop_last` nothing is padded; what is left out stays owed, but the epoch is finished without it."""
    cursor = Cursor.begin(length, range(num_members), drop_last=True)
    dealt = length - length % num_members
    assert shares(cursor) == [[*range(rank, dealt, num_members)] for rank in range(num_members)]
    cursor = cursor.commit(cursor.num_left)
    assert cursor.is_finished
    assert cursor.num_owed == length % num_members


@pytest.mark.parametrize("drop_last", [False, True])
def test_empty_epoch_is_finished_from_the_start(drop_last: bool) -> None:
    """Nothing is dealt of nothing, and nothing is padded."""
    cursor = Cursor.begin(0, "abc", drop_last=drop_last)
    assert cursor.is_finished
    assert shares(cursor) == [[], [], []]
    assert cursor.redeal("ab").commit(0).is_finished


def test_commit_takes_the_next_samples_of_each_share() -> None:
    """What was committed is gone from all shares, and nothing else."""
    cursor = Cursor.begin(20, "abc")
    before = shares(cursor)
    cursor = cursor.commit(3).commit(0).commit(2)
    assert shares(cursor) == [share[5:] for share in before]
    assert cursor.taken == 5


def test_dead_members_samples_are_dealt_first() -> None:
    """What a member took without contributing comes before everything that was not taken."""
    cursor = Cursor.begin(20, "abcd").commit(1).commit(2, "acd")  # b has taken 5 and 9
    assert cursor.owed == (range(5, 10, 4), range(12, 20))
    cursor = cursor.redeal("acd")
    assert shares(cursor)[0][0] == 5
    assert shares(cursor)[1][0] == 9
    assert shares(cursor)[2][0] == 12


def test_survivors_go_on_in_the_old_deal_until_it_is_dealt_again() -> None:
    """A missing contributor changes no share before `redeal`; then all that it missed is owed."""
    cursor = Cursor.begin(24, "abc")
    before = shares(cursor)
    cursor = cursor.commit(2, "ac").commit(3, "ac")
    assert shares(cursor) == [share[5:] for share in before]
    assert positions(cursor.redeal("ac").owed) == [*before[1][:5], *range(15, 24)]


def test_member_that_missed_one_step_may_contribute_to_the_next() -> None:
    """Only the step that it missed becomes a hole."""
    tally = Tally(Cursor.begin(10, "ab"))
    tally.step(2, dead="b")
    tally.step(2)
    assert positions(tally.cursor.owed) == [1, 3, 8, 9]


def test_same_members_without_holes_change_nothing() -> None:
    """The very same value is returned, so that a caller can tell."""
    cursor = Cursor.begin(10, "ab").commit(2)
    assert cursor.redeal(["a", "b"]) is cursor


def test_order_of_members_counts() -> None:
    """A rank is a position among the members."""
    cursor = Cursor.begin(6, "ab").redeal("ba")
    assert positions(cursor.share("b")) == [0, 2, 4]


def test_deals_between_two_steps_leave_no_trace() -> None:
    """What is dealt depends on the last members only, so a joiner may deal to itself first."""
    cursor = Cursor.begin(50, "abcd").commit(3, "abd")
    assert cursor.redeal("x").redeal("abcdefgh").redeal("abd") == cursor.redeal("abd")


def test_restarted_member_deals_as_those_that_kept_their_deal() -> None:
    """Dealing to others and back is the same deal as having gone on with it."""
    cursor = Cursor.begin(50, "abcd").commit(3)
    assert shares(cursor.redeal("x").redeal("abcd")) == shares(cursor)


@pytest.mark.parametrize("kills", [False, True])
def test_four_three_four_members_over_1003(kills: bool) -> None:
    """From four members to three and back: each position once, and only the padding of the last deal."""
    tally = Tally(Cursor.begin(1003, "abcd"))
    for _ in range(10):
        tally.step(8)
    if kills:
        tally.step(8, dead="c")
    tally.redeal("abd")
    for _ in range(7):
        tally.step(8)
    tally.redeal("abdc")
    tally.run(8)
    assert tally.cursor.is_finished
    assert tally.num_extra == 1


def test_two_to_three_members_over_60001() -> None:
    """Growing in the middle of an epoch repeats nothing but padding."""
    tally = Tally(Cursor.begin(60_001, ["0/0", "0/1"]))
    for _ in range(300):
        tally.step(32)
    tally.redeal(["0/0", "0/1", "1/0"])
    tally.run(32)
    assert tally.num_extra == 2  # 60,001 - 19,200 = 40,801 = 3 * 13,600 + 1


def test_eight_to_six_members_over_60000_then_a_whole_epoch() -> None:
    """Two of eight die in the same step; the next epoch knows nothing of it."""
    tally = Tally(Cursor.begin(60_000, range(8)))
    for _ in range(100):
        tally.step(32)
    tally.step(32, dead=[2, 7])
    survivors = [0, 1, 3, 4, 5, 6]
    tally.redeal(survivors)
    tally.run(32)
    assert tally.num_extra == -(60_000 - 100 * 8 * 32 - 6 * 32) % 6
    following = Tally(Cursor.begin(60_000, survivors))
    following.run(32)
    assert following.num_extra == 0
    assert shares(Cursor.begin(60_000, survivors)) == [[*range(rank, 60_000, 6)] for rank in range(6)]


def test_two_resizes_with_holes_in_the_holes() -> None:
    """Members that die while the holes of others are being dealt lose nothing, either."""
    tally = Tally(Cursor.begin(997, range(5)))
    tally.step(16, dead=[1, 2])
    tally.redeal([0, 3, 4])
    tally.step(5, dead=[3, 4])
    tally.redeal([0, 5])
    tally.step(3, dead=[0])
    tally.redeal([5, 6, 7, 8])
    tally.run(16)
    assert tally.num_extra < 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_death_in_the_very_last_step(drop_last: bool) -> None:
    """What the dead member took is dealt once more; the padding that others took then is the price."""
    tally = Tally(Cursor.begin(1003, "abcd", drop_last=drop_last))
    tally.step(tally.cursor.num_left - 7)
    tally.step(7, dead="b")
    assert not tally.cursor.num_left
    assert not tally.cursor.is_finished
    tally.redeal("acd")
    assert tally.cursor.owed == ((range(973, 998, 4), range(1000, 1003)) if drop_last else (range(977, 1002, 4),))
    tally.run(32)
    assert tally.cursor.is_finished
    if drop_last:
        assert max(tally.seen.values()) == 1
        assert 1003 - len(tally.seen) == tally.cursor.num_owed == 1
    else:
        assert tally.num_extra == 1 + 2  # of the first deal and of the second


def test_padding_is_no_hole_and_pays_for_none() -> None:
    """A dead member's padding is not owed; a position is, even if somebody had it as padding."""
    cursor = Cursor.begin(5, "abcd")
    assert shares(cursor) == [[0, 4], [1, 0], [2, 1], [3, 2]]
    assert cursor.commit(2, "abc").owed == (range(3, 4),)
    assert cursor.commit(2, "bcd").owed == (range(0, 5, 4),)


def test_death_of_all_but_one_in_the_last_step() -> None:
    """One survivor is dealt all that the others had."""
    tally = Tally(Cursor.begin(10, "abcd"))
    tally.step(2)
    tally.step(1, dead="bcd")
    tally.redeal("a")
    tally.run(4)
    assert tally.num_extra == 0


def test_fewer_samples_than_members() -> None:
    """All get one, most of it padding; after a death the sample is owed, and that padding was for nothing."""
    tally = Tally(Cursor.begin(2, "abcde"))
    assert shares(tally.cursor) == [[0], [1], [0], [1], [0]]
    tally.step(1, dead="a")
    tally.redeal("bcde")
    tally.run(1)
    assert tally.seen == {0: 2 + 2 + 1, 1: 2 + 1}  # padding of the first deal, of the second, and each its own


def test_joiner_and_death_at_the_same_boundary() -> None:
    """Who comes is dealt the holes of who went."""
    tally = Tally(Cursor.begin(103, ["0/0", "0/1", "0/2"]))
    tally.step(4, dead=["0/1"])
    tally.redeal(["0/0", "0/2", "1/0"])
    assert positions(tally.cursor.share("0/0"))[:1] == [1]
    assert positions(tally.cursor.share("1/0"))[:1] == [7]
    tally.run(4)
    assert tally.num_extra == -(103 - 8) % 3


def test_only_the_last_rows_deal_is_left_out_by_drop_last() -> None:
    """What one deal would have left out is dealt by the next, if there is one."""
    cursor = Cursor.begin(11, "abcd", drop_last=True).commit(2)
    assert cursor.is_finished
    assert shares(cursor.redeal("abc")) == [[8], [9], [10]]


def test_extra_samples_are_bounded_by_ends_of_deals_with_a_death() -> None:
    """W - 1 for the epoch, and W - 1 for each last step of a deal in which somebody was missing."""
    chance = random.Random(1)
    for _ in range(300):
        members: list[Member] = [*range(chance.randint(1, 6))]
        tally, bound = Tally(Cursor.begin(chance.randint(1, 60), members)), 0
        while not tally.cursor.is_finished:
            dead = chance.sample(members, chance.randrange(len(members)))
            count = chance.randint(1, 9)
            if count >= tally.cursor.num_left:
                bound += len(members) - 1
            tally.step(count, dead)
            members = [member for member in members if member not in dead]
            tally.redeal(members)
        assert tally.num_extra <= bound


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 4])
def test_commit_refuses_a_count_out_of_range(count: int) -> None:
    """The error says how many are left, and how many were counted."""
    with pytest.raises(ValueError, match=rf"expected a count from 0 to 3.*got {count} \(taken=2\)"):
        Cursor.begin(10, "ab").commit(2).commit(count)


def test_commit_refuses_strangers_and_nobody() -> None:
    """A contributor was dealt something; a step has a contributor."""
    with pytest.raises(ValueError, match=r"commit failed: \['x'\] contributed, but .* dealt to \['a', 'b'\].*redeal"):
        Cursor.begin(10, "ab").commit(2, "ax")
    with pytest.raises(ValueError, match="at least one contributor"):
        Cursor.begin(10, "ab").commit(2, [])


def test_share_refuses_a_stranger() -> None:
    """Who is in no deal has no share."""
    with pytest.raises(ValueError, match=r"\['a', 'b'\], got 'x'"):
        Cursor.begin(10, "ab").share("x")


@pytest.mark.parametrize("members", ["", "aba"])
def test_deal_refuses_nobody_and_twins(members: str) -> None:
    """Members are one or more, and different."""
    with pytest.raises(ValueError, match="one or more different members"):
        Cursor.begin(10, members)
    with pytest.raises(ValueError, match="one or more different members"):
        Cursor.begin(10, "ab").redeal(members)


def test_begin_refuses_a_negative_length() -> None:
    """There is no such epoch."""
    with pytest.raises(ValueError, match="length >= 0, got -1"):
        Cursor.begin(-1, "ab")


# -- as data ----------------------------------------------------------------------------------------------------------


def example() -> Cursor:
    return Cursor.begin(1003, ["0/0", "0/1", "1/0"]).commit(8, ["0/0", "1/0"]).commit(8, ["0/0"])


@pytest.mark.parametrize("cursor", [example(), Cursor.begin(0, [0, 1], drop_last=True), Cursor.begin(9, range(3))])
def test_state_survives_json(cursor: Cursor) -> None:
    """What is read is what was written."""
    assert Cursor.from_state(json.loads(json.dumps(cursor.state()))) == cursor


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("length", -1, "from 0 to"),
        ("length", 500, "below the length 500, got 1002"),
        ("members", "abc", "expected a list"),
        ("members", [], "one or more different"),
        ("members", ["a", "a", "b"], "one or more different"),
        ("members", ["a", "", "b"], "not empty"),
        ("members", ["a", -1, "b"], "from 0 to"),
        ("members", ["a", True, "b"], "from 0 to"),
        ("members", ["a", "b"], "one list for each of 2 members, got 3"),
        ("drop_last", 0, "true or false"),
        ("rest", {}, "expected a list"),
        ("rest", [[0, 10]], r"\[start, stop, step\]"),
        ("rest", [[10, 10, 1]], "start < stop"),
        ("rest", [[0, 10, 0]], "step > 0"),
        ("rest", [[0, "10", 1]], "from 0 to"),
        ("rest", [[40, 1003, 1]], r"\[\[40, 1003, 1\]\] has a position that \[\[1, 47, 3\]\] has"),
        ("holes", [[], [[5, 26, 2]], [[26, 40, 6], [1, 8, 3]]], "has a position that"),
        ("holes", [[]], "one list for each of 3 members, got 1"),
        ("holes", [[], [], [[1, 2, -1]]], "from 0 to"),
        ("taken", None, "from 0 to"),
    ],
)
def test_bad_state_is_refused_by_field(field: str, value: Any, problem: str) -> None:
    """The error names what is wrong with which field."""
    named = {"members": "(members|holes)", "length": "(length|rest)"}.get(field, field)
    with pytest.raises(ValueError, match=rf"cursor's state, field '{named}': .*{problem}"):
        Cursor.from_state(example().state() | {field: value})


@pytest.mark.parametrize("state", [None, [], {"length": 5}, {**example().state(), "more": 1}])
def test_state_with_other_fields_is_refused(state: Any) -> None:
    """A field too many is from another version; one too few can't be guessed."""
    with pytest.raises(ValueError, match="cursor's state: expected"):
        Cursor.from_state(state)


def test_ranges_are_told_apart_as_their_elements_are() -> None:
    """Two ranges of a state are refused exactly if they share a position."""
    chance = random.Random(5)
    num_refused = 0
    for _ in range(500):
        pair = [range(chance.randrange(30), chance.randrange(30, 60), chance.randrange(1, 9)) for _ in range(2)]
        state = Cursor.begin(60, "a").state() | {"rest": [[piece.start, piece.stop, piece.step] for piece in pair]}
        if set(pair[0]) & set(pair[1]):
            num_refused += 1
            with pytest.raises(ValueError, match="has a position that"):
                Cursor.from_state(state)
        else:
            assert Cursor.from_state(state).rest == tuple(pair)
    assert 100 < num_refused < 400


def test_cursor_is_a_value() -> None:
    """Nothing changes it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().taken = 0  # type: ignore[misc]


# -- how large it grows -----------------------------------------------------------------------------------------------


def longest_state(num_members: int, num_dead: int, count: int, num_steps: int) -> tuple[int, int]:
    """Most ranges and positions that are owed again, if so many members die in each step and are replaced at once."""
    chance = random.Random(7)
    cursor = Cursor.begin(10_000_000, range(num_members))
    num_ranges = num_again = 0
    for _ in range(num_steps):
        dead = set(chance.sample(range(num_members), num_dead))
        cursor = cursor.commit(count, [member for member in range(num_members) if member not in dead])
        cursor = cursor.redeal(range(num_members))
        num_ranges = max(num_ranges, len(cursor.rest))
        num_again = max(num_again, cursor.num_owed - len(cursor.rest[-1]))
    return num_ranges, num_again


def test_thousands_of_deaths_leave_a_few_ranges() -> None:
    """One of eight members dies in each of 3,000 steps."""
    num_ranges, num_again = longest_state(8, 1, 32, 3000)
    assert num_ranges <= 4
    assert num_again == 32


@pytest.mark.parametrize(
    ("num_members", "num_dead", "count"), [(2, 1, 32), (5, 3, 64), (8, 4, 32), (8, 7, 32), (3, 2, 1)]
)
def test_owed_again_is_never_more_than_one_steps_samples(num_members: int, num_dead: int, count: int) -> None:
    """Whatever dies, ranges and positions that are owed again are bounded by what one step takes."""
    num_ranges, num_again = longest_state(num_members, num_dead, count, 700)
    assert num_again <= (num_members - 1) * count
    assert num_ranges <= num_again + 1


def test_steps_without_a_new_deal_are_joined() -> None:
    """Members that are missing for a thousand steps cost a range each, not one a step."""
    cursor = Cursor.begin(1_000_000, range(4))
    for _ in range(1000):
        cursor = cursor.commit(32, [0, 2])
    assert cursor.holes == ((), (range(1, 128_000, 4),), (), (range(3, 128_000, 4),))
    assert cursor.redeal([0, 2]).rest[-1] == range(128_000, 1_000_000)


def test_short_ranges_are_joined_with_their_neighbours() -> None:
    """Single samples of neighbouring members are one range."""
    cursor = Cursor.begin(1000, range(64)).commit(1, [0]).redeal([0])
    assert cursor.rest == (range(1, 1000),)


def test_large_step_of_a_large_epoch_is_cheap() -> None:
    """Half of the members die with all they had: a few ranges, whatever the length."""
    cursor = Cursor.begin(2**62, range(4))
    cursor = cursor.commit(cursor.num_left, [0, 3]).redeal([0, 3])
    assert cursor.rest == (range(1, 2**62, 4), range(2, 2**62, 4))
    assert len(json.dumps(cursor.state())) < 300
