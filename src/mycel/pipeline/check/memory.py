"""How much each rank holds at most, and whether that is under its limit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.pipeline.check.places import Place, at, wrong
from mycel.pipeline.check.waits import Need
from mycel.pipeline.order import Kind, Order

__all__ = ["Memory", "check_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What things take, in bytes or in any other unit, and how much there is.

    Attributes:
        activation: of one micro-batch, taken by each stage's forward; one a stage. ``None``: each rank's stages
            share one unit, so that memory is counted in micro-batches.
        limit: how much each rank has; one a rank, or one for all, or ``None``: any amount.
        fixed: what each rank holds all the time, such as parameters; one a rank, or one for all.
        message: of one tensor that is received, held from its receive until it was used.
        input_frees: share of an activation that the first half of a backward gives back; the second gives the rest.

    Raises:
        UsageError: negative amounts, or a share outside 0..1.

    Examples:
        Two stages of 3 GB a micro-batch on ranks of 8 GB, of which parameters take 1:

        >>> from mycel.pipeline.check import check
        >>> order = Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> gigabyte = Fraction(10**9)
        >>> memory = Memory(activation=(3 * gigabyte,), limit=(8 * gigabyte,), fixed=(gigabyte,))
        >>> [float(peak) for peak in check(order, memory=memory).peaks]
        [7000000000.0, 4000000000.0]
    """

    activation: tuple[Fraction, ...] | None = None
    limit: tuple[Fraction, ...] | None = None
    fixed: tuple[Fraction, ...] = (Fraction(0),)
    message: Fraction = Fraction(0)
    input_frees: Fraction = Fraction(0)

    __repr__ = brief

    def __post_init__(self) -> None:
        amounts = [*(self.activation or ()), *(self.limit or ()), *self.fixed, self.message]
        if any(amount < 0 for amount in amounts) or not 0 <= self.input_frees <= 1:
            raise UsageError(f"memory with negative amounts, or a share {self.input_frees} that is not in 0..1")


def check_memory(order: Order, needs: list[Need], memory: Memory) -> tuple[Fraction, ...]:
    """The most that each rank holds at once, which only its own row decides.

    Args:
        order: of which all work is there.
        needs: what needs what.
        memory: what things take.

    Raises:
        VerificationError: a rank holds more than its limit; the message names the action that is too much.
        UsageError: as many sizes as neither ranks, or stages, nor one.
    """
    limits = None if memory.limit is None else _each(memory.limit, order.ranks, "limits", "ranks")
    fixed = _each(memory.fixed, order.ranks, "fixed sizes", "ranks")
    activation = _activations(order, memory)
    freed_at = _messages_freed(needs) if memory.message and order.has_communication else {}
    has_end = {
        (leaf.stage, leaf.micro_batch)
        for row in order.rows
        for action in row
        for leaf in action.leaves
        if leaf.kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    one = Fraction(1)
    share = {Kind.FORWARD: one, Kind.BACKWARD: -one}
    share |= {Kind.INPUT: -memory.input_frees, Kind.WEIGHT: memory.input_frees - one}
    peaks = []
    for rank, row in enumerate(order.rows):
        held = peak = fixed[rank]
        peak_at = 0
        for step, action in enumerate(row):
            freed = Fraction(0)
            for leaf in action.leaves:
                if leaf.kind in share and (leaf.stage, leaf.micro_batch) in has_end:
                    change = share[leaf.kind] * activation[leaf.stage]
                    held, freed = (held + change, freed) if change > 0 else (held, freed + change)
                elif leaf.kind in (Kind.RECV_F, Kind.RECV_B):
                    held += memory.message
            if held > peak:
                peak, peak_at = held, step
            held += freed - memory.message * freed_at.get(Place(rank, step), 0)
        if limits is not None and peak > limits[rank]:
            raise wrong(
                order,
                f"{at(order, Place(rank, peak_at))}: rank {rank} holds {_number(peak)} there, and its limit is "
                f"{_number(limits[rank])}; put backwards before it, or raise the limit",
                [Place(rank, peak_at)],
            )
        peaks.append(peak)
    return tuple(peaks)


def _activations(order: Order, memory: Memory) -> tuple[Fraction, ...]:
    if memory.activation is not None:
        return _each(memory.activation, order.num_stages, "activations", "stages")
    visits: dict[int, int] = defaultdict(lambda: 1)
    for m in range(order.num_micro_batches if order.routes is not None else 1):
        counts: dict[int, int] = defaultdict(int)
        for stage in order.route_of(m):
            counts[order.rank_of(stage)] += 1
        for rank, count in counts.items():
            visits[rank] = max(visits[rank], count)
    return tuple(Fraction(1, visits[order.rank_of(stage)]) for stage in range(order.num_stages))


def _messages_freed(needs: list[Need]) -> dict[Place, int]:
    found: dict[Place, int] = defaultdict(int)
    for need in needs:
        if need.is_message:
            found[need.consumer] += 1
    return found


def _each(amounts: tuple[Fraction, ...], count: int, what: str, of: str) -> tuple[Fraction, ...]:
    if len(amounts) == 1:
        return amounts * count
    if len(amounts) != count:
        raise UsageError(f"{len(amounts)} {what} for {count} {of}: expected one for all, or one each")
    return amounts


def _number(amount: Fraction) -> str:
    return str(amount) if amount.denominator == 1 else f"{float(amount):g}"
