"""`lightning-ft checkpoint`: looks at differential checkpoints, checks, exports, deletes and repairs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from lightning_ft.cli import checkpoint_check, checkpoint_export, checkpoint_look
from lightning_ft.cli.checkpoint_place import add_storage_options
from lightning_ft.cli.common import EXIT_CODES, Formatter, add_command, add_json, examples, positive

_OVERVIEW = """
lightning-ft checkpoint list s3://bucket/run
lightning-ft checkpoint verify --deep /data/run
lightning-ft checkpoint export s3://bucket/run model.ckpt
"""

_LIST = """
lightning-ft checkpoint list /data/run
lightning-ft checkpoint list s3://bucket/run --endpoint-url http://minio:9000 --json
lightning-ft checkpoint list gs://bucket/run --storage-option project=mine --storage-option token='"anon"'
"""

_INSPECT = """
lightning-ft checkpoint inspect /data/run                     # the newest
lightning-ft checkpoint inspect /data/run --step 1200 --tensors
lightning-ft checkpoint inspect s3://bucket/run/manifests/0000000000-000000001200
"""

_VERIFY = """
lightning-ft checkpoint verify s3://bucket/run                # checks every stored byte
lightning-ft checkpoint verify --deep /data/run               # decodes every state, too; takes as long as loading all
lightning-ft checkpoint verify /data/run --json | jq -r .newest_intact
"""

_EXPORT = """
lightning-ft checkpoint export s3://bucket/run model.ckpt     # Trainer.fit(ckpt_path="model.ckpt") in plain Lightning
lightning-ft checkpoint export /data/run model.safetensors    # the model's weights
lightning-ft checkpoint export /data/run all.safetensors --all --step 1200
"""

_PRUNE = """
lightning-ft checkpoint prune s3://bucket/run --keep 2 --dry-run
lightning-ft checkpoint prune s3://bucket/run --keep 2        # also beside a job that runs
"""

_REPAIR = """
lightning-ft checkpoint repair /data/run                      # says what it would do, and changes nothing
lightning-ft checkpoint repair /data/run --apply              # also beside a job that runs
lightning-ft checkpoint repair /data/run --apply --claim      # when none runs: what its next save might need as well
"""


def add(commands: Any) -> None:
    """Add the command, with its own."""
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look at differential checkpoints; verify, export, delete, repair them",
        description="Look at differential checkpoints; verify, export, delete, repair them.",
        epilog=examples(_OVERVIEW, EXIT_CODES),
        formatter_class=Formatter,
    )
    checkpoint.set_defaults(function=_show_help(checkpoint), parser=checkpoint)
    verbs = checkpoint.add_subparsers(dest="verb", metavar="VERB")
    _add(verbs, "list", checkpoint_look.list_checkpoints, "list checkpoints, newest first", _LIST)

    inspect = _add(verbs, "inspect", checkpoint_look.inspect, "show what one checkpoint holds", _INSPECT)
    _add_step(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list its tensors")

    verify = _add(verbs, "verify", checkpoint_check.verify, "find out which checkpoints are intact", _VERIFY)
    verify.add_argument("--deep", action="store_true", help="decode each state as well")

    export = _add(verbs, "export", checkpoint_export.export, "write one as an ordinary file", _EXPORT)
    export.add_argument("target", metavar="OUT", help="a path or URL: .safetensors, or anything else for torch.load")
    _add_step(export)
    export.add_argument(
        "--all",
        action="store_true",
        help="safetensors: all tensors, not only the model's; else: with what DeltaCheckpoint alone goes on with, too",
    )
    export.add_argument("--force", action="store_true", help="replace OUT if it is there")
    export.add_argument(
        "--allow-pickle", action="store_true", help="run the pickles in it: only if you trust who wrote it"
    )

    prune = _add(verbs, "prune", checkpoint_check.prune, "delete all but the newest checkpoints", _PRUNE)
    prune.add_argument(
        "--keep", type=positive, default=3, metavar="N", help="how many, with what they need and two bases (default: 3)"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")

    repair = _add(
        verbs, "repair", checkpoint_check.repair, "set aside what is damaged, delete what was never finished", _REPAIR
    )
    does = repair.add_mutually_exclusive_group()
    does.add_argument("--apply", action="store_true", help="do it")
    does.add_argument("--dry-run", action="store_true", help="only say what would be done (the default)")
    repair.add_argument(
        "--claim", action="store_true", help="no job writes there any more; one that does is kept from writing"
    )
    repair.add_argument("--delete", action="store_true", help="keep nothing of what is damaged in aside/")


def _add(
    verbs: Any, name: str, function: Callable[[argparse.Namespace], int], text: str, shown: str
) -> argparse.ArgumentParser:
    parser = add_command(verbs, name, function, text, shown)
    parser.add_argument("url", metavar="URL", help="directory: a path, or what fsspec knows, as s3://bucket/run")
    add_storage_options(parser)
    add_json(parser)
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="of the newest run that has it (default: the newest)")


def _show_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def show(_options: argparse.Namespace) -> int:
        parser.print_help()
        return 2

    return show
