"""What EPS-MoE claims of chunks of experts and of choosing the product, on two nodes and on one core.

    python benchmarks/claims/eps_moe.py  # a minute; 4 ranks; replaces its lines and the tables in the page of claims
    python benchmarks/claims/eps_moe.py --only products  # the second table, on one core

Pipeline: the layer's forward pass (prefill, no gradients) with chunks of tokens and with chunks of experts. Product:
one grouped product over all experts beside a product each and a batched one, by tokens an expert, even and uneven;
and the layer's own choice by the table that ``measure_products`` made before, in turns with them. Times are of a
shared machine without GPUs, those of products of the process; the paper's are of H800 nodes.

References:
    Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024 (arXiv 2410.12247).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s
from mycel.moe import MoE, measure_products, use_products
from mycel.moe.kernels.grouped_gemm import grouped_linear
from mycel.moe.kernels.products import ProductShape, batched, one_each, padded
from mycel.topology.builders import two_boxes
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "eps_moe.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_claims.md"
DIM, HIDDEN, EXPERTS, TOKENS, TOP_K, STEPS = 256, 512, 16, 512, 2, 7


@torch.no_grad()
def rank() -> None:
    join()
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, parallel=DeviceMesh("cpu", [[0, 1], [2, 3]]))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(TOKENS, DIM)
    plans: list[dict[str, Any]] = [{"degree": 1}]
    plans += [{"degree": degree, "partition": p} for degree in (2, 4) for p in ("tokens", "experts")]
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(STEPS + 1):
        for plan, found in zip(plans, times, strict=True):
            spent = step_s(lambda p=plan: layer(x, **p))
            if turn:
                found.append(spent)
    for plan, found in zip(plans, times, strict=True):
        say(degree=plan["degree"], chunks=plan.get("partition", "one"), median_s=middle(found))
    dist.destroy_process_group()


def loads() -> dict[str, list[int]]:
    """Rows of each expert, by name: even ones, and one expert in four with most of the rows."""
    found = {f"{n} each": [n] * EXPERTS for n in (1, 4, 16, 64, 256)}
    return found | {f"{16 * n} or {n}": [16 * n if e % 4 == 0 else n for e in range(EXPERTS)] for n in (1, 4, 16)}


@torch.no_grad()
def products() -> list[dict[str, Any]]:
    """Seconds of the process for each way to multiply 16 experts' rows, and of the library's choice, by load."""
    torch.set_num_threads(1)
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K)
    measured = measure_products(layer, trials=STEPS)
    weight = layer.experts.gate_up_proj.detach()
    shape = ProductShape.of(weight)
    out = []
    for name, counts in loads().items():
        x, lengths = torch.randn(sum(counts), DIM), torch.tensor(counts)
        even = len(set(counts)) == 1
        ways = {
            "grouped": lambda x=x, c=lengths: grouped_linear(x, weight, c),
            "each": lambda x=x, c=counts: one_each(x, weight, c),
            "batched": lambda x=x, c=counts, do=batched if even else padded: do(x, weight, c),
            "chosen": lambda x=x, c=lengths: grouped_linear(x, weight, c),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(2 * STEPS + 1):
            for way, do in ways.items():
                use_products(measured if way == "chosen" else None)
                begin = time.process_time()
                do()
                if turn:
                    times[way].append(time.process_time() - begin)
        use_products(None)
        choice = measured.choose(shape, counts).replace("padded", "batched")
        out.append({"load": name, "choice": choice, **{way: middle(found) for way, found in times.items()}})
    return out


def table(lines: list[dict[str, Any]]) -> str:
    piped = [s for s in lines if "degree" in s]
    base = piped[0]["median_s"]
    rows = [(s["degree"], s["chunks"], f"{1e3 * s['median_s']:.1f}", f"{base / s['median_s']:.2f}") for s in piped]
    first = markdown(("chunks", "of", "ms forward", "times as fast"), rows)
    ways = ("grouped", "each", "batched", "chosen")
    found = [(s["load"], *(f"{1e3 * s[way]:.2f}" for way in ways), s["choice"]) for s in lines if "load" in s]
    heads = ("tokens an expert", "grouped, ms", "one each, ms", "batched, ms", "the library's choice, ms", "which is")
    return first + "\n" + markdown(heads, found)


def main() -> None:
    if is_rank():
        rank()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("products",))
    if parser.parse_args().only:
        conclude(OUTPUT, PAGE, "eps_moe", products(), table, kind="load")
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), []) + products()
    conclude(OUTPUT, PAGE, "eps_moe", heard, table)


if __name__ == "__main__":
    main()
