"""What SkipPipe claims: routes past stages that avoid collisions shorten a step, and what leaving out does to a loss.

    python benchmarks/claims/skippipe.py    # three minutes; 8 ranks; replaces its lines and the tables in the page

Four stages on two nodes each; a micro-batch visits three of them. The same skips are run twice: each micro-batch on
its own shortest way, and all ways chosen together; and once more on nodes in turns, which avoids most collisions with
no search at all. Beside them all stages, on nodes in turns. The loss is that of a small residual network in one
process, trained over the very same routes and examined with all stages.

References:
    Blagoev et al., "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks", arXiv:2502.19913.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from mycel.pipeline.order import Action, Kind, Order
from mycel.pipeline.routes import Nodes, Routes, Visit, find_routes
from mycel.topology.builders import star
from paced import WIDTH, Case, PacedStage, measure, ratio
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "skippipe.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
STAGES, EACH, VISITED, MICRO_BATCHES, ROUNDS = 4, 2, 3, 12, 9
UNIT_S, BANDWIDTH_BITS, SEARCH_S = 0.025, 50e6, 60.0
TRAINED = 120
RANKS = STAGES * EACH
NODES = Nodes(
    stage=tuple(node // EACH for node in range(RANKS)),
    forward=(2,) * RANKS,
    backward=(4,) * RANKS,
    delay=tuple(tuple(int(a != b) for b in range(RANKS)) for a in range(RANKS)),
)


def in_turns(routes: Sequence[Sequence[int]]) -> Routes:
    """Nodes of each stage in turns, each serving who comes first: routes among nodes that have no choice."""
    ways = [[stage * EACH + m % EACH for stage in sorted(route)] for m, route in enumerate(routes)]
    alone = Nodes(stage=tuple(range(RANKS)), forward=NODES.forward, backward=NODES.backward, delay=NODES.delay)
    # With a stage to every node a route of stages is a way over nodes.
    found = find_routes(alone, len(ways), visited=1, avoid_collisions=False, routes=ways)
    return Routes(nodes=NODES, visits=found.visits, bound=0)


def order_of(routes: Routes) -> Order:
    """A node is a stage of the order, on a rank of its own, so that a stage may be on several."""
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(RANKS)]
    for m, visits in enumerate(routes.visits):
        for visit in visits:
            rows[visit.node] += _turns(visit, m)
    return Order(
        rows=tuple(tuple(action for _, action in sorted(row, key=lambda each: each[0])) for row in rows),
        num_stages=RANKS,
        num_micro_batches=len(routes.visits),
        routes=tuple(tuple(visit.node for visit in visits) for visits in routes.visits),
    )


def _turns(visit: Visit, m: int) -> list[tuple[int, Action]]:
    return [
        (visit.forward_start, Action(stage=visit.node, kind=Kind.FORWARD, micro_batch=m)),
        (visit.backward_start, Action(stage=visit.node, kind=Kind.BACKWARD, micro_batch=m)),
    ]


def ways() -> dict[str, Routes]:
    """What is compared."""
    together = find_routes(NODES, MICRO_BATCHES, visited=VISITED, time_limit_s=SEARCH_S)
    everything = [tuple(range(STAGES))] * MICRO_BATCHES
    return {
        "all stages, nodes in turns": in_turns(everything),
        "same skips, each its shortest way": find_routes(
            NODES, MICRO_BATCHES, visited=VISITED, avoid_collisions=False, routes=together.stages
        ),
        "same skips, nodes in turns": in_turns(together.stages),
        "SkipPipe: chosen together": together,
    }


def curve(routes: Sequence[Sequence[int]]) -> list[float]:
    """The loss with all stages, every 40 steps of training over routes."""
    torch.manual_seed(0)
    stages = [PacedStage(0.0, 0.0, residual=True) for _ in range(STAGES)]
    teacher = [PacedStage(0.0, 0.0, residual=True) for _ in range(STAGES)]
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.parameters()], lr=0.03)
    said = []
    for step in range(TRAINED + 1):
        x = torch.randn(MICRO_BATCHES, 8, WIDTH)
        with torch.no_grad():
            target = nn.Sequential(*teacher)(x)
            if step % 40 == 0:
                said.append(nn.functional.mse_loss(nn.Sequential(*stages)(x), target).item())
        optimizer.zero_grad()
        for part, aim, route in zip(x, target, routes, strict=True):
            for stage in route:
                part = stages[stage](part)
            (nn.functional.mse_loss(part, aim) / MICRO_BATCHES).backward()
        optimizer.step()
    return said


def table(lines: list[dict[str, Any]]) -> str:
    best = lines[-1]
    rows = [
        (
            line["case"],
            f"{line['more']['units'] * UNIT_S:.2f}",
            f"{median(line['seconds']):.2f}",
            f"{line['more']['units'] / best['more']['units']:.2f}",
            f"{ratio(line['seconds'], best['seconds']) if line is not best else 1:.2f}",
        )
        for line in lines
    ]
    times = markdown(("way", "planned s", "measured s", "planned / SkipPipe's", "measured / SkipPipe's"), rows)
    curves = [(line["case"], *(f"{loss:.4f}" for loss in line["curve"])) for line in (lines[0], best)]
    heads = ("trained over", *(f"loss after {40 * place}" for place in range(len(best["curve"]))))
    return times + "\n" + markdown(heads, curves)


def main() -> None:
    compared = ways()
    num_bytes = int(UNIT_S * BANDWIDTH_BITS / 8)
    cases = [
        Case(
            name=name,
            order=order_of(routes).to_json(),
            times={"F": 2 * UNIT_S, "B": 4 * UNIT_S},
            num_bytes=num_bytes,
            more={"units": routes.makespan, "stage_of": NODES.stage},
        )
        for name, routes in compared.items()
    ]
    heard = measure(star(num_ranks=RANKS, bandwidth=f"{BANDWIDTH_BITS / 1e6:g} Mbit/s"), cases, rounds=ROUNDS)
    for line in heard:
        line["curve"] = curve(compared[line["case"]].stages)
    if any(len(line["losses"]) != MICRO_BATCHES for line in heard):
        raise SystemExit("a micro-batch has no loss")
    conclude(OUTPUT, PAGE, "skippipe", heard, table)


if __name__ == "__main__":
    main()
