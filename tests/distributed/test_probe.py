"""``mycel probe`` on emulated clusters: what is written, and what happens when a rank is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mycel.emulate import launch, start
from mycel.probe.compare import compare
from mycel.topology import load_topology
from mycel.topology.builders import star
from mycel.topology.model import Topology

#: Slow enough for a busy machine to fill: what is tested is the way from sockets to the file.
CLUSTER = """
boxes:
  - name: left
    ranks: 2
    inside: {bandwidth: 100 Mbit/s}
    uplink: {to: core, bandwidth: 40 Mbit/s, per: box}
  - name: right
    ranks: 2
    inside: {bandwidth: 100 Mbit/s}
    uplink: {to: core, bandwidth: 40 Mbit/s, per: box}
switches: [core]
"""


def command(output: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "mycel", "probe", "-o", str(output), "--picture", "none", *more]


@pytest.fixture
def cluster(tmp_path: Path) -> Topology:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return load_topology(file)


class TestEmulated:
    pytestmark = pytest.mark.namespaces

    @pytest.mark.usefixtures("warm_ranks")
    def test_four_ranks_behind_shared_uplinks_are_found(self, cluster: Topology, tmp_path: Path) -> None:
        lines: list[tuple[int, str]] = []
        output = tmp_path / "found.yaml"
        code = launch(
            cluster,
            command(output, "--window", "0.1", "--json", "--expect", str(tmp_path / "cluster.yaml")),
            output=lambda rank, line: lines.append((rank, line)),
            timeout_s=120,
        )
        assert code == 0, lines
        differences = compare(load_topology(output), cluster)
        assert differences is not None, output.read_text()
        assert all(abs(d.ratio - 1) <= 0.1 for d in differences), output.read_text()
        assert [rank for rank, _ in lines] == [0]  # only one rank speaks
        report = json.loads(lines[0][1])
        assert report["confidence"] in ("high", "medium", "low") and report["bytes"] > 0
        assert any(text.startswith("shared: ranks 0, 1") for text in report["findings"])

    def test_ranks_of_one_machine_share_its_cable(self, tmp_path: Path) -> None:
        """Two namespaces, as two machines, with two ranks each; the addresses are those of ``MYCEL_ADDRESS``."""
        lines: list[tuple[int, str]] = []
        output = tmp_path / "found.yaml"
        program = f"""
import json, os, subprocess, sys
machine = int(os.environ["RANK"])
address = json.load(open(os.environ.pop("MYCEL_WIRING")))["addresses"][machine]
shared = os.environ | {{"WORLD_SIZE": "4", "MYCEL_ADDRESS": address}}
ranks = [
    subprocess.Popen({command(output, "--window", "0.1")!r}, env=shared | {{"RANK": str(2 * machine + i)}})
    for i in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
        code = launch(
            star(num_ranks=2, bandwidth="100 Mbit/s"),
            [sys.executable, "-c", program],
            output=lambda rank, line: lines.append((rank, line)),
            timeout_s=120,
        )
        assert code == 0, lines
        found = load_topology(output)
        nodes = [found.vertices[vertex].node for vertex in found.ranks]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3], output.read_text()
        outside = [k for k in found.links if found.vertices[k.src].node != found.vertices[k.dst].node]
        assert outside and all(link.src not in found.rank_of for link in outside), output.read_text()
        per_unit = found.bytes_per_second_per_unit
        assert per_unit is not None
        assert all(abs(link.capacity * per_unit / 12_500_000 - 1) <= 0.1 for link in outside), output.read_text()

    def test_a_rank_that_goes_is_named_by_all_others(self, cluster: Topology, tmp_path: Path) -> None:
        lines: list[tuple[int, str]] = []
        program = f"""
import os, runpy, sys, time
if os.environ["RANK"] == "2":
    from mycel.probe.control import join
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    member = join(address, 2, 4, time.monotonic() + 60)
    member.next(time.monotonic() + 60)
    os._exit(3)
sys.argv = {["mycel", *command(tmp_path / "found.yaml")[3:]]!r}
runpy.run_module("mycel", run_name="__main__")
"""
        with start(
            cluster,
            [sys.executable, "-c", program],
            output=lambda rank, line: lines.append((rank, line)),
            timeout_s=100,
        ) as run:
            run.wait(100)
            codes = run.exit_codes
        assert codes == (2, 2, 3, 2), lines
        assert {rank for rank, line in lines if "rank 2 has gone during the introduction" in line} == {0, 1, 3}, lines
        assert not (tmp_path / "found.yaml").exists()


def test_ranks_of_one_machine(tmp_path: Path) -> None:
    """Without namespaces, as under mpirun: two processes on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = tmp_path / "found.yaml"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")}
    ranks = [
        subprocess.Popen(
            command(output, "--seconds", "10", "--max-bytes", "2GB"),
            env=clean
            | {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    found = load_topology(output)
    assert found.num_ranks == 2
    assert len({vertex.node for vertex in found.vertices}) == 1
    assert "written to" in told[0] and told[1] == ""
