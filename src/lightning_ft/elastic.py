"""What a plain PyTorch loop keeps in step across the processes of a job, and hands to those that join it."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.comm.replay import Trained
from lightning_ft.comm.transfer import State
from lightning_ft.coordinator.fingerprint import Fact, Fingerprint
from lightning_ft.ddp import FaultTolerantDDP
from lightning_ft.errors import FINAL, FaultToleranceError, LaunchError, StopRequested
from lightning_ft.facts import (
    facts_of_module,
    facts_of_optimizer,
    facts_of_script,
    facts_of_verification,
    name_of_class,
)
from lightning_ft.stopping import Stopping, heed_signals

_MOST_RESTORED = 3


class ElasticState:
    """The state of a training loop: what has a `state_dict`, and plain values.

    Args:
        **parts: By name. Modules and optimizers are taken to be bitwise the same on all ranks; everything else that has
            `state_dict` and `load_state_dict` (schedulers, samplers), and plain values, comes from the first rank.

    Each part is an attribute, to be read and, if it is a plain value, set:

        state = lightning_ft.ElasticState(model=model, optimizer=optimizer, step=0)
        while state.step < 1000:
            state.boundary()
            optimizer.zero_grad()
            loss(model, batch_of(state.step)).backward()
            optimizer.step()
            state.step += 1
    """

    __slots__ = ("__dict__", "_is_described", "_kept", "_num_restored", "_stopping")

    def __init__(self, **parts: Any) -> None:
        self._is_described = False
        self._stopping: Stopping | None = None
        self._kept: State | None = None
        self._num_restored = 0
        self.__dict__.update(parts)

    def boundary(self) -> None:
        """Let others join or leave; a process that was started while the job ran joins here itself.

        All ranks must call it at the same place of the loop, between two steps. If a part is an `ft_ddp` model and
        SIGTERM has no handler yet, the first call gives it one: a rank that gets it leaves at a boundary, and the
        others go on; if all do, or too few would stay, all stop at the same one.

        Raises:
            StopRequested: All ranks stop here.
            SystemExit: This rank leaves here, or the job ended in peace before it could join.
            FaultToleranceError: This process was not admitted, or can't go on.
        """
        world = dist.group.WORLD
        if not isinstance(world, FaultTolerantProcessGroup):
            raise LaunchError("boundary() failed: torch.distributed.init_process_group('ft') must come first")
        ring = world.ring
        for part in self.__dict__.values():
            if hasattr(part, "check_boundary"):
                part.check_boundary()
        if not self._is_described:
            self._is_described = True
            ring.describe(Fingerprint([*self._facts(), *facts_of_verification(ring.settings)]))
            self._stopping = heed_signals(self.__dict__.values(), ring)
            self._watch_optimizers()
        if self._stopping is not None and self._stopping.reason() is not None:
            raise StopRequested
        if ring.is_outside:
            if not ring.join(self._give, self._take, self._trained):
                raise SystemExit(0)
        else:
            ring.boundary(self._give, self._take, self._trained)

    def _watch_optimizers(self) -> None:
        """Have what the optimizers keep compared together with the parameters, if these are (`verify_*`)."""
        parts = list(self.__dict__.values())
        optimizers = [_unwrapped(part) for part in parts if isinstance(part, torch.optim.Optimizer)]
        modules = [module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()]
        for module in modules:
            if isinstance(module, FaultTolerantDDP):
                module.watch_optimizers(*optimizers)

    def keep(self) -> None:
        """Keep a copy of the state in memory, to go back to; who joins later is handed it.

        All ranks must call it at the same place of the loop, between two steps.
        """
        self._kept, self._num_restored = copy.deepcopy(self._now()), 0

    def restore(self, error: FaultToleranceError) -> None:
        """Go back to what was kept last, with the ranks that there are now.

        All ranks must: the error is one that all of them raise at the same place. A collective's MembershipChangedError
        is, and whatever follows from what is the same on all, as gradients are after backward.

        Args:
            error: Why. It is raised again if there is nothing to go back to, if this process can't go on at all, or if
                going back to the same state has not helped three times.
        """
        if self._kept is None or isinstance(error, FINAL) or self._num_restored == _MOST_RESTORED:
            raise error
        self._num_restored += 1
        self._set(copy.deepcopy(self._kept))

    def _facts(self) -> Iterator[Fact]:
        for name, part in self.__dict__.items():
            if isinstance(part, torch.nn.Module):
                yield from facts_of_module(part, f" of {name}")
        for name, part in self.__dict__.items():
            if isinstance(part, torch.optim.Optimizer):
                yield from facts_of_optimizer(name, part)
            elif not isinstance(part, torch.nn.Module):
                yield f"part {name}", "it", name_of_class(part) if hasattr(part, "load_state_dict") else "a value"
        yield from facts_of_script()

    def _give(self) -> State:
        now = self._now()
        return State(now.replicated, (now.own, self._kept, self._num_restored))

    def _now(self) -> State:
        own = {}
        for name, part in self.__dict__.items():
            if isinstance(part, torch.nn.Module):
                own[name] = _split(part)[1]
            elif not isinstance(part, torch.optim.Optimizer):
                own[name] = part.state_dict() if hasattr(part, "load_state_dict") else part
        return State(self._replicated(), (own, random_state()))

    def _replicated(self) -> dict[str, Any]:
        replicated = {}
        for name, part in self.__dict__.items():
            if isinstance(part, torch.nn.Module):
                replicated[name] = _split(part)[0]
            elif isinstance(part, torch.optim.Optimizer):
                replicated[name] = part.state_dict()
        return replicated

    def _trained(self) -> Trained:
        parts = list(self.__dict__.values())
        parameters = [own for part in parts if isinstance(part, torch.nn.Module) for own in part.parameters()]
        optimizers = [_unwrapped(part) for part in parts if isinstance(part, torch.optim.Optimizer)]
        return Trained(parameters, optimizers, self._replicated)

    def _take(self, state: State) -> None:
        own, self._kept, self._num_restored = state.own
        self._set(State(state.replicated, own))

    def _set(self, state: State) -> None:
        own, randomness = state.own
        for name, value in (own | state.replicated).items():
            part: Any = getattr(self, name, None)
            if isinstance(part, torch.nn.Module):
                with loading_in_place(part):
                    part.load_state_dict({**own[name], **value})
            elif hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)
        set_random_state(randomness)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what steps: Fabric's optimizers only look like one."""
    is_wrapped = type(optimizer).__module__ == "lightning.fabric.wrappers"
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer) if is_wrapped else optimizer
    return inner


