"""Routing traces: how many tokens each expert of each layer had in each batch, recorded, kept in a file, replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.slots import RoutingResult
from mycel.planning.placement import ExpertPlacement, Policy

__all__ = ["RoutingTrace", "TraceRecorder", "replay"]

#: Of the file's form.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Tokens of each expert.

    Attributes:
        counts: shape ``[batches, layers, experts]``, ``int64``.
        layers: names of the layers.

    Raises:
        UsageError: sizes that do not fit together.
    """

    counts: NDArray[np.int64]
    layers: tuple[str, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.counts.ndim != 3 or self.counts.shape[1] != len(self.layers):
            raise UsageError(f"a trace of shape {self.counts.shape} for {len(self.layers)} layers")

    def save(self, file: str | Path) -> None:
        """Write a compressed ``.npz``."""
        wide = self.counts.max(initial=0) > np.iinfo(np.uint16).max
        counts = self.counts.astype(np.int64 if wide else np.uint16)
        np.savez_compressed(file, version=_VERSION, counts=counts, layers=np.array(self.layers, dtype=np.str_))

    @classmethod
    def load(cls, file: str | Path) -> RoutingTrace:
        """Read what ``save`` wrote.

        Raises:
            UsageError: the file is no trace, or of another version.
        """
        with np.load(file, allow_pickle=False) as content:
            if not {"version", "counts", "layers"} <= set(content.files) or int(content["version"]) != _VERSION:
                raise UsageError(f"{file}: no routing trace of version {_VERSION}")
            return cls(counts=content["counts"].astype(np.int64), layers=tuple(str(n) for n in content["layers"]))


class TraceRecorder:
    """Counts what the routers of a model choose, before capacities cut it.

    Every forward pass of a router adds a batch to its layer; layers must be called equally often. Where activations
    are recomputed in the backward pass, routers are called twice and so are their batches: record without that.

    Args:
        model: with routers that return a ``RoutingResult``; the layers are the modules that have them as ``router``.
        group: ranks whose tokens are added up when the trace is taken; ``None``: this rank's alone.

    Raises:
        UsageError: the model has no such layer.

    Examples:
        >>> from mycel.moe import MoE
        >>> model = nn.Sequential(MoE(8, 8, 4, 1), MoE(8, 8, 4, 1))
        >>> with TraceRecorder(model) as recorder:
        ...     _ = model(torch.randn(5, 8))
        >>> recorder.trace().counts.sum(axis=2)
        array([[5, 5]])
    """

    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        routers = {n: m.router for n, m in model.named_modules() if isinstance(getattr(m, "router", None), nn.Module)}
        if not routers:
            raise UsageError(f"{type(model).__name__} has no module with a router")
        self.group = group
        self.seen: dict[str, list[Tensor]] = {name: [] for name in routers}
        self.hooks = [router.register_forward_hook(self._hook(name)) for name, router in routers.items()]

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, RoutingResult):
                raise UsageError(f"{name}: {type(module).__name__} gives no RoutingResult that could be recorded")
            self.seen[name].append(output.tokens_per_expert.detach())

        return record

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; what was seen stays."""
        for hook in self.hooks:
            hook.remove()

    def trace(self) -> RoutingTrace:
        """What was seen so far. With a group, all its ranks call it, after equally many batches.

        Raises:
            UsageError: nothing was recorded, or layers saw different numbers of batches.
        """
        lengths = {name: len(batches) for name, batches in self.seen.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise UsageError(f"layers saw different numbers of batches, or none: {lengths}")
        counts = torch.stack([torch.stack(batches) for batches in self.seen.values()], dim=1)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return RoutingTrace(counts=counts.cpu().numpy(), layers=tuple(self.seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One batch of one layer, seen by the placement that was made before it.

    Attributes:
        batch, layer: which.
        imbalance: largest over mean load of ranks.
        moved: experts that came to a rank since the batch before.
        placement: under which it ran.
    """

    batch: int
    layer: int
    imbalance: float
    moved: int
    placement: ExpertPlacement

    __repr__ = brief


def replay(
    trace: RoutingTrace, policy: Policy, start: ExpertPlacement, *, memory: float = 0.7, every: int = 1
) -> Iterator[Replayed]:
    """What a policy would have made of a trace: each batch under a placement from the batches before it.

    Args:
        trace: recorded routing.
        policy: of placement.
        start: the placement of every layer at the beginning.
        memory: loads are a moving average, in which the past keeps this part at each batch; 0: the last batch alone.
        every: batches between two uses of the policy.

    Raises:
        UsageError: the placement is for another number of experts, or an argument makes no sense.
    """
    batches, layers, experts = trace.counts.shape
    if start.num_experts != experts:
        raise UsageError(f"the trace has {experts} experts, the placement {start.num_experts}")
    if not 0 <= memory < 1 or every < 1:
        raise UsageError(f"memory {memory}, every {every}; expected at least 0 and below 1, and at least 1")
    for layer in range(layers):
        placed = start
        average = trace.counts[0, layer].astype(np.float64)
        for batch in range(1, batches):
            moved = 0
            if (batch - 1) % every == 0:
                after = policy(average.tolist(), placed)
                moved = num_arrivals(placed, after)
                placed = after
            counts = trace.counts[batch, layer]
            imbalance = placed.imbalance(counts.tolist())
            yield Replayed(batch=batch, layer=layer, imbalance=imbalance, moved=moved, placement=placed)
            average = memory * average + (1 - memory) * counts


def num_arrivals(before: ExpertPlacement, after: ExpertPlacement) -> int:
    """Experts that ranks hold after and did not hold before."""
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = list(zip(before.slots, after.slots, strict=True))
    return sum(len({e for e in new if e >= 0} - set(old)) for old, new in pairs)
