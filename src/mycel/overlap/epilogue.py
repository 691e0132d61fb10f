"""What is done to rows of a sum where they arrive: bias, dropout, residual, norm; and its way back.

Each of these looks at one row, so that slices and tiles of rows give what the whole array would. Masks of dropout are
drawn as torch draws them for the unfused program, for all rows at once, so that the same generator gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["Epilogue", "Mask", "Norm", "draw_mask", "norm_backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the columns of each row.

    Attributes:
        kind: which.
        weight: shape ``[columns]``; ``None``: none.
        bias: shape ``[columns]``, of a layer norm; ``None``: none.
        eps: added to the variance or mean square; ``None``: as torch has it.

    Raises:
        UsageError: a kind that does not exist, or a bias of a norm that has none.

    Examples:
        >>> Norm.of(nn.LayerNorm(8)).kind, Norm.of(nn.RMSNorm(8)).bias is None
        ('layer_norm', True)
    """

    kind: Literal["layer_norm", "rms_norm"]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.kind not in ("layer_norm", "rms_norm"):
            raise UsageError(f"unknown norm {self.kind!r}; known: layer_norm, rms_norm")
        if self.kind == "rms_norm" and self.bias is not None:
            raise UsageError("rms_norm has no bias; give it as the operator's own, or take layer_norm")

    @staticmethod
    def of(module: nn.Module) -> Norm:
        """That of a module over the last dimension.

        Args:
            module: ``torch.nn.LayerNorm`` or ``torch.nn.RMSNorm``.

        Raises:
            UsageError: another module, or a norm over several dimensions.
        """
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            raise UsageError(f"{type(module).__name__} is no norm of rows: give torch.nn.LayerNorm or RMSNorm")
        if len(module.normalized_shape) != 1:
            raise UsageError(f"a norm over {len(module.normalized_shape)} dimensions; rows have one")
        if isinstance(module, nn.LayerNorm):
            return Norm(kind="layer_norm", weight=module.weight, bias=module.bias, eps=module.eps)
        return Norm(kind="rms_norm", weight=module.weight, eps=module.eps)

    def __call__(self, rows: Tensor) -> Tensor:
        """Of rows, shape ``[rows, columns]``."""
        shape = rows.shape[-1:]
        if self.kind == "layer_norm":
            eps = 1e-5 if self.eps is None else self.eps
            return functional.layer_norm(rows, shape, self.weight, self.bias, eps)
        return functional.rms_norm(rows, shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which elements dropout keeps.

    Attributes:
        kept: shape ``[rows, columns]``, of ``bool``.
        scale: what kept elements are multiplied by, a number of the elements' type.
    """

    kept: Tensor
    scale: Tensor

    def apply_(self, rows: Tensor, begin: int, stop: int) -> Tensor:
        """Drop elements of some rows, in place."""
        return rows.mul_(self.kept[begin:stop]).mul_(self.scale)


def draw_mask(
    like: Tensor, rows: int, columns: int, dropout: float, generator: torch.Generator | None
) -> Mask | None:
    """A mask from the generator's state, as ``torch.nn.functional.dropout`` takes it on a processor.

    Args:
        like: of the type and device.
        rows, columns: of what is dropped.
        dropout: share of elements that are.
        generator: torch's own if not given.
    """
    if not 0 <= dropout <= 1:
        raise UsageError(f"dropout is {dropout!r}: a share from 0 to 1")
    if not dropout or not rows * columns:
        return None
    drawn = like.new_empty(rows, columns).bernoulli_(1 - dropout, generator=generator)
    scale = like.new_ones(()).div_(1 - dropout) if dropout < 1 else like.new_zeros(())
    return Mask(kept=drawn.bool(), scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """All of it, in this order; each part may be missing.

    Attributes:
        bias: added to each row.
        mask: of dropout.
        residual: rows that are added.
        norm: at the end.
        sums: gets the rows before the norm, with their first and last, if there is one.
    """

    bias: Tensor | None
    mask: Mask | None
    residual: Tensor | None
    norm: Norm | None
    sums: list[tuple[int, int, Tensor]]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return self.bias is None and self.mask is None and self.residual is None and self.norm is None

    def __call__(self, rows: Tensor, begin: int, stop: int) -> None:
        """Change rows in place; they are those from ``begin`` to ``stop`` of mask and residual."""
        if self.bias is not None:
            rows.add_(self.bias)
        if self.mask is not None:
            self.mask.apply_(rows, begin, stop)
        if self.residual is not None:
            rows.add_(self.residual[begin:stop])
        if self.norm is not None:
            self.sums.append((begin, stop, rows.clone()))
            rows.copy_(self.norm(rows))


def norm_backward(norm: Norm, sums: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the rows before a norm, of its weight and of its bias; the last two of these rows alone.

    Args:
        norm: computed again, which is cheaper than keeping what torch keeps of every tile.
        sums: the rows before it.
        gradient: of the rows behind it.
    """
    with torch.enable_grad():
        rows = sums.detach().requires_grad_()
        weight = None if norm.weight is None else norm.weight.detach().requires_grad_()
        bias = None if norm.bias is None else norm.bias.detach().requires_grad_()
        result = Norm(kind=norm.kind, weight=weight, bias=bias, eps=norm.eps)(rows)
        wanted = [t for t in (rows, weight, bias) if t is not None]
        found = list(torch.autograd.grad(result, wanted, gradient.to(result.dtype)))
    return found.pop(0), None if weight is None else found.pop(0), None if bias is None else found.pop(0)
