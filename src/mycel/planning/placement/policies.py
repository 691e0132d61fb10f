"""From loads and the placement there is to the placement there should be: a function and a registry line each.

A policy is a function ``policy(loads, current) -> ExpertPlacement``: tokens of each expert, the placement in use. It
is deterministic, so that ranks that know the same loads agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mycel.names import spelled
from mycel.planning.placement.cost import PlacementCost
from mycel.planning.placement.model import EMPTY, ExpertPlacement

__all__ = [
    "POLICIES",
    "Policy",
    "eplb",
    "flex",
    "make_policy",
    "near_current",
    "pack",
    "replica_counts",
    "shadow",
    "static",
]

Policy = Callable[[Sequence[float], ExpertPlacement], ExpertPlacement]

#: Ranks, slots: who holds what, while moves are tried.
_Slots = tuple[tuple[int, ...], ...]


def static(loads: Sequence[float], current: ExpertPlacement) -> ExpertPlacement:
    """The placement in use, whatever the loads."""
    return current


def eplb(loads: Sequence[float], current: ExpertPlacement, *, num_groups: int | None = None) -> ExpertPlacement:
    """Fills all slots: each further one with the expert whose replicas have most to do; then packs, heaviest first.

    With several machines of one size, groups of neighbouring experts are first packed onto machines, equally many on
    each, and replicated and packed there: an expert's replicas then share a machine. Where groups do not divide, all
    ranks are one machine.

    Args:
        loads: tokens of each expert.
        current: the placement in use; of two equally good ones, the one nearer to it is chosen.
        num_groups: of experts that are to share a machine, as routers with group limits have them; ``None``: every
            expert is one.

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4 (redundant experts); the expert parallelism
        load balancer published with it (EPLB: hierarchical and global form).
    """
    E = current.num_experts  # noqa: N806
    machines = current.machines
    groups = E if num_groups is None else num_groups
    sizes = {len(machine) for machine in machines}
    divides = len(sizes) == 1 and E % groups == 0 and groups % len(machines) == 0
    if not divides or len(machines) == 1:
        return near_current(_within(range(E), loads, current.num_ranks, current.slots_per_rank), current)
    width = E // groups
    members = [range(group * width, (group + 1) * width) for group in range(groups)]
    weights = [(sum(loads[expert] for expert in members[group]), group) for group in range(groups)]
    held: list[list[int]] = [[] for _ in range(current.num_ranks)]
    on_machines = pack(weights, len(machines), groups // len(machines))
    for machine, some in zip(machines, on_machines, strict=True):
        experts = [expert for group in some for expert in members[group]]
        for rank, content in zip(machine, _within(experts, loads, len(machine), current.slots_per_rank), strict=True):
            held[rank] = content
    return near_current(held, current)


def _within(experts: Sequence[int], loads: Sequence[float], num_ranks: int, room: int) -> list[list[int]]:
    counts = replica_counts([loads[expert] for expert in experts], num_ranks * room, most=num_ranks)
    items = [
        (loads[expert] / count, expert) for expert, count in zip(experts, counts, strict=True) for _ in range(count)
    ]
    return pack(items, num_ranks, room)


def shadow(loads: Sequence[float], current: ExpertPlacement, *, cost: PlacementCost | None = None) -> ExpertPlacement:
    """Experts lie in order; spare slots take shadows of the hottest ones, as many of them as pays best.

    Ranks then work on their own tokens for a shadowed expert, and nothing of it travels but gradients.

    Args:
        loads: tokens of each expert.
        current: the placement in use; its slots beyond ``ceil(E/W)`` a rank are for shadows.
        cost: what is to be least; ``None``: the largest load of a rank.

    References:
        He et al., "FasterMoE: Modeling and Optimizing Training of Large-Scale Dynamic Pre-Trained Models",
        PPoPP 2022, section 4.1.
    """
    model = cost or PlacementCost(token_s=1.0)
    home = ExpertPlacement.contiguous(current.num_experts, current.num_ranks)
    spare = current.slots_per_rank - home.slots_per_rank
    held = [[expert for expert in rank if expert != EMPTY] for rank in home.slots]
    start = ExpertPlacement.contiguous(current.num_experts, current.num_ranks, spare=spare, nodes=current.nodes)
    tried = [start]
    for expert in sorted(range(current.num_experts), key=lambda e: (-loads[e], e))[:spare]:
        held = [[*rank, expert] if expert not in rank else rank for rank in held]
        tried.append(near_current(held, start))
    return min(tried, key=lambda placed: model.of(placed.slots, loads))


def flex(
    loads: Sequence[float],
    current: ExpertPlacement,
    *,
    max_moves: int = 2,
    cost: PlacementCost | None = None,
    min_gain: float = 0.01,
) -> ExpertPlacement:
    """Changes the placement in use by at most so many moves, the best one each time.

    A move is an *expansion* (a replica of an expert of the busiest rank, in an empty slot or in place of a replica
    that another rank has too: the shrinking) or a *migration* (an expert of the busiest rank and one of another rank
    change places, or it alone moves to an empty slot). An exchange carries two experts and counts as one move.

    Args:
        loads: tokens of each expert.
        current: the placement in use.
        max_moves: in one call.
        cost: what a move must lower; ``None``: the largest load of a rank.
        min_gain: part of the cost that a move must save to be worth carrying an expert and its optimizer state.

    References:
        Nie et al., "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement",
        SIGMOD 2023 (expand, shrink and migrate, accepted by a cost model).
    """
    model = cost or PlacementCost(token_s=1.0)
    placed = current
    for _ in range(max_moves):
        moves = list(_moves(placed, loads))
        if not moves:
            break
        best = _moved(placed, moves[_cheapest(moves, placed, loads, model)])
        if not _better(best.slots, placed.slots, loads, model, min_gain):
            break
        placed = best
    return placed


class _Move(NamedTuple):
    """An expert leaves the busiest rank, gets a replica elsewhere, or both; another one may take the opposite way.

    Attributes:
        expert: of the busiest rank.
        place: its slot there.
        rank: where it goes; -1: nowhere, other replicas take its share.
        there: the slot that it takes.
        other: what was in that slot.
        stays: it is an expansion: the expert keeps its slot, and the other one loses this replica.
    """

    busy: int
    expert: int
    place: int
    rank: int
    there: int
    other: int
    stays: bool


def _moves(placed: ExpertPlacement, loads: Sequence[float]) -> Iterator[_Move]:
    """Everything one move away that takes load from the busiest rank."""
    counts = Counter(expert for held in placed.slots for expert in held)
    of_ranks = placed.rank_loads(loads)
    busy = max(range(placed.num_ranks), key=lambda rank: of_ranks[rank])
    here = set(placed.slots[busy])
    sets = [set(held) for held in placed.slots]
    for place, expert in enumerate(placed.slots[busy]):
        if expert == EMPTY:
            continue
        if counts[expert] > 1:
            yield _Move(busy, expert, place, -1, -1, EMPTY, False)
        for rank, held in enumerate(placed.slots):
            if expert in sets[rank]:
                continue
            for there, other in enumerate(held):
                if other == EMPTY or counts[other] > 1:
                    yield _Move(busy, expert, place, rank, there, other, True)
                if other == EMPTY or other not in here:
                    yield _Move(busy, expert, place, rank, there, other, False)


def _moved(placed: ExpertPlacement, move: _Move) -> ExpertPlacement:
    slots = [list(held) for held in placed.slots]
    if not move.stays:
        slots[move.busy][move.place] = move.other
    if move.rank >= 0:
        slots[move.rank][move.there] = move.expert
    held = tuple(tuple(experts) for experts in slots)
    return ExpertPlacement(num_experts=placed.num_experts, slots=held, nodes=placed.nodes)


def _cheapest(moves: Sequence[_Move], placed: ExpertPlacement, loads: Sequence[float], model: PlacementCost) -> int:
    """The move after which the cost is least, then loads of ranks, the largest first; the first of equally good ones.

    A move changes the replicas of two experts: what each rank has is what it had, less these two experts' parts as
    they were, plus what those are then. All moves are looked at in one array operation.
    """
    E, R = placed.num_experts, placed.num_ranks  # noqa: N806
    holds = np.zeros((E + 1, R))  # one more: an empty slot's expert, of no load
    for number, held in enumerate(placed.slots):
        holds[[some for some in held if some != EMPTY], number] = 1.0
    weights = np.append(np.asarray(loads, dtype=float), 0.0)
    columns = [np.array(column) for column in zip(*moves, strict=True)]
    busy, expert, _, rank, _, other, stays = columns
    every = np.arange(len(moves))
    before, after = (holds[expert], holds[other]), (holds[expert], holds[other])
    arrives, leaves = rank >= 0, ~stays
    after[0][every[arrives], rank[arrives]] = 1.0
    after[0][every[leaves], busy[leaves]] = 0.0
    after[1][every[arrives], rank[arrives]] = 0.0
    comes = leaves & arrives
    after[1][every[comes], busy[comes]] = 1.0
    after[1][other == EMPTY] = 0.0
    total = _parts(holds, weights, R).sum(axis=1)[:, None, :]  # of all experts; then of each move, [3, moves, R]
    for which, old, new in zip((expert, other), before, after, strict=True):
        total = total + _parts(new, weights[which], R) - _parts(old, weights[which], R)
    tokens, own, replicas = total
    costs = model.of_ranks(tokens, own, replicas)
    # Sums in another order differ by rounding, which must not choose between moves that are equally good.
    grain = 1e-9 * max(float(weights.sum()), 1e-300)
    close = np.flatnonzero(costs <= costs.min() * (1 + 1e-9))
    ordered = np.rint(-np.sort(-tokens[close], axis=1) / grain)
    return int(close[np.lexsort((*ordered.T[::-1],))[0]])


def _parts(holds: NDArray[Any], weights: NDArray[Any], num_ranks: int) -> NDArray[Any]:
    """Of experts, on each rank: tokens, the rank's own among them, and sums over replicas, ``[3, experts, R]``."""
    counts = np.maximum(holds.sum(axis=1), 1.0)[:, None]
    load = weights[:, None] * holds
    return np.stack([load / counts, load / num_ranks, 2 * (counts - 1) / counts * holds])


def _better(new: _Slots, old: _Slots, loads: Sequence[float], model: PlacementCost, min_gain: float) -> bool:
    """Whether the cost falls enough; or, where others are about as busy, that of the ranks that the move touches."""
    before, after = model.of(old, loads), model.of(new, loads)
    if after <= before * (1 - min_gain) or after >= before:
        return after < before
    pairs = zip(_rank_loads(old, loads), _rank_loads(new, loads), strict=True)
    touched = [(was, will) for was, will in pairs if was != will]
    return bool(touched) and max(will for _, will in touched) <= max(was for was, _ in touched) * (1 - min_gain)


def _rank_loads(slots: _Slots, loads: Sequence[float]) -> list[float]:
    counts = Counter(expert for held in slots for expert in held)
    return [sum(loads[expert] / counts[expert] for expert in held if expert != EMPTY) for held in slots]


# -- what policies share ---------------------------------------------------------------------------------------


def replica_counts(loads: Sequence[float], num_slots: int, *, most: int) -> list[int]:
    """How many replicas each expert gets: slots one by one to the expert whose replicas have most to do.

    Args:
        loads: of the experts.
        num_slots: to fill; at least as many as there are experts.
        most: replicas of one expert.
    """
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        open_ = [expert for expert, count in enumerate(counts) if count < most]
        if not open_:
            break
        counts[max(open_, key=lambda expert: loads[expert] / counts[expert])] += 1
    return counts


