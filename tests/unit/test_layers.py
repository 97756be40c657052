"""The layers: what may import what."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ft.errors

PACKAGE = Path(lightning_ft.errors.__file__).parent

LAYERS = (
    "errors",
    "child",
    "faultpoints",
    "config",
    "event_log",
    "history",
    "monitoring",
    "page",
    "membership",
    "coordinator",
    "comm",
    "facts",
    "chunks",
    "reduction",
    "verification",
    "ddp",
    "stopping",
    "elastic",
    "data",
    "checkpoint",
    "metrics",
    "lightning_internals",
    "lightning_progress",
    "lightning_epoch",
    "lightning_deal",
    "lightning_refresh",
    "lightning_data",
    "lightning_metrics",
    "lightning_evaluation",
    "promotion",
    "rejoin",
    "resize",
    "lightning_checkpoints",
    "delta_interval",
    "delta_memory",
    "delta_modes",
    "delta_checkpoint",
    "rollback",
    "boundary",
    "launch",
    "lightning_ranks",
    "strategy",
    "fabric_data",
    "fabric",
    "callbacks",
    "registration",
    "cli",
    "__init__",
)
"""From the ground up. A module imports only from its own layer and from those before it."""

FORBIDDEN = {
    "errors": {"asyncio", "lightning", "torch"},
    "config": {"asyncio", "lightning", "torch"},
    "event_log": {"asyncio", "lightning", "torch"},
    "page": {"aiohttp", "asyncio", "lightning", "os", "pathlib", "threading", "time", "torch"},
    "history": {"aiohttp", "asyncio", "lightning", "os", "pathlib", "threading", "time", "torch"},
    "membership": {
        "aiohttp",
        "asyncio",
        "datetime",
        "lightning",
        "logging",
        "os",
        "random",
        "secrets",
        "select",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "torch",
        "uuid",
    },
    "coordinator": {"lightning", "torch"},
    "comm": {"aiohttp", "lightning"},
    "facts": {"aiohttp", "lightning"},
    "reduction": {"aiohttp", "lightning"},
    "chunks": {"aiohttp", "lightning"},
    "verification": {"aiohttp", "lightning"},
    "ddp": {"aiohttp", "lightning"},
    "data": {"aiohttp", "lightning"},
    "checkpoint": {"aiohttp", "lightning"},
    "checkpoint.claims": {"blosc2", "numpy", "torch"},
    "checkpoint.manifests": {"blosc2", "numpy", "torch"},
    "checkpoint.store": {"blosc2", "numpy", "torch"},
    "checkpoint.stores": {"blosc2", "numpy", "torch"},
}
"""What a layer must not know. Membership is pure: same state and event, same result."""


def _modules() -> dict[str, Path]:
    """All modules by dotted name inside the package; a sub-package goes by its own name."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return names


def _layer(module: str) -> int:
    top = module.partition(".")[0]
    assert top in LAYERS, f"{top} is in no layer: add it to LAYERS, above all that it imports"
    return LAYERS.index(top)


def _names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each absolute name that a file imports, wherever in it, and the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@functools.cache
def _imports() -> dict[str, dict[str, int]]:
    """For each module, the modules of this package that it imports, and in which line."""
    modules = _modules()
    found: dict[str, dict[str, int]] = {module: {} for module in modules}
    for module, path in modules.items():
        for name, line in _names(path):
            package, _, rest = name.partition(".")
            if package == "lightning_ft":
                while rest and rest not in modules:  # `from module import name`
                    rest = rest.rpartition(".")[0]
                found[module].setdefault(rest or "__init__", line)
    return found


def test_imports_point_up_the_list_of_layers() -> None:
    """No module imports one of a later layer, not even inside a function or for type checking."""
    wrong = [
        f"{_modules()[module]}:{line}: {module} imports {target}, which is a layer above it"
        for module, targets in _imports().items()
        for target, line in targets.items()
        if _layer(target) > _layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other() -> None:
    """Within a layer, too, imports go one way."""
    imports = _imports()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circular import: {' -> '.join((*path, module))}"
        if module not in done:
            for target in imports[module]:
                if target != module:
                    visit(target, (*path, module))
            done.add(module)

    for module in imports:
        visit(module, ())


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_layer_imports_nothing_that_it_must_not_know(layer: str) -> None:
    """The pure core has no clock, socket, thread, random number or log; the lower layers have no Lightning."""
    wrong = [
        f"{path}:{line}: {layer} must not import {name.partition('.')[0]}"
        for module, path in _modules().items()
        if f"{module}.".startswith(f"{layer}.")
        for name, line in _names(path)
        if name.partition(".")[0] in FORBIDDEN[layer]
    ]
    assert not wrong, "\n".join(wrong)
