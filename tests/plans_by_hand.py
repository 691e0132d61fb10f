"""Plans that no search found: built from a few numbers, so that what reads them is tested by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mycel.pipeline.known import known_order
from mycel.pipeline.order import Order
from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.models import ModelDescription, named
from mycel.planning.plan import Plan
from mycel.planning.plan.build import plan_of
from mycel.planning.plan.held import held_total
from mycel.planning.predict import Prediction
from mycel.planning.search import Candidate, Found

__all__ = ["FIVE", "by_hand", "described", "five_plans", "pieces_plan", "unequal_plan", "unequal_plans"]


def by_hand(
    cluster: Cluster,
    model: ModelDescription,
    job: Job,
    cut: tuple[int, ...],
    *,
    ranks: tuple[int, ...] | None = None,
    order: Order | None = None,
    limits: tuple[str, ...] = (),
) -> Plan:
    """A plan whose stages take a second a layer forward and two backward, and whose ranks hold what they need."""
    places = tuple(range(job.mesh.num_ranks)) if ranks is None else ranks
    seconds = tuple((float(layers), 2.0 * layers) for layers in cut)
    step = 3.0 * sum(cut) * job.num_micro_batches
    candidate = Candidate(
        job=job,
        ranks=places,
        cut=cut,
        seconds=Prediction(seconds=step, error=0.1, parts={"compute": step}, num_rows=12, source="by hand"),
        stage_seconds=seconds,
        memory=(0,) * cluster.num_ranks,
        binding="compute",
        replica_seconds=(seconds,) * len(job.shares),
    )
    found = Found(best=candidate, candidates=(candidate,))
    plan = plan_of(found, candidate, model, cluster, order=order, limits=limits)
    held = [0] * cluster.num_ranks
    for place, needed in enumerate(held_total(plan)):
        for rank in plan.group(place):
            held[rank] = round(needed)
    return replace(plan, memory=tuple(held))


def described(name: str = "llama3-8b") -> ModelDescription:
    """A model by its name."""
    return ModelDescription(shape=named(name))


def job(pp: int = 1, dp: int = 1, tp: int = 1, cp: int = 1, **others: Any) -> Job:
    """A job of 64 sequences."""
    return Job(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, cp=cp),
        **{"global_batch": 64, "micro_batch": 1, "seq": 4096, **others},
    )


def five_plans() -> dict[str, Plan]:
    """Five plans that differ in everything that forms have words for."""
    eight, sixteen = load_cluster("h100:nodes=1"), load_cluster("h100:nodes=2")
    model = described()
    folded = known_order("zb_v", 4, 16)
    return {
        "sharded": by_hand(eight, model, job(dp=8, zero=3, recompute="full", is_compiled=True), (32,)),
        "pipeline": by_hand(
            sixteen,
            model,
            job(pp=4, dp=2, tp=2, zero=1, recompute="attention", is_sequence_parallel=True),
            (9, 9, 8, 6),
            limits=("tp<=4", "tp in node", "stage 0 on node0", "memory<=70GiB"),
        ),
        "even": by_hand(eight, model, job(pp=4, dp=2, zero=1), (8, 8, 8, 8), ranks=(0, 4, 1, 5, 2, 6, 3, 7)),
        "interleaved": by_hand(
            eight, model, job(pp=2, dp=2, tp=2, chunks=2, recompute="full", is_offloaded=True), (8, 9, 9, 6)
        ),
        "folded": by_hand(
            eight,
            model,
            job(pp=4, dp=2, chunks=2, zero=3, recompute="alternate", micro_batch=2),
            (4, 4, 4, 4, 4, 4, 4, 4),
            order=folded,
        ),
    }


def pieces_plan() -> Plan:
    """One whose layers are done in pieces on each rank."""
    cut = job(pp=2, dp=4, zero=2, recompute="full", coshard=8, seq=65536, is_loss_fused=True)
    return by_hand(load_cluster("h100:nodes=1"), described(), cut, (17, 15), limits=("coshard<=8",))


def unequal_plan() -> Plan:
    """One whose replicas have unlike many micro-batches: not every form has words for it."""
    shared = job(pp=2, dp=2, tp=2, zero=1, shares=(40, 24))
    return by_hand(load_cluster("h100:nodes=1"), described(), shared, (18, 14))


def unequal_plans() -> dict[str, Plan]:
    """More of them, by name: no pipeline, a batch that no number of replicas divides, shared sequences."""
    eight, sixteen = load_cluster("h100:nodes=1"), load_cluster("h100:nodes=2")
    many = job(dp=4, tp=2, zero=2, recompute="full", is_sequence_parallel=True, shares=(24, 20, 12, 8))
    odd = job(pp=2, dp=4, zero=2, micro_batch=3, global_batch=57, recompute="full", shares=(7, 5, 4, 3))
    long = job(pp=4, dp=2, cp=2, zero=1, recompute="attention", shares=(33, 31))
    return {
        "unequal": unequal_plan(),
        "many": by_hand(eight, described(), many, (32,)),
        "odd": by_hand(eight, described(), odd, (17, 15), ranks=(0, 4, 1, 5, 2, 6, 3, 7)),
        "long": by_hand(sixteen, described(), long, (9, 9, 8, 6), limits=("shares=unequal", "stage 0 on node0")),
    }


#: Their names.
FIVE = ("sharded", "pipeline", "even", "interleaved", "folded")
