"""Files of other tools: what they become, what is said about assumptions, and every complaint with its place.

``python tests/unit/test_topology_formats.py`` rewrites the golden results.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from mycel.errors import TopologyError
from mycel.topology import (
    Reading,
    Topology,
    from_networkx,
    load_topology,
    parse_topology,
    read_topology,
    to_json,
    to_networkx,
)
from mycel.topology.formats.description import Description
from mycel.topology.formats.slurm import expand_hosts
from mycel.topology.load import FORMATS, FileFormat

DATA = Path(__file__).resolve().parents[1] / "data" / "formats"
GOLDEN = DATA / "golden.json"
SAMPLES = sorted(p.name for p in DATA.iterdir() if p != GOLDEN)
SPECS = [
    *SAMPLES,
    "nccl_a100.xml*2",
    "nccl_cloud.xml*2",
    "hwloc.xml*2",
    "rocm_smi.txt*2@25 GB/s",
    "taccl_ndv2.json*2",
]


def record(reading: Reading) -> dict[str, object]:
    topology = reading.topology
    links = [
        f"{topology.label(k.src)} > {topology.label(k.dst)}: {k.capacity}"
        + (f" {k.latency_s}" if k.latency_s else "")
        for k in topology.links
    ]
    vertices = [v.label if v.kind == "rank" else f"({v.label})" for v in topology.vertices]
    return {
        "name": topology.name,
        "unit": topology.unit,
        "vertices": vertices,
        "links": links,
        "notes": list(reading.notes),
    }


def cables(topology: Topology) -> dict[str, int]:
    return {f"{topology.label(k.src)}>{topology.label(k.dst)}": k.capacity for k in topology.links}


@pytest.mark.parametrize("spec", SPECS)
def test_samples_give_the_golden_results(spec: str) -> None:
    assert record(read_topology(str(DATA / spec))) == json.loads(GOLDEN.read_text())[spec]


def recognised(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Formats whose readers a file reaches."""
    seen: list[str] = []

    def watched(known: FileFormat) -> FileFormat:
        def parse(text: str, *, source: str) -> Topology | Description:
            seen.append(known.name)
            return known.parse(text, source=source)

        return replace(known, parse=parse)

    with monkeypatch.context() as patch:
        patch.setattr("mycel.topology.load.FORMATS", tuple(watched(known) for known in FORMATS))
        parse_topology(text, source=name)
    return seen


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_every_format_has_a_right_file_that_is_known_as_one(
    known: FileFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known.example:
        assert recognised(f"example{known.suffixes[0]}", known.example, monkeypatch) == [known.name]
        return
    own = {"JSON": "topologies", "YAML": "../../examples/clusters"}
    folder = (DATA.parent / own.get(known.name, "formats")).resolve()
    files = [
        f
        for f in sorted(folder.iterdir())
        if f.suffix in known.suffixes and f.name not in ("golden.json", "expected.json")
    ]
    found = {name for f in files for name in recognised(f.name, f.read_text(encoding="utf-8"), monkeypatch)}
    assert known.name in found, f"{known.name} has no right file: give it an example, or add one to {folder}"


def test_nccl_machine_with_nvswitch() -> None:
    one = load_topology(DATA / "nccl_a100.xml")
    assert cables(one) == {
        end: 6 * 2 * 20 for n in range(4) for end in (f"gpu{n}>nvswitch", f"nvswitch>gpu{n}")
    }  # six entries of two NVLinks at 20 GB/s
    two = cables(load_topology(f"{DATA}/nccl_a100.xml*2"))
    assert two["node0/mlx5_0>network"] == two["node0/mlx5_0>node0/pci 0000:01:00.0"] == 24  # PCIe 4 x16, not 25
    assert two["node1/gpu0>node1/pci 0000:01:00.0"] == 24
    assert two["node1/cpu0>node1/cpu1"] == 16


def test_cloud_file_says_what_was_inferred() -> None:
    found = read_topology(DATA / "nccl_cloud.xml")
    assert found.topology.num_ranks == 4
    assert "4 GPUs inferred from PCI classes 0x03 and 0x12" in found.notes
    assert any("4 network interfaces inferred" in note for note in found.notes)
    assert any("no NVLink or xGMI" in note for note in found.notes)


def test_rocm_uses_weights_not_hops() -> None:
    ends = cables(load_topology(DATA / "rocm_smi.txt"))
    assert set(ends) == {f"GPU{i}>GPU{(i + step) % 4}" for i in range(4) for step in (1, 3)}


def test_nvidia_few_nvlinks_are_a_mesh() -> None:
    text = "      GPU0 GPU1 GPU2\nGPU0  X  NV4 NV2\nGPU1 NV4  X  NV4\nGPU2 NV2 NV4  X\n"
    ends = cables(parse_topology(text, source="m.txt"))
    assert ends == {
        "GPU0>GPU1": 80, "GPU1>GPU0": 80, "GPU0>GPU2": 40, "GPU2>GPU0": 40, "GPU1>GPU2": 80, "GPU2>GPU1": 80,
    }  # fmt: skip


def test_astra_sim_dimensions() -> None:
    text = "topology: [FullyConnected, Ring]\nnpus_count: [3, 2]\nbandwidth: [10, 5]\nlatency: [0, 1000]\n"
    topology = parse_topology(text, source="n.yml")
    ends = cables(topology)
    assert topology.num_ranks == 6
    giga = 2**30  # bytes; what ASTRA-sim calls a GB
    assert ends["0>2"] == ends["5>3"] == 10 * giga
    assert ends["0>3"] == ends["5>2"] == 5 * giga  # a ring of two is one cable
    assert "0>4" not in ends
    assert topology.latency_s[0, 3] == 1e-6


def test_simai_nodes_and_parallel_cables() -> None:
    topology = load_topology(DATA / "simai.txt")
    assert [v.node for v in topology.vertices[:4]] == ["server0", "server0", "server1", "server1"]
    assert cables(topology)["switch6>switch7"] == 800


def test_slurm_hosts_and_uplinks() -> None:
    found = load_topology(DATA / "slurm_topology.conf")
    assert [found.label(v) for v in found.ranks] == [*(f"tux{n}" for n in range(7)), "tux08"]
    assert cables(found)["leaf1>spine"] == 4
    assert cables(found)["leaf2>spine"] == 4
    assert load_topology(DATA / "slurm_topology.yaml").name == "nvl"
    assert expand_hosts("a[1-2]b[01,3],c") == ["a1b01", "a1b3", "a2b01", "a2b3", "c"]


def test_taccl_rates_and_interfaces() -> None:
    one = cables(load_topology(DATA / "taccl_mesh.json"))
    assert (one["gpu0>gpu1"], one["gpu0>gpu3"]) == (40_000, 20_000)  # 25 and 50 us a MB
    two = cables(load_topology(f"{DATA}/taccl_mesh.json*2"))
    assert two["node0/gpu3>node0/nic1"] == two["node1/nic0>network"] == 10_000


def test_rows_of_a_taccl_matrix_receive() -> None:
    data = {"gpus_per_node": 2, "links": [[0, 1], [1, 0]], "invbws": [[0, 10], [20, 0]]}
    assert cables(parse_topology(json.dumps(data), source="t.json")) == {"gpu1>gpu0": 100_000, "gpu0>gpu1": 50_000}


# -- several nodes ----------------------------------------------------------------------------------------------


def test_several_nodes_of_anything() -> None:
    joined = load_topology("ring:ranks=3,bandwidth=40 GB/s*3@100 Gb/s")
    assert (joined.num_ranks, joined.unit, joined.name) == (9, "Gbit/s", "ring_3_x3")
    assert cables(joined)["node2/1>network"] == 100
    assert cables(joined)["node2/1>node2/2"] == 320


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ring:ranks=3*0@1 GB/s", "no nodes"),
        ("ring:ranks=3*2", "names no network interface; say how fast"),
        ("ring:ranks=3,bandwidth=1*2@1 GB/s", "capacities are relative: '1 GB/s'"),
        ("star:ranks=3*2@soon", "cannot read 'soon'"),
        ("ring:ranks=3*99999@1 GB/s", "more than 65536"),
        ("ring:ranks=3*1@1 GB/s", "more than one node"),
        ("nowhere.xml*2", "nowhere.xml: no such file"),
    ],
)
def test_several_nodes_that_cannot_be(spec: str, expected: str) -> None:
    with pytest.raises(TopologyError, match=expected.replace("(", r"\(")):
        load_topology(spec)


