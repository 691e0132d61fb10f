"""The whole examination of an order, from its work to its memory, and what it found out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from mycel.brief import brief
from mycel.errors import UsageError, VerificationError
from mycel.pipeline.check.collectives import Call, check_collectives
from mycel.pipeline.check.memory import Memory, check_memory
from mycel.pipeline.check.messages import check_messages
from mycel.pipeline.check.parameters import check_parameters
from mycel.pipeline.check.places import at, places_of, wrong
from mycel.pipeline.check.waits import Need, check_no_circle, needs_of_work, told, waits_without_buffering
from mycel.pipeline.check.work import Work, check_work
from mycel.pipeline.order import Kind, Order

__all__ = ["Executor", "Report", "check"]

#: Who carries an order out: torch's own runtime, or mycel's executor on it.
Executor = Literal["torch", "mycel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is known of an order that is right.

    Attributes:
        ranks: how many.
        stages: how many.
        micro_batches: how many.
        has_communication: whether messages stand among its actions.
        peaks: the most that each rank holds, in the unit of the memory that was given: micro-batches, if none was.
        buffering: empty where the order comes to its end even if every send waits for its receive; otherwise the
            circle that there would be.
        notes: what one should know before running it, such as what torch's own loader does not take.

    Examples:
        >>> report = check(Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n"))
        >>> report.ranks, report.has_communication, report.to_json()["peaks"], report.notes
        (2, False, [2.0, 1.0], ())
    """

    ranks: int
    stages: int
    micro_batches: int
    has_communication: bool
    peaks: tuple[Fraction, ...]
    buffering: str
    notes: tuple[str, ...]

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """A JSON object of all of it."""
        return {
            "ranks": self.ranks,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "has_communication": self.has_communication,
            "peaks": [float(peak) for peak in self.peaks],
            "relies_on_buffering": bool(self.buffering),
            "buffering": self.buffering,
            "notes": list(self.notes),
        }


def check(
    order: Order,
    *,
    executor: Executor = "torch",
    memory: Memory | None = None,
    stage_ranks: tuple[int, ...] | None = None,
) -> Report:
    """Prove an order right, without looking at how it was made.

    All work is there once, on one rank a stage; what is sent is received, in one sequence; nothing waits in a circle;
    parameters are whole when they are used and gradients reduced once; memory stays under its limits.

    Args:
        order: of computations only, or with communication.
        executor: who will run it. Torch's runtime reads losses by their position, so that the last stage must do its
            forwards in index order; mycel's keeps them by micro-batch.
        memory: what things take, and limits; micro-batches without a limit if not given.
        stage_ranks: rank on which each stage has been built, if it has.

    Raises:
        VerificationError: the order is wrong; the message names the action, and the error draws the cells around it.
        UsageError: sizes or ranks that do not go with the order.

    Examples:
        >>> report = check(Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n"))
        >>> report.peaks
        (Fraction(2, 1), Fraction(1, 1))
        >>> check(Order.from_csv("0F0,0F1,0B0,0B1\\n1F1,1F0,1B0,1B1\\n"))
        Traceback (most recent call last):
        mycel.errors.VerificationError: rank 1, step 1: 1F0 stands after 1F1 on the last stage, and torch's runtime \
reads losses by position: micro-batches would silently exchange their losses and gradients; put the forwards of \
stage 1 into index order, or run the order with mycel's executor
    """
    if executor not in ("torch", "mycel"):
        raise UsageError(f"no executor is called {executor!r}; torch and mycel are")
    if stage_ranks is not None:
        _check_stage_ranks(order, stage_ranks)
    work, needs = _check_rules(order, executor)
    check_no_circle(order, lambda changed: _is_right(changed, executor))
    gathered = check_parameters(order) if order.has_communication else frozenset()
    _check_groups(order)
    peaks = check_memory(order, needs, memory or Memory())
    held = waits_without_buffering(order)
    return Report(
        ranks=order.ranks,
        stages=order.num_stages,
        micro_batches=order.num_micro_batches,
        has_communication=order.has_communication,
        peaks=peaks,
        buffering=told(order, held) if held else "",
        notes=tuple(_notes(order, work, gathered)),
    )


def _check_rules(order: Order, executor: Executor) -> tuple[Work, list[Need]]:
    work = check_work(order)
    if executor == "torch":
        _check_losses(order, work)
    needs = needs_of_work(order)
    if order.has_communication:
        check_messages(order, needs)
    return work, needs


def _is_right(order: Order, executor: Executor) -> bool:
    try:
        _check_rules(order, executor)
        check_no_circle(order, lambda _: False)
        if order.has_communication:
            check_parameters(order)
    except VerificationError:
        return False
    return True


def _check_stage_ranks(order: Order, stage_ranks: tuple[int, ...]) -> None:
    if len(stage_ranks) != order.num_stages:
        raise UsageError(f"{len(stage_ranks)} stages have been built and the order has {order.num_stages}")
    for stage, rank in enumerate(stage_ranks):
        if rank != order.rank_of(stage):
            raise UsageError(
                f"stage {stage} has been built on rank {rank}, and the order has it on rank {order.rank_of(stage)}; "
                f"build it there, or move its actions to row {rank}"
            )


def _check_losses(order: Order, work: Work) -> None:
    """Torch appends losses as the last stage's forwards come, and reads them by micro-batch."""
    if order.routes is not None or order.feeds is not None:
        return  # torch's own loader refuses them; whoever runs them has to keep losses by micro-batch
    last = order.num_stages - 1
    for m in range(1, order.num_micro_batches):
        before, place = work[Kind.FORWARD, last, m - 1], work[Kind.FORWARD, last, m]
        if place.step < before.step:
            raise wrong(
                order,
                f"{at(order, before)} stands after {last}F{m} on the last stage, and torch's runtime reads losses by "
                "position: micro-batches would silently exchange their losses and gradients; put the forwards "
                f"of stage {last} into index order, or run the order with mycel's executor",
                [before, place],
            )


def _check_groups(order: Order) -> None:
    """Shared blocks are collectives of their ranks: every two of them meet those of both in one order."""
    members: dict[str, set[int]] = defaultdict(set)
    for place, leaf in places_of(order):
        if leaf.kind is Kind.SHARED:
            members[leaf.block].add(place.rank)
    if not members:
        return
    calls: dict[int, list[Call]] = {rank: [] for rank in range(order.ranks)}
    for place, leaf in places_of(order):
        if leaf.kind is Kind.SHARED:
            calls[place.rank].append((frozenset(members[leaf.block]), str(leaf)))
    check_collectives(calls)


def _notes(order: Order, work: Work, gathered: frozenset[int]) -> list[str]:
    notes = []
    if order.routes is not None:
        notes.append(
            "not all micro-batches visit all stages in order: torch's loader refuses it, mycel's executor runs it"
        )
    if order.blocks:
        notes.append(f"blocks on several ranks ({', '.join(sorted(order.blocks))}): only mycel's executor runs them")
    if order.has_communication and len(gathered) < order.num_stages:
        bare = next(stage for stage in range(order.num_stages) if stage not in gathered)
        notes.append(f"stage {bare} is never gathered: for stages under FSDP it has to be (UNSHARD, RESHARD)")
    last = order.num_stages - 1
    forwards = [work.get((Kind.FORWARD, last, m)) for m in range(order.num_micro_batches)]
    steps = [place.step for place in forwards if place is not None]
    if order.routes is None and order.feeds is None and steps != sorted(steps):
        notes.append("the last stage does its forwards out of index order: only mycel's executor keeps losses apart")
    return notes
