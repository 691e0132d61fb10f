"""One GPU: the MoE layer's forward pass and step beside other ways to compute the same, and beside a counted floor.

    python benchmarks/moe_gpu.py                          # on a GPU: three published shapes, bfloat16
    python benchmarks/moe_gpu.py --compile-only           # on any machine: what the kernels take of an A100 and H100

Timed is everything from logits and tokens to the layer's output, and for steps to all gradients: choice, sorting,
experts, sums. (The router's matrix product, alike in all ways, is left out.) All ways share parameters and logits,
and outputs and gradients are compared. Rounds go over the ways in turn; figures are medians with the 10th and 90th
percentile, by CUDA's events. Other ways: a loop over experts, ``F.grouped_mm`` over sorted rows, batched products
padded to the largest load, and the layers of Tutel, MegaBlocks and ScatterMoE where they are installed (with routers
and parameters of their own).

The floor counts for each matrix product the larger of its operations at ``--tflops`` and of its bytes at
``--terabytes`` a second, and for the rest what must cross the memory once even if everything else is fused: logits,
tokens in, rows into the sum over a token's slots, and the sum out.

No GPU has run this yet: no figure in the documents comes from it. Without one, it says so and ends with 2.
"""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kernel_resources import compile_for
from moe_cpu import grouped_mm, loop, padded, swiglu
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.moe import MoE, TopKRouter
from mycel.moe.kernels import use_kernels
from mycel.moe.kernels.tiles import choose_tiles
from mycel.triton_kernels import Launch
from record import append, stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tokens, width, hidden size, experts, experts a token, activation."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def wide(self) -> int:
        """Columns of the first product."""
        return self.hidden * (2 if self.activation == "swiglu" else 1)


SHAPES = {
    "mixtral": Shape(tokens=8192, dim=4096, hidden=14336, experts=8, top_k=2),
    "qwen3": Shape(tokens=16384, dim=2048, hidden=768, experts=128, top_k=8),
    "classic": Shape(tokens=4096, dim=2048, hidden=2048, experts=64, top_k=2, activation="gelu"),
}
ACTIVATIONS = {"swiglu": swiglu, "gelu": functional.gelu}


def floor_s(shape: Shape, tflops: float, terabytes: float) -> tuple[float, float]:
    """Seconds that a forward pass, and a forward and a backward pass, take at least; two bytes a number."""

    def product(inner: int, outer: int) -> float:
        operations = 2 * shape.rows * inner * outer
        numbers = shape.experts * inner * outer + shape.rows * (inner + outer)
        return max(operations / (tflops * 1e12), 2 * numbers / (terabytes * 1e12))

    products = product(shape.dim, shape.wide) + product(shape.hidden, shape.dim)
    tokens = 2 * shape.tokens * shape.dim / (terabytes * 1e12)
    summed = 2 * shape.rows * shape.dim / (terabytes * 1e12) + tokens
    logits = 4 * shape.tokens * shape.experts / (terabytes * 1e12)
    forward = products + tokens + summed + logits
    return forward, forward + 2 * products + tokens + summed + logits


# -- what is timed --------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Logits that are parameters, in place of a router's matrix product."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.num_experts = logits.shape[1]
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits


Way = Callable[[Tensor], Tensor]


def same_ways(layer: MoE, activation: str) -> dict[str, tuple[str, Way]]:
    """Ways that share the layer's parameters: which kernels, and what to call."""
    up, down, act = layer.experts.gate_up_proj, layer.experts.down_proj, ACTIVATIONS[activation]
    found: dict[str, tuple[str, Way]] = {"mycel": ("auto", layer), "mycel, grouped_mm": ("grouped_mm", layer)}
    for name, way in {"F.grouped_mm": grouped_mm, "padded bmm": padded, "loop": loop}.items():
        found[name] = ("grouped_mm", lambda x, way=way: way(x, layer.router(x), up, down, act))
    return found


def tutel_layer(shape: Shape) -> Way:
    from tutel import moe as tutel_moe

    layer = tutel_moe.moe_layer(
        gate_type={"type": "top", "k": shape.top_k, "capacity_factor": 0.0},
        model_dim=shape.dim,
        experts={
            "type": "ffn",
            "num_experts_per_device": shape.experts,
            "hidden_size_per_expert": shape.wide,
            "activation_fn": ACTIVATIONS[shape.activation],
        },
    )
    return layer.to("cuda", torch.bfloat16)


def megablocks_layer(shape: Shape) -> Way:
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    arguments = Arguments(
        hidden_size=shape.dim,
        ffn_hidden_size=shape.hidden,
        moe_num_experts=shape.experts,
        moe_top_k=shape.top_k,
        mlp_type="glu" if shape.activation == "swiglu" else "mlp",
        mlp_impl="grouped",
        activation_fn=functional.silu if shape.activation == "swiglu" else functional.gelu,
        bias=False,
        return_bias=False,
        bf16=True,
        device=torch.device("cuda"),
    )
    layer = dMoE(arguments)
    return lambda x: layer(x.unsqueeze(0))


