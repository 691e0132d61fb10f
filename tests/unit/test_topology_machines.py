"""Files of machines with GPUs: one table of hardware behind all readers, and every feature that real files have."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from tests.unit.test_topology_formats import cables
from tests.unit.test_whatif_and_draw import run

from mycel.cli import show as show_command
from mycel.errors import TopologyError, UsageError
from mycel.topology import Reading, Topology, load_topology, parse_topology, read_topology
from mycel.topology.hardware import GPUS, Gpu, gigabytes, gpu_by_arch, gpu_by_links, gpu_by_pci, gpu_called, gpus_in


def rates(topology: Topology) -> dict[str, float]:
    """GB/s of each link by its ends."""
    scale = {"GB/s": 1.0, "MB/s": 1e-3, "Mbit/s": 0.125e-3, "Gbit/s": 0.125}[topology.unit]
    return {ends: capacity * scale for ends, capacity in cables(topology).items()}


def matrix(cells: list[str], *, before: str = "", nics: str = "") -> str:
    """A matrix as ``nvidia-smi topo -m`` prints it: rows of cells, GPUs first."""
    names = [f"GPU{number}" for number in range(len(cells))]
    if nics:
        names[-len(nics.split()) :] = [f"NIC{number}" for number in range(len(nics.split()))]
    rows = [f"{name}\t" + "\t".join(row.split()) + "\t0-15\t0" for name, row in zip(names, cells, strict=True)]
    legend = "".join(f"  NIC{number}: {name}\n" for number, name in enumerate(nics.split()))
    return before + "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows) + "\n" + legend


def islands(size: int, count: str) -> str:
    """Two islands of GPUs with so many NVLinks between any two of one."""
    cell = {True: count, False: "SYS"}
    return matrix(
        [" ".join("X" if a == b else cell[a // size == b // size] for b in range(2 * size)) for a in range(2 * size)]
    )


def xml(*devices: str, attributes: str = 'numaid="0" arch="x86_64" vendor="GenuineIntel"') -> str:
    return f'<system version="1"><cpu {attributes}>' + "".join(devices) + "</cpu></system>"


def gpu_xml(bus: str, *inside: str, about: str = 'sm="90"', device: str = "", speed: str = "32.0") -> str:
    ids = f' vendor="0x10de" device="{device}"' if device else ""
    return (
        f'<pci busid="{bus}" class="0x030200"{ids} link_speed="{speed} GT/s PCIe" link_width="16">'
        f"<gpu {about}>{''.join(inside)}</gpu></pci>"
    )


# -- the table --------------------------------------------------------------------------------------------------


def test_ids_and_names_mean_one_gpu_each() -> None:
    ids = [(gpu.kind, number) for gpu in GPUS for number in gpu.ids]
    assert len(set(ids)) == len(ids)
    for gpu in GPUS:
        assert gpu_called(f"NVIDIA {gpu.name}") is gpu, gpu.name
    real = {
        "NVIDIA A100-SXM4-40GB": "A100", "NVIDIA A100 80GB PCIe": "A100 PCIe", "NVIDIA H100 80GB HBM3": "H100",
        "Tesla V100-SXM2-16GB": "V100", "Tesla V100-PCIE-32GB": "V100 PCIe", "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA GB200": "GB200", "AMD Instinct MI300X OAM": "MI300X", "AMD INSTINCT MI250 (MCM) OAM AC MBA": "MI250",
        "NVIDIA GH200 480GB": "GH200", "NVIDIA A800-SXM4-80GB": "A800", "NVIDIA GeForce RTX 3090 Ti": "RTX 3090",
    }  # fmt: skip
    assert {name: getattr(gpu_called(name), "name", None) for name in real} == real


LINKED = [gpu for gpu in GPUS if gpu.num_links and gpu.kind == "NVLink" and gpu.num_links <= 18]


@pytest.mark.parametrize("gpu", LINKED, ids=[gpu.name for gpu in LINKED])
def test_two_readers_give_the_same_gpu_the_same_links(gpu: Gpu) -> None:
    count = gpu.num_links
    row = [f"X NV{count}", f"NV{count} X"]
    printed = parse_topology(matrix(row, before=f"GPU 0: NVIDIA {gpu.name} (UUID: a)\n"), source="topo.txt")
    links = [f'<nvlink target="0000:0{2 - n}:00.0" count="{count}" tclass="0x030200"/>' for n in range(2)]
    pair = [gpu_xml(f"0000:0{n + 1}:00.0", links[n], about=f'sm="{gpu.arch}"') for n in range(2)]
    dumped = parse_topology(xml(*pair), source="dump.xml")
    by_id = [gpu_xml(f"0000:0{n + 1}:00.0", links[n], about="", device=f"{gpu.ids[0]:#06x}") for n in range(2)]
    known = parse_topology(xml(*by_id), source="ids.xml")
    expected = float(count * gpu.link_rate / 10**9)
    assert rates(printed)["GPU0>GPU1"] == pytest.approx(expected)
    assert rates(dumped)["gpu0>gpu1"] == rates(known)["gpu0>gpu1"] == pytest.approx(expected)


@pytest.mark.parametrize(("gcn", "rate"), [("906", 24), ("908", 24), ("910", 36), ("gfx90a", 36), ("940", 48)])
def test_old_and_new_gcn_names(gcn: str, rate: int) -> None:
    links = [f'<xgmi target="0000:0{2 - n}:00.0" count="2" tclass="0x038000"/>' for n in range(2)]
    pair = [gpu_xml(f"0000:0{n + 1}:00.0", links[n], about=f'sm="104" gcn="{gcn}"') for n in range(2)]
    assert rates(parse_topology(xml(*pair), source="r.xml"))["gpu0>gpu1"] == 2 * rate


def test_what_is_known_of_gpus() -> None:
    found = gpu_by_pci(0x10DE, 0x20B0)
    assert found is not None and (found.name, found.link_rate) == ("A100", gigabytes(20))
    assert gpu_by_pci(0x1002, 0x20B0) is None and gpu_by_pci(0x10DE, None) is None
    assert gpu_by_arch(86).link_rate == gigabytes(12)
    assert gpu_by_links(7 * 18, 18, 8) is gpu_called("H100") and gpu_by_links(11, 7, 3) is None
    assert gpus_in("GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\n") == (gpu_called("H100"),)


# -- matrices ---------------------------------------------------------------------------------------------------


def test_islands_have_a_switch_each() -> None:
    found = rates(parse_topology(islands(3, "NV18"), source="i.txt"))
    assert {ends for ends in found if "nvswitch" in ends and ends.startswith("GPU")} == {
        *(f"GPU{n}>nvswitch0" for n in range(3)),
        *(f"GPU{n}>nvswitch1" for n in range(3, 6)),
    }
    assert found["GPU0>nvswitch0"] == pytest.approx(18 * 20.6)


@pytest.mark.parametrize(
    ("count", "size", "switched"), [("NV12", 4, True), ("NV4", 4, False), ("NV6", 4, False), ("NV6", 8, True)]
)
def test_whether_nvlinks_lead_to_a_switch(count: str, size: int, switched: bool) -> None:
    cells = [" ".join("X" if a == b else count for b in range(size)) for a in range(size)]
    found = parse_topology(matrix(cells), source="m.txt")
    assert bool(found.switches) == switched  # without one, PCIe is left out


LOST = ["\x1b[4m{}\x1b[0m", "[4m{}[0m", "^[[4m{}^[[0m", "\\u001b[4m{}\\u001b[0m", "4m{}"]


@pytest.mark.parametrize("form", LOST)
def test_headers_whose_escapes_are_lost(form: str) -> None:
    header, rest = matrix(["X NV12 PIX", "NV12 X SYS", "PIX SYS X"], nics="mlx5_7").split("\n", 1)
    text = "$ nvidia-smi topo -m\n\t" + form.format(header.strip()) + "\n" + rest
    assert parse_topology(text, source="h.txt").num_ranks == 2
    quoted = "".join(f"> {line}\n" for line in text.splitlines())
    assert parse_topology(quoted, source="quoted.txt").links == parse_topology(text, source="h.txt").links


def test_interfaces_have_their_names_and_the_pcie_of_the_gpus() -> None:
    text = matrix(["X NV18 PIX", "NV18 X SYS", "PIX SYS X"], nics="mlx5_7")
    Path("m.txt").write_text(text, encoding="utf-8")
    found = rates(load_topology("m.txt*2"))
    assert found["node0/mlx5_7>network"] == found["node1/GPU0>node1/pcie0"] == 48
    said = rates(load_topology("m.txt:gpu=B200,nic=400 Gbit/s,pcie=63 GB/s*2"))
    assert (said["node0/mlx5_7>network"], said["node1/GPU0>node1/pcie0"]) == (50, 63)
    assert said["node0/GPU0>node0/GPU1"] == pytest.approx(18 * 40.1)
    assert rates(load_topology("m.txt:link=25 GB/s"))["GPU0>GPU1"] == 18 * 25


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_names_around_a_matrix_that_cannot_be_its_gpus() -> None:
    cells = ["X NV12", "NV12 X"]
    prose = matrix(cells, before="NVIDIA L4 cards stand in the other rack\n")
    assert rates(parse_topology(prose, source="p.txt"))["GPU0>GPU1"] == 240
    commented = "".join(f"# {line}\n" for line in matrix(cells).splitlines())
    assert parse_topology(commented, source="c.txt").num_ranks == 2


def test_gpus_with_memory_of_their_own_are_grace_hoppers_successors() -> None:
    text = matrix(["X NV18", "NV18 X"]).replace("NUMA Affinity\n", "NUMA Affinity\tGPU NUMA ID\n")
    coherent = text.replace("\t0-15\t0\n", "\t0-15\t0\t2\n")
    assert rates(parse_topology(coherent, source="g.txt"))["GPU0>GPU1"] == pytest.approx(18 * 40.1)
    plain = text.replace("\t0-15\t0\n", "\t0-15\t0\t\tN/A\n")
    assert rates(parse_topology(plain, source="g.txt"))["GPU0>GPU1"] == pytest.approx(18 * 20.6)


def test_an_empty_affinity_does_not_move_the_numa_node() -> None:
    text = matrix(["X SYS", "SYS X"]).replace("\t0-15\t0\n", "\t\t0\n", 1)
    assert len(parse_topology(text, source="a.txt").switches) == 1  # both are of node 0


def rocm(size: int, about: str = "", numa: str = "GPU[{0}]\t\t: (Topology) Numa Node: {0}") -> str:
    names = [f"GPU{number}" for number in range(size)]

    def one(title: str, cell: str) -> str:
        rows = [" ".join([a, *("0" if a == b else cell for b in names)]) for a in names]
        return f"===== {title} between two GPUs =====\n{' '.join(names)}\n" + "\n".join(rows) + "\n"

    nodes = "".join(numa.format(number) + "\n" for number in range(size))
    return about + one("Weight", "15") + one("Hops", "1") + one("Link Type", "XGMI") + nodes


def test_amd_meshes() -> None:
    assert rates(parse_topology(rocm(8), source="a.txt"))["GPU0>GPU7"] == 48
    assert rates(parse_topology(rocm(4), source="a.txt"))["GPU0>GPU3"] == 36
    named = rocm(4, "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300A\n")
    assert rates(parse_topology(named, source="a.txt"))["GPU0>GPU3"] == 48


def test_link_types_alone_will_do() -> None:
    text = rocm(4)
    types = text[text.index("===== Link Type") :]
    Path("t.txt").write_text(types, encoding="utf-8")
    found = read_topology("t.txt")
    assert rates(found.topology)["GPU0>GPU3"] == 36
    assert "there are no weights: every pair with xGMI is taken to be joined directly" in found.notes


def test_numa_lines_of_older_releases() -> None:
    text = rocm(2, numa="GPU {0} : (Topology) Numa Node: {0}").replace("XGMI", "PCIE")
    assert [parse_topology(text, source="a.txt").label(v) for v in (2, 3)] == ["numa0", "numa1"]


# -- NCCL's XML -------------------------------------------------------------------------------------------------


def test_nvswitches_without_a_common_gpu_are_two() -> None:
    switch = '<nvlink target="0000:{}:00.0" count="6" tclass="0x068000"/>'
    gpus = [
        gpu_xml(f"0000:0{n}:00.0", switch.format(f"c{n // 2 * 2}"), switch.format(f"c{n // 2 * 2 + 1}"))
        for n in range(4)
    ]
    found = parse_topology(xml(*gpus), source="x.xml")
    assert [found.label(v) for v in found.switches] == ["cpu0", "nvswitch0", "nvswitch1"]
    boards = [gpu_xml(f"0000:{n:02x}:00.0", switch.format(f"c{n // 8}"), about='sm="70"') for n in range(16)]
    whole = read_topology_of(xml(*boards))
    assert [whole.topology.label(v) for v in whole.topology.switches] == ["nvswitch"]
    assert any("two boards" in note for note in whole.notes)


def read_topology_of(text: str, name: str = "x.xml", more: str = "") -> Reading:
    Path(name).write_text(text, encoding="utf-8")
    return read_topology(name + more)


def test_hosts_are_told_apart() -> None:
    rack = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    cpu = '<cpu host_hash="0x{0}" numaid="0" arch="arm64">{1}</cpu>'
    gpus = [gpu_xml("0008:06:00.0", rack, about=f'dev="0" sm="100" rank="{n}"') for n in range(2)]
    text = "<system>" + "".join(cpu.format(n, gpu) for n, gpu in enumerate(gpus)) + "</system>"
    found = parse_topology(text, source="rack.xml")
    assert found.ranks_by_node == {"host0": (0,), "host1": (1,)}
    cabled = {f"host{n}/gpu{n}>nvswitch" for n in range(2)} | {f"nvswitch>host{n}/gpu{n}" for n in range(2)}
    assert rates(found) == pytest.approx(dict.fromkeys(cabled, 18 * 40.1))
    nic = '<pci busid="0:1" class="0x020000"><nic><net name="mlx5_0" speed="100000"/></nic></pci>'
    apart = text.replace(rack, "").replace("</cpu>", nic + "</cpu>")
    joined = parse_topology(apart, source="two.xml")
    assert "network" in [joined.label(v) for v in joined.switches]
    with pytest.raises(TopologyError, match=r"rack\.xml:1: a second <cpu> with numaid '0' and the same host_hash"):
        parse_topology(text.replace('"0x1"', '"0x0"'), source="rack.xml")


def test_chip_to_chip_takes_the_place_of_pcie() -> None:
    c2c = '<c2c bw="43125" count="8"/>'
    port = '<nic><net name="roce0" speed="200000"/></nic>'
    nic = f'<pci busid="1:0" link_speed="32.0 GT/s PCIe" link_width="4">{port}</pci>'
    Path("spark.xml").write_text(xml(nic, gpu_xml("f:0", c2c, speed="2.5", about='sm="121"')), encoding="utf-8")
    found = rates(load_topology("spark.xml*2"))
    assert found["node0/gpu0>node0/cpu0"] == 345
    assert found["node0/roce0>network"] == 12
    with pytest.raises(TopologyError, match=r"spark\.xml: describes one rank alone.*'spark\.xml\*2'"):
        load_topology("spark.xml")


def test_links_to_oneself_repeated_bridges_and_two_gpus_in_a_device() -> None:
    itself = '<nvlink target="0000:01:00.0" count="12" tclass="0x030200"/>'
    device = gpu_xml("0000:01:00.0", itself, about='dev="0" sm="80" rank="0"')
    second = device.replace("</pci>", '<gpu dev="0" sm="80" rank="1"/></pci>')
    bridge = '<pci busid="0000:c5:00.0" class="0x060400" link_speed="16 GT/s" link_width="16">{}</pci>'
    other = gpu_xml("0000:02:00.0", about='dev="1" sm="80" rank="2"')
    found = read_topology_of(xml(bridge.format(second), bridge.format(other)))
    labels = [vertex.label for vertex in found.topology.vertices]
    assert labels[:3] == ["gpu0", "gpu1", "gpu2"]
    assert {"pci 0000:c5:00.0", "pci 0000:c5:00.0 #2"} <= set(labels)
    said = "\n".join(found.notes)
    assert "from a GPU to itself: left out" in said
    assert "2 bridges are called 'pci 0000:c5:00.0'" in said
    assert "2 GPUs in PCI device 0000:01:00.0: they share its links" in said


def test_parts_of_a_device_share_its_links() -> None:
    rack = '<nvlink target="fffffff:ff:ff.0" count="36" tclass="0x068000"/><c2c bw="50000" count="2"/>'
    part = '<gpu dev="0" sm="107" mlopart="{}" rank="{}">' + rack + "</gpu>"
    device = '<pci busid="000{}:81:00.0" link_speed="64.0 GT/s PCIe" link_width="2">{}{}</pci>'
    both = [device.format(n, part.format(0, 2 * n), part.format(1, 2 * n + 1)) for n in range(2)]
    found = rates(read_topology_of(xml(*both)).topology)
    whole = pytest.approx(36 * 40.1)
    assert found["gpu0>device 0000:81:00.0"] == found["device 0000:81:00.0>nvswitch"] == whole
    assert not any(ends.startswith("gpu0>") and "device" not in ends for ends in found)
    pcie = xml(*both).replace(
        "nvlink", "pcilink"
    )  # without NVLink, C2C and PCIe lead to the processors, once a device
    assert rates(parse_topology(pcie, source="x.xml"))["device 0000:81:00.0>cpu0"] == 100 + 12


def bare(count: int, device: str, nic: str = "") -> str:
    speed = 'link_speed="8 GT/s" link_width="16"'
    gpu = f'<pci busid="0000:1{{}}:00.0" class="0x030200" vendor="0x10de" device="{{}}" {speed}/>'
    port = '<pci busid="0:9" class="0x020000" vendor="0x1d0f" device="0xefa0" link_speed="16 GT/s" link_width="16"/>'
    return xml(*(gpu.format(n, device) for n in range(count)), port if nic else "")


def test_cloud_files_are_completed_from_pci_ids_and_say_so() -> None:
    found = read_topology_of(bare(8, "0x20b2", nic="efa"))
    assert rates(found.topology)["gpu7>nvswitch"] == 240
    assert any(note.startswith("the file describes no NVLink: completed") for note in found.notes)
    two = rates(read_topology_of(bare(8, "0x20b2", nic="efa"), more="*2").topology)
    assert two["node0/nic0>network"] == 12.5  # the port, not its PCIe
    plain = read_topology_of(bare(8, "0x20b5"))
    assert not any("nvswitch" in ends for ends in rates(plain.topology))
    assert any(note.startswith("no NVLink or xGMI is described") for note in plain.notes)


def test_a_person_can_name_the_gpus() -> None:
    text = bare(8, "0xffff")
    assert rates(read_topology_of(text, more=":gpu=H100").topology)["gpu0>nvswitch"] == pytest.approx(18 * 20.6)
    cube = rates(read_topology_of(text, more=":gpu=V100").topology)
    assert (cube["gpu0>gpu3"], cube["gpu0>gpu1"], "gpu0>gpu7" in cube) == (40, 20, False)
    assert rates(read_topology_of(text, more=":gpu=MI300X").topology)["gpu0>gpu7"] == 48
    assert not any("nvswitch" in ends for ends in rates(read_topology_of(text, more=":gpu=L40S").topology))


def test_a_dump_without_links_has_none() -> None:
    gpus = [gpu_xml(f"0000:0{n}:00.0", device="0x2330") for n in range(2)]
    assert not any("nvswitch" in ends for ends in rates(parse_topology(xml(*gpus), source="dump.xml")))


def test_a_speed_that_no_port_has_is_not_believed() -> None:
    nic = '<pci busid="1:0" vendor="0x17db" device="0x0501" link_speed="16.0 GT/s PCIe" link_width="16">{}</pci>'
    port = nic.format('<nic><net name="cxi0" speed="200000000"/></nic>')
    gpus = [gpu_xml(f"0000:0{n}:00.0") for n in range(2)]
    found = read_topology_of(xml(port, *gpus), more="*2")
    assert rates(found.topology)["node0/cxi0>network"] == 24
    assert any(note.startswith("cxi0: no port is as fast") for note in found.notes)


def test_bridges_of_virtual_machines_are_not_believed() -> None:
    device = gpu_xml("0000:a4:00.0", device="0x2330").replace('link_width="16"', 'link_width="0"')
    nic = (
        '<pci busid="0000:a3:00.0" link_speed="32.0 GT/s PCIe" link_width="0">'
        '<nic><net name="mlx5_7" speed="200000"/></nic></pci>'
    )
    bridge = f'<pci busid="0000:a1:00.0" link_speed="2.5 GT/s PCIe" link_width="1">{device}{nic}</pci>'
    found = read_topology_of(xml(bridge, gpu_xml("0000:b4:00.0")), more="*2")
    cables = rates(found.topology)
    assert cables["node0/pci 0000:a1:00.0>node0/cpu0"] == cables["node0/gpu0>node0/pci 0000:a1:00.0"] == 48
    assert cables["node0/mlx5_7>network"] == 25
    assert any("as virtual ones do" in note for note in found.notes)


def test_what_the_kernel_does_not_know_is_not_refused() -> None:
    device = gpu_xml("0000:a4:00.0", device="0x2330").replace("32.0 GT/s PCIe", "Unknown").replace('"16"', '"255"')
    nic = '<pci busid="1:0" link_speed="16 GT/s" link_width="16"><nic><net name="eth0" speed="-1"/></nic></pci>'
    found = read_topology_of(xml(device, nic, gpu_xml("0000:b4:00.0")), more="*2")
    assert rates(found.topology)["node0/gpu0>node0/cpu0"] == 48  # as an H100 has it
    assert rates(found.topology)["node0/eth0>network"] == 24
    assert "eth0 has no speed: taken at its PCIe bandwidth" in found.notes


def test_an_interface_seen_from_two_processors_is_one() -> None:
    nic = '<nic><net name="eth0" dev="0" speed="10000" port="0"/></nic>'
    cpu = '<cpu numaid="{}" arch="x86_64">{}{}</cpu>'
    text = "".join(cpu.format(n, gpu_xml(f"0000:0{n}:00.0"), nic) for n in range(2))
    found = rates(read_topology_of(f"<system>{text}</system>", more="*2").topology)
    assert found["node0/eth0>network"] == found["node0/cpu0>node0/eth0"] == found["node0/cpu1>node0/eth0"] == 1.25
    port = '<pci busid="1:{}" link_speed="8 GT/s" link_width="16"><nic><net name="m" speed="10000"/></nic></pci>'
    gpus = [gpu_xml(f"0000:0{n}:00.0") for n in range(2)]
    bridge = '<pci busid="2:0" link_speed="8 GT/s" link_width="16">{}</pci>'
    both = rates(read_topology_of(xml(bridge.format(port.format(0) + port.format(1)), *gpus), more="*2").topology)
    assert both["node0/m>network"] == both["node0/m #2>network"] == 1.25


def test_a_gpu_whose_links_are_missing_is_named() -> None:
    rack = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    found = read_topology_of(xml(*(gpu_xml(f"0000:0{n}:00.0", rack if n else "") for n in range(3))))
    assert "gpu0: no NVLink or xGMI of it is described, although others have some" in found.notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<system>\n<cpu numaid="0"><pci busid="0000:00:16.0"/></cpu></system>', "x.xml:1: no GPU among 1 PCI dev"),
        ("<graphs/>", "x.xml:1: expected <system>, got <graphs>: those are the rings and trees"),
    ],
)
def test_what_is_no_machine_says_which_file_is_wanted(text: str, expected: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(text, source="x.xml")
    assert str(caught.value).startswith(expected) and "NCCL_TOPO_DUMP_FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (":gpu=H10O", "no GPU called 'H10O' is known (did you mean 'H100'?)"),
        (":nic=fast", "nic: cannot read 'fast' as a bandwidth"),
        (":gpu=H100,gpu=H200", "gpu is said twice"),
        (":gpu=H100,nics=1 GB/s", "'nics' cannot be said (did you mean 'nic'?)"),
        ("*2:gpu=H100", "say it before the number: 'x.xml:gpu=H100*2'"),
    ],
)
def test_what_a_person_says_wrongly(more: str, expected: str) -> None:
    with pytest.raises(TopologyError, match=r"^x\.xml(\*2)?: ") as caught:
        read_topology_of(bare(2, "0xffff"), more=more)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_gpus_that_cannot_have_the_links_of_a_file() -> None:
    Path("m.txt").write_text(matrix(["X NV12", "NV12 X"]), encoding="utf-8")
    with pytest.raises(TopologyError, match=r"m\.txt: describes links between GPUs, and L40S have none"):
        load_topology("m.txt:gpu=L40S")


@pytest.mark.parametrize(("model", "rate"), [("85", 10), ("143", 22), ("207", 40), ("63", 6), ("", 10)])
def test_what_joins_sockets_is_told_by_the_processor(model: str, rate: int) -> None:
    cpu = '<cpu numaid="{}" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="{}">{}</cpu>'
    text = "".join(cpu.format(n, model, gpu_xml(f"0000:0{n}:00.0")) for n in range(2))
    assert rates(parse_topology(f"<system>{text}</system>", source="x.xml"))["cpu0>cpu1"] == rate


def test_files_that_say_all_rates_take_no_more() -> None:
    text = "{ranks: 2, links: [{from: 0, to: 1, bandwidth: 10 Gb/s}]}"
    with pytest.raises(TopologyError, match=r"c\.yaml: YAML says all rates itself"):
        read_topology_of(text, "c.yaml", ":gpu=H100")


# -- hwloc's XML ------------------------------------------------------------------------------------------------


def test_hwloc_holds_ids_from_which_links_follow() -> None:
    file = Path(__file__).parents[1] / "data" / "formats" / "hwloc.xml"
    found = rates(load_topology(f"{file}*2"))
    assert found["node0/gpu3>node0/nvswitch"] == 240
    assert found["node0/gpu1>node0/pci 0000:01:00.0"] == 24  # it slept, at 4 GB/s
    assert found["node1/mlx5_0>network"] == 24  # the port has 25
    assert not any("eth0" in ends for ends in found)  # RDMA devices go before Ethernet
    assert not any("mlx5_1" in ends for ends in found)
    assert "mlx5_1: no port is up, left out" in read_topology(f"{file}*2").notes
    efa = file.read_text(encoding="utf-8").replace("0207 [15b3:101b]", "0200 [1d0f:efa3]")
    bare_efa = "".join(line for line in efa.splitlines(keepends=True) if "mlx5_" not in line and "ib0" not in line)
    assert rates(read_topology_of(bare_efa, more="*2").topology)["node0/nic0>network"] == 24
    assert rates(load_topology(f"{file}:nic=20 GB/s*2"))["node1/mlx5_0>network"] == 20


# -- mycel show -------------------------------------------------------------------------------------------------


def test_show_prints_all_and_writes_what_reads_back() -> None:
    Path("topo.txt").write_text(islands(3, "NV18"), encoding="utf-8")
    shown = run(show_command, "topo.txt", "-o", "cluster.yaml")
    assert shown.exit_code == 0
    for part in ("6 ranks, 3 switches", "GPU5", "nvswitch1", "GPU0 <-> nvswitch0  370.8 GB/s", "taken for H100"):
        assert part in shown.stdout
    found = read_topology("topo.txt")
    text = Path("cluster.yaml").read_text(encoding="utf-8")
    assert all(f"# assumed: {note}" in text for note in found.notes)
    again = load_topology("cluster.yaml")
    assert (again.vertices, set(again.links)) == (found.topology.vertices, set(found.topology.links))
    assert run(show_command, "topo.txt", "-o", "cluster.json").exit_code == 0
    assert load_topology("cluster.json").links == found.topology.links


def test_show_gives_json() -> None:
    Path("topo.txt").write_text(islands(3, "NV18"), encoding="utf-8")
    record = json.loads(run(show_command, "topo.txt", "--json").stdout)
    assert record["assumed"] == list(read_topology("topo.txt").notes)
    assert Fraction(record["links"][0]["capacity"]) > 0 and len(record["ranks"]) == 6


def test_show_refuses_a_name_that_says_no_form() -> None:
    assert isinstance(run(show_command, "ring:ranks=2,bandwidth=1 GB/s", "-o", "cluster.txt").exception, UsageError)
