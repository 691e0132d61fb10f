"""What all routers share: their sizes, and the check of ``top_k``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.slots import RoutingResult

__all__ = ["Router"]


class Router(nn.Module, ABC):
    """Chooses experts for tokens.

    Attributes:
        num_experts: to choose from.
        top_k: experts a token if a call does not say; where their number varies, on average.
        takes_bias: whether ``bias`` of ``forward`` changes the choice.

    Raises:
        UsageError: sizes that make no sense.

    Examples:
        >>> import torch
        >>> class InTurn(Router):
        ...     def forward(self, x, *, top_k=None, bias=None):
        ...         index = torch.arange(len(x)).unsqueeze(1) % self.num_experts
        ...         even = x.new_full((len(x), self.num_experts), 1 / self.num_experts)
        ...         counts = torch.bincount(index.flatten(), minlength=self.num_experts)
        ...         return RoutingResult(index, even[:, :1], even.log(), even, counts, full=True)
        >>> InTurn(num_experts=2, top_k=1)(torch.randn(5, 8)).tokens_per_expert
        tensor([3, 2])
    """

    takes_bias = False

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        if num_experts < 1:
            raise UsageError(f"a router needs at least one expert, got {num_experts}")
        self.num_experts = num_experts
        self.top_k = self.checked(top_k)

    def checked(self, top_k: int | None) -> int:
        """The call's ``top_k``, or the router's own.

        Raises:
            UsageError: there are not so many experts.
        """
        chosen = self.top_k if top_k is None else top_k
        if not 1 <= chosen <= self.num_experts:
            raise UsageError(f"top_k {chosen} of {self.num_experts} experts; expected 1 to {self.num_experts}")
        return chosen

    @abstractmethod
    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """Route tokens.

        Args:
            x: shape ``[T, D]``.
            top_k: experts a token in this call; ``None``: as made.
            bias: added to scores where experts are chosen, not where they are weighted; shape ``[E]``.

        Raises:
            UsageError: there are not so many experts.
        """
