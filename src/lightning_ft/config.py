"""The settings of a job: resolved once, checked once, frozen.

Order of precedence for each: argument, `LIGHTNING_FT_<NAME>`, alias, default. Where a variable and its alias say
different things, that is told, once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("lightning_ft")

ENV_PREFIX = "LIGHTNING_FT_"

AUTO = "auto"
"""Value of the setting `timeout` that has it learned."""

KEEP, SCALE_LR, KEEP_GLOBAL_BATCH = ON_RESIZE = "keep", "scale_lr", "keep_global_batch"
"""Values of the setting `on_resize`."""

PAD, EXACT = UNEVEN = "pad", "exact"
"""Values of the setting `uneven`."""

WARN, HEAL, EVICT = VERIFY_POLICY = "warn", "heal", "evict"
"""Values of the setting `verify_policy`."""

BLOCKING, PIPELINED = CATCH_UP = "blocking", "pipelined"
"""Values of the setting `catch_up`."""

RING, TREE = "ring", "tree"
TOPOLOGIES = (RING, TREE, AUTO)
"""Values of the setting `topology`."""

_LONGEST = 1800.0

_LEAST = {
    "min_world_size": 1,
    "max_link_failures": 0,
    "max_restarts": 0,
    "rejoin_timeout": 0,
    "spares": 0,
    "verify_every_n_steps": 0,
    "verify_state_every_n_steps": 0,
    "verify_chunk_bytes": 16,
}

ALIASES = {
    "enable": "HCCL_FT_ENABLE",
    "checkpoint_interval": "HCCL_FT_CHECKPOINT_INTERVAL",
    "max_failures": "HCCL_FT_MAX_FAILURES",
}
"""Names that operators of other stacks have in their job files."""

_told: set[str] = set()
"""Of which aliases it was told that they are not heeded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a user can configure. Durations are seconds.

    Attributes:
        min_world_size: Fewest members that may go on, >= 1.
        max_failures: Most members that may be missing at once; None: any number.
        heartbeat_interval: How often members and agents say that they are alive.
        heartbeat_timeout: Silence after which a member is given up.
        timeout: How long a collective may wait for a member before that member counts as hung. `"auto"`: for what a
            member has done ten times or more, ten times the longest of these, at least 6 heartbeat_timeout; else 1800.
        max_link_failures: How often the connection of two live members may fail in ten minutes before one of them is
            given up, >= 0.
        evict_stragglers: Whether a member that takes three times the median of all for a step is given up.
        respawn: Whether the agent starts a member again whose process failed; it then joins the job that runs.
        max_restarts: How often it does so for each logical id, >= 0.
        rejoin_timeout: How long members that are too few to go on (`min_world_size`, `max_failures`) wait for others to
            come back, if `respawn`, >= 0.
        max_world_size: Most members that the job may have, >= min_world_size; None: as many as it starts with.
        spares: How many more processes each agent starts, which wait to take a dead member's place, >= 0.
        catch_up: How a process that joins gets the state: `blocking`: all of it while the members wait; `pipelined`:
            most of it before, while they train on, and while they wait only what it has not.
        catch_up_slowdown: By which part of its time a step may be longer for that, > 0 and <= 1.
        on_resize: What a fit does when its ranks change: `keep`; `scale_lr`: learning rates in proportion to their
            number; `keep_global_batch`: as many samples in a step as with all ranks.
        uneven: What a fit does if its samples can't be dealt evenly: `pad`: some of them twice, as `DistributedSampler`
            does it; `exact`: each once, and ranks with fewer in a step weigh less in its gradients.
        verify_every_n_steps: In one of so many steps the ranks compare their reduced gradients; 0: never.
        verify_state_every_n_steps: In one of so many, their parameters and optimizers' state; 0: never.
        verify_chunk_bytes: How large the parts are that are compared, handed over and named, >= 16.
        verify_policy: What follows if they differ: `warn`: it is told; `heal`: who differs from the majority takes the
            majority's values, before anyone steps; `evict`: and then ends, to be started again.
        topology: How all-reduces go: `ring`: around the ring; `tree`: along a tree, with fewer steps, but more to send;
            `auto`: along the tree what is small, comes out the same and is found to be faster so.
        coordinator: `host:port` of the coordinator; None: the agent starts one.
        process_group_backend: Backend inside `ft` (`gloo`); None: chosen by device.
        event_log: File that gets the event log; None: `ft_events.jsonl` in the run's log directory.
        metrics_port: Port of the coordinator's host where Prometheus finds the job's metrics; None: nowhere.
        metrics_host: Address to listen on there.
        enable: False gives stock behaviour without fault tolerance.

    Raises:
        ValueError: A value is out of range, or not `heartbeat_interval < heartbeat_timeout < timeout`.
    """

    min_world_size: int = 1
    max_failures: int | None = None
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    timeout: float | str = 1800.0
    max_link_failures: int = 3
    evict_stragglers: bool = False
    respawn: bool = True
    max_restarts: int = 3
    rejoin_timeout: float = 600.0
    max_world_size: int | None = None
    spares: int = 0
    catch_up: str = PIPELINED
    catch_up_slowdown: float = 0.1
    on_resize: str = KEEP
    uneven: str = PAD
    verify_every_n_steps: int = 0
    verify_state_every_n_steps: int = 0
    verify_chunk_bytes: int = 1 << 20
    verify_policy: str = HEAL
    topology: str = AUTO
    coordinator: str | None = None
    process_group_backend: str | None = None
    event_log: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    enable: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        if self.max_failures is not None and self.max_failures < 0:
            raise ValueError(f"max_failures must be at least 0, or None for no limit, got {self.max_failures!r}")
        if self.max_world_size is not None and self.max_world_size < self.min_world_size:
            raise ValueError(
                f"max_world_size must be at least min_world_size={self.min_world_size}, or None for as many members as "
                f"the job starts with, got {self.max_world_size!r}"
            )
        if isinstance(self.timeout, str) and self.timeout != AUTO:
            raise ValueError(f"timeout must be seconds or {AUTO!r}, got {self.timeout!r}")
        if not 0 < self.heartbeat_interval < self.heartbeat_timeout < self.longest_timeout:
            raise ValueError(
                "0 < heartbeat_interval < heartbeat_timeout < timeout must hold, got "
                f"heartbeat_interval={self.heartbeat_interval!r}, heartbeat_timeout={self.heartbeat_timeout!r}, "
                f"timeout={self.timeout!r}"
            )
        _check_choices(self)
        _check_endpoints(self)
        if self.process_group_backend not in (None, "gloo"):
            raise ValueError(f"process_group_backend must be 'gloo' or None, got {self.process_group_backend!r}")

    @property
    def least_timeout(self) -> float:
        """After so long in a collective one looks who is waited for."""
        return min(6 * self.heartbeat_timeout, _LONGEST) if isinstance(self.timeout, str) else self.timeout

    @property
    def longest_timeout(self) -> float:
        """So long may take what is not known to be shorter."""
        return _LONGEST if isinstance(self.timeout, str) else self.timeout

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
        """Combine arguments (None: not given), environment, aliases and defaults.

        Raises:
            ValueError: As the constructor; a variable that can't be read, or may not have its value, is named with it.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for field in dataclasses.fields(cls):
            if arguments.get(field.name) is not None:
                values[field.name] = arguments.pop(field.name)
                continue
            arguments.pop(field.name, None)
            found = _look_up(field.name, environ, _READERS[field.name])
            if found is not None:
                variable, values[field.name] = found
                sources[field.name] = f"{variable}={environ[variable]!r}"
        if arguments:
            raise ValueError(f"unknown setting {min(arguments)!r}; known are {sorted(_READERS)}")
        try:
            return cls(**values)
        except ValueError as error:
            named = [source for name, source in sources.items() if re.search(rf"\b{name}\b", str(error))]
            if not named:
                raise
            raise ValueError(f"{error} (the environment has {', '.join(named)})") from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables with our prefix that nobody reads: most likely misspelt."""
    known = {field.name.upper() for field in dataclasses.fields(Settings)} | _OTHER_VARIABLES
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :] not in known)


def is_joining(environ: Mapping[str, str]) -> bool:
    """Whether `LIGHTNING_FT_JOIN` says that the agent is to join a job that runs, as a node that it has not had.

    Raises:
        ValueError: The variable can't be read.
    """
    variable = f"{ENV_PREFIX}JOIN"
    return bool(_read(variable, environ.get(variable) or "0", _flag))


def checkpoint_interval(environ: Mapping[str, str] | None = None) -> tuple[int, float] | None:
    """Read `LIGHTNING_FT_CHECKPOINT_INTERVAL` or its alias: optimizer steps (`100`), or a time (`30s`, `10m`, `2h`).

    Returns: Steps and seconds, of which one is 0; None if it is not set.

    Raises:
        ValueError: It is neither.
    """
    found = _look_up("checkpoint_interval", os.environ if environ is None else environ, _interval)
    return None if found is None else found[1]


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port` (`[::1]:port` for IPv6).

    Raises:
        ValueError: It is not of that form.
    """
    host, separator, port = endpoint.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"expected host:port with a port from 1 to 65535, got {endpoint!r}")
    return host.strip("[]"), int(port)


