"""Scripted stories: `testdata/*.txt` are commands to the core, each followed by the effects that it must have.

A line is a comment (`#`), a command, or, indented, an effect. Commands: `members A B ...`, `setting NAME VALUE`,
`hello A GENERATION`, `park A COMPLETED REASON [admits]`, `leave A COMPLETED`, `ready A INCARNATION`, `drop A`,
`refused A`, `exit A`, `tick SECONDS ALIVE...`. Members have incarnation 1. Before you change an
expected effect, understand the difference.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from lightning_ft.config import Settings
from lightning_ft.membership import effects, events, machine
from lightning_ft.membership.events import Address
from lightning_ft.membership.state import State, initial

STORIES = sorted((pathlib.Path(__file__).parent / "testdata").glob("*.txt"))


class Story:
    """Plays commands; every command returns its effects as lines."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {"heartbeat_interval": 1.0, "heartbeat_timeout": 5.0, "timeout": 20.0}
        self.now_s = 0.0
        self.state: State | None = None

    def play(self, command: str) -> Iterator[str]:
        """Run one line."""
        name, *words = command.split()
        if name == "members":
            self.state = initial(words, 0.0, self.values["timeout"])
        elif name == "setting":
            self.values[words[0]] = int(words[1])
        elif name == "tick":
            for _ in range(int(words[0])):
                self.now_s += 1.0
                for member in words[1:]:
                    yield from self._feed(events.Heartbeat(member, 1))
                yield from self._feed(events.Tick())
        else:
            yield from self._feed(self._event(name, *words))

    def _event(self, name: str, member: str, *words: str) -> events.Event:
        assert self.state is not None
        generation = self.state.generation
        match name:
            case "hello":
                return events.Hello(member, 1, int(words[0]), Address(f"host-{member}", 1))
            case "park":
                return events.Parked(member, 1, generation, int(words[0]), words[1], "admits" in words)
            case "leave":
                return events.Leaving(member, 1, generation, int(words[0]))
            case "ready":
                return events.Ready(member, int(words[0]), Address(f"host-{member}", 1))
            case "drop":
                return events.Disconnected(member, 1)
            case "refused":
                return events.ProbeRefused(member, 1)
            case "exit":
                return events.Exited(member, 1, -9, "killed by SIGKILL")
        raise AssertionError(f"unknown command {name!r}")

    def _feed(self, event: events.Event) -> Iterator[str]:
        assert self.state is not None
        self.state, todo = machine.step(Settings(**self.values), self.state, event, self.now_s)  # type: ignore[arg-type]
        return (describe(effect) for effect in todo if not isinstance(effect, effects.Acknowledge))


def describe(effect: effects.Effect) -> str:
    """One effect as a line."""
    match effect:
        case effects.CommitView():
            change = f"base {effect.base}, left [{' '.join(effect.left)}], joined [{' '.join(effect.joined)}]"
            return f"view {effect.generation} to {effect.member}: {change}, meet at {effect.meeting.host}"
        case effects.Record():
            fields = " ".join(f"{k}={' '.join(v) if isinstance(v, tuple) else v!r}" for k, v in effect.fields)
            return f"log {effect.event} g{effect.generation} {effect.member or '-'} {fields}".rstrip()
        case effects.NotifyLeaving():
            return f"leaving {effect.leaver} after {effect.completed} to {effect.member}"
        case effects.Probe():
            return f"probe {effect.member}"
    return f"{type(effect).__name__.lower()} {effect.member}: {effect.reason}"


def rewrite(text: str) -> str:
    """The story with the effects that it really has."""
    story, lines = Story(), []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"    {effect}" for effect in story.play(line)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: pathlib.Path) -> None:
    """Each command has exactly the effects written below it."""
    assert rewrite(path.read_text()) == path.read_text()
