"""What a probe infers, on clusters on paper whose truth is known; and each step of the inference by itself."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from tests.paper_cluster import PaperCluster

import probe as script
from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, UsageError
from mycel.probe import Found, Limits, found_yaml
from mycel.probe.compare import compare, match
from mycel.probe.control import Hub, join
from mycel.probe.fit import Estimate, Fit, fit
from mycel.probe.observations import Observation, Record, observe
from mycel.probe.patterns import between, from_one, rounds, shift, to_one
from mycel.probe.structure import Structure, candidates, fast_groups, merge_routers
from mycel.probe.survey import Survey
from mycel.settings import read_launched
from mycel.topology import load_topology, parse_topology
from mycel.topology.builders import ring, star, torus, two_boxes
from mycel.topology.model import Topology

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
FABRICS = sorted(file.stem for file in CLUSTERS.glob("*.yaml") if "sharp" not in file.stem)


def survey(truth: Topology, limits: Limits | None = None, **how: object) -> Found:
    cluster = PaperCluster(truth, **how)  # type: ignore[arg-type]
    found = Survey(cluster, truth.num_ranks, limits or Limits(), lambda text: None).run("found")
    assert found.num_bytes == pytest.approx(cluster.sent)
    assert found.num_patterns == len(cluster.patterns)
    return found


def furthest(found: Found, truth: Topology) -> float:
    """The largest error of a capacity; the structure must be right."""
    differences = compare(found.topology, truth)
    assert differences is not None, found_yaml(found)
    return max(abs(d.ratio - 1) for d in differences)


# -- whole surveys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FABRICS)
def test_fabrics_whose_routers_answer_are_found_exactly(name: str) -> None:
    truth = load_topology(CLUSTERS / f"{name}.yaml")
    found = survey(truth, noise=0.02)
    assert furthest(found, truth) == 0
    assert found.confidence == "high"
    assert all(note.num_evidence for note in found.links)


@pytest.mark.parametrize("name", ["star4", "star8", "slow_nic", "two_slow_nics", "two_boxes", "shared_uplink"])
def test_switches_that_do_not_answer_are_inferred_from_bandwidth(name: str) -> None:
    truth = load_topology(CLUSTERS / f"{name}.yaml")
    found = survey(truth, silent=True, noise=0.02)
    assert furthest(found, truth) == 0
    assert found.confidence == "high"


def test_a_ring_whose_ranks_keep_silent_is_not_called_a_star_with_confidence() -> None:
    found = survey(ring(num_ranks=6, bandwidth="200 Mbit/s"), silent=True)
    assert found.confidence == "low"


def test_direct_cables_are_not_taken_for_a_switch() -> None:
    mesh = ring(num_ranks=3, bandwidth="1 Gbit/s")  # every rank reaches every other without a hop, as on a switch
    found = survey(mesh, silent=True)
    assert furthest(found, mesh) == 0
    assert not found.topology.switches


def test_a_wide_uplink_that_ranks_share_is_told_from_what_one_rank_gets() -> None:
    truth = two_boxes(num_ranks=8, inside="400 Mbit/s", between="1 Gbit/s", shared_uplink=True)
    found = survey(truth, noise=0.01)
    assert furthest(found, truth) == 0


def test_a_link_that_nothing_can_fill_is_said_to_carry_at_least_what_was_seen() -> None:
    truth = two_boxes(num_ranks=4, inside="400 Mbit/s", between="10 Gbit/s", shared_uplink=True)
    found = survey(truth)
    notes = {(n.src, n.dst): n for n in found.links}
    wide = [k for k in found.topology.links if k.src >= 4 and k.dst >= 4]
    assert wide
    for link in wide:
        assert "at least" in notes[link.src, link.dst].text()
        assert link.capacity * found.topology.bytes_per_second_per_unit == 100_000_000  # type: ignore[operator]


def test_ranks_of_one_machine_share_its_cable() -> None:
    truth = two_boxes(num_ranks=4, inside="8 Gbit/s", between="1 Gbit/s", shared_uplink=True)
    # Machines do not show in the way of packets; only the network's switch would.
    found = survey(truth, silent=True, machines=["a", "a", "b", "b"], unsteady=True)
    labels = [v.label for v in found.topology.vertices]
    assert labels[:4] == ["a/0", "a/1", "b/0", "b/1"]
    rates = {f"{found.topology.label(k.src)} {found.topology.label(k.dst)}": k.capacity for k in found.topology.links}
    assert rates["a/switch b/switch"] == 1000 and 1000 < rates["a/0 a/switch"] <= 8000
    assert found.confidence == "high"
    assert not any("slow" in text for text in found.findings)


def test_one_machine_is_one_node() -> None:
    found = survey(star(num_ranks=3, bandwidth="8 Gbit/s"), silent=True, machines=["a"] * 3)
    assert [v.label for v in found.topology.vertices] == ["a/0", "a/1", "a/2", "a/switch"]


def test_processes_of_one_machine_are_connected_alike() -> None:
    found = survey(load_topology("star:ranks=3,bandwidth=8 Gbit/s"), silent=True, machines=["a"] * 3, noise=0.4)
    assert len({link.capacity for link in found.topology.links}) == 1
    assert not any("slow" in text or "uneven" in text for text in found.findings)


def test_a_link_carries_at_least_what_it_was_seen_to_carry() -> None:
    """One to many alone would say 380; a pair alone was seen to get 400."""
    star = Structure(
        name="",
        num_ranks=3,
        names=("s",),
        paths={(a, b): (a, 3, b) for a in range(3) for b in range(3) if a != b},
        reason="",
    )
    alone = [Observation(pattern="", rates={pair: 400.0}) for pair in star.paths]
    many = Observation(pattern="", rates={(0, 1): 190.0, (0, 2): 190.0})
    found = fit(star, [*alone, many])
    assert estimate_of(found, (0, 3)).evidence == (380.0,)
    assert found.rates[0, 3] == 400.0


def test_findings_name_what_is_odd() -> None:
    slow = survey(load_topology(CLUSTERS / "slow_nic.yaml"))
    assert any(text.startswith("slow: rank 3") and "100" in text for text in slow.findings)
    assert not any("slow: rank 0" in text for text in slow.findings)
    shared = survey(load_topology(CLUSTERS / "shared_uplink.yaml"))
    assert "shared: ranks 0-3 have together 200 Mbit/s from node0/switch to core" in shared.findings
    assert any(text.startswith("2 nodes") for text in shared.findings)


def test_the_file_reads_back_with_notes_as_comments() -> None:
    found = survey(load_topology(CLUSTERS / "two_boxes.yaml"))
    text = found_yaml(found)
    assert parse_topology(text, source="found.yaml") == found.topology
    assert "# confidence: high" in text


def test_little_time_gives_a_topology_and_says_what_is_missing() -> None:
    truth = load_topology(CLUSTERS / "star8.yaml")
    found = survey(truth, Limits(max_bytes=200 << 20))
    assert found.num_bytes <= 200 << 20
    assert any("traffic was up" in note for note in found.notes)
    assert found.confidence != "high"


def test_no_traffic_at_all_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing was measured"):
        survey(star(num_ranks=4), Limits(max_bytes=1000))


# -- steps ------------------------------------------------------------------------------------------------------


def test_rates_count_only_while_all_flows_run() -> None:
    slow = Record(samples=((0.0, 0), (0.1, 5000), (0.5, 25_000)), segment=1448)
    fast = Record(samples=((0.0, 0), (0.1, 50_000), (0.2, 200_000), (0.5, 200_000)), segment=1448)
    seen = observe("two", {(0, 1): slow, (2, 1): fast}, warm_s=0.1, window_s=1.0)
    assert seen is not None
    assert seen.rates[0, 1] == pytest.approx(50_000 * 1514 / 1448)
    assert seen.rates[2, 1] == pytest.approx(1_500_000 * 1514 / 1448)


def test_a_pattern_that_was_over_too_early_says_nothing() -> None:
    assert (
        observe("short", {(0, 1): Record(samples=((0.0, 0), (0.05, 9)), segment=1448)}, warm_s=0.1, window_s=1)
        is None
    )


def test_a_router_has_one_name_although_it_answers_each_side_differently() -> None:
    merged = merge_routers({(0, 1): ("x", "y"), (1, 0): ("v", "w"), (0, 2): ("x",), (2, 0): (None,)})
    assert merged[0, 1] == tuple(reversed(merged[1, 0]))
    assert merged[0, 2] == (merged[0, 1][0],)
    assert merged[2, 0] == (None,)


def test_ways_of_different_length_merge_nothing() -> None:
    merged = merge_routers({(0, 1): ("x", "y"), (1, 0): ("v",)})
    assert len({*merged[0, 1], *merged[1, 0]}) == 3


def test_groups_need_a_gap() -> None:
    even = {(a, b): 100.0 + a for a in range(4) for b in range(4) if a != b}
    assert fast_groups(even, 4) == [[0, 1, 2, 3]]


def test_rounds_have_every_pair_once_and_share_no_link() -> None:
    for truth in (torus(dims=(2, 3), bandwidth="1 Gbit/s"), star(num_ranks=5)):
        size = truth.num_ranks
        cluster = PaperCluster(truth)
        answers = cluster.ask({rank: {"do": "trace"} for rank in range(size)}, 1.0, "")
        number = {f"rank{r}": r for r in range(size)}
        routes = {
            (r, int(d)): tuple(number.get(hop, hop) for hop in way)
            for r, answer in answers.items()
            for d, way in answer["ways"].items()
        }
        structure = candidates([str(r) for r in range(size)], routes, {})[0]
        made = rounds(structure, size, at_once=4)
        assert sorted(pair for pairs in made for pair in pairs) == sorted(routes)
        for pairs in made:
            hops = [hop for pair in pairs for hop in structure.hops(pair)]
            assert len(hops) == len(set(hops)) and len(pairs) <= 4


def test_patterns() -> None:
    assert from_one(1, 3) == ((1, 0), (1, 2)) and to_one(1, 3) == ((0, 1), (2, 1))
    assert between([0, 1], [2, 3, 4]) == ((0, 2), (1, 3), (0, 4))
    assert shift(3, 1) == ((0, 1), (1, 2), (2, 0))


def estimate_of(found: Fit, link: tuple[int, int]) -> Estimate:
    """The estimate of the section that a link is in."""
    return next(e for e in found.estimates if link in e.section.links)


def test_a_full_link_beside_another_full_link_is_no_evidence() -> None:
    line = Structure(name="", num_ranks=2, names=("s",), paths={(0, 1): (0, 2, 1), (1, 0): (1, 2, 0)}, reason="")
    found = fit(line, [Observation(pattern="", rates={(0, 1): 100.0})])
    assert found.rates == {(0, 2): 100.0, (2, 1): 100.0, (1, 2): 0.0, (2, 0): 0.0}
    assert len(estimate_of(found, (0, 2)).section.links) == 2  # in series: one section
    assert estimate_of(found, (0, 2)).evidence == (100.0,)
    assert estimate_of(found, (1, 2)).evidence == ()


def test_fabrics_match_whatever_switches_are_called() -> None:
    truth = load_topology(CLUSTERS / "shared_uplink.yaml")
    text = found_yaml(survey(truth))
    assert match(parse_topology(text, source="found.yaml"), truth) is not None
    assert match(load_topology(CLUSTERS / "two_boxes.yaml"), truth) is None
    assert match(load_topology(CLUSTERS / "ring8.yaml"), load_topology(CLUSTERS / "torus_2x4.yaml")) is None


def test_a_slower_link_shows_in_a_comparison() -> None:
    rows = compare(load_topology(CLUSTERS / "slow_nic.yaml"), load_topology(CLUSTERS / "star4.yaml"))
    assert rows is not None
    assert [(d.src, d.ratio) for d in rows if abs(d.ratio - 1) > 0.1] == [("node3/0", 0.25), ("switch", 0.25)]


# -- ranks ------------------------------------------------------------------------------------------------------


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_rank_that_does_not_come_is_named() -> None:
    server = listener()
    member = join(server.getsockname(), 1, 3, soon())
    with pytest.raises(CollectiveTimeoutError, match="ranks 0, 2 of 3 did not come"):
        Hub(server, 3, soon(0.05))
    assert "did not come" in member.next(soon())["error"]
    member.close()


def test_a_rank_that_goes_is_named_and_the_others_hear_it() -> None:
    server = listener()
    members = [join(server.getsockname(), rank, 2, soon()) for rank in range(2)]
    hub = Hub(server, 2, soon())
    members[1].close()
    with pytest.raises(PeerLostError, match="rank 1 has gone during the test"):
        hub.ask({0: {"do": "ping"}, 1: {"do": "ping"}}, 20.0, "the test")
    hub.dismiss("rank 1 has gone")
    assert members[0].next(soon())["do"] == "ping"
    assert members[0].next(soon())["error"] == "rank 1 has gone"
    members[0].close()


def test_a_silent_rank_is_named() -> None:
    server = listener()
    members = [join(server.getsockname(), rank, 2, soon()) for rank in range(2)]
    hub = Hub(server, 2, soon())
    members[0].answer({}, soon())
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not answer in time during the test"):
        hub.ask({0: {}, 1: {}}, 0.05, "the test")
    hub.dismiss()
    with pytest.raises(PeerLostError, match="rank 0"):
        while True:
            members[1].next(soon())
    for member in members:
        member.close()


def test_a_failure_on_a_rank_is_told_with_its_name() -> None:
    server = listener()
    member = join(server.getsockname(), 0, 1, soon())
    hub = Hub(server, 1, soon())
    member.answer({"error": "no route"}, soon())
    with pytest.raises(CommunicationError, match="rank 0 failed during the test: no route"):
        hub.ask({0: {}}, 20.0, "the test")
    hub.dismiss()
    member.close()


def test_ranks_of_another_probe_are_refused() -> None:
    server = listener()
    member = join(server.getsockname(), 1, 5, soon())
    with pytest.raises(CommunicationError, match="rank 1 of 5"):
        Hub(server, 2, soon())
    member.close()


def test_strangers_do_not_count_as_ranks() -> None:
    server = listener()
    with socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        members: list[object] = []
        thread = threading.Thread(target=lambda: members.append(join(server.getsockname(), 0, 1, soon())))
        thread.start()
        hub = Hub(server, 1, soon())
        thread.join()
        hub.dismiss()
    assert len(members) == 1
    members[0].close()  # type: ignore[attr-defined]


def test_rank_0_that_never_listens_is_named() -> None:
    server = listener()
    address = server.getsockname()
    server.close()
    with pytest.raises(CollectiveTimeoutError, match="rank 1 cannot reach rank 0"):
        join(address, 1, 2, soon(0.1))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no rank"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "not below"),
        ({"RANK": "x", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "not a whole number"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "MASTER_ADDR"),
    ],
)
def test_launchers_that_say_too_little(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_launched(environ)


def test_one_machine_under_mpirun_needs_no_address() -> None:
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    launched = read_launched(sizes)
    assert (launched.rank, launched.world_size, launched.master_address) == (1, 2, "127.0.0.1")


# -- the guide --------------------------------------------------------------------------------------------------


def test_the_guide_has_the_recorded_table() -> None:
    root = CLUSTERS.parents[1]
    page = (root / "docs" / "guides" / "probe.md").read_text(encoding="utf-8")
    lines = script.read(script.RECORDS)
    assert {line["fabric"] for line in lines if line["routers_asked"]} == set(script.FABRICS)
    assert f"<!-- probe:begin -->\n{script.guide_table(lines)}<!-- probe:end -->" in page