def parse_timeout(text: str) -> float | str:
    """Read a `timeout`: seconds or `auto`.

    Raises:
        ValueError: It is neither.
    """
    return text if text == AUTO else float(text)


def _look_up(name: str, environ: Mapping[str, str], reader: Callable[[str], Any]) -> tuple[str, Any] | None:
    """Return the variable that a setting is read from, and its value; None if neither it nor its alias is set."""
    names = (f"{ENV_PREFIX}{name.upper()}", ALIASES.get(name, ""))
    first, *others = [variable for variable in names if environ.get(variable, "") != ""] or [""]
    if not first:
        return None
    value = _read(first, environ[first], reader)
    for other in others:
        if not _says(value, environ[other], reader):
            _tell_once(f"{first}={environ[first]!r}", f"{other}={environ[other]!r}", environ)
    return first, value


def _says(value: object, text: str, reader: Callable[[str], Any]) -> bool:
    """Whether a variable that does not count says the same; it may be wrong."""
    try:
        return bool(reader(text) == value)
    except ValueError:
        return False


def _tell_once(used: str, ignored: str, environ: Mapping[str, str]) -> None:
    """The agent tells it: what it has decided it hands to its children in the variable, beside the alias."""
    if f"{ENV_PREFIX}MEMBER" not in environ and ignored not in _told:
        _told.add(ignored)
        logger.warning("the environment has both %s and %s: the first goes before the second", used, ignored)


