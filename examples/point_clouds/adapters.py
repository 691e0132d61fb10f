"""A small transformer for grouped clouds, and what DAPT puts beside its frozen weights.

References:
    X. Zhou et al., "Dynamic Adapter Meets Prompt Tuning: Parameter-Efficient Transfer Learning for Point Cloud
    Analysis", CVPR 2024, sections 3.2 (dynamic adapter) and 3.3 (internal prompts).
"""

from __future__ import annotations

import torch
from clouds import Clouds
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        """``x`` is normalised already, ``[clouds, tokens, width]``."""
        return self.out(mixed(self.qkv(x), self.heads))

    def feed(self, x: Tensor) -> Tensor:
        """``x`` is normalised already."""
        made: Tensor = self.down(functional.gelu(self.up(x)))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """``[clouds, tokens, width]``."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


def mixed(qkv: Tensor, heads: int) -> Tensor:
    """What tokens see of each other, from queries, keys and values side by side."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CloudNet(nn.Module):
    """Groups become tokens, with a class token before them."""

    def __init__(self, kinds: int, *, width: int = 96, blocks: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.width = width
        self.of_point = nn.Sequential(nn.Linear(3, width // 2), nn.GELU(), nn.Linear(width // 2, width))
        self.of_place = nn.Sequential(nn.Linear(3, width // 2), nn.GELU(), nn.Linear(width // 2, width))
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, kinds)

    def forward(self, clouds: Clouds) -> Tensor:
        """Logits, ``[clouds, kinds]``."""
        tokens = self.of_point(clouds.groups).amax(2) + self.of_place(clouds.centres)
        x = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        made: Tensor = self.head(torch.cat([x[:, 0], x[:, 1:].amax(1)], 1))
        return made


class ScaleAndShift(nn.Module):
    """Each feature of its own; at first as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]``."""
        return x * self.scale + self.shift


class DynamicAdapter(nn.Module):
    """``A(x) = relu(x w) up(gelu(down(LN(x))))``: how much it adds depends on the token. At first nothing."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(width), nn.Linear(width, rank), nn.Linear(rank, width)
        self.weigh = nn.Linear(width, 1)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        nn.init.ones_(self.weigh.bias)  # with w alone, half of all tokens would have no gradient

    def forward(self, x: Tensor) -> Tensor:
        """``[clouds, tokens, width]``."""
        made: Tensor = functional.relu(self.weigh(x)) * self.up(functional.gelu(self.down(self.norm(x))))
        return made


class AdaptedBlock(nn.Module):
    """A frozen block with a dynamic adapter beside its feed-forward part, and an internal prompt behind it.

    The prompt is the mean of what the adapter adds; it stands behind the class token, so that each block makes the
    sequence longer by one.
    """

    def __init__(self, block: Block, width: int, rank: int) -> None:
        super().__init__()
        self.block = block
        self.adapter, self.prompt = DynamicAdapter(width, rank), ScaleAndShift(width)
        self.after_attention_norm, self.after_out = ScaleAndShift(width), ScaleAndShift(width)
        self.after_qkv = ScaleAndShift(3 * width)
        self.after_feed_norm, self.after_down = ScaleAndShift(width), ScaleAndShift(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[clouds, tokens, width]`` to ``[clouds, tokens + 1, width]``."""
        block = self.block
        qkv = self.after_qkv(block.qkv(self.after_attention_norm(block.attention_norm(x))))
        x = x + self.after_out(block.out(mixed(qkv, block.heads)))
        added = self.adapter(x)
        x = x + self.after_down(block.feed(self.after_feed_norm(block.feed_norm(x)))) + added
        prompt = self.prompt(functional.gelu(added).mean(1, keepdim=True))
        return torch.cat([x[:, :1], prompt, x[:, 1:]], 1)


def adapt(model: CloudNet, rank: int) -> CloudNet:
    """Freeze everything but the head, and put adapters beside the blocks; changes the model in place.

    Args:
        model: pre-trained.
        rank: of the adapters; the paper takes 72 of 384.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    model.blocks = nn.ModuleList(AdaptedBlock(block, model.width, rank) for block in model.blocks)
    return model
