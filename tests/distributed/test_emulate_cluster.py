"""An emulated cluster: what it builds, where packets go, and that nothing stays."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest
from tests.settled import settled

from mycel.emulate import EmulatedCluster, launch
from mycel.errors import EmulationError, UsageError
from mycel.topology import Link, Topology, Vertex
from mycel.topology.builders import ring, star, two_boxes

pytestmark = pytest.mark.namespaces

#: Rank 0 sends so many bytes to an address of rank 1, which answers when all are there; rank 0 prints seconds.
STREAM = """
import json, os, socket, sys, time
rank, num_bytes, key = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
with open(os.environ["MYCEL_WIRING"]) as file:
    wiring = json.load(file)
address = wiring["paths"][key] if key else wiring["addresses"][1]
store = (os.environ["MASTER_ADDR"], 29500)
if rank == 0:
    ready = socket.create_server(store)
    ready.accept()[0].recv(1)
    stream = socket.create_connection((address, 5000), timeout=20)
    start = time.perf_counter()
    stream.sendall(bytes(num_bytes))
    stream.shutdown(socket.SHUT_WR)
    assert stream.recv(1) == b"."
    print(time.perf_counter() - start)
elif rank == 1:
    server = socket.create_server((address, 5000))
    while True:
        try:
            told = socket.create_connection(store, timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    told.sendall(b".")
    stream, _ = server.accept()
    while stream.recv(1 << 16):
        pass
    stream.sendall(b".")
"""

#: Every rank connects to every other rank's routed address and says its name.
EVERYBODY = """
import json, os, socket, threading
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with open(os.environ["MYCEL_WIRING"]) as file:
    addresses = json.load(file)["addresses"]
server = socket.create_server((addresses[rank], 5000))
def tell(other):
    while True:
        try:
            with socket.create_connection((addresses[other], 5000), timeout=20) as stream:
                stream.sendall(bytes([rank]))
                return
        except ConnectionRefusedError:
            pass
tellers = [threading.Thread(target=tell, args=(other,)) for other in range(size) if other != rank]
for teller in tellers:
    teller.start()
heard = {rank}
while len(heard) < size:
    stream, (source, _) = server.accept()
    other = stream.recv(1)[0]
    assert source == addresses[other], (source, other)
    heard.add(other)
for teller in tellers:
    teller.join()
print("heard", len(heard))
"""


def stream(cluster: EmulatedCluster, num_bytes: int, path: tuple[int, ...] = ()) -> float:
    """Seconds that the bytes took from rank 0 to rank 1."""
    lines: list[tuple[int, str]] = []
    command = [sys.executable, "-c", STREAM, str(num_bytes), ">".join(map(str, path))]
    assert launch(cluster, command, output=lambda *line: lines.append(line), timeout_s=60) == 0, lines
    return float(lines[-1][1])


def everybody_hears_everybody(topology: Topology) -> bool:
    lines: list[str] = []
    command = [sys.executable, "-c", EVERYBODY]
    code = launch(topology, command, output=lambda rank, line: lines.append(line), timeout_s=60)
    return code == 0 and lines == [f"heard {topology.num_ranks}"] * topology.num_ranks


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def vertex(topology: Topology, label: str) -> int:
    return next(i for i, v in enumerate(topology.vertices) if v.label == label)


def test_nothing_stays() -> None:
    def held() -> tuple[object, ...]:
        return num_descriptors(), threading.active_count(), socket.if_nameindex()

    with EmulatedCluster(star(num_ranks=2)):
        pass  # the first one also loads and caches what later ones find
    before = held()
    cluster = EmulatedCluster(two_boxes(num_ranks=4))
    assert held() != before
    cluster.close()
    cluster.close()
    assert settled(held) == before
    with pytest.raises(EmulationError, match="closed"):
        cluster.counters()


def test_nothing_stays_when_building_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("the routing table is full")

    before = num_descriptors(), threading.active_count()
    monkeypatch.setattr("mycel.emulate.fabric.Host.route", fail)
    with pytest.raises(EmulationError, match="the routing table is full"):
        EmulatedCluster(star(num_ranks=3))
    assert settled(lambda: (num_descriptors(), threading.active_count())) == before


@pytest.mark.parametrize("rate_mbit", [20, 100])
def test_a_link_carries_what_its_capacity_says(rate_mbit: int) -> None:
    """A statement about shaping: the bounds are wide, and the machine's own speed is far above them."""
    num_bytes = rate_mbit * 1_000_000 // 8 // 2
    with EmulatedCluster(star(num_ranks=2, bandwidth=f"{rate_mbit} Mbit/s")) as cluster:
        reached = num_bytes * 8 / stream(cluster, num_bytes) / 1e6 / rate_mbit
    assert 0.7 < reached < 1.05


def test_directions_are_shaped_apart() -> None:
    ends = (Vertex(kind="rank", label="a"), Vertex(kind="rank", label="b"))
    links = (Link(src=0, dst=1, capacity=20), Link(src=1, dst=0, capacity=400))
    with EmulatedCluster(Topology(name="lopsided", unit="Mbit/s", vertices=ends, links=links)) as cluster:
        assert 0.7 < 1_000_000 * 8 / stream(cluster, 1_000_000) / 20e6 < 1.05


def test_pinned_paths_are_taken() -> None:
    topology = two_boxes(num_ranks=4, inside="200 Mbit/s", between="100 Mbit/s")
    node, core = vertex(topology, "left/switch"), vertex(topology, "core")
    num_bytes = 300_000
    with EmulatedCluster(topology) as cluster:
        for middle, other in ((node, core), (core, node)):
            before = cluster.counters()
            stream(cluster, num_bytes, (0, middle, 1))
            sent = {link: now.num_bytes - before[link].num_bytes for link, now in cluster.counters().items()}
            for taken, spared in (((0, middle), (0, other)), ((middle, 1), (other, 1))):
                assert num_bytes < sent[taken] < 1.2 * num_bytes
                assert sent[spared] < 0.1 * num_bytes


def test_the_wiring_names_every_rank_and_path() -> None:
    topology = two_boxes(num_ranks=4)
    with EmulatedCluster(topology) as cluster:
        assert len(set(cluster.wiring.addresses)) == 4
        pairs = {(path[0], path[-1]) for path in cluster.wiring.paths}
        assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}
        both = [address for path, address in cluster.wiring.paths.items() if (path[0], path[-1]) == (0, 1)]
        assert len(set(both)) == len(both) == 2


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_all_ranks_of_a_ring_reach_each_other(num_ranks: int) -> None:
    assert everybody_hears_everybody(ring(num_ranks=num_ranks, bandwidth="100 Mbit/s"))


