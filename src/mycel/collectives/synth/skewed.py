"""Skewed: all_to_all of unlike blocks over boxes that are alike, planned in milliseconds.

Where tokens choose their experts, some ranks have much more to send than others, and the matrix is a new one every
time. The cables between boxes are what binds, and a box is over soonest if all of its ranks send, and get, equally
much. So what box A has for box B leaves A over all of its ranks in equal parts, first moved between them over the
fast links inside; the rank of the same place in B takes a part in and passes on what is for others. Then only boxes
count: their matrix is taken apart into matchings, in each of which a box sends to one box and gets from one (Birkhoff
and von Neumann), and parts go in that order, so that nobody is sent to by many at once.

Blocks are divided in whole units so that parts are exactly equal; those that need not be moved to get there are not.

References:
    Y. Lei, D. Lee, L. Zhao, D. Kurniawan, C. Kim, H. Jeong, C. Kim, H. Choi, L. Yu, A. Krishnamurthy, J. Sherry, E.
    Nurvitadhi, "FAST: An Efficient Scheduler for All-to-All GPU Communication", arXiv 2505.09764 (balance inside
    nodes, Birkhoff-von Neumann between them).
"""

from __future__ import annotations

import numpy as np

from mycel.collectives.boxes import find_boxes
from mycel.collectives.columns import Columns, starts
from mycel.collectives.maxflow import IntArray
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.skewed_plan import SkewedPlan, plan_skewed
from mycel.collectives.spec import Collective, CollectiveName, check_ranks
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "serves", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_to_all",)


def serves(topology: Topology) -> bool:
    """Whether there are boxes that are alike, joined place by place."""
    return find_boxes(topology) is not None


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule in which each box's network links carry equally much.

    Args:
        topology: of boxes that are alike, each rank with a way to those of its place in the others.
        collective: an all_to_all of uneven blocks.

    Raises:
        UsageError: the collective is over another number of ranks.
        SynthesisError: another collective, equal blocks, or no such boxes.
    """
    n = topology.num_ranks
    check_ranks(topology, collective)
    if collective.name not in SERVES or collective.weights is None:
        raise SynthesisError(
            f"skewed plans uneven blocks of all_to_all, not {collective.to_text()}; flow and direct plan equal ones"
        )
    boxes = find_boxes(topology)
    if boxes is None:
        raise SynthesisError(
            f"skewed on {topology.name}: no boxes that are alike and joined rank by rank; flow needs none"
        )
    plan = plan_skewed(boxes, np.array(collective.weights, dtype=np.int64).reshape(n, n))
    return _schedule(topology, collective, plan)


def _schedule(topology: Topology, collective: Collective, plan: SkewedPlan) -> Schedule:
    """Every part along its way: inside its box, between boxes, inside the other."""
    chunks, chunk_of = _chunks(collective, plan)
    stops, legs = plan.stops(), plan.legs()
    hop, part = np.nonzero(legs >= 0)
    order = np.lexsort((part, hop, plan.begins[part]))
    place = np.full(legs.shape, -1, dtype=np.int64)
    place[hop[order], part[order]] = np.arange(len(order))
    # The move before: that of the last stop but one, where it was one.
    before = np.full(legs.shape, -1, dtype=np.int64)
    before[1] = place[0]
    before[2] = np.where(place[1] >= 0, place[1], place[0])
    hop, part = hop[order], part[order]
    after = before[hop, part]
    columns = Columns(
        chunk=chunk_of[part],
        src=stops[hop, part],
        dst=stops[hop + 1, part],
        reduce=np.zeros(len(order), dtype=np.bool_),
        path=legs[hop, part],
        paths=plan.boxes.paths,
        after_start=starts((after >= 0).astype(np.int64)),
        after=after[after >= 0],
    )
    return Schedule.of_columns(
        collective=collective,
        topology=topology,
        method="skewed",
        num_units=collective.total_weight * plan.unit,
        chunks=chunks,
        columns=columns,
    )


def _chunks(collective: Collective, plan: SkewedPlan) -> tuple[tuple[Chunk, ...], IntArray]:
    """A chunk for each part, and for each block that stays; and the number of each part's."""
    n = collective.num_ranks
    weights = np.array(collective.weights, dtype=np.int64)
    kept = np.arange(n) * (n + 1)
    kept = kept[weights[kept] > 0]
    blocks = np.concatenate([plan.source * n + plan.target, kept])
    units = np.concatenate([plan.units, weights[kept] * plan.unit])
    order = np.argsort(blocks, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    ends = np.cumsum(units[order])
    begins = ends - units[order]
    chunks = tuple(Chunk(start=a, stop=b) for a, b in zip(begins.tolist(), ends.tolist(), strict=True))
    return chunks, number[: len(plan.units)]
