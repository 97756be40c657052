"""Any sequence of events, sensible or not, against what must hold after each step."""

from __future__ import annotations

import collections

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events, machine
from lightning_ft.membership.arrangement import with_joined
from lightning_ft.membership.events import Address
from lightning_ft.membership.ids import parse_logical_id
from lightning_ft.membership.quorum import quorum
from lightning_ft.membership.state import Phase, State, Status, Tally, initial

MEMBERS = ("0/0", "0/1", "1/0", "10/0", "9/9")
ADDRESS = Address("host", 1)
names = st.sampled_from(MEMBERS)
incarnations = st.sampled_from([1, 1, 1, 2])
generations = st.integers(-1, 1)


def naive_quorum(state: State, config: Settings, now_s: float) -> set[str] | None:
    """C3 and C4a word by word, without counters or order; those that may go on, joiners not among them."""
    records = [state.members[member] for member in state.view.members]
    parked = {record.member for record in records if record.status is Status.PARKED}
    leaving = {record.member for record in records if record.status is Status.LEAVING}
    released = {record.member for record in records if record.status is Status.RELEASED}
    holders = {record.member for record in records if record.has_state}
    if any(record.status is Status.RUNNING for record in records) or not parked & holders:
        return None
    size = len(parked | leaving | released)
    voters = {record.member for record in records if not record.is_proven} & holders - leaving - released
    if any(state.members[a].completed > state.members[b].completed for a in leaving for b in parked & holders):
        parked, voters = parked | leaving, voters | leaving
    out = {record.member for record in state.members.scan() if record.status in (Status.GONE, Status.RELEASED)}
    waiting = {
        joiner.member for joiner in state.joiners.scan() if now_s - joiner.last_heard_s < config.heartbeat_timeout
    }
    num_places = max(0, (config.max_world_size or state.num_expected) - len(parked))
    size += min(num_places, len(waiting & out | waiting - set(state.members)))
    if size < config.min_world_size or (config.max_failures is not None and state.target - size > config.max_failures):
        return None
    votes = len(parked & voters)
    wins_tie = votes * 2 == len(voters) and min(voters, key=parse_logical_id) in parked
    return parked if votes * 2 > len(voters) or wins_tie else None


