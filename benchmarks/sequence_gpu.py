"""One GPU: linear attention with a decay for each key by kernels beside plain torch, and the ways of attention.

    python benchmarks/sequence_gpu.py                     # on a GPU
    python benchmarks/sequence_gpu.py --compile-only      # on any machine: what the kernels take of an A100 and H100

*linear*: a step of ``linear_attention`` of several lengths, and the most memory that it takes, by the kernels and by
plain torch; outputs and gradients are compared first. *softmax*: attention through a group of one rank, by each way,
beside ``F.scaled_dot_product_attention``: what a way costs before anything travels. Rounds go over the
ways in turn; figures are medians with the 10th and 90th percentile, by CUDA's events.

No GPU has run this yet: no figure in the documents comes from it. Without one, it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kernel_resources import compile_for
from moe_gpu import seconds
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.planning.sequence import per_document_zigzag
from mycel.sequence import SequenceContext, attention, linear_attention
from mycel.sequence.linear import attention as linear
from mycel.triton_kernels import Launch
from record import append, stamp

#: Heads, keys and values of a head: those of GLA and of KDA at 1.3 billion parameters.
SHAPES = {"gla": (4, 128, 256), "kda": (16, 128, 128)}
LENGTHS = (2048, 8192, 32768)
WAYS = ("ring", "all_gather", "sliced", "needed")
WARM_UP = 3

Step = Callable[[], list[Tensor]]


def launches(name: str) -> list[Launch]:
    """Every kernel, as it is called for a shape; tensors without memory."""
    from mycel.sequence.linear import launches as made

    heads, keys, values = SHAPES[name]
    chunks, length = heads * 512, 16

    def empty(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=torch.float32, device="meta")

    k, v = empty(chunks, length, keys), empty(chunks, length, values)
    transition, state = empty(chunks, keys), empty(chunks, keys, values)
    return [
        made.maps(k, v, k, transition, state),
        made.maps_back(k, v, k, transition, state, k, v, k),
        made.outputs(k, k, v, k, state, v),
        made.outputs_back((k, k, v, k, state), v, (k, k, v, k, state)),
    ]


def compile_only(names: list[str], capabilities: list[int], *, as_json: bool) -> None:
    """What each kernel takes of each GPU."""
    rows = [
        {"shape": name, **asdict(compile_for(launch, capability))}
        for name in names
        for capability in capabilities
        for launch in launches(name)
    ]
    if as_json:
        print(json.dumps(rows))
        return
    print("shape GPU    kernel               registers  spilled  shared kB  warps")
    for row in rows:
        where, shared = f"sm_{row['capability']}", row["shared_bytes"] / 1024
        figures = f"{row['registers']:9} {row['spill_bytes']:8} {shared:10.0f} {row['num_warps']:6}"
        print(f"{row['shape']:5} {where:6} {row['kernel']:20} {figures}")


# -- what is timed --------------------------------------------------------------------------------------------------


def linear_ways(name: str, length: int) -> dict[str, Step]:
    """The same attention by kernels and by plain torch."""
    heads, keys, values = SHAPES[name]
    torch.manual_seed(0)
    context = SequenceContext(per_document_zigzag([length], 1))
    widths = (keys, keys, values, keys)
    q, k, v, g = (torch.randn(1, heads, length, width, device="cuda") for width in widths)
    inputs = [x.requires_grad_() for x in (q, k, v, -functional.softplus(g))]

    def step(*, by_kernels: bool) -> list[Tensor]:
        before = linear.is_taken
        if not by_kernels:
            linear.is_taken = lambda *_: False
        try:
            out = linear_attention(*inputs[:3], context, decay=inputs[3])
        finally:
            linear.is_taken = before
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]

    return {"kernels": lambda: step(by_kernels=True), "plain torch": lambda: step(by_kernels=False)}


def softmax_ways(length: int) -> dict[str, Step]:
    """Attention of one rank by each way, in bfloat16, and torch's own."""
    context = SequenceContext(per_document_zigzag([length], 1))
    inputs = [torch.randn(1, 16, length, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def step(attend: Callable[..., Tensor]) -> list[Tensor]:
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]

    def by(way: Any) -> Step:
        return lambda: step(lambda q, k, v: attention(q, k, v, context, way=way))

    own = lambda: step(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: E731
    return {"torch": own, **{way: by(way) for way in WAYS}}


def measure(ways: Mapping[str, Step], rounds: int, tolerance: float) -> list[dict[str, Any]]:
    """Compare what the ways give, then time them in turns."""
    wanted: list[Tensor] = []
    most: dict[str, int] = {}
    for name, step in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = step()
        most[name] = torch.cuda.max_memory_allocated() - before
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            if not (one - other).float().norm() <= tolerance * other.float().norm():
                raise SystemExit(f"{name} computes something else")
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + WARM_UP):
        for name, step in ways.items():
            took = seconds(step)
            if turn >= WARM_UP:
                taken[name].append(took)
    rows = []
    for name, values in taken.items():
        low, middle, high = np.percentile(values, [10, 50, 90])
        figures = {"p10_s": low, "median_s": middle, "p90_s": high, "peak_bytes": most[name]}
        rows.append({"way": name, "n": rounds, **figures})
    return rows


def main() -> None:
    """Time, or only compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of: " + ", ".join(SHAPES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile-only", action="store_true", help="needs Triton, and no GPU")
    parser.add_argument("--capability", default="80,90", help="of --compile-only: 80 for A100, 90 for H100 and H200")
    parser.add_argument("--json", action="store_true", help="of --compile-only: print JSON")
    parser.add_argument("--output", type=Path, help="append every row as a line of JSON")
    options = parser.parse_args()
    names, lengths = options.shapes.split(","), [int(length) for length in options.lengths.split(",")]
    if options.compile_only:
        compile_only(names, [int(c) for c in options.capability.split(",")], as_json=options.json)
        return
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to time; --compile-only shows what the kernels take", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        cases = [
            (f"linear, {name}", length, linear_ways, (name, length), 1e-3) for name in names for length in lengths
        ]
        cases += [("softmax", length, softmax_ways, (length,), 3e-2) for length in lengths]
        print(f"{torch.cuda.get_device_name()}; {describe_hardware()}; ms a step: median (p10 to p90); MiB at most")
        for case, length, make, arguments, tolerance in cases:
            rows = measure(make(*arguments), options.rounds, tolerance)
            for row in rows:
                low, middle, high = (1e3 * row[key] for key in ("p10_s", "median_s", "p90_s"))
                print(
                    f"{case:12} {length:6} {row['way']:12} {middle:9.3f} ({low:.3f} to {high:.3f}) "
                    f"{row['peak_bytes'] / (1 << 20):8.0f}"
                )
            if options.output is not None:
                gpu = {"gpu": torch.cuda.get_device_name(), "hardware": describe_hardware(), **stamp()}
                common = {"case": case, "tokens": length, "versions": describe_versions(), **gpu}
                append(options.output, [common | row for row in rows])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
