"""The tables of the documentation are those of the code: settings, events, errors, messages, fault points, history."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import lightning_ft
from lightning_ft.comm.recovery import Recovery
from lightning_ft.config import ENV_PREFIX, Settings
from lightning_ft.history import fold
from lightning_ft.membership import wire

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "lightning_ft").rglob("*.py"))

WRITERS = ("record", "report", "write")
"""Methods whose first argument is the name of an event."""

NOT_LOGGED = {"log_directory"}
"""Reports that tell the coordinator something and write no line."""

COMMON_FIELDS = {"generation", "member"}


def table(page: str, column: str) -> list[list[str]]:
    """Return the cells of a page's table whose first column has that name, without its head."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {column} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def quoted(cell: str) -> set[str]:
    """Return what stands in backticks."""
    return set(re.findall(r"`([^`]+)`", cell))


def emitted() -> dict[str, set[str]]:
    """Return the events that the sources write, with the fields that can be read there."""
    events: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr=method), args=[ast.Constant(value=str(event)), *_], keywords=keywords
                ) if method in WRITERS and re.fullmatch(r"[a-z]+(_[a-z]+)*", event):
                    fields = {keyword.arg for keyword in keywords if keyword.arg is not None}
                    if any(keyword.arg is None and ast.unparse(keyword.value) == "facts" for keyword in keywords):
                        fields |= set(Recovery(0.0).facts(0))
                    events.setdefault(event, set()).update(fields - COMMON_FIELDS)
    return {event: fields for event, fields in events.items() if event not in NOT_LOGGED}


def test_settings_table_is_that_of_the_code() -> None:
    """Argument, environment variable and default of each setting, in the order of `Settings`."""
    documented = [[cell.strip("`") for cell in row[:3]] for row in table("configuration.md", "argument")]
    expected = [
        [field.name, f"{ENV_PREFIX}{field.name.upper()}", repr(field.default)] for field in dataclasses.fields(Settings)
    ]
    assert documented == expected


def test_event_table_is_that_of_the_code() -> None:
    """Each event that is written is documented with its fields, and no other."""
    documented = {row[0].strip("`"): quoted(row[1]) for row in table("events.md", "event")}
    assert documented == emitted()


def test_errors_table_is_that_of_the_code() -> None:
    """Each public error is documented."""
    documented = {row[0].strip("`") for row in table("errors.md", "error")}
    errors = {name for name in lightning_ft.__all__ if name.endswith("Error")}
    assert documented == errors - {"FaultToleranceError"} | {"ValueError"}


def test_message_table_is_that_of_the_code() -> None:
    """Each message is in the protocol, with its fields in their order, and no other."""
    documented = set()
    for _, types, fields in table("../PROTOCOL.md", "from → to"):
        if fields != "as above":
            documented |= {(name, fields.strip("`").partition("`")[0]) for name in quoted(types.partition(" (")[0])}
    assert documented == {
        (schema.type_name, ", ".join(field.name for field in schema.fields)) for schema in wire._SCHEMAS
    }


def test_fault_points_are_those_of_the_code() -> None:
    """Each named place of the sources is listed, and no other."""
    text = (DOCS / "faults-on-purpose.md").read_text(encoding="utf-8")
    listed = {point for point in quoted(text.partition("The points:")[2]) if re.fullmatch(r"[a-z_]+\.[a-z_]+", point)}
    reached = {
        point for path in SOURCES for point in re.findall(r'reach\("([\w.]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert listed == reached


def test_history_knows_each_event() -> None:
    """A new event is folded into the history, or said to change nothing there."""
    assert set(fold.HANDLERS) | fold.ONLY_TOLD == emitted().keys()
    assert not set(fold.HANDLERS) & fold.ONLY_TOLD
