"""Command line: `lightning-ft run` starts a job on this node, with torchrun's names for the flags."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        return _run(options) if options.command == "run" else _coordinate(options)
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
        "--nproc-per-node", "--nproc_per_node", type=_num_slots, default=1, metavar="N", help="processes (default: 1)"
    )
    _add_nodes(run)
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, no Python script")
    _add_settings(run)
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    _add_coordinator(commands)
    return parser


def _add_coordinator(commands: Any) -> None:
    service = commands.add_parser("coordinator", help="serve as the coordinator of a job, apart from its nodes")
    service.add_argument("--listen", default="0.0.0.0:29400", metavar="HOST:PORT", help="default: 0.0.0.0:29400")
    service.add_argument("--nnodes", type=_positive, required=True, metavar="N", help="nodes that the job starts with")
    service.add_argument("--nproc-per-node", "--nproc_per_node", type=_positive, default=1, metavar="N")
    service.add_argument("--state", required=True, metavar="PATH", help="directory to go on from when started again")
    _add_settings(service)


def _add_settings(command: argparse.ArgumentParser) -> None:
    settings = command.add_argument_group("settings", "each also as environment variable LIGHTNING_FT_<NAME>")
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
    settings.add_argument("--max-world-size", type=int, metavar="N", help="most members; without: as at the start")
    settings.add_argument("--spares", type=int, metavar="N", help="processes on each node that wait to replace members")
    settings.add_argument("--coordinator", metavar="HOST:PORT", help="where node 0's coordinator listens")
    settings.add_argument("--event-log", metavar="PATH", help="file that gets the event log")


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
    "max_world_size",
    "spares",
    "coordinator",
    "event_log",
)


def _add_nodes(run: argparse.ArgumentParser) -> None:
    nodes = run.add_argument_group("several nodes", "as torchrun's; all need the same LIGHTNING_FT_TOKEN, a secret")
    nodes.add_argument("--nnodes", type=_nodes, default=(1, 1), metavar="N|MIN:MAX", help="nodes of the job")
    nodes.add_argument(
        "--node-rank", "--node_rank", type=int, metavar="I", help="0 hosts the coordinator; default: in any order"
    )
    nodes.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST[:PORT]",
        help="of the coordinator (port: 29400)",
    )
    nodes.add_argument("--rdzv-id", "--rdzv_id", default="", metavar="ID", help="nodes of another are refused")
    nodes.add_argument("--rdzv-backend", "--rdzv_backend", choices=("c10d", "static"), help="makes no difference")
    nodes.add_argument(
        "--rdzv-conf", "--rdzv_conf", type=_rdzv_conf, default={}, metavar="last_call_timeout=S,join_timeout=S"
    )
    nodes.add_argument("--master-addr", "--master_addr", metavar="HOST", help="the same as --rdzv-endpoint")
    nodes.add_argument("--master-port", "--master_port", type=int, default=29500, metavar="PORT")
    nodes.add_argument("--local-addr", "--local_addr", metavar="HOST", help="where other nodes reach this one")
    nodes.add_argument("--hosted", action="store_true", help="the coordinator is there (`lightning-ft coordinator`)")
    nodes.add_argument("--join", action="store_true", help="the job runs; without --node-rank: as a new node")
    nodes.add_argument("--standalone", action="store_true", help="one node, whatever else is said")


def _run(options: argparse.Namespace) -> int:
    from lightning_ft.config import Settings, is_joining
    from lightning_ft.errors import LaunchError
    from lightning_ft.event_log import say_on_console
    from lightning_ft.launch.agent import run_agent
    from lightning_ft.launch.nodes import find_nodes

    settings = Settings.resolve(**{name: getattr(options, name) for name in _SETTINGS})
    say_on_console()
    interpreter = [] if options.no_python else [sys.executable, *(["-m"] if options.module else [])]
    command = [*interpreter, options.script, *options.arguments]
    joins = options.join or is_joining(os.environ)
    if options.local_addr:
        os.environ["LIGHTNING_FT_HOST"] = options.local_addr
    try:
        beginning, settings = find_nodes(
            settings,
            nodes=(1, 1) if options.standalone else options.nnodes,
            node=options.node_rank,
            num_slots=options.nproc_per_node,
            endpoint=_endpoint(options),
            job_id=options.rdzv_id,
            limits=options.rdzv_conf,
            is_hosted=options.hosted,
            joins=joins,
        )
        return run_agent(
            lambda _slot: command,
            lambda _slot: {},
            node=beginning.node,
            num_slots=options.nproc_per_node,
            settings=settings,
            expected_members=beginning.expected,
            host_coordinator=beginning.node == 0 and not options.hosted and not joins,
            is_hosted=options.hosted,
            incarnations=beginning.incarnations,
        )
    except LaunchError as error:
        print(f"lightning-ft: {error}", file=sys.stderr)
        return 1


def _coordinate(options: argparse.Namespace) -> int:
    from lightning_ft.config import Settings, parse_endpoint
    from lightning_ft.coordinator.standalone import serve
    from lightning_ft.event_log import say_on_console
    from lightning_ft.launch.nodes import token_of_environment

    settings = Settings.resolve(**{name: getattr(options, name) for name in _SETTINGS})
    say_on_console()
    members = [f"{node}/{slot}" for node in range(options.nnodes) for slot in range(options.nproc_per_node)]
    try:
        return serve(settings, parse_endpoint(options.listen), members, token_of_environment(), Path(options.state))
    except OSError as error:
        print(f"lightning-ft: {error}", file=sys.stderr)
        return 1


def _endpoint(options: argparse.Namespace) -> str | None:
    from lightning_ft.launch.nodes import complete_endpoint, join_endpoint

    if options.rdzv_endpoint:
        return complete_endpoint(options.rdzv_endpoint)
    return join_endpoint(options.master_addr, options.master_port) if options.master_addr else None


def _num_slots(text: str) -> int:
    return os.cpu_count() or 1 if text in ("auto", "cpu") else _positive(text)


def _nodes(text: str) -> tuple[int, int]:
    least, separator, most = text.partition(":")
    numbers = _positive(least), _positive(most if separator else least)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"expected MIN <= MAX, got {text!r}")
    return numbers


def _rdzv_conf(text: str) -> dict[str, float]:
    known = {"last_call_timeout", "join_timeout"}
    pairs = dict(pair.partition("=")[::2] for pair in text.split(",") if pair)
    try:
        return {f"{name.strip()}_s": float(value) for name, value in pairs.items() if name.strip() in known}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected last_call_timeout=S,join_timeout=S, got {text!r}") from None


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
