"""What the examples share: options, text to train on, a small transformer, the loop, and what a run prints.

The text is the source of Python's standard library, as bytes, so that nothing needs to be downloaded. Shape suffixes:
B batch, T positions, D width, H heads, K head width.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from mycel.demo.corpus import load_corpus, sample_batch

#: Every byte is a token.
VOCABULARY = 256
#: Bytes of text that are read.
TEXT_BYTES = 2 << 20
_BARS = " ▁▂▃▄▅▆▇█"


def parse_arguments(about: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of every example."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4, help="windows of text a rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes a window")
    parser.add_argument("--width", type=int, default=128, help="of the model; a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args(arguments)


def main(train: Callable[[argparse.Namespace], list[float]], about: str | None) -> None:
    """Make the process group, train, take it down. ``torchrun`` or ``mycel emulate`` has set RANK and the rest."""
    options = parse_arguments(about)
    torch.set_num_threads(1)
    if options.backend == "mycel":
        import mycel.runtime  # noqa: F401  (registers the backend)
    dist.init_process_group(options.backend)
    train(options)
    dist.destroy_process_group()


class Block(nn.Module):
    """Attention and a feed-forward part. The number of heads follows from the width of what ``q`` gives, so that a
    rank may hold a part of them."""

    def __init__(self, width: int, head_width: int = 32) -> None:
        super().__init__()
        self.head_width = head_width
        self.attention_norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            made.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for made in (self.q(normed_BTD), self.k(normed_BTD), self.v(normed_BTD))
        )
        seen_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(seen_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.gelu(self.up(self.feed_norm(x_BTD))))


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.of_byte, self.of_position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.of_byte(tokens_BT) + self.of_position(torch.arange(tokens_BT.shape[1]))


def transformer(options: argparse.Namespace) -> nn.Sequential:
    """Embedding, blocks, head, one after the other; the same on every rank."""
    torch.manual_seed(options.seed)
    blocks = [Block(options.width) for _ in range(options.layers)]
    head = nn.Sequential(nn.LayerNorm(options.width), nn.Linear(options.width, VOCABULARY, bias=False))
    model = nn.Sequential(Embedding(options.width, options.length), *blocks, head)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats a byte."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW as all examples use it."""
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, foreach=False)


def fit(
    options: argparse.Namespace, step: Callable[[Tensor, Tensor], Tensor], *, reader: int | None = None
) -> list[float]:
    """Train, and let rank 0 print how it goes.

    Args:
        step: one optimizer step on inputs and targets ``[B, T]``; returns the loss.
        reader: ranks with the same number read the same text; by default each rank reads its own.

    Returns:
        The loss of each step, averaged over the ranks.
    """
    text = load_corpus(max_bytes=TEXT_BYTES).train
    which = dist.get_rank() if reader is None else reader
    generator = torch.Generator().manual_seed(options.seed + 1009 * which)
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(1, options.steps + 1):
        inputs, targets = sample_batch(text, options.batch_size, options.length, generator)
        begin = time.perf_counter()
        loss = step(inputs, targets)
        seconds.append(time.perf_counter() - begin)
        losses.append(average(loss))
        say(f"step {number:3}   loss {losses[-1]:.4f}   {seconds[-1] * 1e3:7.1f} ms")
    summarise(options, losses, seconds)
    return losses


def average(loss: Tensor) -> float:
    """Mean over all ranks."""
    total = loss.detach().double().reshape(1).clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def summarise(options: argparse.Namespace, losses: Sequence[float], seconds: Sequence[float]) -> None:
    """The loss curve in one line, and the median step after the first few."""
    settled = sorted(seconds[3:] or seconds)
    say(f"loss   {losses[0]:.4f} {curve(losses)} {losses[-1]:.4f}")
    say(
        f"step   median {statistics.median(settled) * 1e3:.1f} ms, slowest {settled[-1] * 1e3:.1f} ms, over "
        f"{dist.get_world_size()} ranks of {options.backend}"
    )


def curve(values: Sequence[float]) -> str:
    """Bars, the highest for the largest value.

    Examples:
        >>> curve([4.0, 3.0, 2.0, 1.0, 0.0])
        '█▆▄▂ '
    """
    low, high = min(values), max(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * top) if high > low else top] for value in values)


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)
