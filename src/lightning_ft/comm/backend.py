"""Makes the groups of backend `ft` when torch asks for them.

Private API read in torch 2.13.0: `dist.distributed_c10d._world.pg_group_ranks` (`_update_rank_table`) and what a
creator with `extended_api` is given (tests/unit/comm/test_process_group.py fails clearly if they change).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_ft.child import CANNOT_JOIN_STATUS, speaks_for_all, watch_agent
from lightning_ft.comm.gloo import GlooTransport
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.ring import Ring
from lightning_ft.comm.sockets import ForkGuard, open_sockets
from lightning_ft.config import Settings
from lightning_ft.coordinator.channel import reachable_host
from lightning_ft.coordinator.client import MembershipClient
from lightning_ft.errors import LaunchError, QuorumLostError, RepeatedFailureError
from lightning_ft.event_log import describe
from lightning_ft.membership.ids import from_ranges

_NEEDED = ("COORDINATOR", "TOKEN", "MEMBER", "EXPECTED")

_TOLD_TO_ALL = (QuorumLostError, RepeatedFailureError)

Follower = Callable[[str, Mapping[str, Any]], None]
"""Takes an event's name and fields."""

_ring: Ring | None = None
_pid = 0
_followers: list[Follower] = []


def progress(doing: str) -> None:
    """Say that this process makes progress outside collectives, so that it is not taken for hung; costs nothing.

    The strategy says it at each batch of each loop. A hand-written loop says it where it works for long without a
    collective: the setting `timeout` is how long the others wait for a member that neither comes nor says anything.

    Args:
        doing: What it does from now on, for a person: `loading shard 7`. It is named if this process is given up.
    """
    if _ring is not None:
        _ring.activity.progress(doing)


def is_member() -> bool:
    """Whether this process takes part: not while it waits to join, nor once it has left. True if there is no job."""
    return _ring is None or not _ring.is_outside


def report(event: str, **fields: object) -> None:
    """Put a line into the job's event log, from any thread; where there is no job, say it on the console.

    Args:
        event: Its name, `snake_case`.
        fields: Scalars or sequences of them.
    """
    _tell(event, fields)
    if _ring is None:
        level, sentence = describe(event, fields)
        logging.getLogger("lightning_ft").log(level, "%s", sentence)
    elif not _ring.is_outside and os.getpid() == _pid:
        _ring.report(event, **fields)


def follow(follower: Follower) -> None:
    """Have a function called with each event that this process reports, or that all members know, and its fields.

    It is called in the thread that reports.
    """
    _followers.append(follower)


def unfollow(follower: Follower) -> None:
    """Have a function called no more; one that was not is no error."""
    if follower in _followers:
        _followers.remove(follower)


def _tell(event: str, fields: Mapping[str, object]) -> None:
    for follower in tuple(_followers):
        follower(event, fields)


def confirm_membership(*, waits_for_coordinator: bool = True) -> None:
    """As `Ring.confirm_membership`; without a ring, there is nobody to be given up by."""
    if _ring is not None and os.getpid() == _pid:  # a fork is no member
        _ring.confirm_membership(waits_for_coordinator=waits_for_coordinator)


def starts_late() -> bool:
    """Whether this process is none of those that its job started with: it will join the others."""
    incarnation = int(os.environ.get("LIGHTNING_FT_INCARNATION", "1"))
    expected = os.environ.get("LIGHTNING_FT_EXPECTED")
    return incarnation > 1 or (
        expected is not None and os.environ.get("LIGHTNING_FT_MEMBER") not in from_ranges(expected)
    )


