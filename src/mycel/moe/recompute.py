"""What forward passes decided, for their recomputation under activation checkpointing.

A pass that is computed again in the backward pass has to decide as it did, though other passes came in between: two
losses, micro-batches of a pipeline. Its tensors are told by their bits, since what is around a layer may have been
computed anew as well.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from mycel.comm.recomputing import recomputing
from mycel.errors import UsageError

__all__ = ["Keepsake", "Memo", "Passes", "hold", "recomputing"]

Value = TypeVar("Value")

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Passes that are remembered where no graph says how long they are needed.
_RECENT = 64


class Keepsake(Generic[Value]):
    """What one pass decided. It lives as long as somebody holds it: the graph of the pass, by ``hold``.

    Attributes:
        value: the decision; tensors in it have no graph, which would hold the keepsake in turn.
        marks: of the tensor that it was decided for.
    """

    def __init__(self, value: Value) -> None:
        self.value = value
        self.marks: Tensor | None = None


class Passes(Generic[Value]):
    """Keepsakes of the passes under way, by the tensors they were for."""

    def __init__(self) -> None:
        self.alive: WeakSet[Keepsake[Value]] = WeakSet()

    def note(self, keepsake: Keepsake[Value], x: Tensor) -> None:
        """A pass comes by with ``x``."""
        keepsake.marks = _marks(x)
        self.alive.add(keepsake)

    def again(self, x: Tensor, what: str) -> Value | None:
        """The decision of the pass that had ``x``; ``None``: none is under way. With several, waits for the device.

        Raises:
            UsageError: there are several, and none of them had ``x``.
        """
        found = [(kept.value, kept.marks) for kept in self.alive if kept.marks is not None]
        if len(found) < 2:
            return found[0][0] if found else None
        marks = _marks(x)
        for value, of_pass in found:
            if torch.equal(of_pass, marks):
                return value
        raise UsageError(
            f"{what}: recomputed from other tokens than any of the {len(found)} passes under way had; activation "
            "checkpointing has to bring back the same bits where several passes precede a backward pass"
        )


class Memo(Generic[Value]):
    """Small decisions of the latest passes, by the tensors they were for."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Tensor, Value]] = deque(maxlen=_RECENT)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()  # of copies and pickles, no pass is under way

    def note(self, x: Tensor, value: Value) -> None:
        """A pass comes by with ``x``."""
        self._recent.append((_marks(x), value))

    def agrees(self, value: Value) -> bool:
        """Whether all passes that are remembered had this."""
        return all(other is value for _, other in self._recent)

    def again(self, x: Tensor, otherwise: Value) -> Value:
        """The decision of the latest pass that had ``x``."""
        if self.agrees(otherwise):
            return otherwise
        marks = _marks(x)
        same = (value for of_pass, value in reversed(self._recent) if torch.equal(of_pass, marks))
        return next(same, otherwise)


def _marks(x_TD: Tensor) -> Tensor:  # noqa: N803  (the shape suffixes are capitals on purpose)
    """Sums over rows and columns of a matrix's bits, as integers: alike where the bits are, hardly anywhere else."""
    bits = x_TD.detach().contiguous().view(_INTEGERS[x_TD.element_size()])
    found = []
    for dim in (0, 1):
        sums = bits.sum(dim=dim, dtype=torch.int64)
        mixed = (sums ^ (sums >> 17)) * (torch.arange(sums.numel(), device=sums.device) * 0x9E3779B97F4A7C1 + 1)
        found += [mixed.sum(), (mixed ^ (mixed >> 29)).sum(), sums.new_tensor(sums.numel())]
    return torch.stack(found)


def hold(keepsake: Keepsake[Any], x: Tensor) -> Tensor:
    """``x``, in whose graph the keepsake lives on until that is gone."""
    held: Tensor = _Hold.apply(keepsake, x)  # type: ignore[no-untyped-call]
    return held


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(keepsake: Keepsake[Any], x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.keepsake = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]
