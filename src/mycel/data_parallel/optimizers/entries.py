"""What one step works on: a parameter's part on this rank, its gradient, its options and its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Outcome
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.stats import CommStats

__all__ = ["Change", "Entry", "Ranks", "local_part", "totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parameter that has a gradient in this step.

    Attributes:
        name: the same on all ranks; seeds what is random.
        parameter: as the optimizer has it, a ``DTensor`` where it is sharded.
        gradient: this rank's part.
        options: of its group.
        state: of the optimizer.
    """

    name: str
    parameter: Tensor
    gradient: Tensor
    options: dict[str, Any]
    state: dict[str, Any]

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter; what is written there is the parameter."""
        return local_part(self.parameter)

    @property
    def scale(self) -> float:
        """``sqrt(rows / columns)``, by which orthonormal updates change outputs alike whatever a matrix's shape."""
        rows, columns = self.parameter.shape
        return float((rows / columns) ** 0.5)

    def kept(self, key: str) -> Tensor:
        """This rank's part of a tensor of state that lies as the parameter does; zeros at first."""
        if key not in self.state:
            self.state[key] = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        return local_part(self.state[key])

    def move(self, update: Callable[[Tensor, float], object], scale: float = 1.0) -> None:
        """Decay the weights, then have ``update`` subtract: it gets the parameter and what it multiplies with.

        Args:
            update: writes the parameter.
            scale: of the update, besides the rate.
        """
        rate = float(self.options["lr"])
        if self.options["weight_decay"]:
            self.local.mul_(1 - rate * self.options["weight_decay"])
        update(self.local, -rate * scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a step will do to one parameter, if all its values are finite.

    Attributes:
        values: that decide; the same on all ranks.
        apply: writes parameter and state.
    """

    values: Tensor
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """With whom matrices are worked on.

    Attributes:
        replicas: ranks that hold the same whole matrices and have gradients of their own; ``None``: there are none,
            or gradients are averaged already.
        shards: ranks that hold a part of the rows each; ``None``: matrices are whole.
    """

    replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. ``DTensor`` is known by its placements: importing it takes long."""
    found: Any = tensor.detach()
    part: Tensor = found.to_local() if hasattr(found, "placements") else found
    return part


def totals(
    tensors: Sequence[Tensor], wires: Sequence[torch.dtype], group: dist.ProcessGroup | None, stats: CommStats
) -> list[Tensor]:
    """Sums over ranks, in one collective for each type.

    Args:
        tensors: of one type.
        wires: types in which each of them travels and is added up.
        group: ``None``: the tensors themselves.
        stats: counts bytes.
    """
    if group is None or not tensors:
        return list(tensors)
    kinds = list(dict.fromkeys(wires))
    members = [[i for i, wire in enumerate(wires) if wire == kind] for kind in kinds]
    asked = [
        _total(torch.cat([tensors[i].reshape(-1) for i in m]).to(kind))
        for m, kind in zip(members, kinds, strict=True)
    ]
    found: list[Tensor] = list(tensors)
    for m, (outcome,) in zip(members, exchange(asked, group, stats), strict=True):
        parts = outcome.mean.to(tensors[0].dtype).split_with_sizes([tensors[i].numel() for i in m])
        for i, part in zip(m, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


def _total(flat: Tensor) -> Conversation:
    total: Tensor = yield AllReduce(tensor=flat)
    return [Outcome(mean=total)]
