"""A long job in virtual time: the real core, settle plan and cursor decide; only the time that things take is made up.

Between two faults nothing happens but steps, so time jumps. At a fault every message that the coordinator would get is
given to `membership.machine`, one after the other, with what the members have completed drawn at random as rule I3
allows; `settle.plan` says what becomes of the broken step, and `data.cursor` who is owed which sample.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Iterable

from lightning_ft.config import Settings
from lightning_ft.data.cursor import Cursor
from lightning_ft.membership import effects, events, machine, settle, snapshot, state
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import Phase, Status

NUMBERS_PER_STEP = 2
"""A reduction and a commit."""


@dataclasses.dataclass(frozen=True)
class Times:
    """What things take, seconds.

    Attributes:
        step_s: A step of all ranks, assumed.
        communicating: Share of a step in which members may differ in what they have completed, assumed.
        exit_detect_s: From a process's end until the coordinator was told (RESULTS.md, `recovery.py`).
        view_s: To park, rebuild and settle, without what grows with the members (RESULTS.md, `recovery.py`).
        view_per_member_s: What that grows by with each member (RESULTS.md, `coordinator_scale.py`).
        respawn_s: From a process's end until another of its name is ready (RESULTS.md, `rejoin.py`).
        replace_s: From the loss of a machine until another one's process is ready, assumed.
        blocked_s: For how long the others wait for a joiner (RESULTS.md, `rejoin.py`).
        takeover_s: From the loss of the coordinator's machine until a successor is in office: 1.5 heartbeat timeouts.
    """

    step_s: float = 1.0
    communicating: float = 0.1
    exit_detect_s: float = 0.025
    view_s: float = 0.012
    view_per_member_s: float = 0.00016
    respawn_s: float = 2.9
    replace_s: float = 300.0
    blocked_s: float = 0.034
    takeover_s: float = 15.0


KINDS = {"exit": 0.6, "silent": 0.3, "hang": 0.1}
"""How often a failure is which: the process ends, the machine is lost, the process hangs. Assumed."""

TIMEOUT_S = 60.0
SETTINGS = Settings(heartbeat_interval=1.0, heartbeat_timeout=10.0, timeout=TIMEOUT_S)


@dataclasses.dataclass
class Outcome:
    """What became of a run.

    Attributes:
        is_complete: Whether every sample was trained on in time.
        wall_s: How long it took, or lasted.
        ideal_s: How long it takes if nobody fails.
        num_failures: Of members.
        num_views: That were agreed on.
        lost_steps: Committed steps that no member of a later view had.
        lost_samples: That no committed step had, though the run was complete.
        repeated_samples: Of committed steps, beyond once each, without the epoch's padding.
    """

    is_complete: bool = False
    wall_s: float = 0.0
    ideal_s: float = 0.0
    num_failures: int = 0
    num_views: int = 0
    lost_steps: int = 0
    lost_samples: int = 0
    repeated_samples: int = 0

    @property
    def goodput(self) -> float:
        """Share of the time that was needed."""
        return self.ideal_s / self.wall_s if self.is_complete else 0.0


class Job:
    """A run of so many ranks and steps under failures that come at random.

    Args:
        seed: Decides everything.
        num_ranks: Each on a machine of its own.
        num_steps: If nobody fails.
        failures_per_s: Of each rank.
        times: What things take.
        limit_s: When it is given up.
    """

    def __init__(
        self, seed: int, num_ranks: int, num_steps: int, *, failures_per_s: float, times: Times, limit_s: float
    ) -> None:
        self.random = random.Random(seed)
        self.times, self.rate, self.limit_s = times, failures_per_s, limit_s
        names = [f"{node}/0" for node in range(num_ranks)]
        self.now_s = 0.0
        self.core = state.initial(names, 0.0, TIMEOUT_S)
        self.cursor = Cursor.begin(num_ranks * num_steps, names)
        self.num_done = 0
        self.num_trained = 0
        self.numbers: dict[str, int | None] = dict.fromkeys(names, 0)
        self.incarnations = dict.fromkeys(names, 1)
        self.restarts = dict.fromkeys(names, 0)
        self.joiners: list[tuple[float, str]] = []
        self.unsent: list[effects.Effect] = []
        self.is_announced = False
        self.coordinator = names[0]
        self.outcome = Outcome(ideal_s=num_steps * times.step_s)
        self.feed(events.Hello(name, 1, 0, self._address(name)) for name in names)
        self.feed(events.Parked(name, 1, 0, 0, "start") for name in names)
        self.take_view()

    # -- the core -----------------------------------------------------------------------------------------------------

    def feed(self, happened: Iterable[events.Event]) -> list[effects.Effect]:
        """Give the core events, now, and return what is to be done."""
        todo: list[effects.Effect] = []
        for event in happened:
            self.core, new = machine.step(SETTINGS, self.core, event, self.now_s)
            todo += new
            for effect in new:
                if isinstance(effect, effects.AnnounceJoin):
                    self.is_announced = True
                if isinstance(effect, effects.Record) and effect.event == "failure_detected":
                    self.outcome.num_failures += 1
        return todo

    def _address(self, name: str) -> Address:
        return Address(name, 1)

    def running(self) -> list[str]:
        """The members of the view that are not gone."""
        return [name for name in self.core.view.members if self.core.members[name].status is not Status.GONE]

    def heartbeats(self, names: Iterable[str], *, waiting_s: float | None, victims: Iterable[str] = ()) -> None:
        """Have members say that they live: they wait for others, the victims don't and show no progress."""
        hung = set(victims)
        for name in names:
            is_hung, since_s = name in hung, waiting_s or 0.0
            waits_s = None if is_hung else waiting_s
            self.feed([events.Heartbeat(name, self.incarnations[name], 0, waits_s, since_s)])

    def jump(self) -> None:
        """The clock has jumped: to the core that is a time in which it did not run itself (C8), and all are well."""
        self.feed([events.Tick()])
        self.heartbeats(self.running(), waiting_s=None)

    def park(self, reason: str, *, admits: bool = False) -> None:
        """Have all that live park, one after the other; another may die in the middle of it."""
        generation, names = self.core.generation, self.running()
        recovery_s = self.times.view_s + self.times.view_per_member_s * len(names)
        unlucky = self._unlucky(names, recovery_s)
        for index, name in enumerate(names):
            if name in unlucky:
                continue
            if index == len(names) // 2:
                for victim in unlucky:
                    self.end(victim)
            parked = events.Parked(name, self.incarnations[name], generation, self.numbers[name], reason, admits)
            self.feed([parked])
        for victim in unlucky:
            self.end(victim)
        self.now_s += self.times.blocked_s if admits else recovery_s
        self.settle_quorum()

    def _unlucky(self, names: list[str], during_s: float) -> set[str]:
        chance = self.rate * len(names) * during_s
        if self.random.random() >= chance or len(names) < 2:
            return set()
        return {self.random.choice(names)}

    def end(self, name: str) -> None:
        """A process ends; its agent says so, and starts another one a few times."""
        incarnation = self.incarnations[name]
        record = self.core.members[name]
        if record.incarnation != incarnation or record.is_proven:
            return
        is_last = self.restarts[name] >= SETTINGS.max_restarts
        self.feed([events.Exited(name, incarnation, -9, "killed by SIGKILL", is_last=is_last)])
        if not is_last:
            self.restarts[name] += 1
            self.return_after(name, self.times.respawn_s)

    def return_after(self, name: str, seconds: float) -> None:
        """Another process of this name will be ready to join."""
        if all(known != name for _, known in self.joiners):
            heapq.heappush(self.joiners, (self.now_s + seconds, name))

    def settle_quorum(self) -> None:
        """Wait until there is a next view, or none will ever be."""
        while self.core.phase is Phase.SUSPENDED:
            self.now_s += SETTINGS.heartbeat_interval
            self.heartbeats([*self.running(), *self.core.joiners], waiting_s=None)
            self.admit_ready()
            self.feed([events.Tick()])
        if self.core.phase is Phase.HEALTHY:
            self.take_view()

    def take_view(self) -> None:
        """Settle, as the members of a new view do."""
        self.outcome.num_views += 1
        members = self.core.view.members
        self.is_announced = False
        standings = [settle.Standing(self.numbers.get(name), kept_is_void=False, kept_generation=0) for name in members]
        plan = settle.plan(standings)
        done = [number for number in self.numbers.values() if number is not None]
        if self.num_done * NUMBERS_PER_STEP > plan.target:
            self.outcome.lost_steps += self.num_done - plan.target // NUMBERS_PER_STEP
        assert plan.target in done, (plan, done)
        self.numbers = dict.fromkeys(members, plan.target)

    # -- faults -------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """A member fails in the middle of a step, which the others finish."""
        names = self.running()
        victim = self.random.choice(names)
        (kind,) = self.random.choices(list(KINDS), list(KINDS.values()))
        before = self.num_done * NUMBERS_PER_STEP
        is_communicating = self.random.random() < self.times.communicating
        base = before + self.random.randrange(NUMBERS_PER_STEP) if is_communicating else before
        ahead = is_communicating and self.random.random()
        for name in names:  # I3: by one at most
            self.numbers[name] = base + (self.random.random() < ahead)
        others = [name for name in names if name != victim]
        if not others:
            self.end(victim)
            return
        self.jump()
        self.numbers.pop(victim)
        if kind == "exit":
            self.now_s += self.times.exit_detect_s
            self.end(victim)
        else:
            self.wait_for_detection(victim, others, kind)
        self.park("suspended")
        if self.core.phase is Phase.HEALTHY:
            self.finish_step()

    def wait_for_detection(self, victim: str, others: list[str], kind: str) -> None:
        """Let time pass until the core gives up who says nothing, or does nothing."""
        if kind == "silent" and victim == self.coordinator:
            self.take_over(others)
        begin_s = self.now_s
        while self.core.members[victim].status is not Status.GONE:
            self.now_s += SETTINGS.heartbeat_interval
            waited_s = self.now_s - begin_s
            self.heartbeats(others, waiting_s=waited_s)
            if kind == "hang":
                self.heartbeats([victim], waiting_s=waited_s, victims=[victim])
            self.feed([events.Tick()])
            assert waited_s < 10 * TIMEOUT_S, f"{victim} is never given up"
        if kind == "hang":
            self.end(victim)  # its agent was told to kill it
        else:
            self.restarts[victim] = 0  # another machine, another agent
            self.return_after(victim, self.times.replace_s)

    def take_over(self, others: list[str]) -> None:
        """Another node's coordinator goes on from the last decision; all say again who they are."""
        self.now_s += self.times.takeover_s
        self.core = snapshot.load(snapshot.dump(self.core), self.now_s, TIMEOUT_S, TIMEOUT_S)
        self.coordinator = others[0]
        generation = self.core.generation
        self.feed(events.Hello(name, self.incarnations[name], generation, self._address(name)) for name in others)

    def finish_step(self) -> None:
        """The step that was broken counts with whoever is left."""
        present = self.core.view.members
        target = self.numbers[present[0]]
        assert target is not None
        is_counted = target >= (self.num_done + 1) * NUMBERS_PER_STEP
        if not is_counted:
            self.now_s += self.random.random() * self.times.step_s  # what was left of it
        self.count(1, [name for name in present if name in self.cursor.members])
        self.cursor = self.cursor.redeal(present)

    def count(self, num_steps: int, contributors: Iterable[str] | None = None) -> None:
        """Steps were committed."""
        num = min(num_steps, self.cursor.num_left)
        present = None if contributors is None else frozenset(contributors)
        for member, taken in zip(self.cursor.members, self.cursor.next_of_each(num), strict=True):
            if present is None or member in present:
                self.num_trained += sum(map(len, taken))
        self.cursor = self.cursor.commit(num, present)
        self.num_done += num_steps
        self.numbers = dict.fromkeys(self.core.view.members, self.num_done * NUMBERS_PER_STEP)

    # -- joiners ------------------------------------------------------------------------------------------------------

    def admit_ready(self) -> None:
        """Whoever is ready by now says so."""
        while self.joiners and self.joiners[0][0] <= self.now_s:
            _, name = heapq.heappop(self.joiners)
            self.incarnations[name] += 1
            self.numbers[name] = None
            self.feed([events.Ready(name, self.incarnations[name], self._address(name))])

    def boundary(self) -> None:
        """Between two steps, whoever is ready is admitted."""
        self.jump()
        self.admit_ready()
        if self.is_announced:
            self.park("join", admits=True)
            if self.core.phase is Phase.HEALTHY:
                self.cursor = self.cursor.redeal(self.core.view.members)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end, whichever it is."""
        step_s, length = self.times.step_s, self.cursor.length
        while not self.cursor.is_finished and self.core.phase is Phase.HEALTHY and self.now_s < self.limit_s:
            if not self.cursor.num_left:
                self.cursor = self.cursor.redeal(self.core.view.members)
            failure_s = self.now_s + self.random.expovariate(self.rate * len(self.core.view.members))
            next_s = min([failure_s, *(when_s for when_s, _ in self.joiners[:1])])
            num = max(0, min(int((next_s - self.now_s) / step_s), self.cursor.num_left))
            self.count(num)
            self.now_s += num * step_s
            if self.cursor.num_left and next_s == failure_s:
                self.now_s = max(self.now_s, failure_s)
                self.fail()
            elif self.cursor.num_left:  # the step in which they become ready
                self.count(1)
                self.now_s += step_s
                self.boundary()
        self.outcome.is_complete = self.cursor.is_finished and self.now_s <= self.limit_s
        self.outcome.wall_s = self.now_s
        if self.cursor.is_finished:
            self.outcome.lost_samples = max(0, length - self.num_trained)
            self.outcome.repeated_samples = max(0, self.num_trained - length)
        return self.outcome
