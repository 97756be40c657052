"""Writes a checkpoint as one ordinary file: what `torch.load` reads, or safetensors."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import split_protocol

from lightning_ft.checkpoint.store import open_store
from lightning_ft.errors import CheckpointError

RANKS = "lightning_ft_ranks"
"""Entry of a fit's state that `DeltaCheckpoint` alone reads: what a fit with the same number of ranks goes on with."""

_COPY_BYTES = 16 << 20


def write_ckpt(
    state: Any, target: str, *, has_ranks: bool = False, overwrites: bool = False, **storage_options: Any
) -> None:
    """Write a state as `torch.save` does; that of a fit is then an ordinary checkpoint of Lightning's.

    Args:
        state: Of a checkpoint.
        has_ranks: Whether the entry `RANKS` is kept.
        target: A path, or a URL. It is there whole or not at all, whatever is killed when.
        overwrites: Whether a file that is there may be replaced; of a path only.
        storage_options: For a URL.

    Raises:
        FileExistsError: It is there.
        CheckpointError: It can't be written.
    """
    if isinstance(state, dict) and not has_ranks:
        state = {name: value for name, value in state.items() if name != RANKS}

    def write(path: Path) -> None:
        with path.open("wb") as file:  # of a path torch would put the name into it
            torch.save(state, file)

    _write_whole(target, write, overwrites=overwrites, **storage_options)


def write_safetensors(
    state: Any, target: str, *, all_tensors: bool, metadata: Mapping[str, str], overwrites: bool, **storage_options: Any
) -> tuple[str, ...]:
    """Write a state's tensors.

    Args:
        state: Of a checkpoint.
        target: As for `write_ckpt`.
        all_tensors: Whether those of optimizers and callbacks are written, too; else only those of the entry
            `state_dict`, the model, if there is one.
        metadata: For the file's head.
        overwrites: As for `write_ckpt`.
        storage_options: For a URL.

    Returns: The names written.

    Raises:
        ImportError: The package safetensors is not installed.
        CheckpointError: A tensor is of a type that safetensors does not know, or it can't be written.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export to safetensors needs the package: pip install 'lightning-ft[safetensors]'") from error
    has_model = isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping)
    found = list(_tensors(state["state_dict"] if has_model and not all_tensors else state, ()))
    named = dict(found)
    if not named or len(named) < len(found):
        what = "the checkpoint holds no tensors" if not named else "two of its tensors would have the same name"
        raise CheckpointError(f"export failed: {what}")

    def write(path: Path) -> None:
        try:
            save_file(_apart(named), path, {"format": "pt", **metadata})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"export failed: safetensors can't hold these tensors: {error!r}") from error

    _write_whole(target, write, overwrites=overwrites, **storage_options)
    return tuple(named)


def _tensors(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value.detach()
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, str(index)))


def _apart(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor memory of its own, row by row: safetensors refuses what is shared, as tied weights are."""
    seen: set[int] = set()
    found = {}
    for name, tensor in named.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.contiguous() if place not in seen else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(place)
    return found


def _write_whole(target: str, write: Callable[[Path], object], *, overwrites: bool, **storage_options: Any) -> None:
    protocol, local = split_protocol(target)
    if protocol in {None, "file", "local"}:
        _write_here(Path(local), write, overwrites=overwrites)
        return
    if overwrites:
        raise ValueError(f"only a path of this machine can be overwritten, got {target!r}: delete it first")
    directory, _, name = target.rpartition("/")
    store = open_store(directory, **storage_options)
    with tempfile.TemporaryDirectory(prefix="lightning-ft-") as place:
        path = Path(place) / "export"
        _write(write, path)
        with path.open("rb") as file:
            store.create(name, iter(lambda: file.read(_COPY_BYTES), b""))


def _write(write: Callable[[Path], object], path: Path) -> None:
    try:
        write(path)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
        raise CheckpointError(f"export failed: {path.parent} can't be written: {error}") from error


def _write_here(path: Path, write: Callable[[Path], object], *, overwrites: bool) -> None:
    """Write beside the path, make that durable, and only then give it its name."""
    if not overwrites and path.exists():
        raise FileExistsError(f"{path} is there already")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write(write, temporary)
        _sync(temporary, os.O_RDONLY)
        if overwrites:
            temporary.replace(path)
        else:
            _name(temporary, path)
        _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileExistsError:
        raise FileExistsError(f"{path} is there already") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _name(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        temporary.rename(path)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
