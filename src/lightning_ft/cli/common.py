"""What the commands have in common: exit codes, settings as flags, tables, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_ft.config import AUTO, CATCH_UP, TOPOLOGIES, VERIFY_POLICY, Settings, parse_timeout

EXIT_OK = 0
EXIT_FOUND = 1
"""The command has done its work, and what it looked at is not well: damage, a failed check."""
EXIT_USAGE = 2
EXIT_FAILED = 3
"""The command could not do its work: no such thing, no access, no answer."""

EXIT_CODES = (
    "exit status: 0 all is well, 1 damage or a failed check was found, 2 wrong command line, 3 it could not be done"
)


class CommandError(Exception):
    """A command can't do its work; the message says why."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def add_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str, examples: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a command; its help shows examples.

    Args:
        commands: What `add_subparsers` returned.
        name: Of the command.
        function: What carries it out; returns the exit status.
        text: A sentence on what it does.
        examples: Command lines.
        options: For the parser.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        formatter_class=Formatter,
        **{"epilog": f"examples:\n{_indented(examples)}\n\n{EXIT_CODES}", **options},
    )
    parser.set_defaults(function=function, parser=parser)
    return parser


def examples(text: str, *more: str) -> str:
    """Return an epilog."""
    return "\n\n".join([f"examples:\n{_indented(text)}", *more])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def version() -> str:
    """Return the version that is installed."""
    try:
        return importlib.metadata.version("lightning-ft")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


# -- settings ---------------------------------------------------------------------------------------------------------

_FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "min_world_size": ({"type": int, "metavar": "N"}, "fewest members that may go on"),
    "max_failures": ({"type": int, "metavar": "N"}, "most members that may be missing at once"),
    "heartbeat_interval": ({"type": float, "metavar": "S"}, "how often members say that they are alive"),
    "heartbeat_timeout": ({"type": float, "metavar": "S"}, "silence after which a member is given up"),
    "timeout": ({"metavar": f"S|{AUTO}"}, "how long a collective may wait for a member"),
    "max_link_failures": ({"type": int, "metavar": "N"}, "how often a link may fail before one end is given up"),
    "evict_stragglers": ({"action": "store_true"}, "give slow members up"),
    "respawn": (
        {"action": argparse.BooleanOptionalAction},
        "whether members are started again whose process failed",
    ),
    "max_restarts": ({"type": int, "metavar": "N"}, "how often, for each member"),
    "rejoin_timeout": ({"type": float, "metavar": "S"}, "how long too few members wait for others to come back"),
    "max_world_size": ({"type": int, "metavar": "N"}, "most members, with those that join later"),
    "spares": ({"type": int, "metavar": "N"}, "processes on each node that wait to replace members"),
    "catch_up": ({"choices": CATCH_UP}, "how a process that joins gets the state"),
    "catch_up_slowdown": ({"type": float, "metavar": "SHARE"}, "by which part of its time a step may be longer for it"),
    "verify_every_n_steps": ({"type": int, "metavar": "N"}, "compare gradients in one of so many steps; 0: never"),
    "verify_state_every_n_steps": ({"type": int, "metavar": "N"}, "compare parameters and optimizers, likewise"),
    "verify_chunk_bytes": ({"type": int, "metavar": "BYTES"}, "size of the parts that are compared and named"),
    "verify_policy": ({"choices": VERIFY_POLICY}, "what follows if a rank differs from the majority"),
    "topology": ({"choices": TOPOLOGIES}, "whether all-reduces go around the ring or along a tree"),
    "coordinator": ({"metavar": "HOST:PORT"}, "where node 0's coordinator listens"),
    "event_log": ({"metavar": "PATH"}, "file that gets the event log"),
    "metrics_port": ({"type": int, "metavar": "PORT"}, "port of the coordinator's host for Prometheus"),
    "metrics_host": ({"metavar": "HOST"}, "address to listen on for Prometheus"),
}
"""Each setting that is a flag, with what argparse needs and what it does."""

_UNSET = {
    "max_failures": "any number",
    "max_world_size": "as at the start",
    "coordinator": "any port of this node",
    "metrics_port": "no metrics",
    "event_log": "none, or in the run's log directory",
}
"""What the default None means."""

_SPELLINGS = {"max_restarts": ("--max_restarts",)}
"""torchrun's."""


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of a job, with its default."""
    settings = command.add_argument_group(
        "settings", "each also as environment variable LIGHTNING_FT_<NAME>, over which the flag goes"
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, (keywords, text) in _FLAGS.items():
        settings.add_argument(
            f"--{name.replace('_', '-')}",
            *_SPELLINGS.get(name, ()),
            **{"default": None, **keywords, **({"type": _timeout} if name == "timeout" else {})},
            help=f"{text} (default: {_shown(name, defaults[name])})",
        )


def _shown(name: str, default: object) -> str:
    if default is None:
        return _UNSET[name]
    return {"True": "yes", "False": "no"}.get(str(default)) or (
        f"{default:g}" if isinstance(default, float) else str(default)
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the flags and the environment give.

    Raises:
        ValueError: They are wrong.
    """
    return Settings.resolve(**{name: getattr(options, name) for name in _FLAGS})


def _timeout(text: str) -> float | str:
    try:
        return parse_timeout(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds or {AUTO!r}, got {text!r}") from None


# -- output -----------------------------------------------------------------------------------------------------------


def print_json(value: object) -> None:
    """Print what scripts read."""
    print(json.dumps(value, indent=2))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as text in columns; None is a dash."""
    cells = [list(head), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def in_bytes(number: float) -> str:
    """Return a number of bytes for a person."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
