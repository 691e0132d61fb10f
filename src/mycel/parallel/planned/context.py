"""Context parallelism: every rank has some tokens of each sequence, and what mixes tokens goes over the ranks.

One layout serves the whole training, since a plan's sequences have one length. All ranks have equally many tokens, so
that a mean over those here is a part of the whole mean that weighs as much as every other.

References:
    Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024; Zhu et al.,
    "ring-flash-attention" (early and late tokens together, so that causal work is even).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.planning.sequence import Layout, contiguous, zigzag
from mycel.sequence import AppliedSequence, SequenceContext
from mycel.sequence import apply as apply_sequence

__all__ = ["SharedSequences", "layout_for"]


def layout_for(seq: int, numbers: Sequence[int]) -> Layout:
    """Who has which tokens: an early and a late run each, or one run where these are not of equal lengths.

    Args:
        seq: tokens of a sequence, a multiple of the number of ranks.
        numbers: of each member of the group in the plan's order; chains of a pipeline go by these.

    Examples:
        >>> [layout_for(8, (1, 0)).positions(member).tolist() for member in range(2)]
        [[2, 3, 4, 5], [0, 1, 6, 7]]
        >>> [layout_for(6, (0, 1)).positions(member).tolist() for member in range(2)]
        [[0, 1, 2], [3, 4, 5]]
    """
    count = len(numbers)
    made = zigzag([seq], count) if seq % (2 * count) == 0 else contiguous([seq], count)
    return replace(made, ranks=tuple(made.ranks[number] for number in numbers))


class SharedSequences:
    """A model whose ranks have some tokens of each sequence, until it is closed.

    Args:
        model: the whole, before it is cut into stages.
        seq: tokens of a sequence.
        group: of the ranks that share them.
        numbers: of its members in the plan's order.
        device: where stages compute.

    Raises:
        UsageError: the model has nothing that mixes tokens, or something that is not understood.
        MismatchError: ranks have other layouts.
    """

    def __init__(
        self, model: nn.Module, seq: int, group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device
    ) -> None:
        self._applied: AppliedSequence = apply_sequence(model, group)
        self._context = SequenceContext(layout_for(seq, numbers), group)
        self._group = group
        self._context.agree(device)
        #: For every stage's forward: where in their sequence the tokens here are, shape (1, tokens here).
        self.options: dict[str, Any] = {
            "position_ids": self.own(torch.arange(seq, device=device)[None], "the positions")
        }

    def own(self, whole: Tensor, what: str) -> Tensor:
        """The tokens of this rank.

        Args:
            whole: shape (sequences, tokens, ...).
            what: it is, for the message.

        Raises:
            UsageError: it has no or other tokens than the plan's sequences.
        """
        seq = self._context.layout.num_tokens
        if whole.dim() < 2 or whole.shape[1] != seq:
            raise UsageError(
                f"the plan shares sequences of {seq} tokens over cp={self._context.num_ranks} ranks, and {what} has "
                f"shape {tuple(whole.shape)}: give [sequences, {seq}, ...], or search with --seq and --limit cp=1"
            )
        found: Tensor = self._applied.shard_by(self._context, whole)
        return found

    def own_option(self, value: Any) -> Any:
        """Of something for the model's forward the tokens of this rank, where it has any.

        Args:
            value: a tensor with as many columns as a sequence has tokens is divided, everything else stays.
        """
        seq = self._context.layout.num_tokens
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seq:
            return self.own(value, "an argument")
        return value

    def at_work(self, module: nn.Module) -> AbstractContextManager[None]:
        """As of ``AppliedSequence``."""
        return self._applied.at_work(module)

    @property
    def sent_bytes(self) -> int:
        """By this rank so far, for what mixes tokens."""
        return self._context.meter.total()

    def close(self) -> None:
        """Give the model back, and the group."""
        self._applied.close()
        dist.destroy_process_group(self._group)
