"""`lightning-ft report`: what happened in a job, from its event log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_ft.cli.common import EXIT_OK, CommandError, add_command, add_json, positive, print_json
from lightning_ft.history.fold import histories
from lightning_ft.history.state import History

_EXAMPLES = """
lightning-ft report lightning_logs/version_0/ft_events.jsonl                # as text
lightning-ft report ft_events.jsonl --html report.html --png timeline.png
lightning-ft report ft_events.jsonl --json | jq '.goodput'
"""


def add(commands: Any) -> None:
    """Add the command."""
    report = add_command(
        commands, "report", _report, "show what happened in a job, from its event log, which may be cut off", _EXAMPLES
    )
    report.add_argument("events", metavar="EVENTS", help="the event log; -: standard input")
    report.add_argument("--html", metavar="OUT", help="write a page, one file that needs no network")
    report.add_argument(
        "--png", metavar="OUT", help="write a picture of the timeline (pip install 'lightning-ft[report]')"
    )
    report.add_argument(
        "--run", type=positive, metavar="N", help="of a log with several runs of the job (default: the last)"
    )
    add_json(report)


def _report(options: argparse.Namespace) -> int:
    from lightning_ft.page.facts import facts, in_words

    history, others = _read(options.events, options.run)
    shown = facts(history, history.last_s or 0.0, earlier_runs=others)
    if options.html is not None:
        from lightning_ft.page.render import page

        _write(options.html, page(shown).encode())
    if options.png is not None:
        _write(options.png, _png(history, shown))
    if options.json:
        print_json(shown)
    elif options.html is None and options.png is None:
        print(in_words(shown))
    return EXIT_OK


def _read(name: str, run: int | None) -> tuple[History, int]:
    """Return the history of a run, and how many others there are."""
    try:
        if name == "-":
            found = histories(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as file:
                found = histories(file)
    except OSError as error:
        raise CommandError(f"report failed: {name} can't be read: {error.strerror}.") from error
    if not any(history.num_events for history in found):
        raise CommandError(
            f"report failed: {name} holds no event of a job ({found[0].num_damaged} lines are something else). "
            "It takes the file that the setting event_log names, or ft_events.jsonl in a run's log directory."
        )
    if run is not None and run > len(found):
        raise CommandError(
            f"report failed: {name} holds {len(found)} runs of the job; expected --run 1 to {len(found)}."
        )
    return found[len(found) - 1 if run is None else run - 1], len(found) - 1


def _png(history: History, shown: dict[str, Any]) -> bytes:
    import io

    try:
        from lightning_ft.page.picture import picture
    except ImportError as error:
        raise CommandError(
            f"report failed: --png draws with Pillow, which can't be imported ({error}). "
            "Install it: pip install 'lightning-ft[report]'. --html needs nothing."
        ) from error
    file = io.BytesIO()
    picture(history, shown).save(file, "PNG", optimize=True)
    return file.getvalue()


def _write(name: str, data: bytes) -> None:
    try:
        Path(name).write_bytes(data)
    except OSError as error:
        raise CommandError(f"report failed: {name} can't be written: {error.strerror}.") from error
