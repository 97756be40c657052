"""Data that are dealt when an epoch or an evaluation begins: among the ranks there are then.

Read in lightning 2.6.6 (tests/unit/test_lightning_data.py fails clearly if it changes): `_FitLoop._combined_loader`,
`setup_data` and `on_advance_end`, `_EvaluationLoop._combined_loader`, `setup_data` and `_on_evaluation_end`,
`_PredictionLoop._combined_loader`, `setup_data` and `_on_predict_end`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DistributedSampler

from lightning_ft.comm.backend import progress
from lightning_ft.data.sampler import ElasticDistributedSampler
from lightning_ft.lightning_internals import run_before


class DataRefresher:
    """Deals an epoch's data among the ranks there are when it begins.

    An epoch that is under way keeps its deal; the next one is dealt anew, with the right lengths.

    Args:
        trainer: Its loops are changed.
        on_dealt: Called before a loop's data are dealt, if they are.
        on_evaluated: Called with `validation`, `test` or `predict` when the results of one are complete, before
            anybody acts on them.
    """

    def __init__(self, trainer: Trainer, on_dealt: Callable[[], None], on_evaluated: Callable[[str], None]) -> None:
        self._stale: set[int] = set()
        self._on_dealt = on_dealt
        validation = trainer.fit_loop.epoch_loop.val_loop
        evaluations = {
            "validation": (validation, trainer.validate_loop),
            "test": (trainer.test_loop,),
            "predict": (trainer.predict_loop,),
        }
        self._loops: list[Any] = [trainer.fit_loop]
        end_of_epoch = functools.partial(progress, "the end of an epoch")
        trainer.fit_loop.on_advance_end = run_before(end_of_epoch, trainer.fit_loop.on_advance_end)  # type: ignore[method-assign]
        for stage, loops in evaluations.items():
            for loop in loops:
                self._loops.append(loop)
                end = "_on_predict_end" if stage == "predict" else "_on_evaluation_end"
                setattr(loop, end, run_before(functools.partial(on_evaluated, stage), getattr(loop, end)))
        for loop in self._loops:
            self._wrap(loop)

    def ranks_changed(self) -> None:
        """The ranks are others from here on."""
        self._stale = {id(loop) for loop in self._loops}

    def _wrap(self, loop: Any) -> None:
        original = loop.setup_data

        def setup_data() -> None:
            self._on_dealt()
            while True:
                if id(loop) in self._stale:
                    self._forget(loop)
                original()
                if id(loop) not in self._stale:  # else somebody has died between the sampler's making and its length's
                    return

        loop.setup_data = setup_data

    def _forget(self, loop: Any) -> None:
        self._stale.discard(id(loop))
        if loop._combined_loader is None:
            return
        for loader in loop._combined_loader.flattened:
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler) and not isinstance(sampler, ElasticDistributedSampler):
                renumber_sampler(sampler, dist.get_rank(), dist.get_world_size())
        loop._combined_loader = None


def renumber_sampler(sampler: DistributedSampler[Any], rank: int, num_replicas: int) -> None:
    """Give a sampler that a user holds on to other ranks, by its constructor's arithmetic."""
    sampler.rank, sampler.num_replicas = rank, num_replicas
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last and length % num_replicas:
        sampler.num_samples = math.ceil((length - num_replicas) / num_replicas)
    else:
        sampler.num_samples = math.ceil(length / num_replicas)
    sampler.total_size = sampler.num_samples * num_replicas
