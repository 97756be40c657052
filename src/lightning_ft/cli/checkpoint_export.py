"""`lightning-ft checkpoint export`: one checkpoint as an ordinary file."""

from __future__ import annotations

import argparse

from lightning_ft.cli.checkpoint_place import choose, open_place, storage_options
from lightning_ft.cli.common import EXIT_OK, CommandError, print_json
from lightning_ft.errors import CheckpointDamagedError


def export(options: argparse.Namespace) -> int:
    """Write the checkpoint that is meant, or the newest that is intact."""
    from lightning_ft.checkpoint.export import write_ckpt, write_safetensors
    from lightning_ft.checkpoint.manifests import published_keys, read_chain
    from lightning_ft.checkpoint.restore import restore
    from lightning_ft.checkpoint.watched import WatchedStore
    from lightning_ft.cli.watched import Progress

    is_safetensors = options.target.endswith(".safetensors")
    store, named = open_place(options)
    key = choose(store, named, options.step)
    total_bytes = 0
    for likely in [key] if key is not None else published_keys(store)[:1]:
        try:
            total_bytes = sum(pack.num_bytes for manifest in read_chain(store, likely) for pack in manifest.packs)
        except CheckpointDamagedError:
            continue  # restoring says so
    progress = Progress("reading", total_bytes)
    try:
        found = restore(WatchedStore(store, progress.read), key=key, weights_only=not options.allow_pickle)
    finally:
        progress.end()
    own = found.manifest.key
    goes_where_it_comes_from = options.target.partition("://")[0] == options.url.partition("://")[0]
    remote = storage_options(options) if "://" in options.target and goes_where_it_comes_from else {}
    try:
        if is_safetensors:
            names = write_safetensors(
                found.state,
                options.target,
                all_tensors=options.all,
                metadata={"step": str(own.step), "checkpoint": str(own)},
                overwrites=options.force,
                **remote,
            )
            what = f"{len(names)} tensors"
        else:
            write_ckpt(found.state, options.target, has_ranks=options.all, overwrites=options.force, **remote)
            what = "the whole state"
    except FileExistsError as error:
        raise CommandError(f"export failed: {error} (--force replaces it)") from error
    except OSError as error:
        raise CommandError(f"export failed: {error}") from error
    if options.json:
        told = {"url": store.url, "key": str(own), "step": own.step, "num_steps_lost": found.num_steps_lost}
        print_json({**told, "target": options.target, "what": what})
    else:
        print(f"{options.target} has {what} of checkpoint {own}, step {own.step}")
    return EXIT_OK