class MembershipMachine(RuleBasedStateMachine):
    """Feeds the core; keeps what it ever said."""

    @initialize(
        size=st.integers(1, 4),
        min_size=st.integers(1, 2),
        max_failures=st.sampled_from([None, None, 1]),
        max_size=st.sampled_from([None, 3, 9]),
        spares=st.integers(0, 1),
    )
    def start(self, size: int, min_size: int, max_failures: int | None, max_size: int | None, spares: int) -> None:
        """A job in generation 0, with some members connected."""
        self.config = Settings(
            min_world_size=min_size,
            max_failures=max_failures,
            max_world_size=max_size,
            spares=spares,
            rejoin_timeout=12.0,
            heartbeat_interval=1.0,
            heartbeat_timeout=3.0,
            timeout=8.0,
        )
        self.now_s = 0.0
        self.state = initial(MEMBERS[:size], 0.0, 8.0)
        self.views = {0: self.state.view}
        self.failed: collections.Counter[tuple[str, int | None]] = collections.Counter()
        self.out: set[tuple[str, int]] = set()
        self.suspended: collections.Counter[tuple[str, int]] = collections.Counter()
        for member in MEMBERS[:size]:
            self.feed(events.Hello(member, 1, 0, ADDRESS))

    def feed(self, event: events.Event) -> None:
        """One step, and what must hold of it."""
        before = self.state
        self.state, todo = machine.step(self.config, before, event, self.now_s)
        again, same = machine.step(self.config, before, event, self.now_s)
        assert (again, same) == (self.state, todo), "a step is a function"
        self._check_step(before, event, todo)
        for effect in todo:
            self._check_effect(effect)

    def _check_step(self, before: State, event: events.Event, todo: tuple[effects.Effect, ...]) -> None:
        old, new = before.view, self.state.view
        assert new.generation in (old.generation, old.generation + 1)
        assert self.views.setdefault(new.generation, new) == new, "I1"
        if new is not old and not set(new.members) <= set(old.members):
            assert len(new.members) <= (self.config.max_world_size or self.state.num_expected), "C7a"
        if before.phase is Phase.STOPPED:
            assert self.state.phase is Phase.STOPPED
        if (
            isinstance(event, events.Parked | events.Leaving | events.Hello)
            and (event.member, event.incarnation) in self.out
        ):
            assert self.state == before, "the gone change nothing"
            assert any(isinstance(effect, effects.Evict | effects.Release | effects.Stop) for effect in todo)
        if any(isinstance(effect, effects.Refuse) for effect in todo) and any(
            isinstance(effect, effects.Evict) for effect in todo
        ):
            assert self.state == before, "an illegal event changes nothing"

    def _check_effect(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Record(event="failure_detected", member=member):
                assert member is not None
                record = self.state.members[member]
                self.failed[member, record.incarnation] += 1
                assert self.failed[member, record.incarnation] == 1
            case effects.CommitView(member=member, generation=generation, base=base, left=left, joined=joined):
                view = self.views[generation]
                assert member in view.members
                known = () if base is None else self.views[base].members
                assert effect.size == len(view.members)
                assert with_joined((name for name in known if name not in left), joined) == view.members
            case effects.Suspend(generation=generation):
                assert generation == self.state.generation
            case effects.Stop():
                assert self.state.phase is Phase.STOPPED

    @invariant()
    def counters_match_a_recount(self) -> None:
        """The tally, and who is out."""
        state = self.state
        state.check()
        for record in state.members.values():
            is_out = record.status in (Status.GONE, Status.RELEASED)
            if is_out and record.incarnation is not None:
                self.out.add((record.member, record.incarnation))
            if not is_out:
                assert state.is_current(record), "whoever is not in the view is out"
                assert (record.member, record.incarnation) not in self.out, "out is final"
        if state.phase is Phase.STOPPED:
            return
        records = [state.members[member] for member in state.view.members]
        count = collections.Counter(record.status.value for record in records)
        admitting, proven = sum(r.admits for r in records), sum(r.is_proven for r in records)
        holding = sum(r.status is Status.PARKED and r.has_state for r in records)
        opposing = sum(r.status is Status.GONE and r.has_state and not r.is_proven for r in records)
        assert state.tally == Tally(**count, admitting=admitting, proven=proven, holding=holding, opposing=opposing)

    @invariant()
    def quorum_agrees_with_its_definition(self) -> None:
        """Against the naive twin; a view that could be formed was formed."""
        if self.state.phase is not Phase.SUSPENDED:
            return
        members, reason, _ = quorum(self.state, self.state.clock_s(self.now_s), self.config)
        assert members is None, "a view that can be formed is formed at once"
        assert naive_quorum(self.state, self.config, self.state.clock_s(self.now_s)) is None
        assert reason

    @rule(member=names, incarnation=incarnations, behind=generations)
    def hello(self, member: str, incarnation: int, behind: int) -> None:
        """A member connects."""
        self.feed(events.Hello(member, incarnation, max(0, self.state.generation + behind), ADDRESS))

    @rule(member=names, incarnation=incarnations)
    def ready(self, member: str, incarnation: int) -> None:
        """A process wants to join."""
        self.feed(events.Ready(member, incarnation, ADDRESS))

    @rule(
        member=names,
        incarnation=incarnations,
        behind=st.sampled_from([0, 0, 0, 0, -1, 1]),
        completed=st.sampled_from([4, 5, None]),
        reason=st.sampled_from(["connection", "join"]),
    )
    def park(self, member: str, incarnation: int, behind: int, completed: int | None, reason: str) -> None:
        """A member waits for a view."""
        generation = max(0, self.state.generation + behind)
        self.feed(events.Parked(member, incarnation, generation, completed, reason, reason == "join"))

    @rule(reason=st.sampled_from(["connection", "join"]))
    def everybody_parks(self, reason: str) -> None:
        """The view breaks, and all that are left say so."""
        generation = self.state.generation
        for member in self.views[generation].members:
            record = self.state.members[member]
            if record.status is Status.RUNNING and record.incarnation and self.state.generation == generation:
                self.feed(events.Parked(member, record.incarnation, generation, 5, reason, reason == "join"))

    @rule(member=names, incarnation=incarnations, behind=generations, completed=st.integers(4, 5))
    def leave(self, member: str, incarnation: int, behind: int, completed: int) -> None:
        """A member ends."""
        self.feed(events.Leaving(member, incarnation, max(0, self.state.generation + behind), completed))

    @rule(member=names, incarnation=incarnations, what=st.sampled_from([events.Disconnected, events.ProbeRefused]))
    def connection(self, member: str, incarnation: int, what: type) -> None:
        """A connection drops, or a probe is refused."""
        self.feed(what(member, incarnation))

    @rule(member=names, incarnation=incarnations)
    def exited(self, member: str, incarnation: int) -> None:
        """An agent reports."""
        self.feed(events.Exited(member, incarnation, 1, "exited with status 1"))

    @rule(member=names, incarnation=incarnations, signature=st.sampled_from(["", "ValueError at a.py:1"]))
    def failed(self, member: str, incarnation: int, signature: str) -> None:
        """A process ends with an exception."""
        self.feed(events.Failed(member, incarnation, "failed with ValueError", signature))

    @rule(
        seconds=st.sampled_from([0.5, 1.0, 1.5, 4.0]),
        alive=st.dictionaries(names, st.tuples(st.sampled_from([None, 0.0, 9.0]), st.sampled_from([0.0, 9.0]))),
    )
    def pass_time(self, seconds: float, alive: dict[str, tuple[float | None, float]]) -> None:
        """Some members are heard of, then the clock ticks."""
        self.now_s += seconds
        for member in sorted(alive):
            record = self.state.members.get(member)
            self.feed(events.Heartbeat(member, (record and record.incarnation) or 1, 0, *alive[member]))
        self.feed(events.Tick())


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
