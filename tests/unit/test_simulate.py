"""The simulator: times that can be worked out by hand, limits that no time may beat, and what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives.bound import bound
from mycel.collectives.fair_shares import share
from mycel.collectives.lower import chunk_bounds, lower
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.select import TIE, Row, Selection, select
from mycel.collectives.simulate import Machine, Simulation, simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import BY_SIZE, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.verify import verify_programs
from mycel.cost import link_costs
from mycel.errors import ScheduleError, UsageError
from mycel.topology.builders import full_mesh, ring, star, torus, two_boxes
from mycel.topology.link_class import StatedClass
from mycel.topology.load import load_topology, parse_topology
from mycel.topology.model import Link, Topology, Vertex

ROOT = Path(__file__).resolve().parents[2]


#: Eight ranks in three boxes, whose forest has channels of unlike loads on shared links.
UNLIKE = """
boxes:
  - {name: a, ranks: 2, inside: {bandwidth: 24 GB/s}, uplink: {to: core, bandwidth: 3 GB/s, per: rank}}
  - {name: b, ranks: 2, inside: {bandwidth: 8 GB/s}, uplink: {to: core, bandwidth: 5 GB/s, per: box}}
  - {name: c, ranks: 4, inside: {bandwidth: 4 GB/s}, uplink: {to: core, bandwidth: 3 GB/s, per: box}}
switches: [core]
"""


def on(topology: Topology, name: CollectiveName, root: int | None = None) -> Collective:
    return Collective(name=name, num_ranks=topology.num_ranks, root=root)


def line(*capacities: int, latency_s: float = 0.0, unit: str = "MB/s") -> Topology:
    """Ranks in a row, links both ways."""
    links = []
    for i, capacity in enumerate(capacities):
        links += [Link(src=a, dst=b, capacity=capacity, latency_s=latency_s) for a, b in ((i, i + 1), (i + 1, i))]
    vertices = tuple(Vertex(kind="rank", label=str(i)) for i in range(len(capacities) + 1))
    return Topology(name="line", unit=unit, vertices=vertices, links=tuple(links))


def chain(topology: Topology) -> Schedule:
    """Broadcast from rank 0 down the line."""
    transfers = tuple(
        Transfer(chunk=0, src=i, dst=i + 1, reduce=False, path=(i, i + 1), after=(i - 1,) if i else ())
        for i in range(topology.num_ranks - 1)
    )
    return Schedule(
        collective=on(topology, "broadcast", 0),
        topology=topology,
        method="chain",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=transfers,
    )


def scattered(weights: tuple[int, ...]) -> Schedule:
    """Rank 0 sends every other rank of a star its part."""
    topology = load_topology(f"star:ranks={len(weights)},bandwidth=4 MB/s")
    collective = Collective(name="scatter", num_ranks=len(weights), root=0, weights=weights)
    return synthesize(topology, collective, "direct")


# -- worked out by hand ---------------------------------------------------------------------------------------


def test_channels_share_a_link_by_what_they_carry() -> None:
    run = simulate(scattered((1, 3, 1)), 5_000_000, piece_bytes=3_000_000, overhead_s=0)
    assert {run.channels[row["channel"]].dst: row["sent_s"] for row in run.events} == pytest.approx({1: 1.0, 2: 1.0})


def test_a_rank_works_at_one_message_at_a_time() -> None:
    """Two messages leave rank 0 one work after the other; each wakes its receiver, which works at it."""
    schedule = scattered((1, 1, 1))
    said = StatedClass(name="tcp", latency_s=5e-3, wake_s=20e-3, work_s=100e-3)
    topology = replace(schedule.topology, link_classes=(said,))
    run = simulate(replace(schedule, topology=topology), 1_200_000, piece_bytes=1 << 20)
    first, second = sorted(float(row["start_s"]) for row in run.events)
    assert (first, second) == pytest.approx((0.1, 0.2))
    assert run.seconds == pytest.approx(0.2 + 0.1 + 0.005 + 0.02 + 0.1)  # 400,000 bytes at 4 MB/s take 0.1 s
    flat = simulate(schedule, 1_200_000, piece_bytes=1 << 20, overhead_s=0.5)
    assert flat.seconds == pytest.approx(0.2 + 0.5)  # both at once over the link that they share, and no work


def test_equal_shares_can_be_asked_for() -> None:
    run = simulate(scattered((1, 3, 1)), 5_000_000, piece_bytes=3_000_000, overhead_s=0, is_weighted=False)
    assert {run.channels[row["channel"]].dst: row["sent_s"] for row in run.events} == pytest.approx({1: 1.0, 2: 0.5})


def test_weights_bring_a_forest_of_unlike_loads_near_its_bound() -> None:
    schedule = synthesize(parse_topology(UNLIKE, source="unlike.yaml"), "all_gather")
    longest = max(chunk.num_units for chunk in schedule.chunks)
    shares = []
    for is_weighted in (False, True):
        run = simulate(
            schedule,
            schedule.num_units << 16,
            piece_bytes=(longest << 16) // 64,
            overhead_s=0,
            is_weighted=is_weighted,
        )
        shares.append(run.least_s / run.seconds)
    assert shares[0] < 0.95 < 0.98 < shares[1] <= 1


def test_messages_of_thin_channels_stand_where_they_can_come() -> None:
    """Rank 0's chunk of one unit reaches rank 1 in four steps, and goes on beside rank 1's own of four units."""
    ways = ((0, 0, 1, ()), (1, 1, 0, ()), (1, 1, 2, ()), (0, 1, 2, (0,)))
    transfers = tuple(Transfer(chunk=c, src=a, dst=b, reduce=False, path=(a, b), after=w) for c, a, b, w in ways)
    schedule = Schedule(
        collective=Collective(name="all_gather", num_ranks=3, weights=(1, 4, 0)),
        topology=line(1, 5),
        method="by hand",
        num_units=5,
        chunks=(Chunk(start=0, stop=1), Chunk(start=1, stop=5)),
        transfers=transfers,
    )
    assert schedule.parts.of(1).levels == {0: 0, 1: 0, 2: 0, 3: 4}
    assert schedule.levels == (0, 0, 0, 1)  # counted in transfers


def along_line(*stops: int, reduce: bool) -> Schedule:
    """Rank 0's block to each of these ranks of a line of four (or from each to rank 0), a chunk each, hop by hop."""
    transfers: list[Transfer] = []
    for chunk, stop in enumerate(stops):
        hops = [(b, a) for a, b in pairwise(range(stop + 1))][::-1] if reduce else list(pairwise(range(stop + 1)))
        for number, hop in enumerate(hops):
            after = (len(transfers) - 1,) if number else ()
            transfers.append(Transfer(chunk=chunk, src=hop[0], dst=hop[1], reduce=reduce, path=hop, after=after))
    topology = line(1, 1, 1)
    return Schedule(
        collective=on(topology, "reduce" if reduce else "broadcast", 0),
        topology=topology,
        method="by hand",
        num_units=len(stops),
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(len(stops))),
        transfers=tuple(transfers),
    )


