"""Residuals of a sharded model for checkpoints: each rank's parts to whole parameters, and back.

What ranks keep matters only in the mean. So a checkpoint holds that mean in each parameter's whole shape, and every
rank of the next run, however many there are, takes its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.fsdp.layout import Unit, rows_of, whole_of

__all__ = ["ResidualRows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRows:
    """Which rows of a unit's parameters one rank keeps residuals of.

    Attributes:
        unit: whose gradients.
        places: of the rows.
        num_rows: of a whole parameter.
        groups: ranks that together hold all of them, one after the other.
        num_keepers: ranks whose residuals of a row are added up, for the mean over them.
        share: of a row's mean that a rank takes back.
    """

    unit: Unit
    places: Sequence[int]
    num_rows: int
    groups: Sequence[dist.ProcessGroup]
    num_keepers: int
    share: float = 1.0

    def state_dict(self, feedback: ErrorFeedback) -> dict[str, Tensor]:
        """The mean over ranks, by parameter, in its shape. A collective call."""
        found = {}
        for segment in self.unit.segments:
            if not segment.trainable:
                continue
            rows = torch.zeros((self.num_rows, segment.numel), device=self.unit.param_group.device)
            if segment.name in feedback.memory:
                rows[self.places] = feedback.memory[segment.name].view(len(self.places), segment.numel)
            for group in self.groups:
                dist.all_reduce(rows, group=group)
            found[segment.name] = whole_of(rows / self.num_keepers, segment).clone()
        return found

    def load_state_dict(self, feedback: ErrorFeedback, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of means."""
        for segment in self.unit.segments:
            if segment.name in state:
                rows = rows_of(state[segment.name].to(self.unit.param_group.device), segment, self.num_rows)
                feedback.memory[segment.name] = rows[self.places] * self.share
