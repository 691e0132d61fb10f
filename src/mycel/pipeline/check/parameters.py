"""Whether parameters are whole when a stage computes, and gradients are reduced once, after the last backward."""

from __future__ import annotations

from collections import defaultdict

from mycel.pipeline.check.places import Place, at, places_of, wrong
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["check_parameters"]

_ADDS = (Kind.BACKWARD, Kind.WEIGHT)


def check_parameters(order: Order) -> frozenset[int]:
    """Each stage's gathers, returns and reduction stand where torch's runtime can carry them out.

    A reduction also divides by the number of micro-batches: without it gradients are that many times too large, and
    nothing else tells.

    Args:
        order: with communication.

    Returns:
        Stages whose parameters the order gathers; those of others have to be whole all the time.

    Raises:
        VerificationError: a stage computes while its parameters are not whole, is gathered twice, not given back, or
            its gradients are reduced never, twice or too early.
    """
    reduced: dict[int, Place] = {}
    last_added: dict[int, Place] = {}
    moves: dict[int, list[tuple[Place, Action]]] = defaultdict(list)
    gathered: set[int] = set()
    for place, leaf in places_of(order):
        if leaf.kind.is_of_parameters and place.rank != order.rank_of(leaf.stage):
            home = order.rank_of(leaf.stage)
            raise wrong(order, f"{at(order, place)}: stage {leaf.stage} is on rank {home}; move it there", [place])
        if leaf.kind is Kind.REDUCE_GRAD:
            if leaf.stage in reduced:
                raise wrong(
                    order,
                    f"{at(order, place)}: {leaf} stands there a second time, after {reduced[leaf.stage]}; gradients "
                    "would be divided twice: leave one out",
                    [reduced[leaf.stage], place],
                )
            reduced[leaf.stage] = place
        elif leaf.kind in (Kind.UNSHARD, Kind.RESHARD):
            gathered.add(leaf.stage)
            moves[leaf.stage].append((place, leaf))
        elif leaf.kind.is_computation:
            moves[leaf.stage].append((place, leaf))
            if leaf.kind in _ADDS:
                last_added[leaf.stage] = place
    for stage, last in sorted(last_added.items()):
        _check_reduction(order, stage, last, reduced.get(stage))
    for stage, place in reduced.items():
        if stage not in last_added:
            raise wrong(order, f"{at(order, place)}: stage {stage} has no backward; leave it out", [place])
    for stage in sorted(gathered):
        _check_gathers(order, stage, moves[stage])
    return frozenset(gathered)


def _check_reduction(order: Order, stage: int, last: Place, reduction: Place | None) -> None:
    adding = order.rows[last.rank][last.step]
    if reduction is None:
        raise wrong(
            order,
            f"{stage}REDUCE_GRAD is missing on rank {last.rank}: gradients of stage {stage} would silently stay "
            f"{order.num_micro_batches} times too large, and unreduced; add it after {adding} (step {last.step})",
            [last],
        )
    if reduction.step < last.step:
        raise wrong(
            order,
            f"{at(order, reduction)} stands before {adding} (step {last.step}), which still adds to the gradients of "
            f"stage {stage}; move it behind that",
            [reduction, last],
        )


def _check_gathers(order: Order, stage: int, moves: list[tuple[Place, Action]]) -> None:
    is_whole = is_used = False
    before: Place | None = None
    for place, leaf in moves:
        beside = [place] if before is None else [before, place]
        if leaf.kind is Kind.UNSHARD:
            if is_whole:
                raise wrong(
                    order, f"{at(order, place)}: stage {stage} is whole since {before}; leave one out", beside
                )
            is_whole, is_used, before = True, False, place
        elif leaf.kind is Kind.RESHARD:
            if not is_whole:
                raise wrong(
                    order,
                    f"{at(order, place)}: stage {stage} is not whole there; add {stage}UNSHARD before it",
                    beside,
                )
            if not is_used:
                raise wrong(
                    order,
                    f"{at(order, place)}: stage {stage} was gathered at {before} and not used since; leave both out",
                    beside,
                )
            is_whole, before = False, place
        elif not is_whole:
            raise wrong(
                order,
                f"{at(order, place)}: the parameters of stage {stage} are not whole there; add {stage}UNSHARD "
                "before it",
                beside,
            )
        else:
            is_used = True
    if is_whole:
        raise wrong(
            order,
            f"stage {stage} stays whole at the end of the step (since {before}), and the next step stops at "
            f"its first {stage}UNSHARD; add {stage}RESHARD at the end of rank {order.rank_of(stage)}",
            [] if before is None else [before],
        )
