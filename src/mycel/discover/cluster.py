"""From what machines say of themselves to the topology of a job's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from mycel.discover.facts import Interface, Node
from mycel.errors import TopologyError
from mycel.topology.formats.description import Description, Reading, join
from mycel.topology.formats.nvidia_smi import parse_nvidia_smi
from mycel.topology.formats.rocm_smi import parse_rocm_smi
from mycel.topology.given import Given
from mycel.topology.hardware import gigabytes, pcie_rate

__all__ = ["Seat", "cluster_of"]

#: A rank: its machine, and which of the machine's GPUs it has.
Seat = tuple[str, int]

#: GB/s of each process to memory that processes of a machine share, and of an interface, where nothing is known:
#: as ``mycel.topology.builders.hosts`` has them.
_MEMORY, _ANY_PORT = 5, 1


def cluster_of(name: str, nodes: Mapping[str, Node], seats: Sequence[Seat]) -> Reading:
    """The topology of a job.

    Args:
        name: of the topology.
        nodes: what each machine says, by ``Node.machine``.
        seats: of each rank, in rank order; without GPUs, the second number counts the machine's ranks.

    Raises:
        TopologyError: a machine has fewer GPUs than ranks, its tools printed something that cannot be read, or there
            are fewer than two ranks.
    """
    labels = _labels(nodes)
    several = len(nodes) > 1
    if len(seats) < 2:
        why = "".join(f"; {note}" for node in nodes.values() for note in node.notes)
        raise TopologyError(
            f"discover: {len(seats)} rank(s) here, and a collective needs two: start it once a rank, as a training "
            f"program{why}"
        )
    machines = []
    for key, node in nodes.items():
        machine = _gpu_machine(node) if node.matrix else _processes(node, [n for k, n in seats if k == key])
        if several and not machine.has_exits:
            _plug_in(machine, node)
        machine.notes += [f"{node.host}: {note}" for note in node.notes]
        machines.append((labels[key], machine))
    found = join(name, machines)
    wanted = [f"{labels[key]}/{_seat(nodes[key], n)}" if several else _seat(nodes[key], n) for key, n in seats]
    places = {found.topology.label(vertex): rank for rank, vertex in enumerate(found.topology.ranks)}
    missing = next((label for label in wanted if label not in places), None)
    if missing is not None:
        raise TopologyError(f"discover: a rank runs on {missing}, which the machine's tools do not show")
    ranks = [places[label] for label in wanted]
    if len(set(ranks)) < len(ranks):
        twice = next(label for label in wanted if wanted.count(label) > 1)
        raise TopologyError(f"discover: two ranks run on {twice}; start one a GPU")
    inside = sorted(ranks)
    topology = found.topology.subset(inside).reordered([inside.index(rank) for rank in ranks])
    notes = list(found.notes)
    if len(ranks) < found.topology.num_ranks:
        notes.append(f"{found.topology.num_ranks - len(ranks)} GPUs have no rank: left out")
    return Reading(topology=replace(topology, name=name), notes=tuple(notes))


def _labels(nodes: Mapping[str, Node]) -> dict[str, str]:
    """Host names, made different where machines share one."""
    hosts = [node.host for node in nodes.values()]
    return {
        key: node.host if hosts.count(node.host) == 1 else f"{node.host}-{number}"
        for number, (key, node) in enumerate(nodes.items())
    }


def _seat(node: Node, number: int) -> str:
    return f"GPU{number}" if node.matrix else str(number)


def _gpu_machine(node: Node) -> Description:
    nics = {nic.name: _port(nic.gbits) for nic in node.interfaces if nic.gbits}
    links = [pcie_rate(*gpu.pcie) for gpu in node.gpus if gpu.pcie]
    given = Given(nics=nics, pcie=min(links) if len(links) == len(node.gpus) and links else None)
    parse = parse_rocm_smi if "Link Type between two GPUs" in node.matrix else parse_nvidia_smi
    names = "".join(f"GPU {gpu.index}: {gpu.name}\n" for gpu in node.gpus)
    machine = parse(names + node.matrix, source=node.host, given=given)
    dropped = machine.drop_exits(node.silent)
    if dropped:
        machine.notes.append(f"{node.host}: {', '.join(dropped)}: no port is up, left out")
    return machine


def _processes(node: Node, used: Sequence[int]) -> Description:
    """A machine without GPUs: its ranks are processes, which share memory."""
    machine = Description(node.host, node.host)
    machine.switch("memory")
    for number in sorted(set(used)):
        machine.cable(machine.rank(str(number)), "memory", gigabytes(_MEMORY))
    machine.notes.append(f"processes of a machine are taken to be joined at {_MEMORY} GB/s; 'mycel probe' measures")
    return machine


def _plug_in(machine: Description, node: Node) -> None:
    """Interfaces that no matrix shows: the RDMA devices, or else the fastest Ethernet interfaces."""
    places = [label for label in machine.switches if label.startswith("numa")] or machine.switches
    chosen: list[Interface] = [nic for nic in node.interfaces if nic.rdma]
    if not chosen:
        best = max((nic.gbits or 0.0 for nic in node.interfaces), default=0.0)
        chosen = [nic for nic in node.interfaces if (nic.gbits or 0.0) == best][: None if best else 1]
    if not chosen:
        machine.notes.append(f"{node.host}: no network interface was found: one of {_ANY_PORT} GB/s is assumed")
        chosen = [Interface(name="interface", gbits=None, rdma=False)]
    for nic in chosen:
        at = f"numa{nic.numa}" if f"numa{nic.numa}" in places else places[0]
        if not nic.gbits:
            machine.notes.append(f"{node.host}: how fast {nic.name} is, is not known: taken at {_ANY_PORT} GB/s")
        machine.exit(nic.name, [at], _port(nic.gbits) if nic.gbits else gigabytes(_ANY_PORT))


def _port(gbits: float) -> Fraction:
    return Fraction(str(gbits)) * 10**9 / 8
