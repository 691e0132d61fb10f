"""Which experts each rank holds: several slots a rank, experts in one slot or, as replicas, in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.placement.layout import ExpertLayout

__all__ = ["EMPTY", "ExpertPlacement"]

#: What a slot without an expert holds.
EMPTY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Slots of all ranks and the experts in them.

    Attributes:
        num_experts: E, of the layer; each has a slot somewhere.
        slots: for each rank of the expert-parallel group the expert in each of its slots, or ``EMPTY``; equally many
            slots everywhere. A rank holds an expert once at most.
        nodes: ranks that share a machine; ``()``: all do.

    Raises:
        UsageError: an expert without a slot, twice on one rank, or a number that none has; ranks with unequal
            numbers of slots; nodes that are no partition of the ranks.

    Examples:
        >>> placed = ExpertPlacement(num_experts=3, slots=((0, 1), (2, 0)))
        >>> placed.replicas(0), placed.slot_of(0, rank=1)
        ((0, 1), 3)
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        widths = {len(held) for held in self.slots}
        if len(widths) != 1 or 0 in widths:
            raise UsageError(f"ranks have {sorted(widths)} slots; expected one number, at least 1, for all of them")
        for rank, held in enumerate(self.slots):
            experts = [expert for expert in held if expert != EMPTY]
            wrong = [expert for expert in experts if not 0 <= expert < self.num_experts]
            if wrong:
                raise UsageError(f"rank {rank} holds expert {wrong[0]}; there are {self.num_experts}")
            twice = [expert for expert, count in Counter(experts).items() if count > 1]
            if twice:
                raise UsageError(f"rank {rank} holds expert {twice[0]} twice; replicas go to different ranks")
        missing = set(range(self.num_experts)) - {expert for held in self.slots for expert in held}
        if missing:
            raise UsageError(f"expert {min(missing)} has no slot on any rank")
        if self.nodes and sorted(rank for node in self.nodes for rank in node) != list(range(self.num_ranks)):
            raise UsageError(f"nodes {self.nodes} are no partition of {self.num_ranks} ranks")

    @classmethod
    def contiguous(
        cls, num_experts: int, num_ranks: int, *, spare: int = 0, nodes: Sequence[Sequence[int]] = ()
    ) -> ExpertPlacement:
        """Experts in order, ``ceil(E/W)`` a rank, as layers without a placement have them, then empty slots.

        Args:
            num_experts: E.
            num_ranks: W.
            spare: empty slots of each rank beside ``ceil(E/W)``.
            nodes: ranks that share a machine, as ``mycel.moe.nodes_of`` gives them.

        Examples:
            >>> ExpertPlacement.contiguous(3, 2, spare=1).slots
            ((0, 1, -1), (2, -1, -1))
        """
        layout = ExpertLayout(num_experts=num_experts, num_ranks=num_ranks)
        held = [layout.of(rank) for rank in range(num_ranks)]
        slots = [(*some, *[EMPTY] * (layout.width + spare - len(some))) for some in held]
        return cls(num_experts=num_experts, slots=tuple(slots), nodes=tuple(tuple(node) for node in nodes))

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """Of every rank."""
        return len(self.slots[0])

    @property
    def num_slots(self) -> int:
        """Of all ranks; slot ``i`` is on rank ``i // slots_per_rank``."""
        return self.num_ranks * self.slots_per_rank

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """``nodes``, with the one that is meant where none is named."""
        return self.nodes or (tuple(range(self.num_ranks)),)

    def replicas(self, expert: int) -> tuple[int, ...]:
        """Ranks that hold an expert, in order."""
        return tuple(rank for rank, held in enumerate(self.slots) if expert in held)

    def slot_of(self, expert: int, *, rank: int) -> int:
        """Number of the slot, among all ranks' slots, in which a rank holds an expert.

        Raises:
            UsageError: the rank does not hold it.
        """
        if expert not in self.slots[rank]:
            raise UsageError(f"rank {rank} does not hold expert {expert}; ranks {self.replicas(expert)} do")
        return rank * self.slots_per_rank + self.slots[rank].index(expert)

    def shares(self, expert: int) -> tuple[dict[int, Fraction], ...]:
        """Which part of its tokens for an expert each rank sends to each replica.

        If all ranks have equally many tokens for it, all replicas work equally; under that condition a rank prefers
        itself, then its machine, then the others.

        Returns:
            For each rank: rank of the replica, and the part; the parts of a rank add up to 1.

        Examples:
            >>> ExpertPlacement(num_experts=1, slots=((0,), (0,), (-1,))).shares(0)[2]
            {0: Fraction(1, 2), 1: Fraction(1, 2)}
        """
        holders = self.replicas(expert)
        machine = {rank: number for number, node in enumerate(self.machines) for rank in node}
        # Of the tokens of all ranks together; ranks have 1/W each, replicas take 1/n each.
        left = dict.fromkeys(range(self.num_ranks), Fraction(1, self.num_ranks))
        room = dict.fromkeys(holders, Fraction(1, len(holders)))
        found: list[dict[int, Fraction]] = [{} for _ in range(self.num_ranks)]

        def give(source: int, holder: int) -> None:
            part = min(left[source], room[holder])
            if part > 0:
                left[source] -= part
                room[holder] -= part
                found[source][holder] = part * self.num_ranks

        for holder in holders:
            give(holder, holder)
        for near in (True, False):
            for source in range(self.num_ranks):
                for holder in holders:
                    if not near or machine[source] == machine[holder]:
                        give(source, holder)
        return tuple(dict(sorted(parts.items())) for parts in found)

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Tokens on each rank, if the replicas of an expert share its tokens equally.

        Args:
            loads: tokens of each expert.
        """
        counts = Counter(expert for held in self.slots for expert in held if expert != EMPTY)
        return [sum(loads[expert] / counts[expert] for expert in held if expert != EMPTY) for held in self.slots]

    def imbalance(self, loads: Sequence[float]) -> float:
        """Largest of ``rank_loads`` over their mean; 1 where there are no tokens."""
        of_ranks = self.rank_loads(loads)
        mean = sum(of_ranks) / len(of_ranks)
        return max(of_ranks) / mean if mean else 1.0