def _split(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `parameters_and_rest`, also for a wrapper that hands out the state of what it wraps: Fabric's."""
    state = module.state_dict(keep_vars=True)
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, value in state.items():
        parts[not isinstance(value, torch.nn.Parameter)][name] = (
            value.detach() if isinstance(value, torch.Tensor) else value
        )
    return parts


def parameters_and_rest(module: torch.nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a module's state: its parameters are the same on all ranks, its buffers may be each rank's own."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters = {name: value for name, value in state.items() if name in names}
    return parameters, {name: value for name, value in state.items() if name not in names}


@contextlib.contextmanager
def loading_in_place(module: torch.nn.Module) -> Iterator[None]:
    """Have `load_state_dict` copy no parameter onto itself: what was sent ahead is where it belongs."""

    def keep(_: object, state: dict[str, Any], prefix: str, *__: object) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.is_set_to(parameter):
                state[prefix + name] = parameter

    hook = module.register_load_state_dict_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch: numbers, text and bytes, no tensor or array."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": generator_bytes(torch.get_rng_state())}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, keys.tobytes(), *rest)
    if torch.cuda.is_available():
        found["cuda"] = generator_bytes(torch.cuda.get_rng_state())
    return found


def set_random_state(found: dict[str, Any]) -> None:
    """Continue with the generators of another process."""
    random.setstate(found["python"])
    torch.set_rng_state(generator_state(found["torch"]))
    if "numpy" in found and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = found["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(generator_state(found["cuda"]))


def generator_bytes(state: torch.Tensor) -> bytes:
    """Return what torch gives as a generator's state as bytes: a checkpoint's tensors are then the same each time."""
    return state.numpy().tobytes()


def generator_state(data: bytes) -> torch.Tensor:
    """Return it as torch takes it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
