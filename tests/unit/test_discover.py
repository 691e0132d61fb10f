"""What machines say of themselves: outputs of their tools, in the form of the manuals, and what becomes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.test_topology_machines import matrix, rates, rocm
from tests.unit.test_whatif_and_draw import run

from mycel.cli import discover as command
from mycel.discover import Interface, Node, cluster_of, facts, read_node
from mycel.discover.printed import GpuLine, ib_rate, parse_gpu_query, parse_ibstat, parse_product_names
from mycel.errors import CommunicationError, TopologyError, UsageError
from mycel.settings import read_gpu
from mycel.topology import load_topology

QUERY = "0, NVIDIA H100 80GB HBM3, 5, 16\n1, NVIDIA H100 80GB HBM3, 5, 16\n"
IBSTAT = """CA 'mlx5_0'
	CA type: MT4129
	Number of ports: 1
	Port 1:
		State: Active
		Physical state: LinkUp
		Rate: 400
		Link layer: InfiniBand
CA 'mlx5_1'
	CA type: MT4129
	Port 1:
		State: Down
		Physical state: Disabled
		Rate: 10
"""
PAIR = matrix(["X NV18 PIX SYS", "NV18 X SYS PIX", "PIX SYS X SYS", "SYS PIX SYS X"], nics="mlx5_0 mlx5_1")


def node(host: str, *, text: str = PAIR, names: str = QUERY, **more: object) -> Node:
    return Node(host=host, machine=f"id of {host}", matrix=text, gpus=tuple(parse_gpu_query(names)), **more)  # type: ignore[arg-type]


def seats(*nodes: Node, each: int = 2) -> list[tuple[str, int]]:
    return [(one.machine, number) for one in nodes for number in range(each)]


# -- what is printed --------------------------------------------------------------------------------------------


def test_gpus_as_queried() -> None:
    assert parse_gpu_query(QUERY)[1] == GpuLine(index=1, name="NVIDIA H100 80GB HBM3", pcie=(5, 16))
    assert parse_gpu_query("0, Tesla V100, [N/A], [N/A]\nFailed to initialize NVML\n") == [
        GpuLine(index=0, name="Tesla V100")
    ]


def test_names_of_amd_gpus() -> None:
    text = (
        "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X OAM\nGPU[0]\t\t: Card Model: \t\t0x74a1\n"
        "GPU[1]\t\t: Card Series: \t\tAMD Instinct MI300X OAM\n"
    )
    assert [gpu.name for gpu in parse_product_names(text)] == ["AMD Instinct MI300X OAM"] * 2


def test_adapters_whose_port_is_down_have_no_rate() -> None:
    assert parse_ibstat(IBSTAT) == {"mlx5_0": 400.0}
    assert (ib_rate("25 Gb/sec (1X EDR)"), ib_rate(""), ib_rate("unknown")) == (25.0, None, None)


# -- one machine ------------------------------------------------------------------------------------------------


def adapter(system: Path, name: str, *, state: str, rate: str | None, numa: str = "0") -> None:
    port = system / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    if rate is not None:
        (port / "rate").write_text(f"{rate}\n")
    device = port.parents[1] / "device"
    device.mkdir()
    (device / "numa_node").write_text(f"{numa}\n")


def ethernet(system: Path, name: str, *, state: str = "up", speed: str = "25000", hardware: bool = True) -> None:
    folder = system / "class" / "net" / name
    (folder / "device" if hardware else folder).mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "speed").write_text(f"{speed}\n")


def nothing(arguments: Sequence[str]) -> tuple[str | None, str]:
    return None, f"{arguments[0]} is not installed"


def test_the_kernels_files(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", numa="1")
    adapter(tmp_path, "mlx5_1", state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    ethernet(tmp_path, "eth0")
    ethernet(tmp_path, "eth1", speed="-1")
    ethernet(tmp_path, "eth2", state="down")
    ethernet(tmp_path, "docker0", hardware=False)
    found = read_node(run=nothing, system=tmp_path)
    assert found.interfaces == (
        Interface(name="mlx5_0", gbits=400.0, rdma=True, numa=1),
        Interface(name="eth0", gbits=25.0, rdma=False),
        Interface(name="eth1", gbits=None, rdma=False),
    )
    assert found.silent == ("mlx5_1",)
    assert found.notes[0] == "no NVIDIA GPUs were read: nvidia-smi is not installed"


def test_ibstat_is_asked_where_the_kernel_gives_no_rate(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", state="4: ACTIVE", rate=None)

    def tools(arguments: Sequence[str]) -> tuple[str | None, str]:
        return (IBSTAT, "") if arguments[0] == "ibstat" else nothing(arguments)

    assert read_node(run=tools, system=tmp_path).interfaces[0].gbits == 400.0
    silent = read_node(run=nothing, system=tmp_path)
    assert silent.interfaces[0].gbits is None
    assert "how fast RDMA devices are was not read: ibstat is not installed" in silent.notes


def test_a_tool_that_shows_no_gpus_is_no_matrix(tmp_path: Path) -> None:
    found = read_node(run=lambda arguments: ("No devices were found\n", ""), system=tmp_path)
    assert not found.matrix
    assert found.notes[0] == "no NVIDIA GPUs were read: nvidia-smi shows none: No devices were found"


def test_tools_have_deadlines_and_their_failures_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_TOOL_S", 0.2)
    python = sys.executable
    assert facts.run_tool([python, "-c", "import time; time.sleep(60)"]) == (
        None,
        f"{python} did not answer within 0.2 s",
    )
    monkeypatch.undo()
    assert facts.run_tool(["no-such-tool-anywhere"]) == (None, "no-such-tool-anywhere is not installed")
    printed, why = facts.run_tool([python, "-c", "import sys; sys.exit('driver gone')"])
    assert printed is None and why.endswith("failed with exit code 1: driver gone")


def test_a_node_survives_the_way_to_rank_0() -> None:
    one = node("a", interfaces=(Interface(name="mlx5_0", gbits=400.0, rdma=True, numa=1),), notes=("x",))
    assert Node.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(CommunicationError, match="sent no description"):
        Node.from_json({"host": "a"})


# -- the cluster ------------------------------------------------------------------------------------------------


def test_two_machines_with_gpus() -> None:
    ports = tuple(Interface(name=f"mlx5_{n}", gbits=200.0, rdma=True) for n in range(2))
    pair = [node(host, interfaces=ports) for host in ("a", "b")]
    found = cluster_of("job", {one.machine: one for one in pair}, seats(*pair))
    topology = found.topology
    assert [topology.label(vertex) for vertex in topology.ranks] == ["a/GPU0", "a/GPU1", "b/GPU0", "b/GPU1"]
    cables = rates(topology)
    assert cables["a/GPU0>a/GPU1"] == pytest.approx(18 * 20.6)
    assert cables["b/mlx5_1>network"] == 25
    assert cables["a/GPU0>a/pcie0"] == 48
    assert not any("not named" in note for note in found.notes)


def test_ranks_are_in_the_jobs_order_and_gpus_without_one_are_left_out() -> None:
    pair = [node("a"), node("b")]
    order = [(pair[1].machine, 1), (pair[0].machine, 0)]
    found = cluster_of("job", {one.machine: one for one in pair}, order)
    assert [found.topology.label(vertex) for vertex in found.topology.ranks] == ["b/GPU1", "a/GPU0"]
    assert "2 GPUs have no rank: left out" in found.notes


def test_ports_that_are_down_carry_nothing() -> None:
    pair = [node(host, silent=("mlx5_1",)) for host in ("a", "b")]
    found = cluster_of("job", {one.machine: one for one in pair}, seats(*pair))
    assert not any("mlx5_1" in ends for ends in rates(found.topology))
    assert "a: mlx5_1: no port is up, left out" in found.notes


def test_machines_that_differ() -> None:
    amd = Node(host="amd", machine="2", matrix=rocm(2, "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X\n"))
    plain = Node(host="cpu", machine="3", interfaces=(Interface(name="eth0", gbits=25.0, rdma=False),))
    nvidia = node("nv")
    nodes = {one.machine: one for one in (nvidia, amd, plain)}
    order = [(nvidia.machine, 0), ("2", 1), ("3", 0), ("3", 1)]
    found = cluster_of("mixed", nodes, order)
    cables = rates(found.topology)
    assert [found.topology.label(v) for v in found.topology.ranks] == ["nv/GPU0", "amd/GPU1", "cpu/0", "cpu/1"]
    assert cables["cpu/eth0>network"] == 3.125
    assert "amd: no network interface was found: one of 1 GB/s is assumed" in found.notes


def test_one_machine_of_one_name_each() -> None:
    twins = [Node(host="same", machine=str(n)) for n in range(2)]
    found = cluster_of("twins", {one.machine: one for one in twins}, [("0", 0), ("1", 0)])
    assert [found.topology.label(v) for v in found.topology.ranks] == ["same-0/0", "same-1/0"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([("id of a", 0)], "1 rank\\(s\\) here, and a collective needs two"),
        ([("id of a", 0), ("id of a", 0)], "two ranks run on GPU0; start one a GPU"),
        ([("id of a", 0), ("id of a", 7)], "a rank runs on GPU7, which the machine's tools do not show"),
    ],
)
def test_jobs_that_make_no_topology(order: list[tuple[str, int]], expected: str) -> None:
    one = node("a")
    with pytest.raises(TopologyError, match=f"^discover: {expected}"):
        cluster_of("job", {one.machine: one}, order)


def test_which_gpu_a_process_uses() -> None:
    assert read_gpu({"SLURM_LOCALID": "3"}) == 3
    assert read_gpu({"LOCAL_RANK": "3", "ROCR_VISIBLE_DEVICES": "6"}) == 6  # each sees its own alone
    assert read_gpu({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-4cf8db2d"}) == 1
    assert read_gpu({"CUDA_VISIBLE_DEVICES": "4,5"}) is None


# -- the command ------------------------------------------------------------------------------------------------


def tool(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topo").write_text(PAIR)
    (tmp_path / "query").write_text(QUERY)
    tool(tmp_path, "nvidia-smi", f'if [ "$1" = topo ]; then cat {tmp_path}/topo; else cat {tmp_path}/query; fi')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    output = tmp_path / "cluster.yaml"
    shown = run(command, "--alone", "-o", str(output))
    assert shown.exit_code == 0, shown.exception
    assert "GPU0 <-> GPU1  370.8 GB/s" in shown.stdout
    assert load_topology(output).num_ranks == 2
    assert output.read_text().startswith("# read from this machine's tools\n# assumed: one NVLink of H100")


def test_a_machine_with_nothing_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = run(command, "--alone", "-o", str(tmp_path / "c.yaml")).exception
    assert isinstance(refused, TopologyError) and "nvidia-smi is not installed" in str(refused)
    assert not (tmp_path / "c.yaml").exists()
    assert isinstance(run(command, "-o", "c.txt").exception, UsageError)
    assert isinstance(run(command, "-o", "c.yaml", "--timeout", "0").exception, UsageError)
