"""What DeepSpeed-TED claims of duplicate tokens and of checkpointing, counted: 2 nodes, each a tensor-parallel group.

    python benchmarks/claims/ted.py      # a minute; 4 ranks; replaces its lines and the table in the page of claims

Experts are divided over the nodes and, in slices, over the ranks of a node, which have the same tokens. Bytes are the
meter's, of a forward and a backward pass of all ranks; all three ways give the same outputs and gradients (checked).

References:
    Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", ICS
    2023 (arXiv 2303.06318): duplicate token dropping, communication-aware activation checkpointing.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s, total
from mycel.comm.exchange import copy_to_ranks, sum_over_ranks
from mycel.moe import ExpertParallel, Experts, MoE, keep_exchanges
from mycel.moe.dispatch import AllToAllDispatcher
from mycel.moe.expert_mlp import expert_mlp
from mycel.moe.slices import WeightUse
from mycel.topology.builders import two_boxes
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "ted.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_claims.md"
DIM, HIDDEN, EXPERTS, TOKENS, TOP_K, STEPS = 256, 256, 8, 256, 2, 5


def duplicated(layer: MoE, dispatcher: AllToAllDispatcher, experts: Experts, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The layer without dropping: each rank of a node exchanges all tokens with its peer, slices' results add up."""
    meter, node = dispatcher.meter, mesh.get_group("tensor")
    routing = layer.router(x)
    rows, weights = copy_to_ranks([x, routing.top_k_weights], node, meter, "dispatch")
    arrived = dispatcher.dispatch(rows, routing._replace(top_k_weights=weights))
    used = experts.weights(WeightUse(x.dtype, gradient_scale=0.5))
    done = expert_mlp(arrived.rows, arrived.tokens_per_expert, used, experts.kind)
    return sum_over_ranks(dispatcher.combine(done, arrived), node, meter, "combine")


def rank() -> None:
    join()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("expert", "tensor"))
    nodes = ((0, 1), (2, 3))
    torch.manual_seed(0)
    parallel = ExpertParallel(mesh, tensor_shards=2, replicas=mesh["tensor"])
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, parallel=parallel)
    dispatcher = AllToAllDispatcher(EXPERTS, mesh.get_group("expert"))
    experts = Experts(DIM, HIDDEN, EXPERTS, owned=dispatcher.experts, shard=(mesh.get_local_rank("tensor"), 2))
    experts.load_state_dict(layer.experts.state_dict())
    torch.manual_seed(1 + mesh.get_local_rank("expert"))
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    again = {"use_reentrant": False}
    ways: dict[str, tuple[Any, Any, Experts]] = {
        "duplicates sent": (partial(duplicated, layer, dispatcher, experts, mesh), dispatcher.meter, experts),
        "duplicates dropped": (layer, layer.dispatcher.meter, layer.experts),
        "dropped, checkpointed": (partial(checkpoint, layer, **again), layer.dispatcher.meter, layer.experts),
        "dropped, exchanges kept": (
            partial(checkpoint, layer, context_fn=keep_exchanges, **again),
            layer.dispatcher.meter,
            layer.experts,
        ),
    }
    first: list[Tensor] = []
    for name, (way, meter, owner) in ways.items():
        layer.zero_grad()
        experts.zero_grad()
        x.grad = None
        meter.reset()
        y = way(x)
        y.square().mean().backward()
        results = [y.detach(), *(t.grad.clone() for t in (x, *owner.parameters()))]
        first = first or results
        apart = [float((mine - other).norm() / mine.norm()) for mine, other in zip(first, results, strict=True)]
        if max(apart) > 1e-5:
            raise SystemExit(f"{name} computes something else: {apart}")
        inter = total(meter, nodes)
        everything = torch.tensor([meter.total()])
        dist.all_reduce(everything)
        times = [step_s(lambda w=way: w(x).square().mean().backward()) for _ in range(STEPS)]
        say(way=name, between=inter, inside=int(everything) - inter, median_s=middle(times))
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    base = lines[0]["between"]
    rows = [
        (s["way"], f"{s['between'] / 1e3:.0f}", f"{s['between'] / base:.2f}", f"{s['inside'] / 1e3:.0f}",
         f"{1e3 * s['median_s']:.0f}")
        for s in lines
    ]  # fmt: skip
    return markdown(("way", "KB between nodes", "of the first", "KB inside", "ms a step"), rows)


def main() -> None:
    if is_rank():
        rank()
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), [])
    conclude(OUTPUT, PAGE, "ted", heard, table)


if __name__ == "__main__":
    main()
