"""From tokens to logits of experts: by a matrix, or by angles. In float32 at least, also under autocast."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.errors import UsageError

__all__ = ["CosineProjection", "LinearProjection", "experts_of"]


def _wide(x_TD: Tensor) -> torch.dtype:
    """Softmax over many experts and ties between them need more than 8 bits of mantissa."""
    return torch.promote_types(x_TD.dtype, torch.float32)


class LinearProjection(nn.Module):
    """``x W^T`` and perhaps a bias.

    Args:
        dim: width of tokens.
        num_experts: logits a token.
        bias: add a learned vector.

    Examples:
        >>> logits = LinearProjection(dim=8, num_experts=4)(torch.randn(5, 8, dtype=torch.bfloat16))
        >>> logits.shape, logits.dtype
        (torch.Size([5, 4]), torch.float32)
    """

    def __init__(self, dim: int, num_experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights anew: normal, ``1/sqrt(dim)``; the bias is zero."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.shape[1]))
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits, shape ``[T, E]``."""
        dtype = _wide(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            return functional.linear(x_TD.to(dtype), self.weight.to(dtype), bias)


class CosineProjection(nn.Module):
    """Cosine between the projected token and a vector an expert, over a learned temperature.

    Args:
        dim: width of tokens.
        num_experts: logits a token.
        proj_dim: width in which angles are taken.
        temperature: at the beginning; it never falls below 0.01.

    References:
        Chi et al., "On the Representation Collapse of Sparse Mixture of Experts", NeurIPS 2022;
        Hwang et al., "Tutel: Adaptive Mixture-of-Experts at Scale", MLSys 2023 (projection to 256, the clamp).

    Examples:
        >>> projection = CosineProjection(dim=8, num_experts=4, proj_dim=16)
        >>> x = torch.randn(5, 8)
        >>> torch.allclose(projection(x), projection(8 * x))  # how long a token is does not count
        True
    """

    def __init__(self, dim: int, num_experts: int, *, proj_dim: int = 256, temperature: float = 0.5) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(proj_dim, dim))
        self.directions = nn.Parameter(torch.empty(num_experts, proj_dim))
        self.log_scale = nn.Parameter(torch.empty(1))
        self.temperature = temperature
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights anew: normal, ``1/sqrt(dim)``, and 0.01 for directions; the temperature is the first one."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.shape[1]))
        nn.init.normal_(self.directions, std=0.01)
        self.log_scale.fill_(math.log(1.0 / self.temperature))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits, shape ``[T, E]``."""
        dtype = _wide(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            projected = functional.normalize(functional.linear(x_TD.to(dtype), self.weight.to(dtype)), dim=1)
            cosines = functional.linear(projected, functional.normalize(self.directions.to(dtype), dim=1))
            return cosines * self.log_scale.to(dtype).clamp(max=math.log(100.0)).exp()


def experts_of(projection: nn.Module) -> int:
    """How many experts a projection gives logits of.

    Raises:
        UsageError: it does not say.
    """
    count = getattr(projection, "num_experts", None)
    if not isinstance(count, int):
        raise UsageError(f"{type(projection).__name__} does not say its num_experts, as a projection must")
    return count
