"""What dispatchers share: the signature of bringing tokens to their experts and back, at once or step by step."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.comm.meter import ByteMeter
from mycel.moe.slots import RoutingResult
from mycel.planning.placement import ExpertLayout

__all__ = [
    "Dispatched",
    "GroupDispatcher",
    "SteppedDispatcher",
    "Steps",
    "TokenDispatcher",
    "finish",
    "local_routing",
]

Result = TypeVar("Result")

#: Work that stops wherever an exchange is under way, so that other work can be done meanwhile.
Steps = Generator[None, None, Result]


def finish(steps: Steps[Result]) -> Result:
    """All steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stopped:
            result: Result = stopped.value
            return result


class Dispatched(NamedTuple):
    """Rows that arrived at their experts.

    Attributes:
        rows: sorted by expert, shape ``[R, D]``.
        tokens_per_expert: rows of each expert of this rank, ``int64``; they add up to at most ``R``.
        state: what the way back needs.
    """

    rows: Tensor
    tokens_per_expert: Tensor
    state: Any

    def __repr__(self) -> str:
        return brief(self)


class TokenDispatcher(ABC):
    """Brings tokens to the ranks of their experts and results back, with gradients.

    Kinds whose exchanges can be under way while other things are computed say so with ``dispatch_steps`` and
    ``combine_steps``; all ranks take these steps in the same order.

    Attributes:
        num_ranks: that the experts are divided over.
        experts: the layer's experts that this rank holds, one a place; a negative number is a place without one.
        tie: where several ranks hold an expert, what gives their parameters one gradient.
        meter: counts what is sent.
        same_tokens: all ranks have the same tokens (and one loss); otherwise each has its own.
        takes_codec: rows can be coded on the wire.

    Examples:
        >>> import torch
        >>> from mycel.moe import LinearProjection, TopKRouter, make_dispatcher
        >>> dispatcher, x = make_dispatcher(None, num_experts=4, mesh=None), torch.randn(5, 8)
        >>> arrived = dispatcher.dispatch(x, TopKRouter(LinearProjection(8, 4), top_k=2, renormalize=True)(x))
        >>> arrived.rows.shape, torch.allclose(dispatcher.combine(arrived.rows, arrived), x)  # through no experts
        (torch.Size([10, 8]), True)
    """

    same_tokens = False
    takes_codec = False
    num_ranks: int
    experts: Sequence[int]
    meter: ByteMeter
    tie: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None

    @abstractmethod
    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:
        """Tokens to their experts.

        Args:
            x_TD: tokens of this rank, shape ``[T, D]``; other ranks may have other numbers of them.
            routing: of these tokens.
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """The experts' results to their tokens.

        Args:
            rows_RD: for each of ``dispatched.rows`` what its expert made of it, shape ``[R, D]``.
            dispatched: what ``dispatch`` gave.

        Returns:
            For each token the sum of its results, by ``top_k_weights``, shape ``[T, D]``.
        """

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """``dispatch``, step by step."""
        yield from ()
        return self.dispatch(x_TD, routing)

    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """``combine``, step by step."""
        yield from ()
        return self.combine(rows_RD, dispatched)


class GroupDispatcher(TokenDispatcher):
    """One over a single group, among whose ranks experts are divided in order.

    Attributes:
        group: the ranks.
        width: experts of a rank that has its full share.
    """

    experts: range

    def over(self, num_experts: int, group: dist.ProcessGroup, meter: ByteMeter | None) -> None:
        """Set what all of this kind have."""
        layout = ExpertLayout(num_experts=num_experts, num_ranks=dist.get_world_size(group))
        self.group, self.num_ranks, self.width = group, layout.num_ranks, layout.width
        self.experts, self.meter = layout.of(dist.get_rank(group)), meter or ByteMeter()


class SteppedDispatcher(TokenDispatcher):
    """One that says its steps; all of them at once are the rest."""

    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:
        """See ``TokenDispatcher``."""
        return finish(self.dispatch_steps(x_TD, routing))

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See ``TokenDispatcher``."""
        return finish(self.combine_steps(rows_RD, dispatched))

    @abstractmethod
    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """See ``TokenDispatcher``."""

    @abstractmethod
    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """See ``TokenDispatcher``."""


def local_routing(routing: RoutingResult, experts: range) -> RoutingResult:
    """The part of a routing that falls on a range of experts, renumbered from 0; other slots are empty."""
    index_TK = routing.top_k_index
    inside_TK = (index_TK >= experts.start) & (index_TK < experts.stop)
    return routing._replace(
        top_k_index=(index_TK - experts.start).masked_fill(~inside_TK, len(experts)),
        top_k_weights=routing.top_k_weights.masked_fill(~inside_TK, 0.0),
        tokens_per_expert=routing.tokens_per_expert[experts.start : experts.stop],
        full=False,
    )
