"""`lightning-ft doctor`: whether this machine has what a job needs, and what to do if not."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_ft.cli.checkpoint_place import add_storage_options, storage_options
from lightning_ft.cli.common import EXIT_FOUND, EXIT_OK, add_command, add_json, positive, print_json
from lightning_ft.cli.doctor_checks import FAILED, Check, check_machine, check_storage

_EXAMPLES = """
lightning-ft doctor                                             # this machine
lightning-ft doctor --coordinator node0:29400 --nproc-per-node 8   # on each node, before a job of several
lightning-ft doctor --storage s3://bucket/run --endpoint-url http://minio:9000
"""


def add(commands: Any) -> None:
    """Add the command."""
    doctor = add_command(
        commands, "doctor", _examine, "check what a job needs here: network, versions, storage, processors", _EXAMPLES
    )
    doctor.add_argument("--coordinator", metavar="HOST:PORT", help="of the job to be (default: none: one node)")
    doctor.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="processes (default: 1)"
    )
    doctor.add_argument(
        "--storage", metavar="URL", help="where checkpoints will be: a small object is made there, and deleted again"
    )
    add_storage_options(doctor)
    add_json(doctor)


def _examine(options: argparse.Namespace) -> int:
    checks = check_machine(options.coordinator, options.nproc_per_node)
    if options.storage:
        checks.append(check_storage(options.storage, storage_options(options)))
    has_failed = any(check.status == FAILED for check in checks)
    if options.json:
        rows = [{"name": c.name, "status": c.status, "found": c.found, "advice": c.advice} for c in checks]
        print_json({"is_fit": not has_failed, "checks": rows})
    else:
        for check in checks:
            _print(check)
        print("something has to be mended" if has_failed else "this machine is fit for a job")
    return EXIT_FOUND if has_failed else EXIT_OK


def _print(check: Check) -> None:
    print(f"{check.status:6}  {check.name}: {check.found}")
    if check.advice:
        print(f"        -> {check.advice}")