def test_one_way_cables_suffice() -> None:
    vertices = tuple(Vertex(kind="rank", label=str(i)) for i in range(3))
    links = tuple(Link(src=i, dst=(i + 1) % 3, capacity=100) for i in range(3))
    assert everybody_hears_everybody(Topology(name="one way", unit="Mbit/s", vertices=vertices, links=links))


def test_a_broken_link_drops_and_a_mended_one_carries() -> None:
    connect = (
        "import json, os, socket, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    address = json.load(open(os.environ['MYCEL_WIRING']))['addresses'][1]\n"
        "    try:\n"
        "        socket.create_connection((address, 1), timeout=0.3)\n"
        "    except TimeoutError:\n"
        "        sys.exit(7)\n"
        "    except ConnectionRefusedError:\n"
        "        sys.exit(0)\n"
    )
    with EmulatedCluster(star(num_ranks=2)) as cluster:
        command = [sys.executable, "-c", connect]
        assert launch(cluster, command) == 0
        cluster.set_link(0, 2, up=False)
        cluster.set_link(0, 2, up=False)
        assert launch(cluster, command) == 7
        cluster.set_link(0, 2, up=True)
        assert launch(cluster, command) == 0
        with pytest.raises(UsageError, match="no link from vertex 0 to vertex 1"):
            cluster.set_link(0, 1, up=False)


def test_two_clusters_live_side_by_side() -> None:
    with EmulatedCluster(star(num_ranks=2)) as one, EmulatedCluster(star(num_ranks=2)) as other:
        before = other.counters()
        stream(one, 100_000)
        after = other.counters()
    assert all(after[link].num_bytes - before[link].num_bytes < 10_000 for link in after)
    assert one.wiring.addresses == other.wiring.addresses
