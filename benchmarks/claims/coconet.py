"""What CoCoNet claims of collectives fused with computation, measured over slow emulated links, in turns in one run.

    python benchmarks/claims/coconet.py operators    # products and collectives, 2 ranks, 400 Mbit/s, both backends
    python benchmarks/claims/coconet.py choice       # 20 shapes: the tiles that are chosen beside all that could be

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

from moe_ranks import is_rank, join, middle, on_cluster, say, step_s
from mycel.comm import all_gather_rows, reduce_scatter_rows
from mycel.comm.meter import ByteMeter
from mycel.overlap import all_gather_matmul, matmul_reduce_scatter, plan_tiles
from mycel.topology.builders import ring
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims"
PAGE = ROOT / "docs" / "concepts" / "overlap.md"
REPEATS = int(os.environ.get("COCONET_REPEATS", "9"))
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
        seconds = in_turns(ways, min(7, REPEATS))
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


PARTS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "operators": (operators_rank, run_operators),
    "choice": (choice_rank, run_choice),
}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise SystemExit(f"{name}: no part of this claim; there are {', '.join(PARTS)}")
        PARTS[name][0 if is_rank() else 1]()


if __name__ == "__main__":
    main()
