"""`lightning-ft checkpoint verify`, `prune` and `repair`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lightning_ft.cli.checkpoint_place import open_place
from lightning_ft.cli.common import EXIT_FOUND, EXIT_OK, CommandError, print_json

if TYPE_CHECKING:
    from lightning_ft.checkpoint.repair import Repair
    from lightning_ft.checkpoint.store import Store
    from lightning_ft.checkpoint.verification import Verdict


def _verdicts(store: Store, *, deep: bool) -> list[Verdict]:
    from lightning_ft.checkpoint.manifests import published_keys, read_chain
    from lightning_ft.checkpoint.verification import verify
    from lightning_ft.checkpoint.watched import WatchedStore
    from lightning_ft.cli.watched import Progress
    from lightning_ft.errors import CheckpointDamagedError, UnsupportedCheckpointError

    total_bytes = 0
    for key in published_keys(store):
        try:
            sizes = [sum(pack.num_bytes for pack in manifest.packs) for manifest in read_chain(store, key)]
        except (CheckpointDamagedError, UnsupportedCheckpointError):
            continue
        total_bytes += sizes[-1] + (sum(sizes) if deep else 0)
    progress = Progress("verifying", total_bytes)
    try:
        return verify(WatchedStore(store, progress.read), deep=deep)
    finally:
        progress.end()


def verify(options: argparse.Namespace) -> int:
    """Print what is wrong with each checkpoint, and which is the newest that can be used. Returns: 1 for any fault."""
    from lightning_ft.checkpoint.repair import plan_repair
    from lightning_ft.errors import UnsupportedCheckpointError

    store, _ = open_place(options)
    verdicts = _verdicts(store, deep=options.deep)
    newest = next((verdict.key for verdict in verdicts if verdict.is_usable), None)
    notes = []
    try:
        plan = plan_repair(store, verdicts, None, tries=False)
        notes += [f"{path} is of a save that was never finished" for path in plan.orphans]
        notes += [f"LATEST does not name {plan.latest or 'nothing'}"] * plan.is_latest_wrong
    except UnsupportedCheckpointError:
        pass  # it is among the obstacles
    if options.json:
        checkpoints = [
            {
                "key": str(verdict.key),
                "generation": verdict.key.generation,
                "step": verdict.key.step,
                "is_intact": None if verdict.obstacle else not verdict.problems,
                "problems": list(verdict.problems),
                "obstacle": verdict.obstacle,
            }
            for verdict in verdicts
        ]
        told = {"url": store.url, "checkpoints": checkpoints, "notes": notes}
        print_json({**told, "newest_intact": None if newest is None else str(newest)})
    else:
        for verdict in verdicts:
            is_known = verdict.obstacle is None
            print(f"{verdict.key}  {'DAMAGED' if verdict.problems else 'intact' if is_known else 'NOT FOR HERE'}")
            for problem in verdict.problems if is_known else (verdict.obstacle,):
                print(f"    {problem}")
        for note in notes:
            print(f"note: {note}")
        print(f"the newest intact checkpoint is {newest or 'none'}" if verdicts else f"{store.url} has no checkpoint")
    return EXIT_OK if all(verdict.is_usable for verdict in verdicts) else EXIT_FOUND


def prune(options: argparse.Namespace) -> int:
    """Delete all but the newest checkpoints, what they need, and two bases."""
    from lightning_ft.checkpoint.retention import retain

    store, _ = open_place(options)
    if not options.dry_run:
        store.recover()
    done = retain(store, None, keep_last=options.keep, verified=set(), is_dry=options.dry_run)
    if options.json:
        told: dict[str, Any] = {"url": store.url, "is_dry": options.dry_run}
        lists = {"kept": done.kept, "deleted": done.deleted, "damaged": sorted(done.damaged), "files": done.swept}
        print_json({**told, **{name: list(map(str, found)) for name, found in lists.items()}})
        return EXIT_OK
    verb = "would be deleted" if options.dry_run else "deleted"
    for key in done.kept:
        print(f"{key}  kept{' (it is damaged)' if key in done.damaged else ''}")
    for key in done.deleted:
        print(f"{key}  {verb}")
    print(f"{len(done.deleted)} checkpoints and {len(done.swept)} files {verb}, {len(done.kept)} checkpoints are kept")
    return EXIT_OK


def repair(options: argparse.Namespace) -> int:
    """Plan the repair, and carry it out if that is wished. Returns: 1 if something is wrong afterwards."""
    from lightning_ft.checkpoint.claims import Claim, claim_generation, claimed_generations
    from lightning_ft.checkpoint.manifests import published_keys
    from lightning_ft.checkpoint.repair import carry_out, plan_repair
    from lightning_ft.errors import StoreError

    store, _ = open_place(options)
    claim = None
    if options.claim:
        generations = [key.generation for key in published_keys(store)]
        following = max([*generations, *claimed_generations(store)], default=-1) + 1
        claim = claim_generation(store, at_least=following) if options.apply else Claim(store, following)
    elif options.apply:
        store.recover()
    plan = plan_repair(store, _verdicts(store, deep=False), claim)
    if options.apply:
        try:
            carry_out(store, plan, keeps=not options.delete)
        except StoreError as error:
            raise CommandError(
                f"{error} Call it again to go on; if a file can't be read to be set aside, with --delete."
            ) from error
    _tell(store.url, plan, options)
    is_well = not plan.unusable - {key for key, _ in plan.damaged} if options.apply else not plan.is_needed
    return EXIT_OK if is_well else EXIT_FOUND


def _tell(url: str, plan: Repair, options: argparse.Namespace) -> None:
    damaged = [{"key": finding.what, "reason": finding.reason} for _, finding in plan.damaged]
    left = [{"what": finding.what, "reason": finding.reason} for finding in plan.left]
    if options.json:
        told = {"url": url, "is_applied": options.apply, "damaged": damaged, "files": list(plan.paths), "left": left}
        latest = None if plan.latest is None else str(plan.latest)
        print_json(
            {**told, "orphans": list(plan.orphans), "newest_usable": latest, "writes_latest": plan.is_latest_wrong}
        )
        return
    gone = "deleted" if options.delete else "set aside"
    will = "" if options.apply else "would be "
    for row in damaged:
        print(f"{row['key']}  {will}{gone}: {row['reason']}")
    for path in plan.orphans:
        print(f"{path}  {will}deleted: of a save that was never finished")
    for row in left:
        print(f"{row['what']}  left as it is: {row['reason']}")
    if plan.is_latest_wrong:
        print(f"LATEST  {will}written")
    print(f"the newest checkpoint that can be restored is {plan.latest or 'none'}")
    if plan.is_needed and not options.apply:
        print("nothing was changed: --apply does it")