# -- networkx ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["dgx_a100:nodes=2", "torus:dims=2x3,bandwidth=3,latency=5us", "two_boxes"])
def test_networkx_round_trip(spec: str) -> None:
    topology = load_topology(spec)
    again = from_networkx(to_networkx(topology))
    assert (again.name, again.unit, again.vertices) == (topology.name, topology.unit, topology.vertices)
    assert set(again.links) == set(topology.links)
    assert len(again.links) == len(topology.links)


def test_networkx_rates_switches_and_parallel_edges() -> None:
    graph = nx.MultiGraph(name="pair")
    graph.add_node("s", kind="switch", node="left")
    for rank in "ab":
        graph.add_edge(rank, "s", capacity="12.5 GB/s", latency_s=1e-6)
    graph.add_edge("a", "s", capacity="100 Gb/s")
    found = from_networkx(graph)
    assert (found.name, found.num_ranks, found.unit) == ("pair", 2, "Gbit/s")
    assert cables(found) == {"a>s": 200, "s>a": 200, "b>s": 100, "s>b": 100}


@pytest.mark.parametrize(
    ("node", "edge", "expected"),
    [
        ({"kind": "router"}, {}, "node 0: kind 'router'"),
        ({}, {"capacity": 0}, "edge 0 - 1: capacity 0"),
        ({}, {"capacity": 1.5}, "capacity 1.5"),
        ({}, {"capacity": "fast"}, "cannot read 'fast'"),
        ({}, {"latency_s": -1}, "latency_s -1"),
        ({}, {"latency_s": float("nan")}, "latency_s nan"),
        ({}, {"capacity": "1 GB/s"}, "some plain numbers"),
    ],
)
def test_networkx_complaints(node: dict[str, object], edge: dict[str, object], expected: str) -> None:
    graph = nx.path_graph(3)
    graph.nodes[0].update(node)
    graph.edges[0, 1].update(edge)
    with pytest.raises(TopologyError, match=expected):
        from_networkx(graph)
    with pytest.raises(TopologyError, match="expected a networkx graph, got int"):
        from_networkx(3)


