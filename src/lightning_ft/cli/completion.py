"""`lightning-ft completion`: the script with which a shell completes this command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from lightning_ft.cli.common import EXIT_OK, add_command

_EXAMPLES = """
eval "$(lightning-ft completion bash)"                         # now; or, for all shells to come:
lightning-ft completion bash > ~/.local/share/bash-completion/completions/lightning-ft
lightning-ft completion zsh > ~/.zfunc/_lightning-ft            # with fpath+=~/.zfunc before compinit
"""


def add(commands: Any) -> None:
    """Add the command."""
    completion = add_command(
        commands, "completion", _print, "print the script with which a shell completes this command line", _EXAMPLES
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _print(options: argparse.Namespace) -> int:
    import shtab

    make_parser: Callable[[], argparse.ArgumentParser] = options.make_parser
    print(shtab.complete(make_parser(), shell=options.shell))
    return EXIT_OK
