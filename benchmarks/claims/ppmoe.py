"""What Pipeline MoE claims of experts inside a tensor-parallel group, counted on two nodes: bytes and time.

    python benchmarks/claims/ppmoe.py    # a minute; 4 ranks; replaces its lines and the table in the page of claims

All-to-all: experts divided over all four ranks, each with its own tokens. Pipeline MoE: each node has all experts,
divided over its ranks, which have the same tokens (both ranks' of the other way); an all_reduce adds up. Nodes then
are replicas, so their experts' gradients have to be averaged between them, which all-to-all spares: that is a row of
its own. (In the paper, nodes are pipeline stages with experts of their own, and nothing is averaged.) Bytes are of a
forward and a backward pass of all ranks.

References:
    Chen et al., "Pipeline MoE: A Flexible MoE Implementation with Pipeline Parallelism", 2023 (arXiv 2304.11414).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_ranks import forward_backward, is_rank, join, middle, on_cluster, say, step_s, total
from mycel.moe import ExpertParallel, MoE
from mycel.topology.builders import two_boxes
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "ppmoe.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_claims.md"
DIM, HIDDEN, EXPERTS, TOKENS, TOP_K, STEPS = 256, 256, 8, 256, 2, 7


def rank() -> None:
    place, _ = join()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("box", "tensor"))
    nodes = ((0, 1), (2, 3))
    torch.manual_seed(0)
    everywhere = MoE(DIM, HIDDEN, EXPERTS, TOP_K, parallel=DeviceMesh("cpu", [0, 1, 2, 3]))
    torch.manual_seed(0)
    in_node = MoE(DIM, HIDDEN, EXPERTS, TOP_K, parallel=ExpertParallel(mesh["tensor"], dispatcher="all_reduce"))
    torch.manual_seed(1)
    tokens = torch.randn(4, TOKENS, DIM)
    own = tokens[place].clone().requires_grad_()
    shared = tokens[place // 2 * 2 : place // 2 * 2 + 2].reshape(-1, DIM).requires_grad_()
    if not torch.allclose(everywhere(own), in_node(shared).view(2, TOKENS, DIM)[place % 2], rtol=1e-4, atol=1e-5):
        raise SystemExit("the two ways compute different things")
    for layer in (everywhere, in_node):
        layer.dispatcher.meter.reset()
    forward_backward(everywhere, own)
    forward_backward(in_node, shared)
    group = mesh.get_group("box")

    def average() -> None:
        for parameter in in_node.experts.parameters():
            dist.all_reduce(parameter.grad, group=group)

    times: dict[str, list[float]] = {"all-to-all": [], "Pipeline MoE": [], "average": []}
    for _ in range(STEPS):
        times["all-to-all"].append(step_s(lambda: forward_backward(everywhere, own)))
        times["Pipeline MoE"].append(step_s(lambda: forward_backward(in_node, shared)))
        times["average"].append(step_s(average))
    for layer in (everywhere, in_node):
        layer.dispatcher.meter.reset()
    forward_backward(everywhere, own)
    forward_backward(in_node, shared)
    for name, layer in (("all-to-all", everywhere), ("Pipeline MoE", in_node)):
        meter = layer.dispatcher.meter
        between = total(meter, nodes)
        everything = torch.tensor([meter.total()])
        dist.all_reduce(everything)
        say(way=name, between=between, inside=int(everything) - between, median_s=middle(times[name]))
    # An all_reduce of two ranks: each sends its copy once, in halves or whole.
    averaged = 4 * sum(p.numel() * p.element_size() for p in in_node.experts.parameters())
    say(way="gradients averaged between nodes", between=averaged, inside=0, median_s=middle(times["average"]))
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        (s["way"], *(f"{s[where] / 1e3:.0f}" for where in ("between", "inside")), f"{1e3 * s['median_s']:.0f}")
        for s in lines
    ]
    return markdown(("way", "KB between nodes", "KB inside", "ms a step"), rows)


def main() -> None:
    if is_rank():
        rank()
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), [])
    conclude(OUTPUT, PAGE, "ppmoe", heard, table)


if __name__ == "__main__":
    main()
