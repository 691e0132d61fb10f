"""The lines of the cost model, measured: a small and a large one of every exchange, few and many rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.groups import flat_group, subgroup
from mycel.comm.messages import all_gather_single
from mycel.cost import Line
from mycel.errors import UsageError
from mycel.moe.expert_mlp import ExpertWeights, expert_mlp
from mycel.moe.flex.cost import CostModel
from mycel.moe.routed import HeldExperts, RoutedExperts
from mycel.moe.slices import WeightUse

__all__ = ["measure_costs"]

SMALL, LARGE = 4096, 512 * 1024
FEW, MANY = 32, 512


@torch.no_grad()
def measure_costs(routed: RoutedExperts, experts: HeldExperts, like: Tensor, *, repeats: int = 3) -> CostModel:
    """A cost model of this layer on these ranks; all of them call this, and get the same one.

    Args:
        routed: of the layer.
        experts: of the layer.
        like: tokens of the width and type that travel.
        repeats: of every measurement; the least counts, and of all ranks the greatest.
    """
    mesh, layout = routed.mesh, routed.layout
    points: dict[tuple[str, int], float] = {}
    num_nodes = 1
    if mesh is not None and layout.num_ranks > 1:
        whole = flat_group(mesh)
        groups = {"all_to_all": whole}
        if mesh.ndim == 2:
            groups["between"], groups["inside"] = mesh.get_all_groups()
            num_nodes = mesh.shape[0]
        for size in (SMALL, LARGE):
            for kind, group in groups.items():
                points[kind, size] = _least(partial(_swap, group, size, like.device), repeats, like.device)
            points["all_gather", size] = _least(partial(_gather, whole, size, like.device), repeats, like.device)
            for r in layout.ways[:-1]:
                group = subgroup(whole, layout.members(routed.rank, r=r))
                spent = _least(partial(_gather, group, size, like.device), repeats, like.device)
                points[f"gather {r}", size] = spent
    weights, here = experts.weights(WeightUse(like.dtype)), len(experts.owned)
    if not isinstance(weights, ExpertWeights):
        raise UsageError("experts in far memory are not measured; use them without a tuner")

    def compute(num_rows: int) -> Tensor:
        """So many rows, each at all slices, spread over the experts here."""
        total = num_rows * layout.tensor_shards
        counts = torch.full((here,), total // max(1, here), dtype=torch.int64, device=like.device)
        return expert_mlp(like.new_zeros(total, like.shape[1]), counts, weights, experts.kind)

    for rows in (FEW, MANY):
        points["rows", rows] = _least(partial(compute, rows), repeats, like.device)
    seconds = torch.tensor(list(points.values()), dtype=torch.float64)
    if mesh is not None and layout.num_ranks > 1:
        together = seconds.to(like.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=flat_group(mesh))
        seconds = together.cpu()
    points = dict(zip(points, seconds.tolist(), strict=True))
    kinds = {kind for kind, _ in points if kind != "rows"}
    lines = {kind: Line.through((SMALL, points[kind, SMALL]), (LARGE, points[kind, LARGE])) for kind in kinds}
    return CostModel(
        layout=layout,
        row_bytes=float(routed.codec.encode(like[:1]).nbytes),
        weight_bytes=float(sum(t.nbytes for t in weights if t is not None)),
        num_nodes=num_nodes,
        exchanges={kind: line for kind, line in lines.items() if not kind.startswith("gather ")},
        gathers={int(kind.split()[1]): line for kind, line in lines.items() if kind.startswith("gather ")},
        rows=Line.through((FEW, points["rows", FEW]), (MANY, points["rows", MANY])),
    )


def _least(operation: Callable[[], object], repeats: int, device: torch.device) -> float:
    found = []
    for _ in range(repeats + 1):  # the first one may have to connect
        begin = now(device)
        operation()
        found.append(now(device) - begin)
    return min(found[1:])


def now(device: torch.device) -> float:
    """Seconds, when everything the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _swap(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
    """Every rank sends so many bytes to the others, evenly."""
    size = dist.get_world_size(group)
    each = max(1, num_bytes // max(1, size - 1))
    sent = torch.zeros(each * size, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _gather(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
    size = dist.get_world_size(group)
    own = torch.zeros(max(1, num_bytes // max(1, size - 1)), dtype=torch.uint8, device=device)
    all_gather_single(own.new_empty(own.numel() * size), own, group=group)