# -- complaints -------------------------------------------------------------------------------------------------

MALFORMED = [
    ("x.xml", "<system", r"x\.xml:1:\d+: not XML"),
    ("x.xml", "no xml", r"x\.xml:1:\d+: not XML"),
    ("x.xml", "<graphs/>", r"x\.xml:1: expected <system>, got <graphs>"),
    ("x.xml", "<system/>", r"x\.xml:1: <system> holds no <cpu>"),
    ("x.xml", "<!DOCTYPE a [<!ENTITY b 'c'>]>\n<system/>", r"x\.xml:1: a document type"),
    ("x.xml", "<a>" * 99, r"x\.xml:1: nested too deeply"),
    ("x.xml", "<system>\n<cpu><pcj/></cpu></system>", r"x\.xml:2: <pcj> in <cpu> \(did you mean 'pci'\?\)"),
    ("x.xml", "<system>\n<cpu>\n<pci/></cpu></system>", r"x\.xml:3: <pci> busid is missing"),
    ("nccl_a100.xml", ("16.0 GT/s", "17.0 GT/s"), r":3: <pci> link_speed '17.0 GT/s PCIe' is no PCIe speed"),
    ("nccl_a100.xml", ('link_width="16"', 'link_width="-4"'), r":3: <pci> link_width must be a whole number"),
    ("nccl_a100.xml", ('count="2"', 'count="two"'), r":6: <nvlink> count must be a whole number"),
    ("nccl_a100.xml", ('count="2"', 'count="0"'), r":6: <nvlink> count must be positive"),
    ("nccl_a100.xml", ('tclass="0x068000"', 'tclass="0x99"'), r":6: <nvlink> target .* is neither a GPU"),
    ("nccl_a100.xml", ("0000:0f", "0000:07"), r"a second GPU with busid '0000:07:00.0'"),
    ("nccl_a100.xml", ('numaid="1"', 'numaid="0"'), r":\d+: a second <cpu> with numaid '0'"),
    ("nccl_a100.xml", ('speed="200000"', 'speed="fast"'), r"<net> speed must be a whole number"),
    ("g.txt", "     GPU0 GPU1\nGPU0  X   NVX\nGPU1 NV1  X\n", r"g\.txt:2: GPU0 to GPU1: 'NVX'; expected NV#"),
    ("g.txt", "     GPU0 GPU1\nGPU0  X\n", r"g\.txt:2: GPU0 has 1 cells; expected 2"),
    ("g.txt", "     GPU0 GPU1\nGPU0  X PIX\n", r"g\.txt:1: GPU1 has a column and no row"),
    ("g.txt", "     GPU0\nGPU0  X\nGPU1 X\n", r"g\.txt:3: GPU1 has a row and no column"),
    ("g.txt", "     GPU0\nGPU0  X\n", r"g\.txt: describes one rank alone.*'g\.txt\*2' is two such"),
    ("g.txt", "     GPU0 GPU0\nGPU0  X  X\n", r"g\.txt:1: a device has two columns"),
    ("g.txt", " ".join(f"GPU{n}" for n in range(999)) + "\nGPU0 X\n", r"g\.txt:1: 999 devices; at most 256"),
    ("x.xml", "<system>" + "<cpu/>" * 999 + "</system>", r"x\.xml:1: <system> holds 999 <cpu>; at most 256"),
    ("hwloc.xml", ("4.000000", "fast"), r"hwloc\.xml:\d+: pci_link_speed 'fast' is no number"),
    ("hwloc.xml", ("0302 [10de", "0302 (10de"), r"hwloc\.xml:16: pci_type '0302 \(10de.*' is no"),
    ("hwloc.xml", ('type="Machine" ', ""), r"hwloc\.xml:4: <object> type is missing"),
    ("x.xml", '<topology><object type="Machine"/></topology>', r"x\.xml:1: no GPU .*--whole-io --of xml"),
    ("rocm_smi.txt", ("XGMI", "WARP"), r"rocm_smi\.txt:\d+: GPU0 to GPU1: 'WARP'; expected XGMI or PCIE"),
    ("rocm_smi.txt", ("15  ", "-1  "), r"rocm_smi\.txt:\d+: GPU0 to GPU1: weight '-1' is no positive number"),
    ("rocm_smi.txt", ("Link Type between", "Links of"), r"the matrix 'Link Type between two GPUs' is missing"),
    ("rocm_smi.txt", ("GPU[0]", "GPU[9]"), r"rocm_smi\.txt:\d+: GPU9 is in no matrix"),
    ("astra_sim.yml", ("Switch", "Swich"), r":2: unknown topology 'Swich' \(did you mean 'Switch'\?\)"),
    ("astra_sim.yml", ("[ 4, 2 ]", "[ 4 ]"), r":3: npus_count has 1 entries; topology has 2"),
    ("astra_sim.yml", ("[ 4, 2 ]", "[ 4, -2 ]"), r":3: npus_count must be from 1"),
    ("astra_sim.yml", ("12.5", "fast"), r":4: bandwidth must be a decimal number; got 'fast'"),
    ("astra_sim.yml", ("12.5", "0"), r":4: bandwidth must be positive"),
    ("astra_sim.yml", ("latency", "latncy"), r":5: an ASTRA-sim network: unknown key 'latncy' \(did you mean"),
    ("astra_sim.yml", ("[ 4, 2 ]", "[ 65536, 65536 ]"), r":3: \d+ NPUs and about \d+ links are too many"),
    ("simai.txt", ("8 2 2 2", "5 2 2 2"), r"simai\.txt:1: 5 nodes less 2 NVSwitches"),
    ("simai.txt", ("8 2 2 2 10", "8 2 2 2 11"), r"simai\.txt:1: 11 links are announced, 10 follow"),
    ("simai.txt", ("4 5\n", "4 4\n"), r"simai\.txt:3: 3 different switches are numbered; expected 4"),
    ("simai.txt", ("0 4 2400", "0 9 2400"), r"simai\.txt:4: no node '9'"),
    ("simai.txt", ("2400Gbps", "2400"), r"simai\.txt:4: cannot read '2400' as a bandwidth"),
    ("simai.txt", ("0 4 2400", "0 0 2400"), r"simai\.txt:4: a cable from 0 to itself"),
    ("slurm_topology.conf", ("Switches=leaf", "Switches=lef"), r":5: no switch is called 'lef1'"),
    ("slurm_topology.conf", ("[0-3]", "[3-0]"), r":2: \[3-0\] must count up"),
    ("slurm_topology.conf", ("[0-3]", "[0-3"), r":2: cannot read 'tux\[0-3"),
    ("slurm_topology.conf", ("Nodes=tux[0-3]", "Node=tux[0-3]"), r":2: cannot read 'Node=tux.*did you mean 'nodes'"),
    ("slurm_topology.conf", ("Switches=leaf", "Switches=spine,leaf"), r":5: switch 'spine' is above itself"),
    ("slurm_topology.conf", ("SwitchName=spine", "BlockName=spine"), r":5: blocks beside switches"),
    ("slurm_topology.conf", ("SwitchName=leaf2", "SwitchName=leaf1"), r":4: a second switch 'leaf1'"),
    ("slurm_topology.yaml", ("blocks:", "block:"), r":\d+: a block: unknown key 'block'"),
    (
        "slurm_topology.yaml",
        ("node[01-02]\n      - block: b2", "node[\n      - block: b2"),
        r":20: cannot read 'node",
    ),
    ("s.yaml", "- topology: flat\n  flat: true\n", r"s\.yaml:1: no topology with a tree or blocks"),
    ("taccl_mesh.json", ('"links"', '"lnks"'), r"unknown key 'lnks' \(did you mean 'links'\?\)"),
    ("taccl_mesh.json", ('"gpus_per_node": 4', '"gpus_per_node": 5'), r"links must be a list of 5 rows"),
    ("taccl_mesh.json", ('"remote_beta": 100', '"remote_beta": 1e-9'), r"remote_beta must be from"),
    ("taccl_ndv2.json", ("[23, 46],", '[23, "x"],'), r"node_betas_list|node_invbws_list must be"),
    ("taccl_ndv2.json", ('"gpus_per_node": 8', '"gpus_per_node": true'), r"gpus_per_node must be a whole number"),
    ("taccl_ndv2.json", ("}", ""), r"taccl_ndv2\.json:\d+:\d+: not JSON"),
]


