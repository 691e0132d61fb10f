"""What EPS-MoE claims of chunks of experts and of choosing the product, on two nodes and on one core.

    python benchmarks/claims/eps_moe.py  # a minute; 4 ranks; replaces its lines and the tables in the page of claims

Pipeline: the layer's forward pass (prefill, no gradients) with chunks of tokens and with chunks of experts. Product:
one grouped product over all experts beside a product each and a padded batched one, by tokens an expert. Times are
of a shared machine without GPUs; the paper's are of H800 nodes.

References:
    Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024 (arXiv 2410.12247).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s
from mycel.moe import MoE
from mycel.moe.kernels.grouped_gemm import grouped_linear
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


@torch.no_grad()
def products() -> list[dict[str, Any]]:
    """Milliseconds of three ways to multiply 16 experts' rows, by rows an expert."""
    torch.set_num_threads(1)
    weight = torch.randn(EXPERTS, 2 * HIDDEN, DIM)
    out = []
    for rows in (1, 4, 16, 64, 256):
        x = torch.randn(EXPERTS * rows, DIM)
        counts = torch.full((EXPERTS,), rows)
        ways = {
            "grouped": lambda x=x, c=counts: grouped_linear(x, weight, c),
            "one each": lambda x=x, n=rows: torch.cat([x[e * n : e * n + n] @ weight[e].t() for e in range(EXPERTS)]),
            "batched": lambda x=x, n=rows: torch.bmm(x.view(EXPERTS, n, DIM), weight.transpose(1, 2)),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(STEPS + 1):
            for name, way in ways.items():
                begin = time.perf_counter()
                way()
                if turn:
                    times[name].append(time.perf_counter() - begin)
        out.append({"rows": rows, **{name: middle(found) for name, found in times.items()}})
    return out


def table(lines: list[dict[str, Any]]) -> str:
    piped = [s for s in lines if "degree" in s]
    base = piped[0]["median_s"]
    rows = [(s["degree"], s["chunks"], f"{1e3 * s['median_s']:.1f}", f"{base / s['median_s']:.2f}") for s in piped]
    first = markdown(("chunks", "of", "ms forward", "times as fast"), rows)
    ways = ("grouped", "one each", "batched")
    found = [(s["rows"], *(f"{1e3 * s[way]:.2f}" for way in ways)) for s in lines if "rows" in s]
    return first + "\n" + markdown(("tokens an expert", *(f"{way}, ms" for way in ways)), found)


def main() -> None:
    if is_rank():
        rank()
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), []) + products()
    conclude(OUTPUT, PAGE, "eps_moe", heard, table)


if __name__ == "__main__":
    main()