def scattermoe_layer(shape: Shape) -> Way:
    from scattermoe.mlp import GLUMLP, MLP

    kind = GLUMLP if shape.activation == "swiglu" else MLP
    layer = kind(
        input_size=shape.dim,
        hidden_size=shape.hidden,
        num_experts=shape.experts,
        top_k=shape.top_k,
        activation=nn.SiLU() if shape.activation == "swiglu" else nn.GELU(),
    ).to("cuda", torch.bfloat16)
    gate = nn.Linear(shape.dim, shape.experts, bias=False, device="cuda", dtype=torch.bfloat16)

    def way(x: Tensor) -> Tensor:
        weights, index = gate(x).float().softmax(dim=1).topk(shape.top_k, dim=1)
        return layer(x, weights.to(x.dtype), index)

    return way


OTHERS: dict[str, Callable[[Shape], Way]] = {
    "Tutel": tutel_layer,
    "MegaBlocks": megablocks_layer,
    "ScatterMoE": scattermoe_layer,
}


def seconds(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def forward(way: Way, x: Tensor) -> None:
    with torch.no_grad():
        way(x)


def step(way: Way, x: Tensor, factor: Tensor) -> Tensor:
    y = way(x)
    y = y[0] if isinstance(y, tuple) else y
    y.view_as(factor).backward(factor)
    return y


def compare(layer: MoE, x: Tensor, factor: Tensor, ways: dict[str, tuple[str, Way]]) -> None:
    """Outputs and gradients of all ways that share parameters."""
    first: list[Tensor] = []
    for name, (kernels, way) in ways.items():
        use_kernels(kernels)
        layer.zero_grad()
        x.grad = None
        results = [step(way, x, factor).detach(), x.grad, *(p.grad for p in layer.parameters())]
        first = first or results
        for mine, other in zip(first, results, strict=True):
            if not (mine - other).float().norm() <= 5e-2 * mine.float().norm():
                raise SystemExit(f"{name} computes something else")


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    logits = torch.randn(shape.tokens, shape.experts, device="cuda")
    router = TopKRouter(Given(logits), shape.top_k, renormalize=True)
    like: dict[str, Any] = {"activation": shape.activation, "dtype": torch.bfloat16}
    with torch.device("cuda"):
        layer = MoE(shape.dim, shape.hidden, shape.experts, shape.top_k, router=router, **like)
    layer.router.float()
    x = torch.randn(shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    factor = torch.randn_like(x)
    ways = same_ways(layer, shape.activation)
    compare(layer, x, factor, ways)
    for name, make in OTHERS.items():
        try:
            way = make(shape)
            step(way, x, factor)
        except ImportError:
            continue
        except Exception as error:  # a layer that others made for another torch
            print(f"{name} is installed and does not run: {error}", file=sys.stderr)
            continue
        ways[name] = ("auto", way)
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 3):
        for name, (kernels, way) in ways.items():
            use_kernels(kernels)
            layer.zero_grad()
            x.grad = None
            found = {
                "forward": seconds(lambda way=way: forward(way, x)),
                "step": seconds(lambda way=way: step(way, x, factor)),
            }
            if turn >= 3:  # the first ones warm up
                for kind, value in found.items():
                    taken.setdefault((name, kind), []).append(value)
    use_kernels("auto")
    rows = []
    for (name, kind), values in taken.items():
        low, middle, high = np.percentile(values, [10, 50, 90])
        rows.append({"way": name, "kind": kind, "n": rounds, "p10_s": low, "median_s": middle, "p90_s": high})
    return rows


# -- what kernels take of a GPU -------------------------------------------------------------------------------------


def launches(shape: Shape, capability: int) -> list[Launch]:
    """Every kernel of a step, as it is called for a shape; tensors without memory."""
    from mycel.moe.kernels import operations as op

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    T, D, F, E, K, R, wide = (
        shape.tokens,
        shape.dim,
        shape.hidden,
        shape.experts,
        shape.top_k,
        shape.rows,
        shape.wide,
    )
    tiles = choose_tiles(capability, R, E)
    up, down = empty(E, wide, D), empty(E, D, F)
    index, counts = empty(T, K, dtype=torch.int64), empty(E, dtype=torch.int64)
    slots, row_of_slot = empty(R, dtype=torch.int32), empty(T, K, dtype=torch.int32)
    weights, scores = empty(T, K, dtype=torch.float32), empty(T, E, dtype=torch.float32)
    plan, planning = op.make_kernel_args(counts, R, tiles.rows.m, tail=False)
    spans, counting = op.count(index, E)
    return [
        op.top_k(scores, None, index, weights, scores, "softmax")[1],
        counting,
        op.place(index, spans, slots, row_of_slot, counts),
        planning,
        op.gate_up(empty(T, D), slots, K, up, empty(R, wide), empty(R, F), plan, shape.activation, tiles.gate_up),
        op.rows_times(empty(R, F), None, 0, down.transpose(1, 2), empty(R, D), plan, tiles.rows),
        op.combine(empty(R, D), row_of_slot, weights, empty(T, D)),
        op.rows_times(empty(T, D), slots, K, down, empty(R, F), plan, tiles.rows),
        op.activation_backward(
            empty(R, F), empty(R, wide), slots, weights, empty(R, wide), empty(R, F), weights, plan, shape.activation
        ),
        op.outer(empty(T, D), empty(R, F), slots, (K, 0), down, plan, tiles.outer),
        op.outer(empty(R, wide), empty(T, D), slots, (0, K), up, plan, tiles.outer),
        op.rows_times(empty(R, wide), None, 0, up, empty(R, D), plan, tiles.rows),
        op.combine(empty(R, D), row_of_slot, None, empty(T, D)),
        op.spread(empty(T, D), slots, weights, empty(R, D), empty(R, D), weights, K),
        op.top_k_backward(scores, index, weights, None, scores, "softmax"),
    ]


def compile_only(names: list[str], capabilities: list[int], kernels: list[str], *, once: bool, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    if not as_json:
        print("shape     GPU    kernel                       registers  spilled  shared kB  warps  tensor cores")
    for name in names:
        for capability in capabilities:
            done: set[str] = set()
            for launch in launches(SHAPES[name], capability):
                kernel = launch.kernel.__name__
                if (kernels and kernel not in kernels) or (once and kernel in done):
                    continue
                done.add(kernel)
                row = {"shape": name, **asdict(compile_for(launch, capability))}
                rows.append(row)
                if as_json:
                    continue
                kinds = ", ".join(f"{kind} {count}" for kind, count in row["instructions"].items())
                print(
                    f"{name:9} sm_{capability}  {row['kernel']:28} {row['registers']:9} {row['spill_bytes']:8} "
                    f"{row['shared_bytes'] / 1024:10.0f} {row['num_warps']:6}  {kinds}",
                    flush=True,
                )
    if as_json:
        print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of: " + ", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tflops", type=float, default=790.0, help="of bfloat16 products that the GPU reaches")
    parser.add_argument("--terabytes", type=float, default=4.3, help="a second that a copy moves, read and written")
    parser.add_argument("--compile-only", action="store_true", help="needs Triton, and no GPU")
    parser.add_argument("--capability", default="80,90", help="of --compile-only: 80 for A100, 90 for H100 and H200")
    parser.add_argument("--kernels", default="", help="of --compile-only: these, separated by commas; none: all")
    parser.add_argument("--once", action="store_true", help="of --compile-only: the first use of each kernel only")
    parser.add_argument("--json", action="store_true", help="of --compile-only: print JSON")
    parser.add_argument("--output", type=Path, help="append every row as a line of JSON")
    options = parser.parse_args()
    names = options.shapes.split(",")
    if options.compile_only:
        kernels = options.kernels.split(",") if options.kernels else []
        capabilities = [int(c) for c in options.capability.split(",")]
        compile_only(names, capabilities, kernels, once=options.once, as_json=options.json)
        return
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to time; --compile-only shows what the kernels take", file=sys.stderr)
        raise SystemExit(2)
    print(f"{torch.cuda.get_device_name()}; {describe_hardware()}; ms: median (p10 to p90), times the floor")
    for name in names:
        shape = SHAPES[name]
        floors = dict(zip(("forward", "step"), floor_s(shape, options.tflops, options.terabytes), strict=True))
        rows = measure(shape, options.rounds)
        for kind, floor in floors.items():
            print(f"{name:9} {kind:8} {'counted floor':20} {1e3 * floor:9.3f}")
            for row in (row for row in rows if row["kind"] == kind):
                low, middle, high = (1e3 * row[key] for key in ("p10_s", "median_s", "p90_s"))
                print(
                    f"{name:9} {kind:8} {row['way']:20} {middle:9.3f} ({low:.3f} to {high:.3f})  "
                    f"{row['median_s'] / floor:.2f}x"
                )
        if options.output is not None:
            common = {
                "shape": name,
                **asdict(shape),
                "gpu": torch.cuda.get_device_name(),
                "hardware": describe_hardware(),
                "versions": describe_versions(),
                "floor_from": {"tflops": options.tflops, "terabytes_s": options.terabytes},
                **stamp(),
            }
            append(options.output, [{**common, **row, "floor_s": floors[row["kind"]]} for row in rows])


if __name__ == "__main__":
    main()
