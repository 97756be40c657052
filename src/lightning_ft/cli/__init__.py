"""The command line `lightning-ft`: parse, call, exit code. One module for each command.

No module here imports torch or Lightning before its command needs it, so that `--help`, `run`, `status` and
`checkpoint list` start at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from lightning_ft.cli import checkpoint, completion, coordinator, doctor, report, run, status
from lightning_ft.cli.common import EXIT_FAILED, EXIT_USAGE, CommandError, Formatter, examples, version
from lightning_ft.errors import FaultToleranceError

_EXAMPLES = """
lightning-ft run --nproc-per-node 4 train.py       # start a job
lightning-ft status                                # look at it
lightning-ft COMMAND --help                        # flags, defaults, examples and exit status of each command
"""

_COMMANDS = (run, coordinator, status, report, checkpoint, doctor, completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; None: the process's.
    Returns: Exit status; docs/errors.md has the table.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        options.make_parser = make_parser
        status = int(options.function(options))
        sys.stdout.flush()
    except ValueError as error:
        options.parser.error(str(error))
    except (CommandError, FaultToleranceError, ImportError) as error:
        print(f"lightning-ft: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head`; nobody reads what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-ft",
        description="Fault-tolerant data-parallel training: ranks die, the survivors finish the step.",
        epilog=examples(_EXAMPLES),
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    return parser
