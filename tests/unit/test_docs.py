"""The documentation says what the code does: links, snippets, command lines, variables, pictures."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import lightning_ft
import lightning_ft.checkpoint
from lightning_ft import config
from lightning_ft.cli import make_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
README = ROOT / "README.md"

INCLUDE = re.compile(r'^--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)
"""A line in whose place another file is put, or the part of it with a name."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

PROGRAM = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(lightning-ft .*)$")
"""A line of a shell, that runs the command line."""


def included(name: str, part: str | None) -> str:
    """Return a file, or what stands in it between the marks of a part."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text if part is None else text.split(f"--8<-- [start:{part}]")[1].split(f"--8<-- [end:{part}]")[0]


def text_of(path: Path) -> str:
    """Return a page with the files that it includes."""
    return INCLUDE.sub(lambda found: included(found[1], found[2]), path.read_text(encoding="utf-8"))


def fences(language: str) -> list[str]:
    """Return what stands in fences of all pages and the README, but for whole files."""
    found = [
        body
        for page in (*PAGES.values(), README.read_text(encoding="utf-8"))
        for name, body in FENCE.findall(page)
        if name == language
    ]
    return [body for body in found if not INCLUDE.search(body)]


def anchors_of(path: Path) -> set[str]:
    """Return the names that a link into a page may end with."""
    text = FENCE.sub("", text_of(path))
    headings = [re.sub(r"[`*]", "", heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def links() -> Iterator[tuple[Path, str]]:
    """Yield each page with what it links to and shows, other sites excepted."""
    for path in (README, *sorted(DOCS.glob("*.md"))):
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text(encoding="utf-8"))):
            if not re.match(r"https?://", target):
                yield path, target


def flags_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, set[str]]]:
    """Yield the commands of a parser, with the first long name of each of their flags."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                own = {
                    next(flag for flag in each.option_strings if flag.startswith("--"))
                    for each in command._actions
                    if each.option_strings
                }
                yield name, own - {"--help"}
                yield from flags_of(command)


def test_each_page_is_in_the_table_of_contents() -> None:
    """No page is forgotten, none is announced that is not there."""

    def pages(entry: object) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case dict():
                for value in entry.values():
                    yield from pages(value)
            case list():
                for value in entry:
                    yield from pages(value)

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(PAGES)


def is_broken(path: Path, target: str) -> bool:
    """Whether a link does not name a file that is there, and one of its headings; a page can't link out of docs/."""
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    is_reachable = file.exists() and (path == README or file.is_relative_to(DOCS))
    return not is_reachable or (anchor != "" and anchor not in anchors_of(file))


def test_links_lead_somewhere() -> None:
    """Each link and picture is there, and the heading that a link ends with."""
    found = list(links())
    assert len(found) > 80
    assert [f"{path.name}: {target}" for path, target in found if is_broken(path, target)] == []


def test_python_snippets_parse_and_use_what_exists() -> None:
    """Snippets are Python; the names that they take from lightning_ft are public, and have the arguments given."""
    snippets = fences("python")
    assert len(snippets) > 15
    for snippet in snippets:
        for node in ast.walk(ast.parse(snippet)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="lightning_ft"), attr=name), keywords=keywords):
                    parameters = inspect.signature(getattr(lightning_ft, name)).parameters
                    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                        assert {keyword.arg for keyword in keywords} <= set(parameters), snippet
                case ast.Attribute(value=ast.Name(id="lightning_ft"), attr=name):
                    assert name in lightning_ft.__all__, snippet
                case ast.ImportFrom(module="lightning_ft.checkpoint", names=names):
                    assert {alias.name for alias in names} <= set(lightning_ft.checkpoint.__all__), snippet
                case ast.ImportFrom(module="lightning_ft", names=names):
                    assert {alias.name for alias in names} <= set(lightning_ft.__all__), snippet


def test_yaml_snippets_configure_what_exists() -> None:
    """Each class of ours takes the arguments that YAML gives it."""

    def objects(value: object) -> Iterator[tuple[str, set[str]]]:
        if isinstance(value, dict):
            if "class_path" in value:
                yield value["class_path"], set(value.get("init_args", {}))
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from objects(each)

    found = [each for snippet in fences("yaml") for each in objects(yaml.safe_load(snippet))]
    ours = [(path.rpartition(".")[2], given) for path, given in found if path.startswith("lightning_ft.")]
    assert {name for name, _ in ours} >= {"FaultTolerantDDPStrategy", "DeltaCheckpoint"}
    for name, given in ours:
        parameters = set(inspect.signature(getattr(lightning_ft, name)).parameters)
        for_ddp = {"find_unused_parameters", "static_graph", "bucket_cap_mb"} if "ddp_kwargs" in parameters else set()
        assert given <= parameters | for_ddp


def test_command_lines_can_be_parsed() -> None:
    """Each command line in a fence has flags that exist, with values of their type."""
    parser = make_parser()
    lines = [found[1] for body in fences("") for line in body.splitlines() if (found := PROGRAM.match(line))]
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)[1:]
        try:
            parser.parse_args([word for word in words if word != "..."])
        except SystemExit as error:
            raise AssertionError(f"{line}: can't be parsed") from error


def test_each_flag_is_documented() -> None:
    """Commands and their flags are in the page of commands, or in the one of several machines."""
    text = PAGES["commands.md"] + PAGES["machines.md"]
    written = set(re.findall(r"--[a-z][a-z-]*", text))
    for command, flags in flags_of(make_parser()):
        assert re.search(rf"\b{command}\b", PAGES["commands.md"]), command
        assert flags <= written, f"{command}: {sorted(flags - written)}"


def test_each_variable_is_documented() -> None:
    """Whatever is read from the environment is named on the page of settings."""
    names = {f"{config.ENV_PREFIX}{name}" for name in config._OTHER_VARIABLES} | set(config.ALIASES.values())
    assert {name for name in names if f"`{name}`" not in PAGES["configuration.md"]} == set()


def test_each_public_name_is_in_the_reference() -> None:
    """The reference has each public name; errors come with their module."""
    listed = set(re.findall(r"^::: lightning_ft\.(\S+)$", PAGES["api.md"], re.MULTILINE))
    names = {name for name in lightning_ft.__all__ if not name.endswith("Error")}
    expected = names | {f"checkpoint.{name}" for name in lightning_ft.checkpoint.__all__} | {"errors"}
    assert listed == expected


@pytest.mark.parametrize("path", sorted(DOCS.glob("images/*.svg")), ids=lambda path: path.stem)
def test_picture_is_for_everybody(path: Path) -> None:
    """A picture says in words what it shows, has colours for dark pages, and is shown somewhere."""
    text = path.read_text(encoding="utf-8")
    drawing = ElementTree.fromstring(text)  # noqa: S314 - our own
    for tag in ("title", "desc"):
        assert drawing.findtext(f"{{http://www.w3.org/2000/svg}}{tag}")
    assert "prefers-color-scheme:dark" in text
    assert any(f"images/{path.name})" in page for page in PAGES.values())
