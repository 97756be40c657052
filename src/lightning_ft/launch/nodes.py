"""Which node this is, of how many: from torchrun's flags or Lightning's variables."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import socket
from collections.abc import Mapping

from lightning_ft.config import ENV_PREFIX, Settings, parse_endpoint
from lightning_ft.coordinator.gathering import Beginning, Host, Terms, arrive
from lightning_ft.coordinator.listening import listen
from lightning_ft.errors import LaunchError

DEFAULT_PORT = 29400
"""Of a rendezvous endpoint that names none; as torchrun's."""


def token_of_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the nodes of a job share.

    Raises:
        ValueError: There is none.
    """
    token = environ.get(f"{ENV_PREFIX}TOKEN", "")
    if not token:
        raise ValueError(
            "a job of several nodes needs the environment variable LIGHTNING_FT_TOKEN, with the same secret on all "
            "nodes, but it is not set. Make one with `openssl rand -hex 16`"
        )
    return token


def master_endpoint(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return `MASTER_ADDR:MASTER_PORT`, Lightning's and torch's names of the first node; None if they are not set."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return join_endpoint(host, port) if host and port else None


def join_endpoint(host: str, port: int | str) -> str:
    """Write `host:port`; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def complete_endpoint(text: str) -> str:
    """Read torchrun's `host[:port]`.

    Raises:
        ValueError: It is no endpoint.
    """
    has_port = ":" in text if text.count(":") < 2 else "]:" in text
    endpoint = text if has_port else join_endpoint(text, DEFAULT_PORT)
    parse_endpoint(endpoint)
    return endpoint


def find_nodes(
    settings: Settings,
    *,
    nodes: tuple[int, int],
    node: int | None,
    num_slots: int,
    endpoint: str | None,
    job_id: str = "",
    limits: Mapping[str, float] | None = None,
    is_hosted: bool = False,
    joins: bool = False,
) -> tuple[Beginning, Settings]:
    """Find out who the job begins with: from the numbers alone if all are given, else by meeting the other agents.

    Args:
        settings: The job's; its coordinator goes before `endpoint`.
        nodes: Fewest and most nodes.
        node: Number of this one; None: any.
        num_slots: Members of this node.
        endpoint: `host:port` of the coordinator, if it was named; else `MASTER_ADDR:MASTER_PORT`.
        job_id: Nodes that give another are not of this job.
        limits: `last_call_timeout_s` and `join_timeout_s` of the meeting.
        is_hosted: The coordinator is a service of its own, which knows who is expected.
        joins: The job runs; `nodes` does not count, and a node without a number gets one that the job has not had.

    Returns: The beginning, and the settings with the coordinator.

    Raises:
        ValueError: Something is missing or does not fit.
        LaunchError: The nodes don't find each other.
    """
    least, most = nodes
    if node is not None and not joins and not 0 <= node < most:
        raise ValueError(f"--node-rank must be from 0 to {most - 1}, got {node}")
    if most == 1 and not is_hosted and not joins:
        return Beginning(0, tuple(f"0/{slot}" for slot in range(num_slots))), settings
    endpoint = settings.coordinator or endpoint or master_endpoint()
    if endpoint is None:
        raise ValueError(
            "a job of several nodes needs --rdzv-endpoint host:port of node 0 (or the setting coordinator, or "
            "MASTER_ADDR and MASTER_PORT in the environment), got none"
        )
    token = token_of_environment()
    if job_id:
        token = os.environ[f"{ENV_PREFIX}TOKEN"] = f"{token}:{job_id}"
    settings = dataclasses.replace(settings, coordinator=endpoint)
    terms = Terms(token, least, most, **(limits or {}))
    if is_hosted or joins:
        if node is None and not joins:
            raise ValueError("with a coordinator of its own each node needs its number: --node-rank")
        return asyncio.run(arrive(endpoint, terms, num_slots, node)), settings
    if node is not None and least == most:
        return Beginning(node, tuple(f"{n}/{slot}" for n in range(most) for slot in range(num_slots))), settings
    return gather(endpoint, terms, num_slots, node), settings


def gather(endpoint: str, terms: Terms, num_slots: int, node: int | None) -> Beginning:
    """Find the job's other nodes.

    Whoever is node 0, or, where nobody was given a number, is at the endpoint's address, and is the first there, is the
    others' host.

    Args:
        endpoint: `host:port` of the coordinator.
        terms: The same on all nodes.
        num_slots: Members of this node.
        node: Its number, if one was given.

    Raises:
        LaunchError: It does not come about; the message says why.
    """
    listener = _listener(endpoint, node)
    if listener is None:
        return asyncio.run(arrive(endpoint, terms, num_slots, node))

    async def host(found: socket.socket) -> Beginning:
        return await Host(terms, num_slots).gather(found)

    return asyncio.run(host(listener))


def _listener(endpoint: str, node: int | None) -> socket.socket | None:
    """The socket that the others come to, if this node is their host."""
    host, port = parse_endpoint(endpoint)
    if node not in (None, 0) or (node is None and not is_here(host)):
        return None
    try:
        return listen(host, port)
    except OSError as error:
        if node is None and error.errno == errno.EADDRINUSE:  # another agent on this machine
            return None
        raise LaunchError(f"starting the job failed: can't listen on {endpoint}: {error.strerror}.") from error


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: no other can be bound."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"starting the job failed: {host!r} can't be looked up: {error}.") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return True
    return False
