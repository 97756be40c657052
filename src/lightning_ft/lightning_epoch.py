"""Where in an epoch a fit is whose data are not dealt anew: any strategy but `ft_ddp`.

A loader draws what its samplers yield, and these draw random numbers when they begin. So it goes on from the middle of
an epoch if the samplers begin with the generators as they were then, and what they yield first is left out, unread.

Read in lightning 2.6.6 and torch 2.13.0 (tests/unit/test_lightning_epoch.py fails clearly if they change):
`_FitLoop._combined_loader`, `_data_fetcher`, `max_batches` and `epoch_progress`, `_TrainingEpochLoop.batch_progress`
and `reset`, and `DataLoader._index_sampler`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import DataLoader, IterableDataset

from lightning_ft.ddp import FaultTolerantDDP
from lightning_ft.elastic import generator_bytes, generator_state, random_state, set_random_state
from lightning_ft.lightning_internals import around_data_setup


class EpochPlace:
    """Knows how a fit's epoch began, and has it go on in its middle.

    Exact for samplers that draw all their random numbers when they begin, as torch's do. Not for those that draw from
    Python's, NumPy's or torch's generator with each sample, nor for what worker processes draw.

    Args:
        trainer: Its loops are changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None
        self._drawers: list[_Drawer] = []
        self._goes_on = False
        around_data_setup(trainer.fit_loop, lambda: False, self._with_loaders, lambda: None)
        loop = trainer.fit_loop.epoch_loop
        loop.reset = self._without_warning(loop.reset)  # type: ignore[method-assign]

    def state(self) -> dict[str, Any] | None:
        """Return where it is, for `take`; None: at an epoch's start or end, or it can't be told."""
        fit = self._trainer.fit_loop
        progressed: Any = fit.epoch_loop.batch_progress.current
        began = [drawer.began for drawer in self._drawers]
        is_within = 0 < progressed.processed < fit.max_batches
        if not began or None in began or not is_within or isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher):
            return None
        return {"num_done": int(progressed.processed), "epoch": self._epoch, "began": began}

    def take(self, state: dict[str, Any] | None) -> None:
        """Have the next fit go on there; called before its data are set up."""
        self._saved = state

    @property
    def _epoch(self) -> int:
        progressed: Any = self._trainer.fit_loop.epoch_progress.current
        return int(progressed.processed)

    def _with_loaders(self) -> None:
        fit = self._trainer.fit_loop
        saved, self._saved, self._drawers = self._saved, None, []
        if isinstance(self._trainer.strategy.model, FaultTolerantDDP) or fit._combined_loader is None:
            return
        loaders = fit._combined_loader.flattened
        if not all(map(_is_known, loaders)):
            return
        self._drawers = [_drawer_of(loader) for loader in loaders]
        self._goes_on = saved is not None and saved["epoch"] == self._epoch and len(saved["began"]) == len(loaders)
        if saved is not None and self._goes_on:
            for drawer, began in zip(self._drawers, saved["began"], strict=True):
                drawer.go_on(began, saved["num_done"])

    def _without_warning(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Lightning takes a loader without a state of its own for one that can't be resumed."""

        def reset_epoch() -> None:
            with warnings.catch_warnings():
                if self._goes_on:
                    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
                reset()

        return reset_epoch


class _Drawer:
    """Stands in the place of what a loader asks for indices.

    Attributes:
        began: The generators' states when the present pass began; None: none has.
    """

    def __init__(self, inner: Any, generators: list[torch.Generator]) -> None:
        self.inner = inner
        self.began: dict[str, Any] | None = None
        self._generators = generators
        self._goes_on: tuple[dict[str, Any], int] | None = None

    def go_on(self, began: dict[str, Any], num_done: int) -> None:
        """Have the next pass be one that began so, after so many steps of the epoch."""
        if len(began["generators"]) == len(self._generators):
            self._goes_on = began, num_done

    def __iter__(self) -> Iterator[Any]:
        goes_on, self._goes_on = self._goes_on, None  # only when the first is drawn: an iterator may be thrown away
        if goes_on is None:
            own = [generator_bytes(generator.get_state()) for generator in self._generators]
            self.began = {"random": random_state(), "generators": own}
            yield from self.inner
            return
        self.began, num_done = goes_on
        present = random_state()
        set_random_state(self.began["random"])
        for generator, kept in zip(self._generators, self.began["generators"], strict=True):
            generator.set_state(generator_state(kept))
        drawn = iter(self.inner)
        for _ in range(_num_of_pass(num_done, self)):
            next(drawn)
        set_random_state(present)
        yield from drawn

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # a copy that is being made has none
            raise AttributeError(name)
        return getattr(self.inner, name)


def _num_of_pass(num_done: int, drawer: _Drawer) -> int:
    """Return how many of so many steps belong to the last pass of a loader that starts again at its end."""
    return num_done if num_done <= len(drawer) else (num_done - 1) % len(drawer) + 1


def _is_known(loader: object) -> bool:
    """Whether it is the indices that decide where a loader is, and nobody else keeps them."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
        and hasattr(loader._index_sampler, "__len__")
    )


def _drawer_of(loader: Any) -> _Drawer:
    """Put one into a loader, unless it has one."""
    if not isinstance(loader._index_sampler, _Drawer):
        generators: dict[int, torch.Generator] = {}
        for owner in (loader, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
            for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(value, torch.Generator):
                    generators.setdefault(id(value), value)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(loader)[name] = _Drawer(vars(loader)[name], list(generators.values()))  # it refuses a plain assignment
    drawer: _Drawer = loader._index_sampler
    return drawer
