"""The time bound: below every simulated time, and met where it can be."""

from __future__ import annotations

import pytest

from mycel.collectives.select import select
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.collectives.synth import candidates_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.collectives.time_bound import bound_seconds
from mycel.errors import SynthesisError
from mycel.topology.builders import hypercube, ring, star, torus, two_boxes
from mycel.topology.model import Topology

FABRICS: tuple[Topology, ...] = (
    star(num_ranks=5, latency="20us"),
    two_boxes(num_ranks=6),
    ring(num_ranks=7, bandwidth="1 GB/s", latency="1us"),
    torus(dims=(2, 4), bandwidth="10 GB/s", latency="2us"),
    hypercube(dim=3, bandwidth="1 GB/s"),
)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.name)
def test_no_simulated_time_is_below(fabric: Topology, name: CollectiveName) -> None:
    root = fabric.num_ranks - 1 if name in ROOTED else None
    collective = Collective(name=name, num_ranks=fabric.num_ranks, root=root)
    for how in ({"overhead_s": 0.0}, {}, {"links": "rdma"}):
        least = bound_seconds(fabric, collective, **how)  # type: ignore[arg-type]
        for method in (*candidates_for(name), *classics_for(name)):
            try:
                schedule = synthesize(fabric, collective, method)
            except SynthesisError:
                continue
            for size, piece in ((64, 1 << 14), (1 << 14, 1 << 10), (1 << 18, 1 << 14)):
                run = simulate(schedule, size, piece_bytes=piece, **how)  # type: ignore[arg-type]
                assert run.seconds >= least.seconds(run.num_bytes) * (1 - 1e-9), (method, size, piece)


def test_it_is_met() -> None:
    fabric = star(num_ranks=6, latency="10us")
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        for row in select(fabric, name, [1 << 10, 1 << 16, 1 << 24], links="rdma").rows:
            assert 1.0 <= row.gap < 1.02
    far = bound_seconds(ring(num_ranks=8, latency="1us"), Collective(name="all_reduce", num_ranks=8), overhead_s=0.0)
    assert far.seconds(1) == pytest.approx(4e-6, rel=1e-3)


def test_what_comes_from_afar_starts_late() -> None:
    """Half way round a ring, a rank's links wait for blocks that are some messages away."""
    fabric = ring(num_ranks=16, bandwidth="1 GB/s", latency="10us")
    for name in ("all_gather", "reduce_scatter"):
        least = bound_seconds(fabric, Collective(name=name, num_ranks=16), overhead_s=0.0)
        size = 100_000
        apart = max(least.distance_s, size / least.bytes_per_second + least.last_s)
        assert least.seconds(size) > 1.03 * apart
    assert not bound_seconds(fabric, Collective(name="all_reduce", num_ranks=16), overhead_s=0.0).waits


def test_a_rank_works_at_one_message_at_a_time() -> None:
    """Over sockets: 4 us at either end, 25 us to wake. 15 blocks come to each of 16 ranks, and 15 go."""
    fabric = star(num_ranks=16, bandwidth="1 GB/s")
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        row = select(fabric, name, [1 << 10], methods=["direct" if name == "all_to_all" else "tree"]).rows[0]
        assert row.least_s >= 2 * 15 * 4e-6 and row.gap < 1.3
    least = bound_seconds(fabric, Collective(name="gather", num_ranks=16, root=3))
    assert least.seconds(1) == pytest.approx(29e-6 + 15 * 4e-6)
    # One tells the others, one every 4 us, and who knows helps: after 33, 37, 41 us and so on; it is over at 74.
    least = bound_seconds(fabric, Collective(name="broadcast", num_ranks=16, root=0))
    assert least.seconds(1) == pytest.approx(74e-6)
