"""The command line as a whole: its flags, its help, what it imports."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from lightning_ft.cli import main, make_parser

RUN_AND_COORDINATOR = (
    "--catch-up --catch-up-slowdown --topology "
    "--coordinator --event-log --evict-stragglers --heartbeat-interval --heartbeat-timeout --max-failures "
    "--max-link-failures --max-restarts --max-world-size --metrics-host --metrics-port --min-world-size --no-respawn "
    "--nnodes --nproc-per-node --rejoin-timeout --respawn --spares --timeout "
    "--verify-chunk-bytes --verify-every-n-steps --verify-policy --verify-state-every-n-steps"
)

PLACE = "--endpoint-url --json --storage-option"

FLAGS = {
    "": "--version",
    "run": (
        f"{RUN_AND_COORDINATOR} --hosted --join --local-addr --master-addr --master-port --module --no-python "
        "--node-rank --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --standalone"
    ),
    "coordinator": f"{RUN_AND_COORDINATOR} --listen --state",
    "report": "--html --json --png --run",
    "status": "--coordinator --json --open --pid --rdzv-id",
    "doctor": f"{PLACE} --coordinator --nproc-per-node --storage",
    "completion": "",
    "checkpoint": "",
    "checkpoint list": PLACE,
    "checkpoint inspect": f"{PLACE} --step --tensors",
    "checkpoint verify": f"{PLACE} --deep",
    "checkpoint export": f"{PLACE} --all --allow-pickle --force --step",
    "checkpoint prune": f"{PLACE} --dry-run --keep",
    "checkpoint repair": f"{PLACE} --apply --claim --delete --dry-run",
}


def parsers(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its words."""
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                found.update(parsers(child, f"{name} {word}".strip()))
    return found


ALL = parsers(make_parser())


@pytest.mark.parametrize("command", ALL)
def test_flags_are_these(command: str) -> None:
    """A flag that comes or goes is a decision; torchrun's spelling with `_` is accepted beside each of its flags."""
    spelled = {
        option
        for action in ALL[command]._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help" and "_" not in option
    }
    assert spelled == set(FLAGS[command].split())


@pytest.mark.parametrize("command", [name for name in ALL if name])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help has a sentence, examples that begin with it, and the exit status."""
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "exit status:" in text
    if ALL[command].get_default("function") is None:
        return
    examples = text.partition("examples:\n")[2].partition("\n\n")[0]
    assert f"lightning-ft {command}" in examples
    documented = [action for action in ALL[command]._actions if action.option_strings]
    assert all(action.help or action.metavar for action in documented)


def test_help_tells_the_settings_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """As `Settings` has them."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for told in ("--heartbeat-timeout S silence after which a member is given up (default: 10)", "(default: 1800)"):
        assert told in text


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["run", "--help"], set()),
        (["status"], set()),
        (["checkpoint", "verify", "--help"], set()),
        (["checkpoint", "list", "no/such/place"], {"fsspec"}),
    ],
)
def test_it_starts_without_torch_and_lightning(arguments: list[str], allowed: set[str]) -> None:
    """Nor does it import aiohttp or fsspec to find out that there is nothing to do."""
    program = (
        "import sys\n"
        "from lightning_ft.cli import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"heavy = ({{'torch', 'lightning', 'numpy', 'aiohttp', 'fsspec'}} - {allowed}) & set(sys.modules)\n"
        "sys.exit(f'it imports {heavy}' if heavy else 0)\n"
    )
    environment = {**os.environ, "LIGHTNING_FT_COORDINATOR": "127.0.0.1:1", "LIGHTNING_FT_TOKEN": "x"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_command_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2: nothing was done."""
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_each_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In each shell's own language."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for command in ALL for word in command.split())
    assert "deep" in script


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    """A real bash, which has read the script."""
    main(["completion", "bash"])
    words = "COMP_WORDS=(lightning-ft checkpoint ver); COMP_CWORD=2; _shtab_lightning_ft; echo ${COMPREPLY[@]}"
    script = f"{capsys.readouterr().out}\n{words}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)  # noqa: S607
    assert done.stdout.strip() == "verify"