def _interval(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"([0-9]+)([smh]?)", text)
    if not found or not int(found[1]):
        raise ValueError("expected a number of steps, or a time, like 100, 30s, 10m or 2h")
    number, unit = int(found[1]), found[2]
    return (0, number * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit]) if unit else (number, 0.0)


def _read(variable: str, text: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"environment variable {variable}={text!r} can't be read: {error}") from None


def _check_types(settings: Settings) -> None:
    """Raises: ValueError: A value given in Python is of another type than what would be read from the environment."""
    for name, hint in typing.get_type_hints(Settings).items():
        value = getattr(settings, name)
        expected = hint | int if hint in (float, float | str) else hint
        if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{name} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _check_endpoints(settings: Settings) -> None:
    if settings.coordinator is not None:
        try:
            parse_endpoint(settings.coordinator)
        except ValueError as error:
            raise ValueError(f"coordinator: {error}") from None
    port = settings.metrics_port
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"metrics_port must be from 1 to 65535, or None for no metrics, got {port!r}")


def _flag(text: str) -> bool:
    flags = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in flags:
        raise ValueError(f"expected one of {sorted(flags)}")
    return flags[text.lower()]


def _check_choices(settings: Settings) -> None:
    choices = {
        "on_resize": ON_RESIZE,
        "uneven": UNEVEN,
        "catch_up": CATCH_UP,
        "verify_policy": VERIFY_POLICY,
        "topology": TOPOLOGIES,
    }
    for name, allowed in choices.items():
        _check_one_of(name, getattr(settings, name), allowed)
    if not 0 < settings.catch_up_slowdown <= 1:
        raise ValueError(f"catch_up_slowdown must be > 0 and <= 1, got {settings.catch_up_slowdown!r}")


def _check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _optional_int(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "min_world_size": int,
    "max_failures": _optional_int,
    "heartbeat_interval": float,
    "heartbeat_timeout": float,
    "timeout": parse_timeout,
    "max_link_failures": int,
    "evict_stragglers": _flag,
    "respawn": _flag,
    "max_restarts": int,
    "rejoin_timeout": float,
    "max_world_size": _optional_int,
    "spares": int,
    "catch_up": str,
    "catch_up_slowdown": float,
    "on_resize": str,
    "uneven": str,
    "verify_every_n_steps": int,
    "verify_state_every_n_steps": int,
    "verify_chunk_bytes": int,
    "verify_policy": str,
    "topology": str,
    "coordinator": str,
    "process_group_backend": str,
    "event_log": str,
    "metrics_port": _optional_int,
    "metrics_host": str,
    "enable": _flag,
}

_OTHER_VARIABLES = {
    "AGENT_FD",
    "AGENT_PID",
    "CHECKPOINT_INTERVAL",
    "EXPECTED",
    "FAIL_AT",
    "HOST",
    "INCARNATION",
    "JOIN",
    "MEMBER",
    "SPOKESMAN_FD",
    "STACKS_FD",
    "STANDBYS",
    "TOKEN",
}
"""What else is read from the environment, here and in other modules."""
