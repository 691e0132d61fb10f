"""What SuperScaler (nnScaler) claims: constraints shrink the search and keep good plans; plans beyond 1F1B are found.

    python benchmarks/claims/superscaler.py    # two minutes; replaces its lines and the table

*Limits*: the same search without limits and with some of a user's that the best plan keeps: jobs of the space, jobs
that were looked at, processor time, and the optimum, which must not move. *Interlaced*: nnScaler shares a large
embedding among all ranks and works on it between stages; here a head that is heavier than a stage is on the last rank
(even cut), on the last rank with a cut that makes up for it, and on all ranks as a block of its own with a searched
order. *Co-sharded* plans cut one device's work along heads and do them one after the other to save memory; the space
has no such cut, so what stands there is what recomputation and micro-batches save instead.

All figures are modelled or simulated.

References:
    Lin et al., "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training", OSDI 2024,
    sections 3.3 (interlaced, co-shard) and 6.4 (search time with constraints: 11.7 times shorter); before that
    "SuperScaler", arXiv:2301.08984.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.pipeline import known_order, simulate
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.search import find_batch
from mycel.planning.cluster import load_cluster
from mycel.planning.cuts import Chain, best_cut
from mycel.planning.job import Job, Mesh
from mycel.planning.memory import ways_to_save
from mycel.planning.models import named
from mycel.planning.search import Limits, search
from mycel.planning.search.space import space_of
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "superscaler.jsonl"
PAGE = ROOT / "docs" / "concepts" / "plan_search.md"
#: Cluster, model, batch, sequence, limits that a user of such a cluster would write.
SEARCHES = (
    ("h100:nodes=4", "llama3-8b", 128, 8192, ("tp in node", "micro_batch<=2", "cp<=2", "zero=2|3")),
    ("h100:nodes=16", "llama3-70b", 512, 8192, ("tp in node", "tp>=2", "cp<=4", "zero=1|2")),
    ("h100", "llama3-8b", 16, 8192, ("pp<=2", "tp=1", "recompute=none|alternate", "zero>=1")),
)
#: Ranks, micro-batches, layers, and what a layer and the head take, forward; backward is twice.
RANKS, BATCHES, LAYERS, LAYER, HEAD = 4, 8, 8, 2, 8


def limits() -> list[dict[str, Any]]:
    """Searches with and without limits."""
    lines = []
    for cluster_text, model, batch, seq, texts in SEARCHES:
        cluster, shape = load_cluster(cluster_text), named(model)
        base = Job(mesh=Mesh(), global_batch=batch, micro_batch=1, seq=seq)
        row: dict[str, Any] = {"part": "limits", "cluster": cluster_text, "model": model, "limits": list(texts)}
        for name, given in (("free", Limits()), ("limited", Limits.from_text(*texts))):
            begun = time.process_time()
            found = search(cluster, shape, batch=batch, seq=seq, limits=given, top=1)  # the best alone
            row |= {
                f"{name}_space": len(space_of(cluster, shape, base, given)),
                f"{name}_visited": found.visited,
                f"{name}_s": time.process_time() - begun,
                f"{name}_step_s": found.best.seconds.seconds,
            }
        lines.append(row)
    return lines


def _interlaced() -> Placement:
    """Layers as stages, and the head as a block of all ranks between forward and backward."""
    ranks = range(RANKS)
    forward = LAYERS // RANKS * LAYER
    blocks = [Block(name=f"F{r}", devices=(r,), time=forward, memory=1) for r in ranks]
    blocks.append(Block(name="H0", devices=tuple(ranks), time=3 * HEAD // RANKS, memory=0))
    blocks += [Block(name=f"B{r}", devices=(r,), time=2 * forward, memory=-1) for r in reversed(ranks)]
    waits = tuple(Dependency(before=i, after=i + 1) for i in range(len(blocks) - 1))
    return Placement(
        name="interlaced", num_devices=RANKS, blocks=tuple(blocks), dependencies=waits, cap=(RANKS + 1,) * RANKS
    )


def interlaced() -> list[dict[str, Any]]:
    """A head heavier than a stage: three places for it."""
    order = known_order("1f1b", RANKS, BATCHES)

    def piped(cut: Sequence[int]) -> float:
        def seconds(stage: int) -> int:
            return cut[stage] * LAYER + (HEAD if stage == RANKS - 1 else 0)

        times = {f"{s}F": float(seconds(s)) for s in range(RANKS)} | {f"{s}B": 2.0 * seconds(s) for s in range(RANKS)}
        return simulate(order, times).makespan

    chain = Chain(
        num_layers=LAYERS,
        batches=BATCHES,
        layer_s=(3.0 * LAYER,) * RANKS,
        extra_s=(0.0,) * (RANKS - 1) + (3.0 * HEAD,),
        message_s=(0.0,) * (RANKS - 1),
        most=(LAYERS,) * RANKS,
        least=(*(1,) * (RANKS - 1), 0),
    )
    cut = best_cut(chain)
    assert cut is not None
    shared = find_batch(_interlaced(), BATCHES, time_limit_s=20.0)
    even = piped((LAYERS // RANKS,) * RANKS)
    return [
        {"part": "interlaced", "plan": "1F1B, even cut, head on the last rank", "makespan": even, "times": 1.0},
        {
            "part": "interlaced",
            "plan": f"1F1B, cut {cut}",
            "makespan": piped(cut),
            "times": even / piped(cut),
        },
        {
            "part": "interlaced",
            "plan": "head on all ranks, searched order",
            "makespan": float(shared.timed.makespan),
            "times": even / shared.timed.makespan,
        },
    ]


def co_sharded() -> list[dict[str, Any]]:
    """What of the space saves memory on one device without moving anything to another."""
    shape = named("llama3-8b")
    job = Job(mesh=Mesh(dp=8), global_batch=16, micro_batch=2, seq=8192, zero=3)
    saved = ways_to_save(shape, job)
    return [
        {"part": "co-sharded", "way": way, "saved_gib": saved[way] / 2**30}
        for way in saved
        if way.startswith(("recompute", "micro_batch"))
    ]


def table(lines: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    """Three tables, one a part."""
    of = {part: [row for row in lines if row["part"] == part] for part in ("limits", "interlaced", "co-sharded")}
    first = markdown(
        ("cluster, model", "limits", "jobs", "of them looked at", "step, s", "processor, s"),
        (
            (
                f"{row['cluster']}, {row['model']}",
                ", ".join(f"`{text}`" for text in row["limits"]).replace("|", "\\|"),
                f"{row['free_space']} -> {row['limited_space']}",
                f"{row['free_visited']} -> {row['limited_visited']}",
                f"{row['free_step_s']:.4g} -> {row['limited_step_s']:.4g}",
                f"{row['free_s']:.2f} -> {row['limited_s']:.2f}",
            )
            for row in of["limits"]
        ),
    )
    second = markdown(
        ("head heavier than a stage", "makespan, units", "times faster"),
        ((row["plan"], f"{row['makespan']:g}", f"{row['times']:.2f}") for row in of["interlaced"]),
    )
    third = markdown(
        ("instead of co-sharding (8B, micro-batch 2, FSDP over 8)", "saves, GiB"),
        ((row["way"], f"{row['saved_gib']:.1f}") for row in of["co-sharded"]),
    )
    return f"{first}\n{second}\n{third}"


def main() -> None:
    """All parts."""
    conclude(OUTPUT, PAGE, "superscaler", [*limits(), *interlaced(), *co_sharded()], table)


if __name__ == "__main__":
    main()
