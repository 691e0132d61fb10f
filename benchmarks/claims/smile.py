"""What SMILE claims of routing in two levels, counted on two nodes: bytes between nodes, messages, parameters, time.

    python benchmarks/claims/smile.py    # a minute; 4 ranks; replaces its lines and the table in the page of claims

Flat: one router over all experts and one exchange among all ranks. Bi-level: a router chooses the node, another one
the experts there, and the exchange goes between nodes, then inside. Bytes are those the meter sees in a forward and a
backward pass of all ranks. Messages are those with rows that a rank sends to others on the way there, at most,
counted by the meter. Quality is not measured here.

References:
    He et al., "SMILE: Scaling Mixture-of-Experts with Efficient Bi-level Routing", 2022 (arXiv 2212.05191).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_ranks import forward_backward, is_rank, join, middle, on_cluster, say, step_s, total
from mycel.moe import BiLevelRouter, ExpertParallel, LinearProjection, MoE, TopKRouter
from mycel.topology.builders import two_boxes
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "smile.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_claims.md"
DIM, HIDDEN, EXPERTS, TOKENS, STEPS = 256, 256, 16, 256, 7


def rank() -> None:
    join()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    nodes = ((0, 1), (2, 3))
    for top_k in (1, 2):
        torch.manual_seed(0)
        bi_level = BiLevelRouter(LinearProjection(DIM, 2), LinearProjection(DIM, EXPERTS // 2), top_k)
        flat = TopKRouter(LinearProjection(DIM, EXPERTS), top_k)
        ways: dict[str, tuple[Any, str]] = {
            "flat router, flat exchange": (flat, "all_to_all"),
            "flat router, hierarchical exchange": (flat, "hierarchical"),
            "bi-level router, hierarchical exchange": (bi_level, "hierarchical"),
        }
        layers = {
            name: MoE(DIM, HIDDEN, EXPERTS, top_k, router=router, parallel=ExpertParallel(mesh, dispatcher=algorithm))
            for name, (router, algorithm) in ways.items()
        }
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(TOKENS, DIM, requires_grad=True)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(STEPS):
            for name, layer in layers.items():
                layer.dispatcher.meter.reset()
                times[name].append(step_s(partial(forward_backward, layer, x)))
        for name, layer in layers.items():
            router, _ = ways[name]
            between, meter = total(layer.dispatcher.meter, nodes), layer.dispatcher.meter
            meter.reset()
            layer(x)
            peers = {peer for (exchange, peer), sent in meter.sent.items() if exchange == "dispatch" and sent}
            messages = torch.tensor([len(peers)])
            dist.all_reduce(messages, op=dist.ReduceOp.MAX)
            say(
                top_k=top_k,
                way=name,
                between=between,
                messages=int(messages),
                parameters=sum(p.numel() for p in router.parameters()),
                median_s=middle(times[name]),
            )
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for s in lines:
        figures = (f"{s['between'] / 1e3:.0f}", s["messages"], s["parameters"], f"{1e3 * s['median_s']:.0f}")
        rows.append((s["top_k"], s["way"], *figures))
    return markdown(("K", "way", "KB between nodes", "messages a rank", "router parameters", "ms a step"), rows)


def main() -> None:
    if is_rank():
        rank()
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), [])
    conclude(OUTPUT, PAGE, "smile", heard, table)


if __name__ == "__main__":
    main()
