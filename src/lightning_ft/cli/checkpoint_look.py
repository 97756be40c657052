"""`lightning-ft checkpoint list` and `inspect`: from the manifests alone, without torch."""

from __future__ import annotations

import argparse
import collections
from typing import TYPE_CHECKING, Any

from lightning_ft.cli.checkpoint_place import choose, open_place
from lightning_ft.cli.common import EXIT_FOUND, EXIT_OK, CommandError, in_bytes, print_json, table

if TYPE_CHECKING:
    from lightning_ft.checkpoint.records import Manifest


def list_checkpoints(options: argparse.Namespace) -> int:
    """Print a row for each checkpoint, newest first. Returns: 1 if a manifest is damaged."""
    from lightning_ft.checkpoint.manifests import published_keys, read_manifest
    from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

    store, _ = open_place(options)
    rows: list[dict[str, Any]] = []
    for key in published_keys(store):
        row: dict[str, Any] = {"key": str(key), "generation": key.generation, "step": key.step, "problem": None}
        try:
            row.update(_summary(read_manifest(store, key)[0]))
        except (CheckpointDamagedError, UnsupportedCheckpointError) as error:
            row["problem"] = str(error)
        rows.append(row)
    if any(row["problem"] for row in rows):  # what a job has deleted meanwhile is no damage
        still_there = set(map(str, published_keys(store)))
        rows = [row for row in rows if not row["problem"] or row["key"] in still_there]
    if options.json:
        print_json({"url": store.url, "checkpoints": rows})
    elif not rows:
        print(f"{store.url} has no checkpoint")
    else:
        print(table(("STEP", "GENERATION", "KIND", "MODE", "STORED", "STATE", "RANKS", "KEY"), map(_row, rows)))
    return EXIT_FOUND if any(row["problem"] for row in rows) else EXIT_OK


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    if row["problem"]:
        return row["step"], row["generation"], "DAMAGED", None, None, None, None, f"{row['key']}: {row['problem']}"
    kind = "base" if row["parent"] is None else f"needs {int(row['parent'].partition('-')[2])}"
    sizes = in_bytes(row["stored_bytes"]), in_bytes(row["state_bytes"])
    return row["step"], row["generation"], kind, row["mode"], *sizes, row["num_ranks"], row["key"]


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "parent": None if manifest.parent is None else str(manifest.parent.key),
        "base": str(manifest.base),
        "depth": manifest.depth,
        "mode": manifest.mode,
        "contract": manifest.contract,
        "num_ranks": manifest.num_ranks,
        "num_packs": len(manifest.packs),
        "stored_bytes": sum(pack.num_bytes for pack in manifest.packs),
        "state_bytes": sum(stream.num_bytes for stream in manifest.streams),
        "state_hash": manifest.state_hash.hex(),
        "versions": dict(manifest.versions),
    }


def _of_mode(manifest: Manifest) -> dict[str, Any]:
    """Return what a mode has to say of its checkpoint."""
    extra = manifest.extra
    if "error" in extra:
        return {"error_bound": extra["error"]["bound"], "error": extra["error"]["measured"]}
    if "optimizer" in extra:
        steps = extra["steps"]
        told = {name: extra[name] for name in ("optimizer", "device", "program")}
        return {**told, "num_steps": len(steps), "num_skipped": sum(step["skipped"] for step in steps)}
    return {}


def inspect(options: argparse.Namespace) -> int:
    """Print what one checkpoint's manifest says."""
    from lightning_ft.checkpoint.manifests import published_keys, read_manifest

    store, named = open_place(options)
    key = choose(store, named, options.step) or next(iter(published_keys(store)), None)
    if key is None:
        raise CommandError(f"{store.url} has no checkpoint")
    manifest = read_manifest(store, key)[0]
    codecs: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"chunks": 0, "bytes": 0, "stored_bytes": 0})
    for frame in manifest.frames:
        count = codecs[frame.codec]
        count["chunks"] += 1
        count["bytes"] += frame.num_bytes
        count["stored_bytes"] += frame.stored_bytes
    streams: list[dict[str, Any]] = [
        {
            "kind": stream.kind,
            "name": stream.name,
            "dtype": stream.dtype,
            "shape": list(stream.shape),
            "bytes": stream.num_bytes,
        }
        for stream in manifest.streams
    ]
    told: dict[str, Any] = {
        "url": store.url,
        "key": str(key),
        "generation": key.generation,
        "step": key.step,
        **_summary(manifest),
        **_of_mode(manifest),
    }
    if options.json:
        print_json({**told, "codecs": codecs, "streams": streams})
        return EXIT_OK
    for name, value in told.items():
        print(f"{name:13} {_shown(name, value)}")
    counted = [(name, c["chunks"], in_bytes(c["bytes"]), in_bytes(c["stored_bytes"])) for name, c in codecs.items()]
    print("\n" + table(("CODEC", "CHUNKS", "BYTES", "STORED"), counted))
    if options.tensors:
        print("\n" + table(("NAME", "KIND", "DTYPE", "SHAPE", "BYTES"), [_stream_row(stream) for stream in streams]))
    return EXIT_OK


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{part} {number}" for part, number in value.items())
    if name.endswith("_bytes"):
        return in_bytes(value)
    return "-" if value is None else str(value)


def _stream_row(stream: dict[str, Any]) -> tuple[object, ...]:
    shape = "x".join(map(str, stream["shape"]))
    return stream["name"] or "(the tree)", stream["kind"], stream["dtype"], shape, in_bytes(stream["bytes"])
