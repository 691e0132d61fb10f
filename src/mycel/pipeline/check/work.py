"""Whether all the work of a step is in an order, once, on the right rank: forwards, backwards, shared blocks."""

from __future__ import annotations

import re
from collections import defaultdict

from mycel.pipeline.check.places import Place, at, places_of, wrong
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Work", "check_work"]

#: Where each computation stands: by kind, stage and micro-batch.
Work = dict[tuple[Kind, int, int], Place]

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_NAMED_BACKWARD = re.compile(r"(\d+)[BIW]", re.ASCII)


def check_work(order: Order) -> Work:
    """Each stage on a micro-batch's route has one forward, and one backward or its two halves; nothing else is there.

    Args:
        order: with communication or without.

    Returns:
        Where each computation stands.

    Raises:
        VerificationError: something is missing, twice, on a second rank, off the route or before what it needs on
            its own rank.
    """
    found: Work = {}
    owner: dict[int, Place] = {}
    for place, leaf in places_of(order):
        if not leaf.kind.is_computation or leaf.micro_batch is None:
            continue
        first = owner.setdefault(leaf.stage, place)
        if first.rank != place.rank:
            raise _on_two_ranks(order, leaf.stage)
        key = (leaf.kind, leaf.stage, leaf.micro_batch)
        if key in found:
            raise _twice(order, found[key], place, leaf)
        found[key] = place
        if order.routes is not None and leaf.stage not in order.routes[leaf.micro_batch]:
            raise wrong(
                order,
                f"{at(order, place)}: micro-batch {leaf.micro_batch} does not visit stage {leaf.stage}; "
                f"its route is {'>'.join(map(str, order.route_of(leaf.micro_batch)))}",
                [place],
            )
    _check_complete(order, found)
    _check_own_order(order, found)
    _check_shared(order)
    return found


def _on_two_ranks(order: Order, stage: int) -> Exception:
    cells: dict[int, list[Place]] = defaultdict(list)
    for place, leaf in places_of(order):
        if leaf.stage == stage and leaf.kind.is_computation:
            cells[place.rank].append(place)
    home = max(cells, key=lambda rank: len(cells[rank]))
    strays = [place for rank, places in cells.items() if rank != home for place in places]
    return wrong(
        order,
        f"stage {stage} is on rank {home} and on rank {strays[0].rank} ({at(order, strays[0])}); a stage is on one "
        f"rank: move it to rank {home}, or name a block on several ranks SHARED",
        strays,
    )


def _twice(order: Order, first: Place, second: Place, leaf: Action) -> Exception:
    there = {
        other.micro_batch for _, other in places_of(order) if (other.kind, other.stage) == (leaf.kind, leaf.stage)
    }
    missing = [m for m in range(order.num_micro_batches) if m not in there]
    repair = f"; {leaf.stage}{leaf.kind.value}{missing[0]} is missing, which one of them may be" if missing else ""
    return wrong(
        order,
        f"{at(order, second)}: {leaf} stands there a second time, after {first}" + (repair or "; leave one out"),
        [first, second],
    )


def _check_complete(order: Order, found: Work) -> None:
    has_backward = _stages_with_backward(order, found)
    for m in range(order.num_micro_batches):
        for stage in order.route_of(m):
            if (Kind.FORWARD, stage, m) not in found:
                raise _missing(order, found, Action(stage=stage, kind=Kind.FORWARD, micro_batch=m))
            there = [kind for kind in _BACKWARDS if (kind, stage, m) in found]
            if there in ([Kind.BACKWARD], [Kind.INPUT, Kind.WEIGHT]) or (not there and stage not in has_backward):
                continue
            cells = [found[kind, stage, m] for kind in there]
            if not there:
                raise _missing(order, found, Action(stage=stage, kind=Kind.BACKWARD, micro_batch=m))
            if Kind.BACKWARD in there:
                raise wrong(
                    order,
                    f"stage {stage}, micro-batch {m} has a whole backward ({cells[0]}) and half of one, "
                    f"{stage}{there[1].value}{m} ({cells[1]}); it is B, or I and W",
                    cells,
                )
            lacking = Kind.WEIGHT if there == [Kind.INPUT] else Kind.INPUT
            raise wrong(
                order,
                f"{at(order, cells[0])} is one half of a backward, and {stage}{lacking.value}{m}, the other, is "
                f"missing; add it to rank {cells[0].rank}, or write {stage}B{m}",
                cells,
            )


def _stages_with_backward(order: Order, found: Work) -> set[int]:
    """All stages; where the order says what feeds what, those of which a backward is named or stands somewhere."""
    if order.feeds is None:
        return set(range(order.num_stages))
    named = {int(match[1]) for pair in order.feeds for end in pair if (match := _NAMED_BACKWARD.fullmatch(end))}
    return named | {stage for kind, stage, _ in found if kind is not Kind.FORWARD}


def _missing(order: Order, found: Work, lacking: Action) -> Exception:
    rank = order.rank_of(lacking.stage)
    near = [
        found[key]
        for m in ((lacking.micro_batch or 0) - 1, (lacking.micro_batch or 0) + 1)
        if (key := (lacking.kind, lacking.stage, m)) in found
    ]
    what = f"{lacking}" if lacking.kind is Kind.FORWARD else f"{lacking} (or I and W)"
    where = f"; its neighbour is at {at(order, near[0])}" if near else ""
    return wrong(
        order,
        f"stage {lacking.stage} (rank {rank}) lacks {what}: every stage on a micro-batch's route has one forward and "
        f"one backward{where}; add it there, or let routes say that micro-batch {lacking.micro_batch} skips "
        "the stage",
        near,
    )


def _check_own_order(order: Order, found: Work) -> None:
    """On its rank a forward stands before its backward, and the first half of a backward before the second."""
    for (kind, stage, m), place in found.items():
        if kind is Kind.FORWARD:
            continue
        earlier = Kind.INPUT if kind is Kind.WEIGHT else Kind.FORWARD
        first = found[earlier, stage, m]
        # Of two parts of one cell the forward comes first.
        if place.step < first.step:
            raise wrong(
                order,
                f"{at(order, place)} stands before {stage}{earlier.value}{m} (step {first.step}), which it needs; "
                f"move it behind that",
                [place, first],
            )


def _check_shared(order: Order) -> None:
    cells: dict[tuple[str, int], dict[int, Place]] = defaultdict(dict)
    ranks: dict[str, set[int]] = defaultdict(set)
    for place, leaf in places_of(order):
        if leaf.kind is Kind.SHARED:
            there = cells[leaf.block, leaf.micro_batch or 0]
            if place.rank in there:
                raise _twice(order, there[place.rank], place, leaf)
            there[place.rank] = place
            ranks[leaf.block].add(place.rank)
    for block, members in sorted(ranks.items()):
        for m in range(order.num_micro_batches):
            lacking = sorted(members - set(cells[block, m]))
            if lacking:
                raise wrong(
                    order,
                    f"SHARED{m}[{block}] is missing on rank {lacking[0]}; block {block} is on ranks "
                    f"{', '.join(map(str, sorted(members)))}, and each of them takes part in every micro-batch",
                    cells[block, m].values(),
                )
