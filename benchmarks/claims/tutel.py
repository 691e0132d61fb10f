"""What Tutel's layer is on a CPU beside this one: its published padded design, reimplemented, in the same run.

    python benchmarks/claims/tutel.py            # a minute; replaces its lines and the table in the page of claims
    python benchmarks/claims/tutel.py --quick    # fewer rounds, nothing recorded

Tutel's published layer pads: tokens are encoded into a buffer ``[E, C, D]``, experts are two batched products, and
the buffer is decoded. "Dropless" has C = the largest load (its capacity factor 0), "factor 1.25" a fixed C, which
drops tokens and so computes less and something else. The encode is sparse (one row copied for every slot, as its fast
kernels do); "one-hot" encodes and decodes by products with a mask, as GShard's formulation, which Tutel replaced.
``grouped_mm`` is the formulation that Hugging Face's models use. Steps are a forward and a backward pass of the
Qwen3-30B-A3B shape with widths divided by 8, float32, one thread; a ratio is the median over rounds of times in the
same round. None of Tutel's code is run here; its own kernels for CPUs have not been compared.

References:
    Hwang et al., "Tutel: Adaptive Mixture-of-Experts at Scale", MLSys 2023 (arXiv 2206.03382).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from moe_cpu import SHAPES, grouped_mm, padded, step, swiglu
from moe_ranks import middle
from mycel.bench.measurement import describe_hardware
from mycel.moe import CapacityPolicy, MoE, RoutingResult
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "tutel.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_claims.md"
SHAPE = "qwen3/8"


def fixed_capacity(x: Tensor, routing: RoutingResult, up: Tensor, down: Tensor, factor: float = 1.25) -> Tensor:
    """Padded products with room for so many times the mean load; what does not fit is dropped."""
    tokens, slots = routing.top_k_index.shape
    experts = up.shape[0]
    capacity = slots * max(1, int(factor * -(-tokens // experts)))
    kept = CapacityPolicy(factor=factor).apply(routing, top_k=slots)
    expert = kept.top_k_index.reshape(-1)
    used = expert < experts
    chosen = functional.one_hot(expert, experts + 1)
    place = (chosen.cumsum(0) - 1).gather(1, expert.unsqueeze(1)).squeeze(1)
    cell = torch.where(used, expert * capacity + place, experts * capacity)  # one more for what is dropped
    token = torch.arange(tokens).repeat_interleave(slots)
    buffer = x.new_zeros(experts * capacity + 1, x.shape[1]).index_copy(0, cell, x[token])
    z = torch.bmm(buffer[:-1].view(experts, capacity, -1), up.transpose(1, 2))
    out = torch.bmm(swiglu(z), down.transpose(1, 2)).view(experts * capacity, -1)
    out = torch.cat([out, out.new_zeros(1, out.shape[1])])
    rows = out[cell] * kept.top_k_weights.reshape(-1).unsqueeze(1).to(x.dtype)
    return rows.view(tokens, slots, -1).sum(1)


def one_hot(x: Tensor, routing: RoutingResult, up: Tensor, down: Tensor) -> Tensor:
    """Dropless, encoded and decoded by products with a mask ``[T, E * C]``."""
    tokens, slots = routing.top_k_index.shape
    experts, capacity = up.shape[0], int(routing.tokens_per_expert.max())
    expert = routing.top_k_index.reshape(-1)
    place = (functional.one_hot(expert, experts).cumsum(0) - 1).gather(1, expert.unsqueeze(1)).squeeze(1)
    cell = (expert * capacity + place).view(tokens, slots)
    weights = routing.top_k_weights.to(x.dtype)
    mask = x.new_zeros(tokens, experts * capacity).scatter(1, cell, weights)
    buffer = (mask.detach() != 0).to(x.dtype).t() @ x
    z = torch.bmm(buffer.view(experts, capacity, -1), up.transpose(1, 2))
    return mask @ torch.bmm(swiglu(z), down.transpose(1, 2)).view(experts * capacity, -1)


def measure(rounds: int) -> list[dict[str, Any]]:
    tokens, dim, hidden, experts, top_k = SHAPES[SHAPE]
    torch.manual_seed(0)
    layer = MoE(dim, hidden, experts, top_k)
    up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    x = torch.randn(tokens, dim, requires_grad=True)
    factor = torch.randn(tokens, dim)
    formulations = {
        "grouped_mm, as Hugging Face's models": grouped_mm,
        "Tutel's design, dropless": padded,
        "Tutel's design, factor 1.25, drops": fixed_capacity,
        "one-hot encode, dropless": one_hot,
    }
    ways: dict[str, Any] = {"mycel": layer}
    for name, way in formulations.items():
        ways[name] = lambda x, way=way: way(x, layer.router(x), up, down)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        first: list[Tensor] = []
        for name, way in ways.items():
            if name.startswith("one-hot") and turn > 2:
                continue  # slow, and not close
            taken, results = step(way, layer, x, factor)
            first = first or results
            if "drops" not in name and any(
                (a - b).norm() > 1e-4 * a.norm() for a, b in zip(first, results, strict=True)
            ):
                raise SystemExit(f"{name} computes something else")
            if turn:
                seconds[name].append(taken)
    return [
        {"way": name, "rounds": len(taken), "median_s": middle(taken),
         "ratio": middle([t / own for t, own in zip(taken, seconds["mycel"], strict=False)])}
        for name, taken in seconds.items()
    ]  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    rows = [(s["way"], f"{1e3 * s['median_s']:.0f}", f"{s['ratio']:.2f}", s["rounds"]) for s in lines]
    return markdown(("way", "ms a step", "of mycel's, same round", "rounds"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [{**s, "hardware": describe_hardware(), **stamp()} for s in measure(3 if options.quick else 15)]
    print(table(lines))
    if not options.quick:
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, lines)
        write_section(PAGE, "tutel", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
