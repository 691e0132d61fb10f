"""What DeepSpeed-TED claims of duplicate tokens, of checkpointing and of tiled steps, counted.

    python benchmarks/claims/ted.py      # a minute; 4 ranks; replaces its lines and the tables in the page of claims
    python benchmarks/claims/ted.py --only tiles  # the second table, on one core

Two nodes, each a tensor-parallel group. Experts are divided over the nodes and, in slices, over the ranks of a node,
which have the same tokens. Bytes are the meter's, of a forward and a backward pass of all ranks; all three ways give
the same outputs and gradients (checked).

Tiles: one step of AdamW, with float32 masters, of 8.4 million numbers of experts in bfloat16. Temporaries are the
bytes of tensors that the step makes and that live at once, at most, after a first step has made the state. All ways
end with the same bits (checked); times are of the process, in turns.

References:
    Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", ICS
    2023 (arXiv 2303.06318): duplicate token dropping, communication-aware activation checkpointing.
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s, total
from mycel.comm.exchange import copy_to_ranks, sum_over_ranks
from mycel.moe import ExpertParallel, Experts, MoE, TiledOptimizer, keep_exchanges
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


class Alive(TorchDispatchMode):
    """Bytes of tensors made meanwhile that live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.now += made.nbytes
                weakref.finalize(made, self._gone, made.nbytes)
        self.most = max(self.most, self.now)
        return out

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


class Whole:
    """Mixed precision as usual: all gradients up-cast, one step of the masters, all rounded back."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.inner = torch.optim.AdamW(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for master, p in zip(self.masters, self.parameters, strict=True):
            p.copy_(master)
            master.grad = None


def tiles() -> list[dict[str, Any]]:
    """Temporaries and time of a step, whole and in tiles."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    like = [torch.randn(8, 1024, 512).bfloat16(), torch.randn(8, 512, 1024).bfloat16()]
    makers: dict[str, Callable[[list[Tensor]], Any]] = {"one step for all": Whole}
    for tile in (1_800_000, 262_144, 65_536):
        makers[f"tiles of {tile:,}"] = partial(TiledOptimizer, inner=torch.optim.AdamW, tile=tile)
    copies = {name: [torch.nn.Parameter(t.clone()) for t in like] for name in makers}
    optimizers = {name: make(copies[name]) for name, make in makers.items()}
    most: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(STEPS + 2):
        grads = [torch.randn_like(t) for t in like]
        for name, optimizer in optimizers.items():
            for p, grad in zip(copies[name], grads, strict=True):
                p.grad = grad
            if turn == 1:
                with Alive() as alive:
                    optimizer.step()
                most[name] = alive.most
            else:
                begin = time.process_time()
                optimizer.step()
                times[name].append(time.process_time() - begin)
        first = next(iter(copies.values()))
        if not all(torch.equal(a, b) for some in copies.values() for a, b in zip(some, first, strict=True)):
            raise SystemExit("tiles give other bits")
    numbers = sum(t.numel() for t in like)
    return [
        {"tile": name, "numbers": numbers, "temporary": most[name], "median_s": middle(times[name][1:])}
        for name in makers
    ]


def table(lines: list[dict[str, Any]]) -> str:
    stepped = [s for s in lines if "tile" in s]
    lines = [s for s in lines if "way" in s]
    base = lines[0]["between"]
    rows = [
        (s["way"], f"{s['between'] / 1e3:.0f}", f"{s['between'] / base:.2f}", f"{s['inside'] / 1e3:.0f}",
         f"{1e3 * s['median_s']:.0f}")
        for s in lines
    ]  # fmt: skip
    first = markdown(("way", "KB between nodes", "of the first", "KB inside", "ms a step"), rows)
    found = [(s["tile"], f"{s['temporary'] / 1e6:.1f}", f"{1e3 * s['median_s']:.0f}") for s in stepped]
    return (
        first + "\n" + markdown(("AdamW of experts in bfloat16", "MB of temporaries", "processor ms a step"), found)
    )


def main() -> None:
    if is_rank():
        rank()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tiles",))
    if parser.parse_args().only:
        conclude(OUTPUT, PAGE, "ted", tiles(), table, kind="tile")
        return
    heard = on_cluster(two_boxes(num_ranks=4), Path(__file__), []) + tiles()
    conclude(OUTPUT, PAGE, "ted", heard, table)


if __name__ == "__main__":
    main()
