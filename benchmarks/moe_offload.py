"""Decoding with experts in far memory behind an emulated link: latency a token and experts near, by fetch policy.

    python benchmarks/moe_offload.py               # 12 blocks of 16 experts, one token at a time
    python benchmarks/moe_offload.py --ratio 2     # a link that takes twice as long as a block computes

A stack of blocks decodes one token at a time: attention over a cache of keys and values, then experts. The link is
``mycel.moe.memory.EmulatedLink``, a thread that copies and takes as long as the link would. Its speed is set in the
same run, so that the active experts of a block take ``--ratio`` times as long as a block computes with everything
near. All policies run the same pre-gated model and give the same output (checked); they take turns token by token,
and a figure is the median over tokens. The layer's own products for stacked experts are in the table too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.bench.measurement import describe_hardware
from mycel.moe import MoE
from mycel.moe.memory import EmulatedLink, FetchPolicy, Offload, Ring, make_fetch_policy, pre_gate
from record import markdown


@lru_cache(maxsize=64)
def cache(place: int, heads: int, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a block's past tokens, the same for all models: they are only read."""
    generator = torch.Generator().manual_seed(place)
    keys, values = torch.randn(2, heads, context, 64, generator=generator)
    return keys, values


class DecodeBlock(nn.Module):
    """Attention of new tokens over a cache that stands for what came before, then experts."""

    def __init__(self, place: int, dim: int, hidden: int, experts: int, top_k: int, context: int) -> None:
        super().__init__()
        self.heads = dim // 64
        self.attention_norm, self.norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.keys, self.values = cache(place, self.heads, context)
        self.moe = MoE(dim, hidden, experts, top_k)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.attention_norm(x)).view(x.shape[0], self.heads, 64).transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(q[None], self.keys[None], self.values[None])[0]
        x = x + self.out(mixed.transpose(0, 1).reshape(x.shape))
        return x + self.moe(self.norm(x))


def stack(*, blocks: int, dim: int, hidden: int, experts: int, top_k: int, context: int, seed: int = 0) -> nn.Module:
    """Decoding blocks with random weights, pre-gated."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(DecodeBlock(place, dim, hidden, experts, top_k, context) for place in range(blocks))
    ).eval()
    pre_gate(model)
    return model


def seconds_of(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, Tensor]:
    begin = time.perf_counter()
    y = run(x)
    return time.perf_counter() - begin, y


@torch.inference_mode()
def measure(
    make: Callable[[], nn.Module],
    policies: dict[str, FetchPolicy],
    *,
    ratio: float,
    steps: int,
    tokens: int = 1,
    width: int,
) -> list[dict[str, Any]]:
    """A row a policy.

    Args:
        make: the same pre-gated model at every call.
        policies: by name; the first one is what the others are compared with.
        ratio: time of a block's active experts on the link over the time of a block with everything near.
        steps: passes that are measured.
        tokens: in each pass.
        width: of tokens.
    """
    plain = make()
    xs = [torch.randn(tokens, width, generator=torch.Generator().manual_seed(n)) for n in range(steps + 3)]
    layers = [m for m in plain.modules() if isinstance(m, MoE)]
    active: list[int] = []
    hooks = [
        layer.router.register_forward_hook(lambda m, i, o: active.append(int((o.tokens_per_expert > 0).sum())))
        for layer in layers
    ]
    wanted = [plain(x) for x in xs]
    for hook in hooks:
        hook.remove()
    with ExitStack() as cleanup:
        fast = EmulatedLink(bandwidth_gbps=1e3)
        cleanup.callback(fast.close)
        near = make()
        cleanup.enter_context(Offload(near, fast, "resident"))
        block_s = float(np.median([seconds_of(near, x)[0] for x in xs])) / len(layers)
        expert_bytes = sum(p[0].numel() * p.element_size() for p in layers[0].experts.parameters())
        mean_active = sum(active) / len(active)
        gbps = mean_active * expert_bytes / (ratio * block_s) / 1e9
        runs: dict[str, tuple[nn.Module, Offload | None]] = {"layer as it is": (plain, None)}
        for name, policy in policies.items():
            link = EmulatedLink(bandwidth_gbps=gbps)
            cleanup.callback(link.close)
            model = make()
            runs[name] = (model, cleanup.enter_context(Offload(model, link, policy)))
        times: dict[str, list[float]] = {name: [] for name in runs}
        stores = {name: offload.store for name, (_, offload) in runs.items() if offload is not None}
        before = {name: store.fetched for name, store in stores.items()}  # what was brought before the first pass
        for step, (x, y) in enumerate(zip(xs, wanted, strict=True)):
            for name, (model, _) in runs.items():
                taken, got = seconds_of(model, x)
                if (got - y).norm() > 1e-4 * y.norm():
                    raise SystemExit(f"{name} computes something else")
                if step >= 3:  # the first ones warm up
                    times[name].append(taken)
    first = next(iter(policies))
    rows = []
    for name, taken in times.items():
        store = stores.get(name)
        low, middle, high = np.percentile(taken, [10, 50, 90])
        total = len(layers) * layers[0].num_experts
        rows.append(
            {
                "policy": name,
                "median_s": float(middle),
                "p10_s": float(low),
                "p90_s": float(high),
                "of_first": float(np.median(np.array(taken) / np.array(times[first]))),
                "peak": total if store is None else store.peak,
                "experts": total,
                "fetched_a_pass": 0.0 if store is None else (store.fetched - before[name]) / len(xs),
                "waited_s": 0.0 if store is None else store.waited_s / len(xs),
                "link_gbps": gbps,
                "block_ms": 1e3 * block_s,
                "ratio": ratio,
                "tokens": tokens,
                "n": steps,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    headings = ("policy", "ms a pass: median (p10 to p90)", "of resident, pair by pair", "experts near at most")
    lines = [
        (
            r["policy"],
            f"{1e3 * r['median_s']:.1f} ({1e3 * r['p10_s']:.1f} to {1e3 * r['p90_s']:.1f})",
            f"{r['of_first']:.2f}x",
            f"{r['peak']} of {r['experts']} ({100 * r['peak'] / r['experts']:.1f} %)",
        )
        for r in rows
    ]
    return markdown(headings, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-3)

    def make() -> nn.Module:
        return stack(blocks=options.blocks, dim=512, hidden=256, experts=options.experts, top_k=2, context=4096)

    policies: dict[str, FetchPolicy] = {
        name: make_fetch_policy(name)
        for name in ("resident", "pre_gated", "pre_gated_keep_first", "on_demand", "prefetch_all")
    }
    policies["ring"] = Ring(slots=3)
    rows = measure(make, policies, ratio=options.ratio, steps=options.steps, tokens=options.tokens, width=512)
    first = rows[0]
    print(describe_hardware())
    print(f"link {first['link_gbps']:.2f} GB/s emulated; a block with everything near: {first['block_ms']:.2f} ms")
    print(table(rows))


if __name__ == "__main__":
    main()
