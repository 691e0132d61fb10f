"""MiniMax's lightning attention over ranks: linear attention with one constant decay a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.sequence.linear import linear_attention
from mycel.sequence.models.active import here
from mycel.sequence.models.stand_in import with_stand_in, without_stand_in

__all__ = ["lightning_forward"]


def lightning_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``forward`` of ``MiniMaxLightningAttention``, whose state comes from the ranks before.

    Args:
        self: the layer.
        hidden_states: shape [batch, tokens here, width].
        position_embeddings: not used, as in the layer.
        attention_mask: none.
        past_key_values: none.

    References:
        Z. Qin et al., "Lightning Attention-2", arXiv 2401.04658; the layer is MiniMax-Text-01's.
    """
    if past_key_values is not None:
        raise UsageError("a cache of states over ranks is not there: close() the handle to generate")
    if (active := here()) is None:
        raise UsageError("MiniMaxLightningAttention computes outside of the model that apply was called on")
    _, context = active
    rows, tokens, _ = hidden_states.shape
    projected = self.act_fn(self.qkv_proj(hidden_states)).reshape(rows, tokens, self.num_attention_heads, -1)
    query, key, value = projected.chunk(3, dim=3)
    q, k, v = (without_stand_in(x, context, 1).transpose(1, 2) for x in (query, key, value))
    seen = linear_attention(q, k, v, context, decay=-self.slope_rate.flatten().to(v.dtype))
    seen = with_stand_in(seen, context, 2).transpose(1, 2)
    seen = self.norm(seen.reshape(rows, tokens, self.num_attention_heads * self.head_dim))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * seen), None