@pytest.mark.parametrize(
    ("file", "change", "expected"), MALFORMED, ids=[f"{n}-{m[0]}" for n, m in enumerate(MALFORMED)]
)
def test_complaints_name_the_place(file: str, change: str | tuple[str, str], expected: str) -> None:
    if isinstance(change, str):
        text = change
    else:
        text = (DATA / file).read_text(encoding="utf-8")
        assert change[0] in text
        last = file == "taccl_ndv2.json" and change[0].startswith("[23")
        text = text.replace(*change) if last else text.replace(*change, 1)
    with pytest.raises(TopologyError, match=expected) as caught:
        parse_topology(text, source=file)
    assert str(caught.value).startswith(file)
    assert "\n" not in str(caught.value)


def test_broken_files_give_a_topology_or_a_complaint() -> None:
    draw = random.Random(5)
    for number in range(1200):
        name = SAMPLES[number % len(SAMPLES)]
        text = list((DATA / name).read_text(encoding="utf-8"))
        for _ in range(draw.randint(1, 4)):
            at, action = draw.randrange(len(text)), draw.randrange(4)
            if action == 0:
                del text[at : at + draw.randint(1, 40)]
            elif action == 1:
                text.insert(at, draw.choice("0123456789[]{}<>=-,:\"' \n\tX"))
            elif action == 2:
                text[at:at] = text[max(0, at - draw.randint(1, 60)) : at]
            else:
                text[at] = chr(draw.randrange(1, 300))
            text = text or ["x"]
        try:
            found = parse_topology("".join(text), source=name)
        except TopologyError as error:
            assert str(error).startswith(name), error
            assert "\n" not in str(error)
        else:
            assert to_json(found)["links"]


if __name__ == "__main__":
    results = {spec: record(read_topology(str(DATA / spec))) for spec in SPECS}
    GOLDEN.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
