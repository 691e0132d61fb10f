"""A byte-level language model of linear attention, localized filtering, and softmax attention in every fourth layer.

It is written as for one process. That its tokens are spread over ranks only the three operations know that look along
the sequence; a context tells them. Shape suffixes: B batch, T tokens of this rank, D width, H heads, K head width, V
vocabulary (256 bytes).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.sequence import LocalizedFiltering, SequenceContext, attention, linear_attention

#: Every byte is a token.
VOCABULARY = 256
#: One layer of so many attends to all tokens by softmax; the others hold a state.
SOFTMAX_EVERY = 4
#: By what normed queries are multiplied at first. The one key of 8,192 that meets a query then has 0.97 of the
#: weight, where others meet it by chance. With half as much it has 0.16, but of 512 keys 0.75: after 100 steps such a
#: model is 0.07 nats worse, and one that sees 512 bytes as good.
SHARPNESS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model.

    Attributes:
        width: of the residual stream; a multiple of three and of the head width.
        head_width: of attention.
        num_layers: blocks.
        is_filtered: queries and keys are made of filtered tokens. Where they are not, feed-forward parts are wider,
            so that both kinds of model have as many weights.
    """

    width: int = 96
    head_width: int = 32
    num_layers: int = 4
    is_filtered: bool = True

    @property
    def hidden(self) -> int:
        """Width of feed-forward parts; the filtering's two convolutions have the weights of 2/3 ``width`` of it."""
        return 2 * self.width + (0 if self.is_filtered else 2 * self.width // 3)


class Block(nn.Module):
    """Attention of one kind or the other, and a feed-forward part."""

    def __init__(self, sizes: Sizes, *, is_softmax: bool) -> None:
        super().__init__()
        width, self.head_width, self.is_softmax = sizes.width, sizes.head_width, is_softmax
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.filtering = LocalizedFiltering(width) if sizes.is_filtered else None
        self.qk, self.v = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if is_softmax:
            # Normed as in Qwen3 (arXiv 2505.09388, section 2): else no key stands out among thousands at first.
            self.q_norm, self.k_norm = nn.RMSNorm(self.head_width), nn.RMSNorm(self.head_width)
            nn.init.constant_(self.q_norm.weight, SHARPNESS)
        else:
            self.decay, self.head_norm = nn.Linear(width, width // self.head_width), nn.RMSNorm(self.head_width)
            # From a head that forgets within a dozen tokens to one that remembers thousands.
            self.decay.bias.data = torch.linspace(2.0, 8.0, width // self.head_width)
        self.up, self.down = (
            nn.Linear(width, 2 * sizes.hidden, bias=False),
            nn.Linear(sizes.hidden, width, bias=False),
        )

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        near_BTD = normed_BTD if self.filtering is None else self.filtering(normed_BTD, context)
        q_BHTK, k_BHTK, v_BHTK = (
            made_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for made_BTD in (*self.qk(near_BTD).chunk(2, -1), self.v(normed_BTD))
        )
        if self.is_softmax:
            seen_BHTK = attention(self.q_norm(q_BHTK), self.k_norm(k_BHTK), v_BHTK, context)
        else:
            decay_BHT, scale = functional.logsigmoid(self.decay(normed_BTD)).mT, self.head_width**-0.5
            q_BHTK, k_BHTK = positive(q_BHTK), positive(k_BHTK)
            seen_BHTK = linear_attention(q_BHTK, k_BHTK, v_BHTK, context, decay=decay_BHT, scale=scale)
            seen_BHTK = self.head_norm(seen_BHTK)
        x_BTD = x_BTD + self.out(seen_BHTK.transpose(1, 2).flatten(2))
        gate_BTF, up_BTF = self.up(self.feed_norm(x_BTD)).chunk(2, -1)
        fed_BTD: Tensor = x_BTD + self.down(functional.silu(gate_BTF) * up_BTF)
        return fed_BTD


class Hybrid(nn.Module):
    """Predicts the byte after each token of this rank. Initial values follow from the seed, alike on all ranks."""

    def __init__(self, sizes: Sizes, *, seed: int = 1234) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, sizes.width)
            kinds = [layer % SOFTMAX_EVERY == SOFTMAX_EVERY - 1 for layer in range(sizes.num_layers)]
            self.blocks = nn.ModuleList(Block(sizes, is_softmax=kind) for kind in kinds)
            self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY, bias=False)
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    usual = 0.5 * parameter[0].numel() ** -0.5
                    nn.init.normal_(parameter, std=1.0 if name.startswith("embedding") else usual * _share(name))

    def forward(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        """Logits, shape ``[B, T, V]``."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, context)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def positive(x: Tensor) -> Tensor:
    """Katharopoulos et al. 2020 (arXiv 2006.16236, eq. 7).

    Weights of either sign cancel, what is left of them is normed, and each step makes rounding ten times larger.
    """
    return functional.elu(x) + 1


def _share(name: str) -> float:
    """Blocks add little at first, and all bytes are about as likely: else steps part what rounding told apart."""
    return 0.02 if name.startswith("head") else 0.1 if "out." in name or "down." in name else 1.0


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats of each token, shape ``[tokens]``."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
