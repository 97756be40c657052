"""One group's numbered collectives, and the settling that makes all members' numbers equal after a failure."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_ft.comm.operations import Kind, Operation
from lightning_ft.comm.place import Place, acknowledge, as_bytes, gather_now
from lightning_ft.comm.topology import NUM_TIMES, Times
from lightning_ft.config import TOPOLOGIES
from lightning_ft.errors import MembershipChangedError, ProtocolViolationError
from lightning_ft.faultpoints import reach
from lightning_ft.membership.settle import SettlePlan, Standing
from lightning_ft.membership.settle import plan as plan_settling


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """What settling a sequence found, the same on every member; for the event log.

    Attributes:
        target: The number at which all members stand.
        handed_over: Kind of the result that was handed to members that missed it; NONE if nobody had.
        pending: Kind of the number that members were in, to be redone.
        kept: Kind of the last final number.
        kept_generation: Generation in which that became final.
    """

    target: int
    handed_over: Kind
    pending: Kind
    kept: Kind
    kept_generation: int


MAX_FAILURES = 3
"""So often a number may fail among the same members before the failure is taken for the operation's own."""


class CollectiveSequence:
    """The numbers of one group (PROTOCOL.md, section 4). Owned by the training thread.

    Args:
        name: `world`, or the sub-group's.
        visible: The members it is made with.

    Attributes:
        completed: The last final number.
        has_state: Whether this member has what the numbers up to `completed` have made; not if it has just joined.
        visible: What rank and world size say to the caller: members of the view in which the last number that was
            shown became final.
        pending: The operation in number `completed + 1`, if this member is in it.
        works: Its inner works; None if it is not running on the current place.
        place: Where it runs now; None while there is none.
        times: What all-reduces take, as the members have agreed; None: nobody of them knows.
    """

    def __init__(self, name: str, visible: tuple[str, ...] = ()) -> None:
        self.name = name
        self.completed = 0
        self.has_state = True
        self.visible = visible
        self.pending: Operation | None = None
        self.works: Sequence[dist.Work] | None = None
        self.place: Place | None = None
        self.times: Times | None = None
        self._kept: Operation | None = None
        self._shown = 0
        self._first_generation = 0
        self._first_is_void = 0
        self._refused = 0
        self._num_failures = 0
        self._failed_among: tuple[str, ...] = ()
        self._failure: Exception | None = None

    @property
    def last(self) -> Operation | None:
        """The operation that was entered last."""
        return self._kept if self.pending is None else self.pending

    @property
    def shown(self) -> int:
        """The last number that the caller waited for; the same on all members at the same place of the program."""
        return self._shown

    def enter(self, operation: Operation, visible: tuple[str, ...]) -> None:
        """Give the next number to an operation, whose arguments were made for the members `visible`."""
        operation.number = self.completed + 1
        operation.members = visible
        self.pending = operation
        self.works = None

    def start(self) -> None:
        """Issue the pending operation on the current place, or a barrier if it means nothing there."""
        operation, place = self.pending, self.place
        if operation is not None and place is not None:
            self.works = None
            operation.is_void = operation.number == self._refused or not operation.is_redoable(place.members)
            self.works = [acknowledge(place)] if operation.is_void else operation.start(place)

    def finish(self) -> Operation:
        """Wait for the pending operation's works and make its number final.

        Raises:
            RuntimeError: A work failed.
        """
        operation, place = self.pending, self.place
        assert operation is not None
        assert place is not None
        assert self.works is not None
        for work in self.works:
            place.inner.wait(work)
        if not operation.is_void:
            operation.finish(place)
        self._finalize(operation, place.generation, place.members)
        return operation

    def show(self, operation: Operation) -> bool:
        """Let rank and world size follow a final operation that the caller waited for.

        Not before: a number may become final in the recovery of another sequence, which is at no certain place of the
        program, and all members must see the change at the same one.

        Returns: Whether the visible members changed.
        """
        if operation.number <= self._shown or operation.final_members == self.visible:
            self._shown = max(self._shown, operation.number)
            return False
        self._shown = operation.number
        self.visible = operation.final_members
        return True

    def note_failure(self, error: Exception) -> None:
        """Remember that the pending operation failed.

        The settling after it agrees whether the operation itself is to blame: an unsupported dtype fails on any view.
        """
        if self.place is None:
            return
        if self.place.members != self._failed_among:
            self._num_failures, self._failed_among = 0, self.place.members
        self._num_failures += 1
        self._failure = error

    def settle(
        self,
        place: Place,
        members_of: Callable[[int], tuple[str, ...]],
        admit: Callable[[Place, SettlePlan], None] | None = None,
    ) -> Settled:
        """Exchange, hand over, confirm (PROTOCOL.md#M3); afterwards all members stand at the same number.

        Args:
            place: Where this sequence goes on.
            members_of: This group's members in an earlier generation.
            admit: Hands the job's state to those that have joined; None where nobody can.

        Raises:
            RuntimeError: A member failed; settle again in the next view. What was adopted stays.
            ProtocolViolationError: The members' numbers can't come from one job.
        """
        reach("recover.exchange")
        rows = self._exchange(place)
        plan = plan_settling(
            [
                Standing(completed=None if row[0] < 0 else row[0], kept_is_void=bool(row[1]), kept_generation=row[2])
                for row in rows
            ]
        )
        reach("recover.handover")
        if plan.joiners:
            self._admit(plan, place, admit, rows)
        elif plan.donor is not None:
            generation = rows[plan.donor][2]
            self._hand_over(plan, generation, members_of(generation), place)
        reach("recover.confirm")
        place.inner.wait(acknowledge(place))
        if not self.visible:  # what the first view was must be agreed too: a member may have failed in its confirm
            self._first_generation = max(row[2] for row in rows) or place.generation
            self.visible = members_of(self._first_generation)
        ahead = [row for row in rows if row[0] == plan.target]
        if ahead == rows and min(row[6] for row in rows) >= MAX_FAILURES:
            self._refused = plan.target + 1
        kept = Kind(max(row[4] for row in ahead))
        return Settled(
            target=plan.target,
            handed_over=Kind.NONE if plan.donor is None else kept,
            pending=Kind(max(row[3] for row in ahead)),
            kept=kept,
            kept_generation=max(row[2] for row in ahead),
        )

    def _admit(
        self,
        plan: SettlePlan,
        place: Place,
        admit: Callable[[Place, SettlePlan], None] | None,
        rows: list[list[int]],
    ) -> None:
        if admit is None or plan.donor is not None:
            raise ProtocolViolationError(
                f"establishing {self.name} failed: {place.members} holds joiners, but not all of its members stand at "
                f"one boundary (completed={self.completed})",
                generation=place.generation,
            )
        admit(place, plan)
        if not self.has_state:  # from here on it stands where the others stand, whether they confirm it or not
            self.completed, self.has_state = plan.target, True
            self._first_generation = max(row[2] for row in rows)
            self._first_is_void = max(row[1] for row in rows)

    def _finalize(self, operation: Operation, generation: int, members: tuple[str, ...]) -> None:
        if operation.is_void and operation.number == self._refused:
            operation.error = RuntimeError(
                f"{operation.name} number {operation.number} of {self.name} failed {MAX_FAILURES} times among the same "
                f"members, so it can't be done by any of them ({', '.join(members)}). All ranks raise this at the same "
                f"number. Here it failed with: {self._failure}"
            )
            operation.error.__cause__ = self._failure
        elif operation.is_void:
            operation.error = MembershipChangedError(
                f"{operation.name} number {operation.number} of {self.name} failed: its arguments depend on the ranks, "
                f"and before anyone had the result the members changed from {', '.join(operation.members)} to "
                f"{', '.join(members)} (generation={generation}). All ranks raise it at this number; read the new "
                "rank and world size and call again.",
                generation=generation,
            )
        operation.is_final = True
        operation.final_generation = generation
        operation.final_members = members
        self.completed = operation.number
        self.pending, self.works = None, None
        self._num_failures, self._failure = 0, None
        self._kept = operation

    def _exchange(self, place: Place) -> list[list[int]]:
        pending, kept = self.pending, self._kept
        own = torch.tensor(
            [
                self.completed if self.has_state else -1,
                self._first_is_void if kept is None else int(kept.is_void),
                self._first_generation if kept is None else kept.final_generation,
                Kind.NONE if pending is None else pending.kind,
                Kind.NONE if kept is None else kept.kind,
                zlib.crc32(",".join(place.members).encode()),
                self._num_failures if self._failed_among == place.members else 0,
                TOPOLOGIES.index(place.topology),
                *([0] * NUM_TIMES if self.times is None else dataclasses.astuple(self.times)),
            ],
            dtype=torch.int64,
        )
        rows: list[list[int]] = gather_now(place, own).view(torch.int64).tolist()
        if len({row[5] for row in rows}) > 1:
            raise ProtocolViolationError(
                f"establishing {self.name} failed: its members don't agree who they are (here {place.members})",
                generation=place.generation,
            )
        if len(told := sorted({TOPOLOGIES[row[7]] for row in rows})) > 1:
            raise ProtocolViolationError(
                f"establishing {self.name} failed: the setting topology is {place.topology!r} here, but {told} among "
                "its members. Start all with the same.",
                generation=place.generation,
            )
        told_times = next((row[-NUM_TIMES:] for row in rows if any(row[-NUM_TIMES:])), None)
        self.times = None if told_times is None else Times(*told_times)
        return rows

    def _hand_over(self, plan: SettlePlan, generation: int, members: tuple[str, ...], place: Place) -> None:
        has_result = self.completed == plan.target
        operation = self._kept if has_result else self.pending
        if operation is None or operation.number != plan.target:
            raise ProtocolViolationError(
                f"adopting number {plan.target} of {self.name} failed: expected to be in it, but completed="
                f"{self.completed} and pending={operation and operation.number}. Do all ranks issue the same "
                "collectives?",
                generation=place.generation,
            )
        operation.is_void = plan.handover_is_void
        if not plan.handover_is_void:
            self._transfer(operation, plan.donor or 0, place, has_result=has_result)
        if not has_result:
            self._finalize(operation, generation, members)

    def _transfer(self, operation: Operation, donor: int, place: Place, *, has_result: bool) -> None:
        payload = [as_bytes(tensor) for tensor in operation.payload()] if has_result else []
        count = torch.tensor([len(payload)])
        _broadcast(count, donor, place)
        sizes = torch.tensor([tensor.numel() for tensor in payload] if has_result else [0] * int(count))
        _broadcast(sizes, donor, place)
        if not has_result:
            payload = operation.receive_into(sizes.tolist())
        for tensor in payload:  # other donors receive what they have already
            _broadcast(tensor, donor, place)
        if not has_result:
            operation.adopt(payload)


def _broadcast(tensor: torch.Tensor, root: int, place: Place) -> None:
    if tensor.numel():
        options = dist.BroadcastOptions()
        options.rootRank = root
        place.inner.wait(place.group.broadcast([tensor], options))
