"""Shards inside, replicas between (HSDP): gradients are averaged over replicas in fewer bytes.

Inside a group of shards everything stays as FSDP2 does it. Between replicas, where links are slow, each rank takes
part with its shard of the mean gradient in the same conversations as for DDP, so that every compressor works there,
those of several rounds too. Torch calls this after its own reduce-scatter; a mesh of one dimension is given to
``fully_shard``, since over one of two torch does the sum between replicas itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.compress import AllReduce, Compressor, Context, Conversation, Item, Outcome
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.fsdp.layout import Segment, Unit, layout_of
from mycel.data_parallel.fsdp.residuals import ResidualRows
from mycel.data_parallel.fsdp.steps import Steps
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.stats import CommStats

__all__ = ["ReplicaMean"]


class ReplicaMean:
    """The mean of one unit's gradient shards over replicas.

    Args:
        unit: whose gradients.
        policy: says how each parameter's shard travels.
        group: the ranks that hold the same shard.
        steps: whose residuals are kept.
        stats: counts bytes.
        seed: of chance.

    Attributes:
        step: means so far.
    """

    def __init__(
        self,
        unit: Unit,
        policy: CompressionPolicy,
        group: dist.ProcessGroup,
        steps: Steps,
        stats: CommStats,
        seed: int,
    ) -> None:
        self.unit, self.policy, self.group, self.stats, self.seed = unit, policy, group, stats, seed
        self.feedback, self.step, self._steps = steps.feedback, 0, steps
        self._shard = dist.get_rank(unit.group)

    def __call__(self, shard: Tensor) -> None:
        """Replace a flat gradient shard by its mean over replicas; torch's all-reduce hook."""
        self._steps.reduces()
        segments = layout_of(self.unit.segments, shard.numel())
        if segments is None:
            segments = (_anonymous(shard.numel()),)
        parts = shard.split_with_sizes([segment.numel for segment in segments])
        groups: dict[int, tuple[Compressor | None, list[int]]] = {}
        for place, segment in enumerate(segments):
            chosen = self.policy.choose(segment.name, segment.shape, self.step) if segment.name else None
            if chosen is not None and not chosen.takes(segment.shard_shape):
                chosen = None
            groups.setdefault(id(chosen), (chosen, []))[1].append(place)
        conversations = [
            self._converse(chosen, [(segments[i], parts[i]) for i in members]) for chosen, members in groups.values()
        ]
        self.stats.exact_bytes += self._exact_bytes(shard)
        named = {}
        for (chosen, members), outcomes in zip(
            groups.values(), exchange(conversations, self.group, self.stats), strict=True
        ):
            for i, outcome in zip(members, outcomes, strict=True):
                parts[i].copy_(outcome.mean.view(-1))
                if segments[i].name:  # torch divides the shard itself later; the mean stays what it is
                    named[segments[i].name] = outcome.mean.view(segments[i].shard_shape)
                if chosen is not None and self.feedback is not None and outcome.residual is not None:
                    self.feedback.remember(segments[i].name, outcome.residual.view(1, -1))
        self._steps.add(shard, named, self.step)
        self.step += 1

    def residual_rows(self) -> ResidualRows:
        """Where this rank's residuals lie in whole parameters."""
        return ResidualRows(
            unit=self.unit,
            places=[self._shard],
            num_rows=dist.get_world_size(self.unit.group),
            groups=[self.group, self.unit.group],
            num_keepers=dist.get_world_size(self.group),
        )

    def _converse(self, chosen: Compressor | None, members: list[tuple[Segment, Tensor]]) -> Conversation:
        world_size = dist.get_world_size(self.group)
        if chosen is None:
            return _exact_mean([part for _, part in members], world_size)
        items = []
        for segment, part in members:
            if self.feedback is not None:
                part = self.feedback.compensate(segment.name, part.view(1, -1))
            tensor = part.view(segment.shard_shape)
            context = Context(
                name=segment.name,
                step=self.step,
                rank=dist.get_rank(self.group),
                world_size=world_size,
                part=self._shard,
                seed=self.seed,
            )
            items.append(Item(tensor=tensor.float().contiguous(), context=context))
        return chosen.converse(items, keep_residual=self.feedback is not None)

    def _exact_bytes(self, shard: Tensor) -> float:
        size = dist.get_world_size(self.group)
        return 2 * (size - 1) / size * shard.numel() * shard.element_size()


def _exact_mean(parts: list[Tensor], world_size: int) -> Generator[AllReduce, Any, list[Outcome]]:
    total: Tensor = yield AllReduce(tensor=torch.cat(parts))
    means = (total / world_size).split_with_sizes([part.numel() for part in parts])
    return [Outcome(mean=mean) for mean in means]


def _anonymous(numel: int) -> Segment:
    return Segment(name="", numel=numel, shape=(numel,), shard_shape=(numel,), shard_dim=0, trainable=False)