def test_sums_come_as_late_as_copies_go_early() -> None:
    """A reduce is a broadcast turned round in time: what has the longest way to the root goes first."""
    out, back = along_line(1, 3, 2, reduce=False), along_line(1, 3, 2, reduce=True)
    last = max(out.order_levels)
    for chunk in range(3):
        there = [step for t, step in zip(out.transfers, out.order_levels, strict=True) if t.chunk == chunk]
        home = [step for t, step in zip(back.transfers, back.order_levels, strict=True) if t.chunk == chunk]
        assert home == [last - step for step in reversed(there)]
    assert back.parts.of(1).levels[0] == last  # one hop, in the last step; counted from the leaves it were the first


def sent_in_order(schedule: Schedule) -> bool:
    """Whether every channel sends its transfers in the order in which they stand in the schedule."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for t in schedule.transfers:
        numbers.setdefault((t.src, t.dst), []).append(t.chunk)
    size, found = schedule.num_units, True
    for program in lower(schedule, size, piece_elements=size):
        for channel, ends in enumerate(program.channels):
            if ends.src == program.rank:
                rows = [i for i in program.instructions if i.channel == channel]
                starts = [chunk_bounds(schedule, size)[chunk][0] for chunk in numbers[ends.src, ends.dst]]
                whole = [row.offset for row in rows]  # in OUTPUT chunks stand as in the array
                found &= whole == starts
    return found


def test_a_plan_in_time_is_kept_on_every_channel() -> None:
    fabric = torus(dims=(2, 3), bandwidth="50 GB/s", latency="500ns")
    plan = synthesize(fabric, "all_reduce", "greedy", num_bytes=1 << 20)
    assert plan.is_timed and sent_in_order(plan)
    verify_programs(lower(plan, 6 * 16, piece_elements=3))
    by_depth = replace(plan, is_timed=False)
    assert plan != by_depth and not sent_in_order(by_depth)
    assert Schedule.from_text(plan.to_text()) == Schedule.from_json(json.loads(plan.to_json_text())) == plan
    with pytest.raises(ScheduleError, match="wrong shape: 1 where true or false was expected"):
        Schedule.from_json(plan.to_json() | {"timed": 1})


@given(st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)  # the first one compiles
def test_shares_are_max_min_fair(random: Random) -> None:
    """Every channel has a bottleneck: a full link of its path on which no other goes faster for its weight."""
    num_links, num_channels = random.randint(1, 8), random.randint(1, 12)
    paths = [random.sample(range(num_links), random.randint(1, num_links)) for _ in range(num_channels)]
    starts = np.cumsum([0, *map(len, paths)])
    capacity = np.array([float(random.randint(1, 9)) for _ in range(num_links)])
    weight = np.array([float(random.choice((1, 2, 3, 1000))) for _ in range(num_channels)])
    rate = np.full(num_channels, np.nan)
    active = np.array(random.sample(range(num_channels), num_channels))
    num_active = random.randint(1, num_channels)
    share(active, num_active, starts, np.array([link for path in paths for link in path]), capacity, weight, rate)
    chosen = active[:num_active].tolist()
    users = [[c for c in chosen if link in paths[c]] for link in range(num_links)]
    full = []
    for link in range(num_links):
        used = sum(rate[c] for c in users[link])
        assert used <= capacity[link] * (1 + 1e-9)
        full.append(used >= capacity[link] * (1 - 1e-9))
    for c in chosen:
        most = rate[c] / weight[c] * (1 + 1e-6)
        assert any(full[k] and all(rate[d] / weight[d] <= most for d in users[k]) for k in paths[c])


def test_one_link_takes_bytes_over_capacity_and_latency() -> None:
    run = simulate(chain(line(100, latency_s=1e-3)), 1_000_000, piece_bytes=1_000_000, overhead_s=0.5e-3)
    assert run.seconds == pytest.approx(0.01 + 1e-3 + 0.5e-3)
    assert run.least_s == pytest.approx(0.01)
    assert run.link_busy == pytest.approx({(0, 1): 0.01 / 0.0115, (1, 0): 0.0})


@pytest.mark.parametrize("pieces", [1, 2, 5, 10])
def test_pieces_are_pipelined(pieces: int) -> None:
    """Two hops of equal speed: the second starts after one piece and ends one piece after the first."""
    run = simulate(chain(line(100, 100)), 1_000_000, piece_bytes=1_000_000 // pieces, overhead_s=0.0)
    assert run.seconds == pytest.approx(0.01 * (1 + 1 / pieces))


def test_the_slower_hop_decides() -> None:
    run = simulate(chain(line(100, 25)), 1_000_000, piece_bytes=100_000, overhead_s=0.0)
    assert run.seconds == pytest.approx(0.04 + 0.001)


def test_links_are_shared_max_min_fairly() -> None:
    """Three messages leave rank 0 through one link; one of them is held to a tenth of it further on."""
    ends = ((0, 4, 100), (4, 1, 10), (4, 2, 100), (4, 3, 100))
    vertices = [Vertex(kind="rank", label=str(i)) for i in range(4)] + [Vertex(kind="switch", label="s")]
    links = [Link(src=a, dst=b, capacity=c) for a, b, c in ends]
    links += [Link(src=b, dst=a, capacity=100) for a, b, _ in ends]
    topology = Topology(name="narrow", unit="MB/s", vertices=tuple(vertices), links=tuple(links))
    schedule = Schedule(
        collective=on(topology, "broadcast", 0),
        topology=topology,
        method="star",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=tuple(Transfer(chunk=0, src=0, dst=i, reduce=False, path=(0, 4, i)) for i in (1, 2, 3)),
    )
    run = simulate(schedule, 450_000, piece_bytes=450_000, overhead_s=0.0)
    done = {run.channels[e["channel"]].dst: float(e["done_s"]) for e in run.events}
    assert done[2] == pytest.approx(0.01) and done[3] == pytest.approx(0.01)  # 45 MB/s each beside the 10 MB/s
    assert done[1] == pytest.approx(0.045)


def test_a_channel_sends_in_order_and_never_two_at_once() -> None:
    run = simulate(synthesize(two_boxes(num_ranks=8), on(two_boxes(num_ranks=8), "all_reduce")), 1 << 20)
    for number in range(len(run.channels)):
        mine = run.events[run.events["channel"] == number]
        assert (mine["start_s"][1:] >= mine["sent_s"][:-1] - 1e-12).all()
        assert (mine["done_s"][1:] >= mine["done_s"][:-1]).all()
    assert (run.events["done_s"] > run.events["sent_s"]).all()
    assert (run.events["sent_s"] > run.events["start_s"]).all()


# -- limits ---------------------------------------------------------------------------------------------------

FABRICS = (two_boxes(num_ranks=6), ring(num_ranks=5), star(num_ranks=4), torus(dims=(2, 4)), full_mesh(num_ranks=4))


@pytest.mark.parametrize("topology", FABRICS, ids=[t.name for t in FABRICS])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"])
def test_no_time_beats_links_or_bound(topology: Topology, name: CollectiveName) -> None:
    collective = on(topology, name, 0 if name in ("broadcast", "reduce") else None)
    best = bound(topology, collective)
    rate = float(topology.bytes_per_second_per_unit or 1e9)
    chosen = select(topology, collective, [64, 10_000, 1 << 20])
    assert {"forest", "tree"} <= set(chosen.rows[0].seconds)
    for row in chosen.rows:
        for method, seconds in row.seconds.items():
            sized = {"num_bytes": row.num_bytes} if method in {*BY_SIZE, "forest"} else {}
            schedule = synthesize(topology, collective, method, **sized)
            run = simulate(schedule, row.num_bytes, piece_bytes=row.piece_bytes[method])
            assert run.seconds == seconds >= run.least_s * (1 - 1e-9)
            assert all(0 <= busy <= 1 + 1e-9 for busy in run.link_busy.values())
            if row.num_bytes == 1 << 20:  # below, whole elements cannot be cut as finely as units
                least = run.num_bytes / (float(schedule.algbw) * rate)
                assert run.seconds >= least * (1 - 1e-3)
                assert run.seconds >= run.num_bytes / (float(best.algbw) * rate) * (1 - 1e-3)


def test_large_messages_come_close_to_the_links() -> None:
    topology = two_boxes(num_ranks=8)
    run = simulate(synthesize(topology, on(topology, "all_gather")), 1 << 26)
    assert run.least_s <= run.seconds < 1.05 * run.least_s
    assert run.algbw == pytest.approx(400, rel=0.05)


def test_relative_capacities_count_as_gigabytes_a_second() -> None:
    a, b = (simulate(chain(line(1, unit=unit)), 1 << 20).seconds for unit in ("link", "GB/s"))
    assert a == b


@pytest.mark.parametrize("arguments", [{"num_bytes": 0}, {"piece_bytes": 3}, {"overhead_s": -1.0}])
def test_senseless_arguments_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"cannot simulate|must be zero or more"):
        simulate(chain(line(1)), **{"num_bytes": 8, **arguments})  # type: ignore[arg-type]


# -- beside measurements ----------------------------------------------------------------------------------------


def recorded() -> list[dict[str, object]]:
    lines = (ROOT / "benchmarks" / "recorded" / "two_boxes.jsonl").read_text(encoding="utf-8").splitlines()
    return [m for m in map(json.loads, lines) if m["emulated"] and m["backend"] == "mycel" and m["bytes"] == 1 << 24]


@pytest.mark.parametrize("measured", recorded(), ids=lambda m: f"{m['topology']}-{m['collective']}")
def test_simulation_is_near_what_was_measured(measured: dict[str, object]) -> None:
    topology = load_topology(str(ROOT / "examples" / "clusters" / f"{measured['topology']}.yaml"))
    assert topology.fingerprint == measured["fingerprint"]
    name = str(measured["collective"])
    run = simulate(synthesize(topology, on(topology, name)), 1 << 24)  # type: ignore[arg-type]
    assert abs(run.seconds / float(measured["median_s"]) - 1) < 0.10  # type: ignore[arg-type]


def test_one_machine_delays_the_start_and_narrows_the_links() -> None:
    """Two ranks of 1 ms of a core each on one core: 2 ms; then half the link is left."""
    machine = Machine(cores=1, start_s=1e-3, efficiency=0.5)
    run = simulate(chain(line(100)), 1_000_000, piece_bytes=1_000_000, overhead_s=0.0, machine=machine)
    assert run.seconds == pytest.approx(2e-3 + 0.02)
    assert run.events["start_s"].min() == pytest.approx(2e-3)
    assert run.least_s == pytest.approx(0.01)


@pytest.mark.parametrize("changes", [{"cores": 0}, {"start_s": -1.0}, {"efficiency": 0.0}, {"efficiency": 1.1}])
def test_senseless_machines_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="needs a core"):
        Machine(**{"cores": 2, **changes})  # type: ignore[arg-type]


# -- selection --------------------------------------------------------------------------------------------------


def test_small_goes_by_steps_and_large_by_bytes() -> None:
    topology = load_topology(str(ROOT / "examples" / "clusters" / "two_boxes.yaml"))
    chosen = select(topology, on(topology, "all_reduce"), [1 << 10, 1 << 24])
    small, large = chosen.rows
    assert small.method != "forest" and large.method in ("forest", "hierarchical")
    assert f"{large.method} overtakes {small.method}" in chosen.explain()
    ours = {"forest", "tree", "exchange", "greedy"}
    known = ours | set(classics_for("all_reduce"))
    assert known & set(chosen.refused) == {"trivance", "trivance_latency"}  # eight ranks are no power of three
    assert set(chosen.rows[0].seconds) - ours == set(classics_for("all_reduce")) - set(chosen.refused)


def test_methods_that_take_the_same_time_do_not_overtake_each_other() -> None:
    def chosen(*times: dict[str, float]) -> str:
        fabric = star(num_ranks=3)
        rows = tuple(
            Row(num_bytes=1 << 10 + i, seconds=seconds, piece_bytes=dict.fromkeys(seconds, 1 << 14), least_s=1.0)
            for i, seconds in enumerate(times)
        )
        return Selection(
            collective=on(fabric, "all_gather"), topology=fabric, costs=link_costs(fabric), rows=rows, refused={}
        ).explain()

    tie = chosen({"ring": 1.0, "tree": 1.004}, {"ring": 2.004, "tree": 2.0})
    assert tie == "ring is the fastest from 1KB to 2KB, and tree as fast."
    # A tie between does not hide that one overtakes another later.
    later = chosen({"ring": 1.0, "tree": 1.5}, {"ring": 2.001, "tree": 2.0}, {"ring": 3.3, "tree": 3.0})
    assert later == "Between 2KB and 4KB tree overtakes ring: at 4KB it takes 3 s, 1.10 times less."


def test_no_line_of_a_selection_says_that_nothing_is_gained() -> None:
    topology = load_topology("star:ranks=4")
    sizes = [1 << power for power in range(10, 23, 2)]
    chosen = select(topology, on(topology, "all_gather"), sizes, methods=["forest", "tree", "greedy"], links="rdma")
    assert len({row.method for row in chosen.rows}) > 1  # or this shows nothing
    assert chosen.explain() == "greedy is the fastest from 1KB to 4MB, and forest and tree as fast."


def test_selection_refuses_what_it_cannot_compare() -> None:
    topology = star(num_ranks=3)
    with pytest.raises(UsageError, match="no sizes"):
        select(topology, on(topology, "all_gather"), [])
    with pytest.raises(UsageError, match="unknown method 'bush'"):
        select(topology, on(topology, "all_gather"), [1], methods=["bush"])
    with pytest.raises(UsageError, match=r"no method serves all_gather on .*has no node"):
        select(topology, on(topology, "all_gather"), [1], methods=["hierarchical"])
    assert (
        "bruck does not serve"
        in select(topology, on(topology, "all_reduce"), [1], methods=["bruck", "tree"]).refused["bruck"]
    )
    only = select(topology, on(topology, "all_gather"), [1 << 10], methods=["ring"])
    assert only.explain() == "ring is the fastest from 1KB to 1KB."
    assert set(CLASSICS) >= {only.rows[0].method}


def test_a_simulation_names_its_piece_size() -> None:
    run: Simulation = simulate(chain(line(1)), 100, piece_bytes=64)
    assert (run.num_bytes, run.piece_bytes) == (100, 64)
    assert run.events["num_bytes"].tolist() == [48, 52]


def test_the_command_prints_the_table() -> None:
    runner, arguments = CliRunner(), ["select", "star:ranks=3", "-c", "all_gather", "--sizes", "1KB,1MB"]
    result = runner.invoke(build_app(), [*arguments, "--json"])
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["simulated"] and [row["bytes"] for row in record["rows"]] == [1 << 10, 1 << 20]
    for row in record["rows"]:
        least = min(row["simulated_s"].values())
        fast = [method for method, seconds in row["simulated_s"].items() if seconds <= TIE * least]
        assert row["simulated_s"][row["method"]] == least
        assert sorted([row["method"], *row["tied"]]) == sorted(fast)
    assert "has no node" in record["refused"]["hierarchical"]
    text = runner.invoke(build_app(), arguments).stdout
    assert "simulated all_gather" in text and "left out: hierarchical on" in text
