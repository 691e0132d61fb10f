"""What a plan should take: exchanges by latency and bandwidth, experts by row, chunks by playing their steps out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mycel.brief import brief
from mycel.cost import Line, makespan
from mycel.moe.schedule import ExpertSchedule
from mycel.planning.placement import ExpertLayout

__all__ = ["CostModel", "Load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one call brings, a rank.

    Attributes:
        num_tokens: T.
        slots_per_token: K.
    """

    num_tokens: int
    slots_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicts a layer's step.

    Attributes:
        layout: of the experts.
        row_bytes: of a token on the wire.
        weight_bytes: of a rank's slices, as they travel.
        num_nodes: of the hierarchical exchange; 1 without it.
        exchanges: by kind, of bytes a rank sends: ``all_to_all`` among all, ``between`` and ``inside`` of nodes,
            ``all_gather`` among all.
        gathers: by ``r`` below the number of shards, of bytes a rank sends.
        rows: of the experts here, by row of whole experts.
    """

    layout: ExpertLayout
    row_bytes: float
    weight_bytes: float
    num_nodes: int
    exchanges: Mapping[str, Line]
    gathers: Mapping[int, Line]
    rows: Line

    __repr__ = brief

    def seconds(self, plan: ExpertSchedule, load: Load, *, training: bool) -> float:
        """A forward pass; with ``training``, a backward pass as well: as many bytes, twice the arithmetic."""
        chunk = 1.0 / plan.degree
        slots = load.num_tokens * load.slots_per_token
        total = 0.0
        for products in (1, 2) if training else (1,):
            if plan.r in self.gathers:
                members = len(self.layout.members(0, r=plan.r))
                total += self.gathers[plan.r].at(self.weight_bytes * (members - 1))
            host_s = products * self.rows.at(slots * chunk)  # r copies of a row meet 1/r of an expert
            if plan.r == 0:
                total += products * self.rows.at(slots)
                continue
            there = [self.exchanges[kind].at(units) for kind, units in self._exchange(plan, load, chunk)]
            last = there[-1] if there else 0.0
            stages = [(0.0, s) for s in there] + [(host_s, last)] + [(0.0, s) for s in there[-2::-1]]
            total += makespan(stages, plan.degree)
        return total

    def _exchange(self, plan: ExpertSchedule, load: Load, chunk: float) -> list[tuple[str, float]]:
        """Stages of the way there of a chunk, with the bytes a rank sends if experts are hit alike."""
        if not self.exchanges:
            return []
        ranks, tokens = self.layout.num_ranks, load.num_tokens * chunk
        copies = load.slots_per_token * plan.r
        if plan.algorithm == "hierarchical":
            elsewhere = self.num_nodes - 1
            visited = elsewhere * (1.0 - (1.0 - 1.0 / self.num_nodes) ** load.slots_per_token)
            local = ranks // self.num_nodes
            slots_bytes = 8 * copies
            between = tokens * visited * (self.row_bytes + slots_bytes)
            return [("between", between), ("inside", tokens * copies * self.row_bytes * (local - 1) / local)]
        if plan.algorithm in ("all_gather", "all_reduce"):
            return [("all_gather", tokens * self.row_bytes * (ranks - 1))]
        return [("all_to_all", tokens * copies * self.row_bytes * (ranks - 1) / ranks)]
