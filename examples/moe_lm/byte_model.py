"""A small byte-level language model whose feed-forward parts are dense, or mixtures of experts.

Shape suffixes: B batch, T positions, D width, H heads, K head width, V vocabulary (256 bytes).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.moe import ExpertParallel, MoE, SharedExpert, SwitchLoss

#: Every byte is a token.
VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model.

    Attributes:
        width: of the residual stream; a multiple of the head width.
        head_width: of attention.
        num_layers: blocks.
        length: bytes a text.
        num_experts: of a mixture.
        expert_hidden: width inside an expert.
        top_k: experts a token.
    """

    width: int = 64
    head_width: int = 16
    num_layers: int = 2
    length: int = 64
    num_experts: int = 8
    expert_hidden: int = 64
    top_k: int = 2

    @property
    def dense_hidden(self) -> int:
        """Width of the dense part with as many multiplications a token as experts and their router, rounded up.

        A unit of width costs ``3 D`` multiplications in a SwiGLU network, the router costs ``D`` for each expert.
        """
        return self.top_k * self.expert_hidden + -(-self.num_experts // 3)


def dense(sizes: Sizes) -> nn.Module:
    """A feed-forward part that every byte passes."""
    return SharedExpert(sizes.width, sizes.dense_hidden)


def experts(sizes: Sizes, parallel: ExpertParallel) -> MoE:
    """A feed-forward part of experts."""
    form = (sizes.width, sizes.expert_hidden, sizes.num_experts, sizes.top_k)
    return MoE(*form, balancing=SwitchLoss(0.01), parallel=parallel)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, sizes: Sizes, feed: nn.Module) -> None:
        super().__init__()
        width = sizes.width
        self.head_width = sizes.head_width
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = feed

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x_BTD)).unflatten(-1, (3, -1, self.head_width))
        q_BHTK, k_BHTK, v_BHTK = heads.permute(2, 0, 3, 1, 4)
        seen_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(seen_BHTK.transpose(1, 2).flatten(2))
        fed_BTD: Tensor = x_BTD + self.feed(self.feed_norm(x_BTD))
        return fed_BTD


class ByteModel(nn.Module):
    """Predicts the next byte at every position.

    Everything outside feed-forward parts follows from the seed alone, experts follow from it by their number: models
    that differ in exchange or codec begin alike, on any number of ranks.

    Args:
        sizes: of the model.
        feed: makes the feed-forward part of a block.
        seed: of the initial values.
    """

    def __init__(self, sizes: Sizes, feed: Callable[[], nn.Module], *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.of_byte = nn.Embedding(VOCABULARY, sizes.width)
        self.of_position = nn.Embedding(sizes.length, sizes.width)
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY, bias=False)
        blocks = []
        for number in range(sizes.num_layers):
            torch.manual_seed(seed + 1 + number)
            blocks.append(Block(sizes, feed()))
        self.blocks = nn.ModuleList(blocks)
        for embedding in (self.of_byte, self.of_position):
            nn.init.normal_(embedding.weight, std=0.1, generator=torch.Generator().manual_seed(seed))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits, shape ``[B, T, V]``."""
        x_BTD = self.of_byte(tokens_BT) + self.of_position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def loss_of(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats a byte."""
    return functional.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
