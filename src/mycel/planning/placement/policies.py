"""From loads and the placement there is to the placement there should be: a function and a registry line each.

A policy is a function ``policy(loads, current) -> ExpertPlacement``: tokens of each expert, the placement in use. It
is deterministic, so that ranks that know the same loads agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mycel.errors import UsageError
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
    slots = current.slots
    for _ in range(max_moves):
        moves = [*_moves(slots, loads)]
        best = min(moves, key=lambda other: _score(other, loads, model), default=slots)
        if not _better(best, slots, loads, model, min_gain):
            break
        slots = best
    return ExpertPlacement(num_experts=current.num_experts, slots=slots, nodes=current.nodes)


def _score(slots: _Slots, loads: Sequence[float], model: PlacementCost) -> tuple[float, list[float]]:
    """Modelled cost, then loads of ranks, the largest first."""
    return model.of(slots, loads), sorted(_rank_loads(slots, loads), reverse=True)


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


def _moves(slots: _Slots, loads: Sequence[float]) -> Iterator[_Slots]:
    """Everything one move away that takes load from the busiest rank."""
    counts = Counter(expert for held in slots for expert in held)
    of_ranks = _rank_loads(slots, loads)
    busy = max(range(len(slots)), key=lambda rank: of_ranks[rank])
    for place, expert in enumerate(slots[busy]):
        if expert == EMPTY:
            continue
        if counts[expert] > 1:  # the others take its share
            yield _with(slots, {(busy, place): EMPTY})
        for rank, held in enumerate(slots):
            if expert in held:
                continue
            for there, other in enumerate(held):
                if other == EMPTY or counts[other] > 1:
                    yield _with(slots, {(rank, there): expert})
                if other == EMPTY or other not in slots[busy]:
                    yield _with(slots, {(rank, there): expert, (busy, place): other})


def _with(slots: _Slots, changed: dict[tuple[int, int], int]) -> _Slots:
    return tuple(
        tuple(changed.get((rank, place), expert) for place, expert in enumerate(held))
        for rank, held in enumerate(slots)
    )


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
    if name not in POLICIES:
        raise UsageError(f"no placement policy is called {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
