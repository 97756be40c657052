"""Command line: `lightning-ft run` starts a job on this node, with torchrun's names for the flags."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from lightning_ft.config import AUTO, parse_timeout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; None: the process's.
    Returns: Exit status: that of the job, or 2 for a wrong command line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return _run(options)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-ft", description="Fault-tolerant data-parallel training.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a training script, one process per device",
        usage="lightning-ft run [options] (SCRIPT | -m MODULE) [arguments ...]",
    )
    run.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=_positive, default=1, metavar="N", help="processes (default: 1)"
    )
    run.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="nodes of the job, each with N processes")
    run.add_argument("--node-rank", "--node_rank", type=int, default=0, metavar="I", help="0 hosts the coordinator")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    settings = run.add_argument_group("settings", "each also as environment variable LIGHTNING_FT_<NAME>")
    settings.add_argument("--min-world-size", type=int, metavar="N", help="fewest members that may go on")
    settings.add_argument("--max-failures", type=int, metavar="N", help="most members that may be missing at once")
    settings.add_argument("--heartbeat-interval", type=float, metavar="S")
    settings.add_argument(
        "--heartbeat-timeout", type=float, metavar="S", help="silence after which a member is given up"
    )
    settings.add_argument(
        "--timeout", type=_timeout, metavar="S|auto", help="how long a collective may wait for a member"
    )
    settings.add_argument(
        "--max-link-failures", type=int, metavar="N", help="how often a link may fail before one end is given up"
    )
    settings.add_argument("--evict-stragglers", action="store_true", default=None, help="give slow members up")
    settings.add_argument(
        "--respawn",
        action=argparse.BooleanOptionalAction,
        help="whether members are started again whose process failed",
    )
    settings.add_argument("--max-restarts", "--max_restarts", type=int, metavar="N", help="how often, for each member")
    settings.add_argument("--coordinator", metavar="HOST:PORT", help="where node 0's coordinator listens")
    settings.add_argument("--event-log", metavar="PATH", help="file that gets the event log")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


_SETTINGS = (
    "min_world_size",
    "max_failures",
    "heartbeat_interval",
    "heartbeat_timeout",
    "timeout",
    "max_link_failures",
    "evict_stragglers",
    "respawn",
    "max_restarts",
    "coordinator",
    "event_log",
)


def _run(options: argparse.Namespace) -> int:
    from lightning_ft.config import Settings
    from lightning_ft.errors import LaunchError
    from lightning_ft.event_log import say_on_console
    from lightning_ft.launch.agent import run_agent

    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(f"--node-rank must be from 0 to {options.nnodes - 1}, got {options.node_rank}")
    settings = Settings.resolve(**{name: getattr(options, name) for name in _SETTINGS})
    say_on_console()
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    num_slots = options.nproc_per_node
    try:
        return run_agent(
            lambda _slot: command,
            lambda _slot: {},
            node=options.node_rank,
            num_slots=num_slots,
            settings=settings,
            expected_members=[f"{node}/{slot}" for node in range(options.nnodes) for slot in range(num_slots)],
            host_coordinator=options.node_rank == 0,
        )
    except LaunchError as error:
        print(f"lightning-ft: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _timeout(text: str) -> float | str:
    try:
        return parse_timeout(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds or {AUTO!r}, got {text!r}") from None


def _version() -> str:
    try:
        return importlib.metadata.version("lightning-ft")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
