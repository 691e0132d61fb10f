"""A small language model over bytes that is a chain of modules: embedding, blocks, norm, head.

Shape suffixes: B batch, T positions, D width, H heads, K head width, V vocabulary (256 bytes).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Every byte is a token.
VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model; as they are given, it is the one that ``mycel plan search --model tiny`` knows.

    Attributes:
        width: of the residual stream; a multiple of the head width.
        head_width: of attention.
        num_layers: blocks.
        length: of the longest text, in bytes.
        vocabulary: rows of the head; more than 256 make it heavy and learn nothing.
    """

    width: int = 64
    head_width: int = 16
    num_layers: int = 12
    length: int = 128
    vocabulary: int = VOCABULARY


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.of_byte = nn.Embedding(sizes.vocabulary, sizes.width)
        self.of_position = nn.Embedding(sizes.length, sizes.width)

    def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            return self.of_byte(tokens_BT) + self.of_position.weight[: tokens_BT.shape[1]]
        summed_BTD: Tensor = self.of_byte(tokens_BT) + self.of_position(position_ids)
        return summed_BTD


class Block(nn.Module):
    """Attention and a feed-forward part. How many heads there are follows from the width of what ``q`` gives, so
    that a rank may hold some of them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head_width = sizes.width, sizes.head_width
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            made.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for made in (self.q(normed_BTD), self.k(normed_BTD), self.v(normed_BTD))
        )
        seen_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(seen_BHTK.transpose(1, 2).flatten(2))
        fed_BTD: Tensor = x_BTD + self.down(functional.gelu(self.up(self.feed_norm(x_BTD))))
        return fed_BTD


class TinyGPT(nn.Module):
    """Predicts the next byte at every position.

    Args:
        sizes: of the model.
        seed: of the initial values.
    """

    def __init__(self, sizes: Sizes, *, seed: int = 1234) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.embedding = Embedding(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1 and not parameter.is_meta:
                nn.init.normal_(parameter, std=0.02, generator=made)

    def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits, shape ``[B, T, V]``.

        Args:
            tokens_BT: of whole texts, or of some places in them.
            position_ids: which places, shape ``[B or 1, T]``; ``None``: all, from 0.
        """
        x_BTD = self.embedding(tokens_BT, position_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV
