"""`lightning-ft coordinator`: serves a job as a process of its own, apart from its nodes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_ft.cli.common import add_command, add_settings, examples, positive, settings_of

_EXAMPLES = """
lightning-ft coordinator --nnodes 4 --nproc-per-node 8 --state /var/lib/job1      # then, on each node:
lightning-ft run --hosted --node-rank 0 --rdzv-endpoint coordinator:29400 --nproc-per-node 8 train.py
"""

_STATUS = (
    "LIGHTNING_FT_TOKEN must hold the job's secret.\n\n"
    "exit status: 0 when the job is over, whatever its status; 143 if it was asked to end before (start it again\n"
    "with the same --state), 1 if it can't serve, 2 for a wrong command line"
)


def add(commands: Any) -> None:
    """Add the command."""
    service = add_command(
        commands,
        "coordinator",
        _coordinate,
        "serve as the coordinator of a job, apart from its nodes",
        _EXAMPLES,
        epilog=examples(_EXAMPLES, _STATUS),
    )
    service.add_argument("--listen", default="0.0.0.0:29400", metavar="HOST:PORT", help="default: 0.0.0.0:29400")
    service.add_argument("--nnodes", type=positive, required=True, metavar="N", help="nodes that the job starts with")
    service.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="of each node (default: 1)"
    )
    service.add_argument("--state", required=True, metavar="PATH", help="directory to go on from when started again")
    add_settings(service)


def _coordinate(options: argparse.Namespace) -> int:
    from lightning_ft.config import parse_endpoint
    from lightning_ft.coordinator.standalone import serve
    from lightning_ft.event_log import say_on_console
    from lightning_ft.launch.nodes import token_of_environment

    settings = settings_of(options)
    say_on_console()
    members = [f"{node}/{slot}" for node in range(options.nnodes) for slot in range(options.nproc_per_node)]
    try:
        return serve(settings, parse_endpoint(options.listen), members, token_of_environment(), Path(options.state))
    except OSError as error:
        print(f"lightning-ft: {error}", file=sys.stderr)
        return 1
