"""Cluster: what a search for plans works on: ranks, what each computes with, how much it holds, and the wires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.machines import Fit, Machine, known_machines, load_machine
from mycel.planning.step.links import Links, Rates
from mycel.planning.step.wires import Wires
from mycel.topology.device import Device
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

__all__ = ["Cluster", "load_cluster"]

#: Ranks of a preset: more would be a mistake of typing.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks with devices, in nodes, on a fabric or on rates that are the same everywhere.

    Attributes:
        name: what people call it.
        machine: whose coefficients say how near ranks come to their data sheets.
        devices: of each rank.
        nodes: name of the node of each rank.
        memory_bytes: that a job may use on each rank.
        topology: the wires; ``None`` where nodes are all alike and ``machine.rates`` says all.
        way: of running models, by the name of one of the machine's fits; the usual one if not given.

    Raises:
        UsageError: lists of different lengths, no rank at all, a topology with relative capacities only, or one of
            another number of ranks.

    Examples:
        >>> cluster = load_cluster("h100:nodes=2")
        >>> cluster.num_ranks, cluster.is_uniform, cluster.memory_bytes[0] >> 30
        (16, True, 80)
    """

    name: str
    machine: Machine
    devices: tuple[Device, ...]
    nodes: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    topology: Topology | None = None
    way: str | None = field(default=None)

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.devices or not len(self.devices) == len(self.nodes) == len(self.memory_bytes):
            raise UsageError(
                f"cluster {self.name!r}: {len(self.devices)} devices, {len(self.nodes)} nodes and "
                f"{len(self.memory_bytes)} sizes of memory; each rank has one of each"
            )
        for rank, size in enumerate(self.memory_bytes):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"cluster {self.name!r}: memory of rank {rank} is {size!r}; it must be bytes from 1")
        self.machine.fit(self.way)
        if self.topology is None:
            return
        if self.topology.num_ranks != len(self.devices):
            raise UsageError(
                f"cluster {self.name!r}: {len(self.devices)} devices for the {self.topology.num_ranks} ranks of its "
                "topology"
            )
        if self.topology.unit == "link":
            raise UsageError(
                f"{self.topology.name} has relative capacities only: give its links bandwidths such as '25 GB/s' to "
                "plan by them"
            )

    @property
    def num_ranks(self) -> int:
        """World size."""
        return len(self.devices)

    @property
    def fit(self) -> Fit:
        """How near ranks come to their data sheets, with the errors seen."""
        return self.machine.fit(self.way)

    @property
    def rank_names(self) -> tuple[str, ...]:
        """What people call each rank."""
        if self.topology is not None:
            return tuple(self.topology.label(vertex) for vertex in self.topology.ranks)
        per = self.machine.rates.ranks_per_node
        return tuple(f"{node}/{rank % per}" for rank, node in enumerate(self.nodes))

    @property
    def is_uniform(self) -> bool:
        """All nodes are alike, and so are all ranks: exchanges depend on sizes and strides alone."""
        return self.topology is None and len(set(self.devices)) == 1 and len(set(self.memory_bytes)) == 1

    @property
    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each node, nodes in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @property
    def fabric(self) -> Topology | None:
        """The wires as a topology, made of the machine's rates where there is none; ``None`` for a single rank."""
        if self.topology is not None or self.num_ranks < 2:
            return self.topology
        return _fabric(self.name, self.nodes, self.machine.rates, self.devices[0])

    def links(self, order: tuple[int, ...] = ()) -> Links:
        """The wires as the cost model asks for them.

        Args:
            order: rank at each place of the mesh; by number if not given.
        """
        if self.topology is None:
            return self.machine.rates
        return Wires(topology=self.topology, order=order)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same ranks with so much more memory each, or less if negative."""
        return replace(self, memory_bytes=tuple(max(1, size + memory_bytes) for size in self.memory_bytes))

    def with_another_node(self) -> Cluster:
        """The cluster with one node more, like its last one and connected as that one is.

        Examples:
            >>> load_cluster("h100:nodes=2").with_another_node().num_ranks
            24
        """
        last = self.nodes[-1]
        taken, number = set(self.nodes), len(self.ranks_by_node)
        while f"{last}+{number}" in taken:
            number += 1
        copied = [rank for rank, node in enumerate(self.nodes) if node == last]
        topology = None if self.topology is None else _with_copy(self.topology, last, f"{last}+{number}")
        return replace(
            self,
            name=f"{self.name} and a node",
            devices=self.devices + tuple(self.devices[rank] for rank in copied),
            nodes=self.nodes + (f"{last}+{number}",) * len(copied),
            memory_bytes=self.memory_bytes + tuple(self.memory_bytes[rank] for rank in copied),
            topology=topology,
        )

    def with_faster_links(self, factor: int, *, is_inside: bool) -> Cluster:
        """The cluster whose links inside nodes, or between them, carry so many times as much.

        Args:
            factor: whole, from 1.
            is_inside: links inside nodes; else all others.
        """
        if self.topology is None:
            rates = self.machine.rates
            faster = replace(
                rates,
                link_gbps=rates.link_gbps * (factor if is_inside else 1),
                network_gbps=rates.network_gbps * (1 if is_inside else factor),
            )
            return replace(self, machine=replace(self.machine, rates=faster))
        ends = self.topology.vertices

        def is_chosen(link: Link) -> bool:
            inside = ends[link.src].node is not None and ends[link.src].node == ends[link.dst].node
            return inside == is_inside

        links = tuple(
            replace(link, capacity=link.capacity * factor) if is_chosen(link) else link
            for link in self.topology.links
        )
        return replace(self, topology=replace(self.topology, links=links))


def load_cluster(
    source: str | Path | Topology,
    *,
    machine: str | Path | Machine | None = None,
    memory_bytes: int | Mapping[int, int] | None = None,
    way: str | None = None,
) -> Cluster:
    """A cluster from a topology's file, a preset, or a topology.

    Args:
        source: ``h100:nodes=128`` (a machine by name, with ``nodes`` and ``ranks_per_node``), a topology's file or
            builder, or a topology. Files say what ranks compute with by ``device``.
        machine: whose coefficients and, where the topology names no devices, whose device counts; by name or file.
        memory_bytes: that a job may use on each rank, or on some by number; what their devices have if not given.
        way: of running models, by the name of one of the machine's fits.

    Raises:
        UsageError: no such machine; devices that are not known for some ranks; relative capacities.
        TopologyError: the topology cannot be read.
    """
    given = load_machine(machine) if isinstance(machine, (str, Path)) else machine
    if not isinstance(source, Topology):
        name, _, rest = str(source).partition(":")
        if name.lower() in known_machines() and not Path(str(source)).exists():
            cluster = _preset(str(source), given or load_machine(name), rest)
            return _finished(cluster, memory_bytes, way)
        source = load_topology(source)
    devices = _devices(source, given)
    kind = given or _machine_of(devices)
    vertices = [source.vertices[vertex] for vertex in source.ranks]
    cluster = Cluster(
        name=source.name,
        machine=kind,
        devices=devices,
        nodes=tuple(vertex.node or vertex.label for vertex in vertices),
        memory_bytes=tuple(int(device.memory_bytes) for device in devices),
        topology=source,
    )
    return _finished(cluster, memory_bytes, way)


def _finished(cluster: Cluster, memory_bytes: int | Mapping[int, int] | None, way: str | None) -> Cluster:
    if memory_bytes is not None:
        said = (
            memory_bytes
            if isinstance(memory_bytes, Mapping)
            else dict.fromkeys(range(cluster.num_ranks), memory_bytes)
        )
        for rank in said:
            if not 0 <= rank < cluster.num_ranks:
                raise UsageError(f"{cluster.name}: memory of rank {rank}; it has {cluster.num_ranks} ranks, from 0")
        held = tuple(said.get(rank, size) for rank, size in enumerate(cluster.memory_bytes))
        cluster = replace(cluster, memory_bytes=held)
    return replace(cluster, way=way) if way is not None else cluster


def _preset(spec: str, machine: Machine, rest: str) -> Cluster:
    values = {"nodes": 1, "ranks_per_node": machine.rates.ranks_per_node}
    for part in filter(None, rest.split(",")):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if key not in values or not equals:
            raise UsageError(f"{spec}: cannot read {part!r}{nearest(key, values)}; write for example 'h100:nodes=16'")
        if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
            raise UsageError(f"{spec}: {key} is {text!r}; it must be a whole number from 1")
        values[key] = int(text)
    nodes, per = values["nodes"], values["ranks_per_node"]
    if nodes * per > _MOST_RANKS:
        raise UsageError(f"{spec}: {nodes * per} ranks are more than {_MOST_RANKS}")
    count = nodes * per
    return Cluster(
        name=f"{machine.name}_x{nodes}",
        machine=replace(machine, rates=replace(machine.rates, ranks_per_node=per)),
        devices=(machine.device,) * count,
        nodes=tuple(f"node{rank // per}" for rank in range(count)),
        memory_bytes=(int(machine.device.memory_bytes),) * count,
    )


def _devices(topology: Topology, machine: Machine | None) -> tuple[Device, ...]:
    known = topology.devices
    missing = [topology.label(v) for v, device in zip(topology.ranks, known, strict=True) if device is None]
    if machine is not None:
        return tuple(device or machine.device for device in known)
    if missing:
        some = f"{len(missing)} of {len(known)} ranks" if len(missing) < len(known) else "its ranks"
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UsageError(
            f"{topology.name}: speed and memory of {some} are not known ({names}): write 'device: H100' into the "
            "file, at the top, in a box or under 'devices', or name a machine (--machine h100)"
        )
    return tuple(device for device in known if device is not None)


def _machine_of(devices: tuple[Device, ...]) -> Machine:
    """The machine whose device most ranks have; the generic one where none has it."""
    counts = {name: devices.count(load_machine(name).device) for name in known_machines()}
    best = max(counts, key=lambda name: counts[name])
    return load_machine(best if counts[best] else "generic")


@lru_cache(maxsize=8)
def _fabric(name: str, nodes: tuple[str, ...], rates: Rates, device: Device) -> Topology:
    """Nodes with a switch inside, and a card for each rank on one switch between them."""
    order = list(dict.fromkeys(nodes))
    count = len(nodes)
    place: Counter[str] = Counter()
    vertices = []
    for node in nodes:
        vertices.append(Vertex(kind="rank", label=f"{node}/{place[node]}", node=node, device=device))
        place[node] += 1
    vertices += [Vertex(kind="switch", label=f"{node}/switch", node=node) for node in order]
    ends = [(rank, count + order.index(node), rates.link_gbps) for rank, node in enumerate(nodes)]
    if len(order) > 1:
        vertices.append(Vertex(kind="switch", label="network"))
        ends += [(rank, len(vertices) - 1, rates.network_gbps) for rank in range(count)]
    links = tuple(
        Link(src=a, dst=b, capacity=max(1, round(gbps * 1000)))
        for one, other, gbps in ends
        for a, b in ((one, other), (other, one))
    )
    return Topology(name=name, unit="MB/s", vertices=tuple(vertices), links=links)


def _with_copy(topology: Topology, node: str, name: str) -> Topology:
    """A fabric with a copy of a node's vertices and of their links, to one another and to what is outside."""
    vertices = list(topology.vertices)
    chosen = [
        i
        for i, v in enumerate(vertices)
        if v.node == node or (v.kind == "rank" and v.node is None and v.label == node)
    ]
    labels = {vertex.label for vertex in vertices}
    place = {}
    for old in chosen:
        label = vertices[old].label.replace(node, name, 1)
        while label in labels:
            label += "+"
        labels.add(label)
        place[old] = len(vertices)
        vertices.append(replace(vertices[old], label=label, node=name if vertices[old].node else None))
    links = list(topology.links)
    links += [
        replace(link, src=place.get(link.src, link.src), dst=place.get(link.dst, link.dst))
        for link in topology.links
        if link.src in place or link.dst in place
    ]
    return replace(topology, vertices=tuple(vertices), links=tuple(links))