def pack(items: Sequence[tuple[float, int]], num_bins: int, room: int) -> list[list[int]]:
    """Things into bins of equal room, the heaviest first, each into the lightest bin that has room for it.

    A bin takes a thing once. A replica that finds no bin is left out; one that is its thing's first always finds one.

    Args:
        items: weight and thing; equal things are replicas.
        num_bins: of them.
        room: things in a bin; all items fit.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    weights = [0.0] * num_bins
    # First replicas get their place before bins are full of second ones, unless those are heavier.
    for weight, thing in sorted(items, key=lambda item: (-item[0], item[1])):
        free = [number for number, held in enumerate(bins) if len(held) < room and thing not in held]
        if free:
            lightest = min(free, key=lambda number: weights[number])
            bins[lightest].append(thing)
            weights[lightest] += weight
    return bins


def near_current(held: Sequence[Sequence[int]], current: ExpertPlacement) -> ExpertPlacement:
    """A placement of these experts on ranks, ranks of a machine exchanged so that most experts stay where they are.

    Args:
        held: experts of each rank, no more than it has slots.
        current: the placement in use.
    """
    from scipy.optimize import linear_sum_assignment  # half of what importing this package would cost

    content: list[Sequence[int]] = list(held)
    for machine in current.machines:
        kept = np.array([[len(set(held[new]) & set(current.slots[old])) for new in machine] for old in machine])
        old_places, new_places = linear_sum_assignment(-kept)
        for old, new in zip(old_places, new_places, strict=True):
            content[machine[old]] = held[machine[new]]
    slots = []
    for before, experts in zip(current.slots, content, strict=True):
        after = [expert if expert in experts else EMPTY for expert in before]
        coming = [expert for expert in experts if expert not in before]
        for place, expert in enumerate(after):
            if expert == EMPTY and coming:
                after[place] = coming.pop(0)
        slots.append(tuple(after))
    return ExpertPlacement(num_experts=current.num_experts, slots=tuple(slots), nodes=current.nodes)


#: Policies by name, with their usual settings.
POLICIES: dict[str, Policy] = {"static": static, "eplb": eplb, "shadow": shadow, "flex": flex}


def make_policy(name: str) -> Policy:
    """A policy.

    Raises:
        UsageError: no policy has that name.
    """
    return POLICIES[spelled(name, sorted(POLICIES), "placement policy")]
