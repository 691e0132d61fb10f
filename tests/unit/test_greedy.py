"""Greedy plans: right, the same every time, and ahead in the middle of sizes."""

from __future__ import annotations

import pytest
from tests.effort import long

from mycel.collectives.proof import prove_lowering
from mycel.collectives.select import select
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.greedy import SERVES
from mycel.collectives.synth.greedy import synthesize as plan
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.builders import hypercube, mesh, ring, star, torus, two_boxes
from mycel.topology.model import Link, Topology, Vertex

FABRICS = (star(num_ranks=5), two_boxes(num_ranks=6), ring(num_ranks=5), torus(dims=(2, 3)), hypercube(dim=3))


@pytest.mark.parametrize("name", SERVES)
@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.name)
def test_plans_are_right_at_every_size(fabric: Topology, name: CollectiveName) -> None:
    for size in (1 << 10, 1 << 22):
        schedule = synthesize(fabric, name, "greedy", num_bytes=size)
        verify_schedule(schedule)
        prove_lowering(schedule)
        assert schedule == synthesize(fabric, name, "greedy", num_bytes=size)
        messages = (fabric.num_ranks - 1) * len(schedule.chunks)  # each part to every other rank, once
        assert len(schedule.transfers) == messages * (2 if name == "all_reduce" else 1)


def test_one_way_links_are_turned_for_sums() -> None:
    fabric = Topology(
        name="one way",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank", label=str(i)) for i in range(4)),
        links=tuple(Link(src=i, dst=(i + 1) % 4, capacity=1) for i in range(4)),
    )
    for name in SERVES:
        verify_schedule(synthesize(fabric, name, "greedy"))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("dims", [(3, 3), pytest.param((4, 4), marks=long)])
def test_the_middle_of_sizes(dims: tuple[int, ...], name: CollectiveName) -> None:
    fabric = torus(dims=dims, bandwidth="1 GB/s", latency="30us")
    row = select(fabric, name, [1 << 18], methods=["tree", "forest", "greedy"], links="rdma").rows[0]
    assert row.method == "greedy" and row.gap < 1.25
    assert min(row.seconds["tree"], row.seconds["forest"]) > 1.2 * row.seconds["greedy"]


def test_ranks_that_work_at_one_message_at_a_time_get_fewer() -> None:
    """Over sockets a plan has fewer parts than where messages take no work, and is quicker for it."""
    fabric = torus(dims=(4, 4), bandwidth="1 GB/s", latency="26us")
    plans = [synthesize(fabric, "all_gather", "greedy", num_bytes=1 << 18, links=links) for links in ("tcp", "rdma")]
    assert len(plans[0].transfers) < len(plans[1].transfers)
    times = [simulate(p, 1 << 18, piece_bytes=1 << 18, links="tcp").seconds for p in plans]
    assert times[0] < 0.7 * times[1]


def test_plans_are_compared_in_the_pieces_in_which_they_run() -> None:
    """Both cut into 2 and into 4 parts take 77.6 us as a whole; in pieces fewer parts leave more to the pipeline."""
    fabric, size, limit_s = mesh(dims=(3, 3), bandwidth="50 GB/s", latency="0.5us"), 1 << 22, 72e-6
    schedule = synthesize(fabric, "all_reduce", "greedy", num_bytes=size, overhead_s=1e-6)
    assert simulate(schedule, size, piece_bytes=size, overhead_s=1e-6).seconds > limit_s
    pieces = (1 << 14, 1 << 15, 1 << 16)
    assert min(simulate(schedule, size, piece_bytes=p, overhead_s=1e-6).seconds for p in pieces) < limit_s


def test_refusals() -> None:
    with pytest.raises(SynthesisError, match="plans up to 4000 messages; forest and tree serve others"):
        synthesize(star(num_ranks=65), "all_gather", "greedy")
    with pytest.raises(SynthesisError, match="plans equal blocks only"):
        plan(star(num_ranks=3), Collective(name="all_gather", num_ranks=3, weights=(1, 2, 3)))
    with pytest.raises(UsageError, match="cannot plan 0 bytes"):
        synthesize(star(num_ranks=3), "all_gather", "greedy", num_bytes=0)
