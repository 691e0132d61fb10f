"""What CoCoNet claims of collectives fused with computation, measured over slow emulated links, in turns in one run.

    python benchmarks/claims/coconet.py operators    # products and collectives, 2 ranks, 400 Mbit/s, both backends
    python benchmarks/claims/coconet.py choice       # 20 shapes: the tiles that are chosen beside all that could be
    python benchmarks/claims/coconet.py boundary     # a pipeline's boundary, 4 ranks a stage, two boxes
    python benchmarks/claims/coconet.py update       # optimizers on slices beside DDP, ZeRO and FSDP2, 2 and 4 ranks
    python benchmarks/claims/coconet.py compiled     # programs compiled with and without the pass, two link speeds

Each command replaces its own lines and tables in the page; without a word, all run. Figures are medians of repeats
from a common start to the last rank's end; ratios are of the same run.

References:
    A. Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning
    Workloads", ASPLOS 2022.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s
from mycel.comm import all_gather_rows, reduce_scatter_rows
from mycel.comm.meter import ByteMeter
from mycel.overlap import (
    all_gather_matmul,
    compile_pass,
    matmul_reduce_scatter,
    plan_tiles,
    receive_slices,
    reduce_scatter_update_all_gather,
    send_slices,
)
from mycel.topology.builders import ring, two_boxes
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims"
PAGE = ROOT / "docs" / "concepts" / "overlap.md"
REPEATS = int(os.environ.get("COCONET_REPEATS", "9"))
#: Of the choice of tiles, where a few per cent count.
CHOICE_REPEATS = 21
TILES = (1, 2, 4, 8, 16)


def in_turns(ways: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of each way; one after the other, again and again."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            seconds = step_s(way)
            if turn:  # the first one plans
                times[name].append(seconds)
    return {name: middle(spent) for name, spent in times.items()}


# -- operators ----------------------------------------------------------------------------------------------------


def gather_ways(rows: int, inner: int, columns: int) -> dict[str, Callable[[], object]]:
    """The whole array has so many rows; a way for each number of tiles, the chosen one, and both halves alone."""
    group, meter = dist.group.WORLD, ByteMeter()
    assert group is not None
    size = dist.get_world_size()
    x, weight = torch.randn(rows // size, inner), torch.randn(inner, columns)
    whole = torch.randn(rows, inner)

    def plain() -> Tensor:
        (gathered,) = all_gather_rows([x], group, meter, "plain")
        return gathered @ weight

    ways: dict[str, Callable[[], object]] = {"plain": plain}
    ways |= {f"{t} tiles": (lambda t=t: all_gather_matmul(x, weight, tiles=t)) for t in TILES}
    ways["chosen"] = lambda: all_gather_matmul(x, weight)
    ways["exchange"] = lambda: all_gather_rows([x], group, meter, "plain")
    ways["product"] = lambda: whole @ weight
    return ways


def scatter_ways(rows: int, inner: int, columns: int) -> dict[str, Callable[[], object]]:
    """As ``gather_ways``, of a product and the reduce_scatter of its rows."""
    group, meter = dist.group.WORLD, ByteMeter()
    assert group is not None
    x, weight = torch.randn(rows, inner), torch.randn(inner, columns)
    made = torch.randn(rows, columns)
    ways: dict[str, Callable[[], object]] = {"plain": lambda: reduce_scatter_rows(x @ weight, group, meter, "plain")}
    ways |= {f"{t} tiles": (lambda t=t: matmul_reduce_scatter(x, weight, tiles=t)) for t in TILES}
    ways["chosen"] = lambda: matmul_reduce_scatter(x, weight)
    ways["exchange"] = lambda: reduce_scatter_rows(made, group, meter, "plain")
    ways["product"] = lambda: x @ weight
    return ways


def mlp_ways(rows: int, dim: int, hidden: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of a tensor-parallel MLP whose input and output are slices of rows."""
    group, meter = dist.group.WORLD, ByteMeter()
    assert group is not None
    size = dist.get_world_size()
    x = torch.randn(rows // size, dim, requires_grad=True)
    up = torch.randn(dim, hidden // size).mul_(dim**-0.5).requires_grad_()
    down = torch.randn(hidden // size, dim).mul_(hidden**-0.5).requires_grad_()
    upstream = torch.randn(rows // size, dim)

    def plain() -> None:
        (gathered,) = all_gather_rows([x], group, meter, "plain")
        reduce_scatter_rows((gathered @ up).relu() @ down, group, meter, "plain").backward(upstream)

    def overlapped(tiles: int | None) -> None:
        inside = all_gather_matmul(x, up, tiles=tiles).relu()
        matmul_reduce_scatter(inside, down, tiles=tiles).backward(upstream)

    ways: dict[str, Callable[[], object]] = {"plain": plain}
    ways |= {f"{t} tiles": (lambda t=t: overlapped(t)) for t in TILES}
    return ways | {"chosen": lambda: overlapped(None)}


CASES: dict[str, tuple[Callable[[int, int, int], dict[str, Callable[[], object]]], tuple[int, int, int]]] = {
    "all_gather + product": (gather_ways, (1024, 1024, 768)),
    "product + reduce_scatter": (scatter_ways, (1024, 512, 1024)),
    "MLP, forward and backward": (mlp_ways, (1024, 512, 2048)),
}


def operators_rank() -> None:
    _, _ = join()
    torch.manual_seed(dist.get_rank())
    for name, (make, sizes) in CASES.items():
        seconds = in_turns(make(*sizes))
        say(case=name, sizes=sizes, seconds=seconds)
    dist.destroy_process_group()


def operators(pairs: list[dict[str, Any]]) -> str:
    rows = []
    for line in pairs:
        s = line["seconds"]
        best = min((s[f"{t} tiles"], t) for t in TILES[1:])
        cells = [f"{1e3 * s[key]:.1f}" if key in s else "" for key in ("exchange", "product", "plain", "1 tiles")]
        cells += [f"{1e3 * best[0]:.1f} ({best[1]})", f"{1e3 * s['chosen']:.1f}", f"{s['plain'] / s['chosen']:.2f}"]
        rows.append((line["case"], " x ".join(map(str, line["sizes"])), line["backend"], *cells))
    return markdown(
        (
            "case",
            "rows x inner x columns",
            "backend",
            "exchange, ms",
            "product, ms",
            "plain, ms",
            "one tile, ms",
            "best tiles, ms",
            "chosen, ms",
            "plain / chosen",
        ),
        rows,
    )


def run_operators() -> None:
    fabric = ring(num_ranks=2, bandwidth="400 Mbit/s")
    heard = []
    for backend in ("mycel", "gloo"):
        said = on_cluster(fabric, Path(__file__), ["operators"], backend=backend)
        heard += [{**line, "backend": backend} for line in said]
    conclude(OUTPUT / "coconet_operators.jsonl", PAGE, "operators", heard, operators)


# -- which number of tiles ----------------------------------------------------------------------------------------

#: Rows of the whole array, inner, columns; and which way round.
SHAPES = [
    (way, rows, inner, columns)
    for rows, inner, columns in (
        (512, 256, 256),
        (512, 512, 1024),
        (512, 1024, 512),
        (1024, 256, 1024),
        (1024, 512, 512),
        (1024, 1024, 768),
        (1024, 1024, 256),
        (2048, 256, 512),
        (2048, 512, 768),
        (128, 512, 512),
    )
    for way in ("gather", "scatter")
]
MAKERS = {
    "gather": ("all_gather_matmul", gather_ways),
    "scatter": ("matmul_reduce_scatter", scatter_ways),
}


def choice_rank() -> None:
    join()
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    for way, *sizes in SHAPES:
        operator, make = MAKERS[way]
        tiling = plan_tiles(operator, *sizes, dtype=torch.float32, group=group)  # type: ignore[arg-type]
        ways = {name: run for name, run in make(*sizes).items() if name.endswith("tiles")}
        seconds = in_turns(ways, CHOICE_REPEATS)
        modelled = {f"{t} tiles": s for t, s in tiling.seconds}
        say(way=way, sizes=sizes, chosen=tiling.tiles, seconds=seconds, modelled=modelled)
    dist.destroy_process_group()


def choices(lines: list[dict[str, Any]]) -> str:
    rows, near = [], 0
    for line in lines:
        s, chosen = line["seconds"], f"{line['chosen']} tiles"
        best = min(s, key=s.__getitem__)
        loss = s[chosen] / s[best] - 1
        near += loss <= 0.05
        cells = [f"{1e3 * s[f'{t} tiles']:.1f}" for t in TILES]
        rows.append((line["way"], " x ".join(map(str, line["sizes"])), *cells, line["chosen"], f"{100 * loss:.1f} %"))
    heads = ("collective", "rows x inner x columns", *(f"{t}, ms" for t in TILES), "chosen", "above the best")
    return markdown(heads, rows) + f"\nWithin 5 % of the best: {near} of {len(lines)}.\n"


def run_choice() -> None:
    heard = on_cluster(ring(num_ranks=2, bandwidth="400 Mbit/s"), Path(__file__), ["choice"])
    conclude(OUTPUT / "coconet_choice.jsonl", PAGE, "choice", heard, choices)


# -- a boundary of stages -----------------------------------------------------------------------------------------

BOUNDARY = (1024, 1024)


def boundary_rank() -> None:
    rank, size = join()
    half = size // 2
    stages = [list(range(half)), list(range(half, size))]
    groups = [dist.new_group(stage) for stage in stages]
    here = rank // half
    group, others = groups[here], stages[1 - here]
    torch.manual_seed(rank)
    part = torch.randn(*BOUNDARY)
    results: dict[str, Tensor] = {}

    def whole() -> None:
        if here == 0:
            summed = part.clone()
            dist.all_reduce(summed, group=group)
            dist.send(summed, others[rank % half])
            return
        received = torch.empty(*BOUNDARY)
        dist.recv(received, others[rank % half])
        results["all_reduce, whole sends"] = received

    def slices(tiles: int) -> None:
        if here == 0:
            send_slices(part, others, group=group, tiles=tiles)
        else:
            name = "slices" if tiles == 1 else f"slices in {tiles} tiles"
            results[name] = receive_slices(BOUNDARY, others, group=group, tiles=tiles)

    ways: dict[str, Callable[[], object]] = {"all_reduce, whole sends": whole}
    ways |= {("slices" if t == 1 else f"slices in {t} tiles"): (lambda t=t: slices(t)) for t in (1, 2, 4, 8)}
    seconds = in_turns(ways, min(5, REPEATS))
    told: list[Any] = [None]
    if rank == half:
        first = results["all_reduce, whole sends"]
        told = [{name: float((first - found).abs().max()) for name, found in results.items()}]
    dist.broadcast_object_list(told, half)
    for name, spent in seconds.items():
        say(way=name, seconds=spent, differs=told[0][name])
    dist.destroy_process_group()


def boundaries(lines: list[dict[str, Any]]) -> str:
    first = lines[0]["seconds"]
    rows = [
        (line["way"], f"{1e3 * line['seconds']:.0f}", f"{first / line['seconds']:.2f}", f"{line['differs']:.1g}")
        for line in lines
    ]
    return markdown(("way", "ms", "times as fast", "largest difference"), rows)


def run_boundary() -> None:
    fabric = two_boxes(num_ranks=8, inside="400 Mbit/s", between="50 Mbit/s")
    heard = on_cluster(fabric, Path(__file__), ["boundary"])
    conclude(OUTPUT / "coconet_boundary.jsonl", PAGE, "boundary", heard, boundaries)


# -- updates ------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 1024


def stack() -> torch.nn.Module:
    """Four million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def update_rank() -> None:
    rank, size = join()
    torch.manual_seed(rank)
    x = torch.randn(16, WIDTH)
    ways: dict[str, Callable[[], object]] = {}
    state: dict[str, Callable[[], int]] = {}

    def bytes_of(optimizer: Any) -> int:
        tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.nbytes for t in local)

    def add(name: str, model: Any, optimizer: Any, measure: Callable[[], int]) -> None:
        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        ways[name], state[name] = step, measure

    plain = DistributedDataParallel(stack())
    adamw = AdamW(plain.parameters(), lr=1e-3)
    add("DDP, AdamW", plain, adamw, lambda: bytes_of(adamw))
    sliced: dict[int | None, tuple[Any, Any]] = {}
    for tiles in (1, 4, None):
        model = stack()
        optimizer = reduce_scatter_update_all_gather(
            AdamW(model.parameters(), lr=1e-3), model.named_parameters(), tiles=tiles
        )
        sliced[tiles] = (model, optimizer)
        name = "slices, tiles chosen" if tiles is None else f"slices, {tiles} tile{'s' * (tiles > 1)}"
        add(name, model, optimizer, lambda optimizer=optimizer: optimizer.state_bytes)
    zero_model = DistributedDataParallel(stack())
    zero = ZeroRedundancyOptimizer(zero_model.parameters(), optimizer_class=AdamW, lr=1e-3)
    add("DDP, ZeroRedundancyOptimizer", zero_model, zero, lambda: bytes_of(zero.optim))
    sharded = stack()
    mesh = init_device_mesh("cpu", (size,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    of_shards = AdamW(sharded.parameters(), lr=1e-3)
    add("FSDP2, AdamW", sharded, of_shards, lambda: bytes_of(of_shards))
    seconds = in_turns(ways, min(5, REPEATS))
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    found = torch.cat([p.detach().reshape(-1) for p in sliced[4][0].parameters()])
    differs = float((expected - found).abs().max())
    for name, spent in seconds.items():
        say(way=name, ranks=size, seconds=spent, state_bytes=state[name](), differs=differs)
    dist.destroy_process_group()


def updates(lines: list[dict[str, Any]]) -> str:
    first = {line["ranks"]: line["seconds"] for line in lines if line["way"] == "DDP, AdamW"}
    rows = [
        (
            line["ranks"],
            line["way"],
            f"{1e3 * line['seconds']:.0f}",
            f"{first[line['ranks']] / line['seconds']:.2f}",
            f"{line['state_bytes'] / 1e6:.1f}",
        )
        for line in lines
    ]
    text = markdown(("ranks", "way", "ms a step", "times as fast as DDP", "state on rank 0, MB"), rows)
    told = {line["ranks"]: line["differs"] for line in lines}
    words = ", ".join(f"{differs:.2g} at {ranks} ranks" for ranks, differs in told.items())
    return text + f"\nLargest difference of a parameter between DDP and slices in 4 tiles after all steps: {words}.\n"


def run_update() -> None:
    heard = []
    for ranks in (2, 4):
        heard += on_cluster(ring(num_ranks=ranks, bandwidth="400 Mbit/s"), Path(__file__), ["update"])
    conclude(OUTPUT / "coconet_update.jsonl", PAGE, "update", heard, updates)


# -- compiled programs --------------------------------------------------------------------------------------------

#: Rows of the whole array, features, hidden features.
COMPILED = [
    (rows, dim, hidden)
    for rows in (256, 1024, 2048, 4096)
    for dim, hidden in ((256, 1024), (512, 2048), (1024, 1024), (256, 4096), (256, 6144))
]


class Mlp(torch.nn.Module):
    """What the pass is shown: a tensor-parallel block between slices of rows."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def compiled_rank() -> None:
    rank, size = join()
    mesh = init_device_mesh("cpu", (size,))
    plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    shapes = COMPILED if "COCONET_SHAPES" not in os.environ else COMPILED[: int(os.environ["COCONET_SHAPES"])]
    for rows, dim, hidden in shapes:
        x = torch.randn(rows // size, dim, generator=torch.Generator().manual_seed(rank))
        runs: dict[str, Callable[[], object]] = {}
        backs: dict[str, Callable[[], object]] = {}
        found: Any = None
        outcomes = []
        torch._dynamo.reset()
        for name in ("plain", "overlapped"):
            torch.manual_seed(0)
            block = parallelize_module(Mlp(dim, hidden), mesh, plan)

            # Each has a backend of its own: Dynamo shares code between instances of a class, overlapped or not.
            def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
                return compile_fx(graph, inputs)

            compiled = torch.compile(block, backend=backend)
            given = x.clone().requires_grad_()

            def forward(compiled: Any = compiled, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return compiled(x)  # type: ignore[no-any-return]

            def both(compiled: Any = compiled, given: Tensor = given) -> None:
                compiled(given).sum().backward()

            if name == "overlapped":
                with compile_pass() as found:
                    both()
                    forward()
            else:
                both()
                forward()
            outcomes.append([forward(), *(p.grad.to_local().clone() for p in block.parameters())])
            runs[name], backs[name] = forward, both
        weight, down = torch.randn(dim, hidden // size), torch.randn(hidden // size, dim)
        whole, made = torch.randn(rows, dim), torch.randn(rows, hidden // size)
        group, meter = dist.group.WORLD, ByteMeter()
        assert group is not None
        runs["products"] = lambda whole=whole, weight=weight, made=made, down=down: (whole @ weight, made @ down)
        runs["exchanges"] = lambda x=x, whole=whole, group=group, meter=meter: (
            all_gather_rows([x], group, meter, "plain"),
            reduce_scatter_rows(whole, group, meter, "plain"),
        )
        forward_s, both_s = in_turns(runs, min(7, REPEATS)), in_turns(backs, min(5, REPEATS))
        say(
            sizes=(rows, dim, hidden),
            forward=forward_s,
            both=both_s,
            replaced=sum(f.is_replaced for f in found.found),
            left=[f.explain() for f in found.found if not f.is_replaced],
            same=all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)),
        )
    dist.destroy_process_group()


def compiled_table(lines: list[dict[str, Any]]) -> str:
    rows, worst, best = [], 9.0, []
    for line in lines:
        f, b = line["forward"], line["both"]
        gain, both = f["plain"] / f["overlapped"], b["plain"] / b["overlapped"]
        serial = f["products"] + f["exchanges"]
        share = f["products"] / serial
        worst = min(worst, gain, both)
        if 0.4 <= share <= 0.6:
            best.append(gain)
        cells = [f"{1e3 * f[key]:.1f}" for key in ("products", "exchanges", "plain", "overlapped")]
        cells += [f"{gain:.2f}", f"{both:.2f}", line["replaced"], len(line["left"]), "yes" if line["same"] else "no"]
        rows.append((line["bandwidth"], " x ".join(map(str, line["sizes"])), *cells))
    heads = ("links", "rows x features x hidden", "products, ms", "exchanges, ms", "plain, ms", "overlapped, ms")
    heads += ("forward", "forward and backward", "replaced", "left", "same bits")
    words = f"\nSlowest: {worst:.2f}. "
    if best:
        words += f"Where products and exchanges each take 40 % or more, forward: {min(best):.2f} to {max(best):.2f}."
    return markdown(heads, rows) + words + "\n"


def run_compiled() -> None:
    heard = []
    for bandwidth in ("200 Mbit/s", "400 Mbit/s"):
        said = on_cluster(ring(num_ranks=2, bandwidth=bandwidth), Path(__file__), ["compiled"], timeout_s=3000)
        heard += [{**line, "bandwidth": bandwidth} for line in said]
    conclude(OUTPUT / "coconet_compiled.jsonl", PAGE, "compiled", heard, compiled_table)


PARTS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "operators": (operators_rank, run_operators),
    "choice": (choice_rank, run_choice),
    "boundary": (boundary_rank, run_boundary),
    "update": (update_rank, run_update),
    "compiled": (compiled_rank, run_compiled),
}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise SystemExit(f"{name}: no part of this claim; there are {', '.join(PARTS)}")
        PARTS[name][0 if is_rank() else 1]()


if __name__ == "__main__":
    main()
