"""A validation or test whose results are of all of its data, whoever dies in it.

The results of a rank are in its metrics, and die with it. So before the ranks put their results together they wait for
each other; if any has died since the data were dealt, the others evaluate all of its share, too, and wait again. If any
dies while the results are put together, that is done for its share as well, and the results are put together anew.

Read in lightning 2.6.6 (tests/unit/test_lightning_evaluation.py fails clearly if it changes): `_EvaluationLoop.reset`,
`_evaluation_step`, `_store_dataloader_outputs`, `_combined_loader`, `_data_fetcher`, `_is_sequential`, `_stage` and
`_results`, and that a `_ResultMetric` is a Metric.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import Metric

from lightning_ft import lightning_metrics
from lightning_ft.comm.backend import progress
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.data.cursor import Member, Ranges
from lightning_ft.data.evaluation import EvaluationShares
from lightning_ft.data.sampler import ElasticDistributedSampler


class CompleteEvaluations:
    """Has the ranks of a validation or test evaluate what others have left.

    Each sample counts once in metrics (torchmetrics, `self.log`), but for those that `DistributedSampler` adds itself.
    All ranks do equally many steps, so that collectives in them fit together: if a sample is missing in the last row of
    what is dealt, a rank repeats one, and what that did to its metrics is undone.

    Args:
        trainer: Its evaluation loops are changed.
        members: Returns who is in the job, by rank order.
        wait_for_all: Returns when all ranks have called it.
        on_complete: Called when the results of a loader's data are complete, with `validation` or `test`, the members
            that have died, and how many samples were evaluated again for that.
    """

    def __init__(
        self,
        trainer: Trainer,
        members: Callable[[], tuple[str, ...]],
        wait_for_all: Callable[[], None],
        on_complete: Callable[[str, list[Member], int], None],
    ) -> None:
        self._trainer = trainer
        self._members = members
        self._wait_for_all = wait_for_all
        self._on_complete = on_complete
        self._loader_idx = self._num_steps = 0
        self._has_hole = False
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._wrap(loop)

    def _wrap(self, loop: Any) -> None:
        reset, step, store = loop.reset, loop._evaluation_step, loop._store_dataloader_outputs

        def reset_all() -> None:
            self._loader_idx = self._num_steps = 0
            self._has_hole = False
            reset()

        def count_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            self._loader_idx = dataloader_idx
            self._num_steps += 1
            step(batch, batch_idx, dataloader_idx, dataloader_iter)

        def store_when_complete() -> None:
            self._complete(loop, step)
            store()  # what is known by now
            self._num_steps = 0

        loop.reset, loop._evaluation_step, loop._store_dataloader_outputs = reset_all, count_step, store_when_complete

    def _complete(self, loop: Any, step: Callable[..., None]) -> None:
        loader = self._dealt_loader(loop)
        if loader is None or not self._num_steps:
            self._has_hole |= loader is None  # what is stored is of the ranks that are left
            return
        sampler: Any = loader.sampler
        first: Any = loader.batch_sampler
        count = min(self._num_steps * first.batch_size, sampler.num_left)
        shares = EvaluationShares.begin(sampler.cursor, count)
        missing: list[Member] = []
        num_samples = 0
        self._wait_for_all()
        while True:
            members = self._members()
            lost = [member for member in shares.of if member not in members]
            if lost:
                progress("evaluating what others have left")
                missing += lost
                num_samples += sum(len(piece) for member in lost for piece in shares.of[member])
                shares, parts = shares.redeal(members)
                self._evaluate(loader, parts, step)
                self._wait_for_all()
            elif self._are_put_together(members):
                break
        if not self._has_hole:
            self._on_complete("test" if self._trainer.testing else "validation", missing, num_samples)

    def _are_put_together(self, members: tuple[str, ...]) -> bool:
        """Put the results together. Returns: Whether all these members were there for it; else they are forgotten."""
        results: Any = self._trainer._results
        if not self._trainer.sanity_checking:  # nobody looks at them
            results.metrics(on_step=False)
        if self._members() == members:
            return True
        lightning_metrics.forget(list(results.values()))
        return False

    def _dealt_loader(self, loop: Any) -> DataLoader[Any] | None:
        """Return the loader that has ended, if it is known what each rank was dealt."""
        loaders = loop._combined_loader.flattened
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher) or (len(loaders) > 1 and not loop._is_sequential):
            return None
        loader = loaders[self._loader_idx]
        is_known = (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and isinstance(loader.sampler, ElasticDistributedSampler)
            and type(loader.batch_sampler) is BatchSampler
        )
        return loader if is_known else None

    def _evaluate(self, loader: DataLoader[Any], parts: Mapping[Member, Ranges], step: Callable[..., None]) -> None:
        sampler: Any = loader.sampler
        first: Any = loader.batch_sampler
        own = [index for piece in parts[sampler.member] for index in sampler.indices(piece)]
        sizes = [sum(map(len, part)) for part in parts.values()]
        whole_rows, last_row = own[: min(sizes)], own[min(sizes) :]
        batches = [whole_rows[at : at + first.batch_size] for at in range(0, len(whole_rows), first.batch_size)]
        for batch in self._load(loader, batches):
            self._step(step, batch)
        if max(sizes) == min(sizes):
            return
        for batch in self._load(loader, [last_row or sampler.indices(range(1))]):
            with contextlib.nullcontext() if last_row else self._unchanged_metrics():
                self._step(step, batch)

    def _step(self, step: Callable[..., None], batch: Any) -> None:
        step(batch, self._num_steps, self._loader_idx, None)
        self._num_steps += 1

    @staticmethod
    def _load(loader: DataLoader[Any], batches: Iterable[list[int]]) -> DataLoader[Any]:
        return DataLoader(
            loader.dataset,
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )

    @contextlib.contextmanager
    def _unchanged_metrics(self) -> Iterator[None]:
        """Undo what a step does to the metrics of the module, and to what is logged."""
        results: Any = self._trainer._results
        found = [module for module in self._trainer.lightning_module.modules() if isinstance(module, Metric)]
        found += results.values()
        found += [result.value for result in results.values() if isinstance(result.value, Metric)]
        states = [copy.deepcopy(metric.metric_state) for metric in found]
        yield
        for metric, state in zip(found, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)


class EvaluationReports:
    """Says, in the log and to the user, which members' shares an evaluation lacks or was dealt again.

    Args:
        group: Of all members; None: nobody is lost.
    """

    def __init__(self, group: FaultTolerantProcessGroup | None) -> None:
        self._group = group
        self._evaluated_by: tuple[str, ...] = ()

    def on_dealt(self) -> None:
        """Data are dealt among those that are here now."""
        self._evaluated_by = () if self._group is None else self._group.members

    def on_complete(self, stage: str, missing: list[Member], num_samples: int) -> None:
        """All that was dealt has been evaluated by whoever is here."""
        self.on_dealt()
        if missing and self._group is not None and self._group.rank() == 0:
            self._group.ring.report("evaluation_redealt", stage=stage, missing=missing, num_samples=num_samples)

    def on_evaluated(self, stage: str) -> None:
        """Say what the dead have left out: the share of a member that went is in no result."""
        progress(f"the end of the {stage}")
        if self._group is None or self._group.members == self._evaluated_by:
            return
        missing = [member for member in self._evaluated_by if member not in self._group.members]
        coverage = 1 - len(missing) / len(self._evaluated_by)
        if self._group.rank() == 0:
            self._group.ring.report("evaluation_incomplete", stage=stage, coverage=round(coverage, 6), missing=missing)
        rank_zero_warn(
            f"The results of this {stage} cover {coverage:.1%} of the data: {', '.join(missing)} died during it, and "
            "what they had to evaluate was not evaluated."
        )
