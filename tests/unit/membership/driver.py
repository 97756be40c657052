"""A job in a test: the core, its clock, and the effects of the last step."""

from __future__ import annotations

from typing import Any

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events, machine
from lightning_ft.membership.effects import Effect
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import Phase, State, initial

INTERVAL_S, SILENCE_S, TIMEOUT_S = 1.0, 5.0, 20.0


class Job:
    """Feeds events to `machine.step`, and returns the effects. There is room to join, unless told otherwise."""

    def __init__(self, *members: str, **settings: Any) -> None:
        self.settings = Settings(
            **({"max_world_size": 9} | settings),
            heartbeat_interval=INTERVAL_S,
            heartbeat_timeout=SILENCE_S,
            timeout=TIMEOUT_S,
        )
        self.now_s = 0.0
        self.state: State = initial(members, 0.0, TIMEOUT_S)
        self.effects: tuple[Effect, ...] = ()
        self.since_s: dict[str, tuple[float | None, float | None, str]] = {}

    @classmethod
    def running(cls, *members: str, **settings: Any) -> Job:
        """A job in generation 1."""
        job = cls(*members, **settings)
        for member in members:
            job.hello(member)
        for member in members:
            job.park(member, reason="start")
        assert job.state.generation == 1
        assert job.state.phase is Phase.HEALTHY
        return job

    def feed(self, event: events.Event) -> tuple[Effect, ...]:
        self.state, self.effects = machine.step(self.settings, self.state, event, self.now_s)
        return self.effects

    def hello(self, member: str, generation: int = 0, incarnation: int = 1) -> tuple[Effect, ...]:
        return self.feed(events.Hello(member, incarnation, generation, Address(f"host{member[0]}", 1)))

    def ready(self, member: str, incarnation: int = 1, fingerprint: str = "") -> tuple[Effect, ...]:
        return self.feed(events.Ready(member, incarnation, Address(f"host{member[0]}", 2), fingerprint=fingerprint))

    def describe(self, member: str, fingerprint: str, incarnation: int = 1) -> tuple[Effect, ...]:
        return self.feed(events.Described(member, incarnation, fingerprint, f"description of {fingerprint}"))

    def park(
        self,
        member: str,
        completed: int = 0,
        *,
        reason: str = "connection",
        generation: int | None = None,
        incarnation: int = 1,
        admits: bool = False,
        suspects: tuple[str, ...] = (),
        is_quiet: bool = False,
    ) -> tuple[Effect, ...]:
        generation = self.state.generation if generation is None else generation
        return self.feed(events.Parked(member, incarnation, generation, completed, reason, admits, suspects, is_quiet))

    def leave(
        self, member: str, completed: int = 0, *, generation: int | None = None, incarnation: int = 1
    ) -> tuple[Effect, ...]:
        generation = self.state.generation if generation is None else generation
        return self.feed(events.Leaving(member, incarnation, generation, completed))

    def heartbeat(self, *members: str, incarnation: int = 1) -> tuple[Effect, ...]:
        for member in members:
            self.feed(events.Heartbeat(member, incarnation, 0, *self.standings.get(member, (None, 0.0, ""))))
        return self.effects

    def stands(self, member: str, *, waits: bool = False, idle: bool = False, doing: str = "") -> None:
        """Have a member say from now on, with its heartbeats, that it waits or shows no progress since now."""
        self.since_s[member] = (self.now_s if waits else None, self.now_s if idle or waits else None, doing)

    @property
    def standings(self) -> dict[str, tuple[float | None, float, str]]:
        """What heartbeats say now of those that `stands` was called for."""
        return {
            member: (
                None if waits_s is None else self.now_s - waits_s,
                0.0 if idle_s is None else self.now_s - idle_s,
                doing,
            )
            for member, (waits_s, idle_s, doing) in self.since_s.items()
        }

    def drop(self, member: str, incarnation: int = 1) -> tuple[Effect, ...]:
        return self.feed(events.Disconnected(member, incarnation))

    def refused(self, member: str, incarnation: int = 1) -> tuple[Effect, ...]:
        return self.feed(events.ProbeRefused(member, incarnation))

    def exited(self, member: str, incarnation: int = 1, *, is_last: bool = False) -> tuple[Effect, ...]:
        return self.feed(events.Exited(member, incarnation, -9, "killed by SIGKILL", is_last=is_last))

    def tick(self, seconds: float = INTERVAL_S, alive: tuple[str, ...] = ()) -> tuple[Effect, ...]:
        """Let time pass in whole intervals, with heartbeats of `alive`; effects of all these ticks."""
        seen: list[Effect] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + INTERVAL_S, end_s)
            self.heartbeat(*alive)
            seen += self.feed(events.Tick())
        self.effects = tuple(seen)
        return self.effects

    def of(self, kind: type[Effect]) -> list:
        """The last effects of one class."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def records(self, event: str) -> list[dict[str, object]]:
        """The last lines for the event log with this name, with `member`."""
        return [dict(r.fields) | {"member": r.member} for r in self.of(effects.Record) if r.event == event]
