"""From experts to slots: a token goes to one replica of its expert, in fixed shares, without asking other ranks."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from mycel.moe.slots import RoutingResult, count_tokens
from mycel.planning.placement import ExpertPlacement

__all__ = ["SlotTable"]


class SlotTable:
    """Where one rank sends its tokens.

    Token ``i`` of the ``n`` that a rank has for an expert goes where ``(i + (s + 1/2) / W) / n`` falls among the
    running sums of the shares: each share is met to within a token, and ranks round differently. The same routing
    gives the same slots every time, and nothing waits for a device.

    Args:
        placement: of the experts.
        source: the rank that sends; ``None``: all ranks have the same tokens and must send them alike.
    """

    def __init__(self, placement: ExpertPlacement, source: int | None) -> None:
        E, W = placement.num_experts, placement.num_ranks
        self.num_slots = placement.num_slots
        self.offset = 0.5 if source is None else (source + 0.5) / W
        targets, ends = [], []
        for expert in range(E):
            holders = placement.replicas(expert)
            if source is None:
                parts = {rank: 1.0 / len(holders) for rank in holders}
            else:
                parts = {rank: float(part) for rank, part in placement.shares(expert)[source].items()}
            targets.append([placement.slot_of(expert, rank=rank) for rank in parts])
            ends.append([*accumulate(parts.values())][:-1])
        width = max(len(some) for some in targets)
        self.alone = width == 1
        # Slots of the replicas that the rank uses, and running sums of their shares; what pads them is never reached.
        self.targets_EN = torch.tensor([[*some, *some[-1:] * (width - len(some))] for some in targets])
        self.ends_EN = torch.tensor([[*some, *[2.0] * (width - 1 - len(some))] for some in ends], dtype=torch.float64)

    def apply(self, routing: RoutingResult) -> RoutingResult:
        """The routing with slots in place of experts; an empty slot of a token has the number of all slots."""
        index_TK = routing.top_k_index
        device = index_TK.device
        if self.targets_EN.device != device:
            self.targets_EN, self.ends_EN = self.targets_EN.to(device), self.ends_EN.to(device)
        E = routing.num_experts
        expert_S = index_TK.reshape(-1)
        known_S = expert_S.clamp_max(E - 1)
        if self.alone:
            slot_S = self.targets_EN[:, 0][known_S]
        else:
            counts_E = routing.tokens_per_expert
            by_expert, order = expert_S.sort(stable=True)
            begins = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
            places = torch.arange(expert_S.numel(), device=device) - begins[by_expert]
            turn_S = torch.empty_like(places).index_copy_(0, order, places)
            at_S = (turn_S + self.offset) / counts_E[known_S]
            replica_S = (at_S.unsqueeze(1) >= self.ends_EN[known_S]).sum(dim=1)
            slot_S = self.targets_EN[known_S].gather(1, replica_S.unsqueeze(1)).squeeze(1)
        if not routing.full:
            slot_S = slot_S.masked_fill(expert_S == E, self.num_slots)
        slot_TK: Tensor = slot_S.view(index_TK.shape)
        return routing._replace(top_k_index=slot_TK, tokens_per_expert=count_tokens(slot_TK, self.num_slots))
