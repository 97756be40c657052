"""What all ranks should have alike is compared, and made alike again (PROTOCOL.md#T6).

One digest of each rank goes with the commit's word, so that comparing is no collective of its own. If all are the same,
which is so unless a machine is broken, nothing else happens. If not, all learn it with the same commit, and find out
with further numbers, before `backward` returns: which chunks, whose, by how much.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ft.chunks import (
    FARTHEST,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    Chunk,
    Difference,
    Piece,
    Subject,
    chunks_of,
    compare,
    differences,
    digests_of,
    fold,
    read,
    write,
)
from lightning_ft.comm.chunk_transfer import ChunkTransfer
from lightning_ft.comm.operations import GatherBytes
from lightning_ft.comm.process_group import FaultTolerantProcessGroup
from lightning_ft.config import EVICT, WARN
from lightning_ft.errors import EvictedError, FaultToleranceError, MembershipChangedError
from lightning_ft.faultpoints import reach
from lightning_ft.reduction import Commit, GradientReduction, Layout

CLEAN_AFTER_S = 300.0
"""So long no rank must have differed before the event log says that they are alike again: who looks at a metric now and
then must see it."""

_TRANSFER_BYTES = 16 << 20
"""So much is handed over as one number; it takes that memory once more."""

_MOST_NAMED = 8
"""Of the chunks and parameters that differ, in an event."""

HEALED, EVICTED, REDONE, WARNED, FAILED = "healed", "evicted", "redone", "warned", "failed"
"""Outcomes of a comparison that has found something."""


def is_due(step: int, every_n_steps: int) -> bool:
    """Whether something is done in this of every n steps: in each n once, at a place that seems drawn by chance.

    If it were always the same, of two models that are trained in turns only one would ever be looked at.
    """
    if not every_n_steps:
        return False
    block, place = divmod(step, every_n_steps)
    return place == (block * 2654435761 % (1 << 32) >> 16) % every_n_steps


@dataclasses.dataclass(slots=True)
class Check:
    """One step's comparison.

    Attributes:
        step: Number of the gradient step.
        subjects: What is compared.
        reduction: What has made the step's gradients; the later one, if it was done again.
        digests: Of the chunks here, as they are now.
        is_finite: Whether the gradients here are, as they are now.
        findings: By how much chunks differed here, and in what, by position.
    """

    step: int
    subjects: list[Subject]
    reduction: GradientReduction
    digests: list[int] = dataclasses.field(default_factory=list)
    is_finite: bool = True
    findings: dict[int, tuple[float, list[str]]] = dataclasses.field(default_factory=dict)

    @property
    def word(self) -> int:
        """What is said with the commit: 63 bits of digest and whether anything is not finite, as a signed number."""
        word = fold(self.digests) & ~1 | (not self.is_finite)
        return word - (1 << 64) if word >> 63 else word


@dataclasses.dataclass(slots=True)
class Mismatch:
    """What all members know of a difference, as the event log has it.

    Attributes:
        what: Kinds of what differs.
        members: Who differs from the majority; all, if there is none.
        chunks: Some of the chunks, for a person.
        num_chunks: How many there are.
        parameters: Some of the parameters that differ in them.
        divergence: The largest relative difference.
        has_majority: Whether more than half of the members agree on each chunk.
        num_members: Of how many.
    """

    what: list[str]
    members: list[str]
    chunks: list[str]
    num_chunks: int
    parameters: list[str]
    divergence: float
    has_majority: bool
    num_members: int


class Verifier:
    """Compares a model's gradients and state across the ranks.

    Args:
        group: WORLD.
        parameters: Returns the model's parameters by name.
        layout_of: Returns what is where in a bucket of a reduction, by its index.

    Attributes:
        optimizers: Whose state is compared with the parameters.
        eviction: To be raised before this member's next step: it has what the others have, who go on without it.
        is_scaled: Gradients that are not finite are no cause for alarm: a scaler looks for them.
    """

    def __init__(
        self,
        group: FaultTolerantProcessGroup,
        parameters: Callable[[], Sequence[tuple[str, Tensor]]],
        layout_of: Callable[[list[Layout], int], Layout],
    ) -> None:
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.is_scaled = False
        self.eviction: EvictedError | None = None
        self._group = group
        self._settings = group.ring.settings
        self._parameters = parameters
        self._layout_of = layout_of
        self._divergence: float | None = None
        self._differed_s = 0.0
        self._not_finite: object = None

    def begin(self, reduction: GradientReduction) -> Check | None:
        """Take the digests of what is compared in this step, after its reduction and before its commit.

        Returns: None on all members if nothing is.
        """
        step = self._group.ring.step
        has_gradients = is_due(step, self._settings.verify_every_n_steps)
        has_state = is_due(step, self._settings.verify_state_every_n_steps)
        if not has_gradients and not has_state:
            return None
        subjects = [*(self._gradients(reduction) if has_gradients else ()), *(self._state() if has_state else ())]
        check = Check(step, subjects, reduction)
        self._digest(check)
        return check

    def conclude(self, check: Check, commit: Commit) -> None:
        """Compare, when the commit is final; before anybody uses the result.

        Raises:
            FaultToleranceError: The ranks differ, and can't be made alike.
        """
        words = commit.digests
        is_finite = not any(word & 1 for word in words)
        if len(set(words)) > 1:
            reach("verify.mismatch")
            is_finite = self._resolve(check)
        else:
            self._tell_alike(check.step)
        if is_finite:
            self._not_finite = None
        else:
            self._name_not_finite(check)

    # -- what is compared ---------------------------------------------------------------------------------------------

    def _gradients(self, reduction: GradientReduction) -> Iterator[Subject]:
        index = 0
        for part in reduction.parts:
            if part.tensor.dtype is torch.int32:
                name = "the map of used parameters"
                yield Subject(GRADIENTS, name, part.tensor, _whole(part.tensor, name))
            else:
                yield Subject(GRADIENTS, f"bucket {index}", part.tensor, self._pieces_of(reduction, index))
                index += 1

    def _pieces_of(self, reduction: GradientReduction, index: int) -> Callable[[], Sequence[Piece]]:
        layouts = reduction.layouts  # not the reduction: it would hold itself

        def pieces() -> list[Piece]:
            names = {id(parameter): name for name, parameter in self._parameters()}
            layout = self._layout_of(layouts, index)
            return [(start, start + part.numel(), names.get(id(part), "?")) for part, start in layout]

        return pieces

    def _state(self) -> Iterator[Subject]:
        names = {}
        for name, parameter in self._parameters():
            names[id(parameter)] = name
            yield Subject(PARAMETERS, name, parameter, _whole(parameter, name))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in (part for part in group["params"] if id(part) in names):
                    state = optimizer.state.get(parameter, {})
                    for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                        name = f"{key} of {names[id(parameter)]}"
                        yield Subject(OPTIMIZER_STATE, name, state[key], _whole(state[key], name))

    def _digest(self, check: Check) -> None:
        check.digests, check.is_finite = digests_of(check.subjects, self._settings.verify_chunk_bytes)

    # -- a difference -------------------------------------------------------------------------------------------------

    def _resolve(self, check: Check) -> bool:
        """Find out and mend. Returns: Whether all gradients are finite."""
        outcome = ""
        told: Mismatch | None = None
        chunks = chunks_of(check.subjects, self._settings.verify_chunk_bytes)
        while True:
            members, answers = self._gather([int(check.is_finite), *check.digests])
            is_finite, rows = all(answer[0] for answer in answers), [answer[1:] for answer in answers]
            if len({len(row) for row in rows}) > 1:
                outcome, told = FAILED, _uncountable(members, rows)
                break
            found = differences(rows)
            if not found or outcome:
                outcome = FAILED if found else outcome
                break
            can_heal = all(difference.is_majority for difference in found)
            heals = can_heal and self._settings.verify_policy != WARN
            try:
                self._transfer(check, chunks, found, members, heals=heals)
            except MembershipChangedError:  # all who held a value are gone: who is left compares anew
                self._digest(check)
                continue
            told = self._tell_each_other(check, chunks, found, members)
            if heals:
                outcome = HEALED
                reach("verify.healed")
            elif can_heal:
                outcome = WARNED
                break
            elif told.what == [GRADIENTS]:  # of a state there is no other copy
                outcome = REDONE
                check.reduction = check.reduction.again()
                self._group.ring.run(self._group.sequence, check.reduction)
            else:
                outcome = FAILED
                break
            self._digest(check)
        self._conclude(check, outcome, told)
        return is_finite

    def _gather(self, value: object) -> tuple[tuple[str, ...], list[Any]]:
        """Give every member every member's value, as JSON. Returns: Who took part, and what each has said."""
        operation = GatherBytes(json.dumps(value).encode())
        self._group.ring.run(self._group.sequence, operation)
        return operation.final_members, [json.loads(entry.numpy().tobytes()) for entry in operation.entries]

    def _transfer(
        self,
        check: Check,
        chunks: Sequence[Chunk],
        found: Sequence[Difference],
        members: tuple[str, ...],
        *,
        heals: bool,
    ) -> None:
        """Give all what the holders have, so that who differs knows by how much, and can take it."""
        own = self._group.ring.member
        for batch in _batches(found, chunks):
            parts = [(check.subjects[chunks[one.chunk].subject], chunks[one.chunk], one) for one in batch]
            pieces = [
                (read(subject, chunk), frozenset(members[rank] for rank in one.holders))
                for subject, chunk, one in parts
            ]
            transfer = ChunkTransfer(pieces)
            self._group.ring.run(self._group.sequence, transfer)
            for (subject, chunk, one), value in zip(parts, transfer.values, strict=True):
                if own in (members[rank] for rank in one.others):
                    check.findings[one.chunk] = compare(subject, chunk, value)
                    if heals:
                        write(subject, chunk, value)

    def _tell_each_other(
        self, check: Check, chunks: Sequence[Chunk], found: Sequence[Difference], members: tuple[str, ...]
    ) -> Mismatch:
        """Return what is said of the difference, the same on all members."""
        own = {
            "divergence": max((divergence for divergence, _ in check.findings.values()), default=0.0),
            "parameters": _first_of(name for _, names in check.findings.values() for name in names),
        }
        _, answers = self._gather(own)
        differing = {
            members[rank] for one in found for rank in (one.others if one.is_majority else (*one.holders, *one.others))
        }
        named = [chunks[one.chunk] for one in found[:_MOST_NAMED]]
        step_bytes = self._settings.verify_chunk_bytes
        return Mismatch(
            what=_first_of(check.subjects[chunks[one.chunk].subject].kind for one in found),
            members=sorted(differing),
            chunks=[f"{check.subjects[chunk.subject].name}[{chunk.start // step_bytes}]" for chunk in named],
            num_chunks=len(found),
            parameters=_first_of(name for answer in answers for name in answer["parameters"]),
            divergence=max(answer["divergence"] for answer in answers),
            has_majority=all(one.is_majority for one in found),
            num_members=len(members),
        )

    def _conclude(self, check: Check, outcome: str, told: Mismatch | None) -> None:
        """Record what was found, and end what must end; all members come here alike."""
        if told is None:  # whoever differed is gone
            return
        policy, ring = self._settings.verify_policy, self._group.ring
        if outcome == HEALED and policy == EVICT and 2 * len(told.members) < told.num_members:
            outcome = EVICTED
        self._divergence, self._differed_s = told.divergence, time.monotonic()
        ring.record(
            "gradient_mismatch",
            step=check.step,
            what=told.what,
            members=told.members,
            chunks=told.chunks,
            num_chunks=told.num_chunks,
            parameters=told.parameters,
            gradient_divergence=told.divergence,
            has_majority=told.has_majority,
            policy=policy,
            outcome=outcome,
            contributors=list(check.reduction.final_members),
        )
        where = f"{', '.join(told.chunks[:3])} ({', '.join(told.parameters[:3]) or 'parameter unknown'})"
        if outcome == EVICTED and ring.member in told.members:
            self.eviction = EvictedError(
                f"verification failed at step {check.step}: {', '.join(told.what)} of this rank differed from those "
                f"of the other ranks in {where}, and verify_policy is 'evict'. It ends; a process that is started in "
                "its place takes over the others' state. If it happens again, replace the host.",
                member=ring.member,
                generation=ring.view.generation,
            )
        if outcome == FAILED and policy != WARN:
            raise FaultToleranceError(
                f"verification failed at step {check.step}: {', '.join(told.members)} have different "
                f"{', '.join(told.what)} in {where}, and no majority of the ranks says who is right, or they differed "
                "again after that was mended. Nobody has stepped with it. Look for a faulty host, and resume from the "
                "last checkpoint; among three or more, one is found out.",
                member=ring.member,
                generation=ring.view.generation,
            )

    def _tell_alike(self, step: int) -> None:
        is_clean = self._divergence == 0.0
        if not is_clean and (self._divergence is None or time.monotonic() - self._differed_s > CLEAN_AFTER_S):
            self._divergence = 0.0
            self._group.ring.record("gradients_compared", step=step, gradient_divergence=0.0)

    # -- what is not finite -------------------------------------------------------------------------------------------

    def _name_not_finite(self, check: Check) -> None:
        """Say whose own gradients are to blame: after a reduction all have what one had."""
        names: list[str] = []
        subjects = [subject for subject in check.subjects if subject.kind is GRADIENTS]
        for subject, part in zip(subjects, check.reduction.parts, strict=True):
            if part.tensor.is_floating_point():
                local = part.local()
                names += [name for start, end, name in subject.pieces() if not bool(local[start:end].isfinite().all())]
        members, answers = self._gather(_first_of(names))
        blamed = [member for member, answer in zip(members, answers, strict=True) if answer]
        parameters = _first_of(name for answer in answers for name in answer)
        if (blamed, parameters) != self._not_finite:  # of many steps alike, the first
            self._not_finite = blamed, parameters
            self._group.ring.record(
                "gradient_not_finite",
                step=check.step,
                members=blamed,
                parameters=parameters,
                is_scaled=self.is_scaled,
            )


def _whole(tensor: Tensor, name: str) -> Callable[[], Sequence[Piece]]:
    return functools.partial(list, [(0, tensor.numel(), name)])


def _first_of(names: Any) -> list[str]:
    return list(dict.fromkeys(names))[:_MOST_NAMED]


def _batches(found: Sequence[Difference], chunks: Sequence[Chunk]) -> Iterator[list[Difference]]:
    batch: list[Difference] = []
    size = 0
    for one in found:
        chunk = chunks[one.chunk]
        if batch and size + chunk.end - chunk.start > _TRANSFER_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += chunk.end - chunk.start
    yield batch


def _uncountable(members: tuple[str, ...], rows: Sequence[Sequence[int]]) -> Mismatch:
    """What is said if the ranks don't even have equally many chunks."""
    return Mismatch(
        what=[OPTIMIZER_STATE],
        members=list(members),
        chunks=[f"{len(row)} chunks on {member}" for member, row in zip(members, rows, strict=True)][:_MOST_NAMED],
        num_chunks=max(map(len, rows)),
        parameters=[],
        divergence=FARTHEST,
        has_majority=False,
        num_members=len(members),
    )
