"""`lightning-ft run`: starts a job on this node, with torchrun's names for the flags."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from lightning_ft.cli.common import add_command, add_settings, examples, positive, settings_of

_EXAMPLES = """
lightning-ft run --nproc-per-node 4 train.py --epochs 3        # one node; what follows the script is its own
lightning-ft run --nproc-per-node auto -m package.train        # a module, on as many processes as there are CPUs
lightning-ft run --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint node0:29400 train.py   # the same on each node
lightning-ft run --join --rdzv-endpoint node0:29400 --nproc-per-node 8 train.py         # a node for a job that runs
"""

_STATUS = (
    "exit status: the job's: 0 if the members that were in it to the end succeeded, else the last failure's\n"
    "(128 + n for signal n); 1 if it could not be started, 2 for a wrong command line"
)


def add(commands: Any) -> None:
    """Add the command."""
    run = add_command(
        commands,
        "run",
        _run,
        "start a training script, one process per device",
        _EXAMPLES,
        epilog=examples(_EXAMPLES, _STATUS),
        usage="lightning-ft run [options] (SCRIPT | -m MODULE) [arguments ...]",
    )
    run.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=_num_slots, default=1, metavar="N", help="processes (default: 1)"
    )
    _add_nodes(run)
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, no Python script")
    add_settings(run)
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")


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
    from lightning_ft.config import is_joining
    from lightning_ft.errors import LaunchError
    from lightning_ft.event_log import say_on_console
    from lightning_ft.launch.agent import run_agent
    from lightning_ft.launch.nodes import find_nodes

    settings = settings_of(options)
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


def _endpoint(options: argparse.Namespace) -> str | None:
    from lightning_ft.launch.nodes import complete_endpoint, join_endpoint

    if options.rdzv_endpoint:
        return complete_endpoint(options.rdzv_endpoint)
    return join_endpoint(options.master_addr, options.master_port) if options.master_addr else None


def _num_slots(text: str) -> int:
    return os.cpu_count() or 1 if text in ("auto", "cpu") else positive(text)


def _nodes(text: str) -> tuple[int, int]:
    least, separator, most = text.partition(":")
    numbers = positive(least), positive(most if separator else least)
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
