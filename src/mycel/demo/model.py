"""A small byte-level GPT: pre-norm blocks, rotary positions, SwiGLU, tied embeddings, no biases.

Shape suffixes: B batch, T positions, D width, H heads, K head width, V vocabulary (256 bytes).

References:
    Su et al., "RoFormer", 2021 (rotary positions); Shazeer, "GLU Variants Improve Transformer", 2020;
    Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017 (weight tying).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.errors import UsageError

__all__ = ["VOCABULARY", "ByteGPT", "ModelConfig"]

#: Every byte is a token.
VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a model.

    Attributes:
        width: of the residual stream.
        num_layers: transformer blocks.
        num_heads: attention heads; each ``width / num_heads`` wide, an even number.
        max_length: longest text, in bytes.

    Raises:
        UsageError: sizes that do not fit together.
    """

    width: int = 192
    num_layers: int = 4
    num_heads: int = 4
    max_length: int = 128

    def __post_init__(self) -> None:
        if min(self.width, self.num_layers, self.num_heads, self.max_length) < 1:
            raise UsageError(f"model sizes must be positive: {self}")
        if self.width % (2 * self.num_heads):
            raise UsageError(f"width {self.width} does not divide into {self.num_heads} heads of even width")

    @property
    def hidden(self) -> int:
        """Width inside the feed-forward part: 8/3 of the width, a multiple of 16."""
        return -(-8 * self.width // 48) * 16


class ByteGPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        cos_TK, sin_TK = _rotary_tables(config.max_length, config.width // config.num_heads)
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual = 0.5 / math.sqrt(2 * self.config.num_layers * self.config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            ends_in_residual = name.endswith(("attention_out.weight", "down.weight"))
            std = residual if ends_in_residual else 0.5 / math.sqrt(self.config.width)
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens_BT: ``int64`` bytes, shape ``[batch, positions]``, at most ``max_length`` positions.

        Returns:
            Shape ``[batch, positions, 256]``.

        Raises:
            UsageError: the text is too long.
        """
        length = tokens_BT.shape[1]
        if length > self.config.max_length:
            raise UsageError(f"text of {length} bytes; this model reads {self.config.max_length}")
        x_BTD = self.embedding(tokens_BT)
        cos_TK, sin_TK = self.get_buffer("cos_TK")[:length], self.get_buffer("sin_TK")[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return functional.linear(self.norm(x_BTD), self.embedding.weight)

    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(p.numel() for p in self.parameters())


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD), cos_TK, sin_TK)
        gate, up = self.gate_up(self.feed_norm(x_BTD)).chunk(2, dim=-1)
        fed_BTD: Tensor = self.down(functional.silu(gate) * up)
        return x_BTD + fed_BTD

    def _attend(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = heads.permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK = _rotate(q_BHTK, cos_TK, sin_TK), _rotate(k_BHTK, cos_TK, sin_TK)
        out_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        attended_BTD: Tensor = self.attention_out(out_BHTK.transpose(1, 2).reshape(batch, length, width))
        return attended_BTD


def _rotary_tables(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
