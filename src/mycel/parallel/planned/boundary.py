"""A stage's boundary as shares: ranks that all hold the same tensor send a part each, and put it together over there.

With tensor parallelism of degree ``t`` all ``t`` ranks of a stage end with the same tensor, and all of the next stage
need it. Sent whole by each, it crosses the wires between the stages ``t`` times; in shares it crosses them once, and
is gathered where ranks are near each other. Backwards the same holds for its gradient.

References:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 4.1
    (scatter/gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError

__all__ = ["InShares", "Shares"]


class Shares:
    """How a tensor is divided over ranks that all have the same of it.

    Args:
        group: of these ranks.
        numbers: which share each member of the group has.
        dim: that is divided.
    """

    def __init__(self, group: dist.ProcessGroup, numbers: Sequence[int], dim: int = 1) -> None:
        self.group, self.dim = group, dim
        self._members = sorted(range(len(numbers)), key=lambda member: numbers[member])
        self._own = numbers[dist.get_rank(group)]

    def own(self, whole: Tensor) -> Tensor:
        """This rank's share.

        Args:
            whole: the same on all ranks.

        Raises:
            UsageError: it does not divide.
        """
        count = len(self._members)
        if whole.dim() <= self.dim or whole.shape[self.dim] % count:
            raise UsageError(
                f"a boundary of shape {tuple(whole.shape)} does not divide into {count} shares along dimension "
                f"{self.dim}: a sequence length that is a multiple of {count} does, or a plan with is_scattered=false"
            )
        return whole.chunk(count, self.dim)[self._own].contiguous()

    def whole(self, share: Tensor) -> Tensor:
        """All shares, put together.

        Args:
            share: of this rank.
        """
        found = [torch.empty_like(share) for _ in self._members]
        dist.all_gather(found, share.contiguous(), group=self.group)
        return torch.cat([found[member] for member in self._members], self.dim)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.own(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.whole(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.whole(share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.own(grad), None


class InShares(nn.Module):
    """A stage whose input comes, and whose result goes, in shares.

    Args:
        inner: the stage.
        shares: of its ranks.
        gathers: whether a stage comes before it.
        splits: whether a stage comes after it.
    """

    def __init__(self, inner: nn.Module, shares: Shares, *, gathers: bool, splits: bool) -> None:
        super().__init__()
        self.inner = inner
        self._shares, self._gathers, self._splits = shares, gathers, splits

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The stage's result, or this rank's share of it.

        Args:
            x: the batch, or this rank's share of what the stage before gave.
            kwargs: of the stage.
        """
        if self._gathers:
            x = _Gather.apply(x, self._shares)  # type: ignore[no-untyped-call]
        y: Tensor = self.inner(x, **kwargs)
        return _Split.apply(y, self._shares) if self._splits else y  # type: ignore[no-untyped-call]
