"""What SuperScaler (nnScaler) claims: constraints shrink the search and keep good plans; plans beyond 1F1B are found.

    python benchmarks/claims/superscaler.py    # two minutes; replaces its lines and the table

*Limits*: the same search without limits and with some of a user's that the best plan keeps: jobs of the space, jobs
that were looked at, processor time, and the optimum, which must not move. *Interlaced*: nnScaler shares a large
embedding among all ranks and works on it between stages; here a head that is heavier than a stage is on the last rank
(even cut), on the last rank with a cut that makes up for it, and on all ranks as a block of its own with a searched
order. *Co-sharded* plans cut one device's work along heads and inner columns and do the pieces one after the other to
save memory: long sequences on ranks that share none, searched with whole layers, with pieces, and with ranks that may
share them; and the longest sequence that one rank alone has room for.

All figures are modelled or simulated.

References:
    Lin et al., "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training", OSDI 2024,
    sections 3.3 (interlaced, co-shard) and 6.4 (search time with constraints: 11.7 times shorter); before that
    "SuperScaler", arXiv:2301.08984.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect
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
from mycel.planning.memory import memory_of
from mycel.planning.models import from_hugging_face, named
from mycel.planning.plan.explain import ways
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
#: Cluster, model, batch, sequence, that whole layers leave no room for on a rank without a pipeline.
LONG = (
    ("h100", "llama3-8b", 8, 65536),
    ("a100:nodes=8,ranks_per_node=1", "llama3-8b", 8, 65536),
)
#: Qwen3-1.7B.
SMALL = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
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
    """The best plans of whole layers, of pieces, and of ranks that share layers or sequences."""
    lines = []
    for cluster_text, model, batch, seq in LONG:
        base = Job(mesh=Mesh(), global_batch=batch, micro_batch=1, seq=seq, is_loss_fused=True)
        for texts in (("tp=1", "cp=1"), ("tp=1", "cp=1", "coshard<=8"), ("coshard<=8",)):
            limits, cluster = Limits.from_text(*texts), load_cluster(cluster_text)
            best = search(cluster, named(model), batch=batch, seq=seq, limits=limits, base=base, top=1).best
            lines.append(
                {
                    "part": "co-sharded",
                    "cluster": f"{cluster_text}, {model}, {batch} sequences of {seq}",
                    "limits": list(texts),
                    "plan": ways(best.job),
                    "pieces": best.job.coshard,
                    "step_s": best.seconds.seconds,
                    "gib": max(best.memory) / 2**30,
                }
            )
    return lines


def longest() -> list[dict[str, Any]]:
    """Tokens of one sequence that fit on one rank alone, in steps of 256."""
    shape, room = from_hugging_face(SMALL), 80 << 30
    lines = []
    for pieces in (1, 2, 4, 8):

        def holds(seq: int, pieces: int = pieces) -> float:
            one = Job(
                mesh=Mesh(),
                global_batch=1,
                micro_batch=1,
                seq=seq,
                recompute="full",
                coshard=pieces,
                is_loss_fused=True,
            )
            return memory_of(shape, one).total

        fits = bisect(range(256, 1 << 18, 256), room, key=holds)
        lines.append({"part": "longest", "pieces": pieces, "tokens": 256 * fits, "gib": holds(256 * fits) / 2**30})
    return lines


def table(lines: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    """Four tables, one a part."""
    parts = ("limits", "interlaced", "co-sharded", "longest")
    of = {part: [row for row in lines if row["part"] == part] for part in parts}
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
        ("long sequences", "limits", "plan found", "step, s", "fullest rank, GiB"),
        (
            (
                row["cluster"],
                ", ".join(f"`{text}`" for text in row["limits"]),
                row["plan"],
                f"{row['step_s']:.4g}",
                f"{row['gib']:.1f}",
            )
            for row in of["co-sharded"]
        ),
    )
    fourth = markdown(
        ("1.7B on one rank of 80 GiB, all recomputed: pieces", "longest sequence, tokens"),
        ((str(row["pieces"]), f"{row['tokens']:,}") for row in of["longest"]),
    )
    return f"{first}\n{second}\n{third}\n{fourth}"


def main() -> None:
    """All parts."""
    conclude(OUTPUT, PAGE, "superscaler", [*limits(), *interlaced(), *co_sharded(), *longest()], table)


if __name__ == "__main__":
    main()