def make_group(options: Any, _: Any = None) -> FaultTolerantProcessGroup:
    """Make WORLD (no ranks given) or a sub-group; torch calls it from init_process_group and new_group."""
    global _ring, _pid
    if options.global_ranks_in_group:
        assert _ring is not None
        sequence = _ring.add_group(str(options.group_id), tuple(options.global_ranks_in_group))
        return FaultTolerantProcessGroup(_ring, sequence)
    watch_agent()
    settings = Settings.resolve()
    missing = [name for name in _NEEDED if not os.environ.get(f"LIGHTNING_FT_{name}")]
    if missing:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise LaunchError(
                "init_process_group('ft') failed: torchrun has started this process. Its agent kills all ranks if one "
                "fails, so that none could survive another. Write `lightning-ft run` in the place of `torchrun`, with "
                "the same flags."
            )
        raise LaunchError(
            f"init_process_group('ft') failed: LIGHTNING_FT_{missing[0]} is not set, so this process was not started "
            "as a member of a job. Start the script with `lightning-ft run --nproc-per-node N script.py`, or use "
            'Trainer(strategy="ft_ddp"), which starts the processes itself.'
        )
    endpoint = os.environ["LIGHTNING_FT_COORDINATOR"]
    transport = GlooTransport(reachable_host(endpoint), settings.heartbeat_timeout)
    member = os.environ["LIGHTNING_FT_MEMBER"]
    incarnation = int(os.environ.get("LIGHTNING_FT_INCARNATION", "1"))
    expected = from_ranges(os.environ["LIGHTNING_FT_EXPECTED"])
    is_joiner = starts_late()
    token = os.environ["LIGHTNING_FT_TOKEN"]
    client = MembershipClient(
        endpoint=endpoint,
        token=token,
        member=member,
        incarnation=incarnation,
        address=transport.address,
        expected=expected,
        settings=settings,
        is_joiner=is_joiner,
        standbys=[found for found in os.environ.get("LIGHTNING_FT_STANDBYS", "").split(",") if found],
    )
    ForkGuard(lambda: [found for found in open_sockets() if found.number == client.fileno()])
    _ring, _pid = Ring(client, transport, member, settings, token, is_joiner=is_joiner), os.getpid()
    _ring.on_renumbered.append(_update_rank_table)
    _ring.follow_reports(_tell)
    _ring.start(expected)
    atexit.register(_leave_at_exit, _ring, os.getpid(), is_joiner=is_joiner)
    sys.excepthook = functools.partial(_crash_at_once, _ring, os.getpid(), sys.excepthook)
    return FaultTolerantProcessGroup(_ring, _ring.world)


def _crash_at_once(  # noqa: PLR0917 - a hook's own order
    ring: Ring,
    pid: int,
    show: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show an uncaught exception, then tell the others: the interpreter may first wait for threads for long.

    What all members are told, and raise, is shown by one of each node; its agent says how many there were.
    """
    if not isinstance(error, _TOLD_TO_ALL) or speaks_for_all():
        show(kind, error, trace)
    if os.getpid() == pid:
        ring.crash(error)


def _leave_at_exit(ring: Ring, pid: int, *, is_joiner: bool) -> None:
    if os.getpid() != pid:  # a fork that ends like a program: it is no member, and has no threads to leave with
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        ring.leave()
    else:  # somebody has replaced our hook
        ring.crash(error)
    is_refused = is_joiner and isinstance(error, LaunchError)
    # A stuck thread would come back from C++, when its peers' sockets close, into an interpreter that is gone, which
    # ends the process by abort(). Python tells no exit handler the status; what sys.exit was given is lost here.
    if ring.is_stuck or is_refused:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(CANNOT_JOIN_STATUS if is_refused else 0 if error is None else 1)


def _update_rank_table() -> None:
    """Tell c10d the new ranks: it translates WORLD ranks to a group's with a table that it never updates."""
    world_state = dist.distributed_c10d._world
    world = dist.group.WORLD
    if not isinstance(world, FaultTolerantProcessGroup):
        return
    rank_of = {member: rank for rank, member in enumerate(world.members)}
    for group in tuple(world_state.pg_group_ranks):
        if isinstance(group, FaultTolerantProcessGroup):
            world_state.pg_group_ranks[group] = {
                rank_of[member]: rank for rank, member in enumerate(group.members) if member in rank_of
            }
