"""What links take: their rates, and what a message costs on them, by class of link.

The simulator, ``select``, the bound on time, plans for a size and the runtime's own choice take a message's costs
from here. A topology may say of a link which class it is, and of a class what its messages cost
(``mycel.topology.link_class``); what it does not say has the defaults of ``LINK_CLASSES``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mycel.brief import brief
from mycel.cost.processors import MESSAGE_S, WAKE_S, Costs
from mycel.errors import UsageError
from mycel.topology.link_class import StatedClass
from mycel.topology.model import LOCALHOST, Link, Topology

__all__ = ["LINK_CLASSES", "LinkClass", "LinkCosts", "bytes_per_second", "link_class", "link_costs"]

#: Bytes a second that capacity 1 stands for where a topology gives only relative capacities.
_ASSUMED_RATE = 1e9
#: Slower links than this are taken for sockets: cards of 25 Gbit/s and more are bought for RDMA.
_SOCKETS_BELOW = 3.1e9
#: Pieces of an array beyond which no shorter ones are tried.
_MOST_PIECES = 1 << 11


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """What a message costs on links of one class.

    Attributes:
        latency_s: of a path over them, where the topology states none, in seconds.
        wake_s: from a message's arrival until its receiver goes on, in seconds.
        work_s: work for a message at either end, one after the other for all of a rank's messages, in seconds.
        piece_bytes: lengths of messages worth trying, the shortest first.
        is_socket: whether processors copy and add what moves.
        source: where these numbers come from.
    """

    latency_s: float
    wake_s: float
    work_s: float
    piece_bytes: tuple[int, ...]
    is_socket: bool = False
    source: str = ""


#: From messages that are mostly latency up to what NCCL moves at a time: a slot of its buffer of 4 MB is 512 KB in
#: the protocol for large messages.
_GPU_PIECES = (1 << 13, 1 << 15, 1 << 17, 1 << 19)
_NCCL = "NCCL 2.27, src/graph/tuning.cc, hwLat: {}, a step of a ring in protocol LL"
_SOCKETS = "measured on loopback sockets (mycel.cost.processors)"

#: Defaults by name. A GPU works at its channels side by side and polls: no work in turn, no waking. Over sockets
#: peers take turns by pieces, and a long one holds up all others (all_gather of 256 KB, 4 ranks of 400 Mbit/s, in
#: pieces of 16, 32 and 64 KB: 4.0, 4.5 and 5.1 ms; of 16 MB in two nodes in pieces of 32 and 256 KB: 365 and 418 ms).
#: Between ranks that share a machine's memory, to which unix sockets come near, fewer messages are less work, as long
#: as a piece is still in the cache when it is reduced (all_reduce in pieces of 32, 64, 128 and 256 KB, medians in ms:
#: between 2 ranks 16 MB 9.3, 8.8, 7.7, 6.9, 64 MB 38.8, 33.8, 30.3, 27.7; between 4 ranks 4 MB 5.5, 5.0, 4.7, 5.7,
#: 16 MB 19.6, 19.7, 17.4, 17.6). Over TCP they lose there as well (4 ranks, 16 MB: 22, 32, 31, 27).
LINK_CLASSES: dict[str, LinkClass] = {
    "nvlink": LinkClass(
        latency_s=0.6e-6, wake_s=0.0, work_s=0.0, piece_bytes=_GPU_PIECES, source=_NCCL.format("NVLink")
    ),
    "xgmi": LinkClass(
        latency_s=0.6e-6, wake_s=0.0, work_s=0.0, piece_bytes=_GPU_PIECES, source="taken to be as NVLink"
    ),
    "pcie": LinkClass(latency_s=1.0e-6, wake_s=0.0, work_s=0.0, piece_bytes=_GPU_PIECES, source=_NCCL.format("PCI")),
    "rdma": LinkClass(
        latency_s=2.7e-6, wake_s=0.0, work_s=0.0, piece_bytes=_GPU_PIECES, source=_NCCL.format("network")
    ),
    "tcp": LinkClass(
        latency_s=0.0,
        wake_s=WAKE_S,
        work_s=MESSAGE_S,
        piece_bytes=(1 << 14, 1 << 15),
        is_socket=True,
        source=_SOCKETS,
    ),
    "shared_memory": LinkClass(
        latency_s=0.0,
        wake_s=WAKE_S,
        work_s=MESSAGE_S,
        piece_bytes=(1 << 14, 1 << 15, 1 << 16, 1 << 17),
        is_socket=True,
        source=_SOCKETS,
    ),
}


def bytes_per_second(topology: Topology) -> float:
    """What capacity 1 stands for: the unit's rate, or 10^9 where capacities are only relative.

    Times made of an assumed rate can be compared with each other, and with nothing else.

    Examples:
        >>> from mycel.topology.builders import ring
        >>> bytes_per_second(ring(num_ranks=4, bandwidth="8 Mbit/s"))
        125000.0
    """
    return float(topology.bytes_per_second_per_unit or _ASSUMED_RATE)


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """What messages cost on the links of one topology.

    Attributes:
        classes: name of each link's class by ``(src, dst)``; of all ``"flat"`` where one overhead was given.
        table: what the classes' messages cost, by name, the topology's own statements included.
        latency_s: what each link states by ``(src, dst)``, in seconds; 0 where it states nothing.
    """

    classes: Mapping[tuple[int, int], str]
    table: Mapping[str, LinkClass]
    latency_s: Mapping[tuple[int, int], float]

    __repr__ = brief

    def message(self, path: Sequence[int]) -> tuple[float, float]:
        """Of a message along a path: seconds from its last byte to its arrival, and of work at either end.

        The latencies that are stated and, for links without, the longest of their classes' once; the slowest to
        wake, and the dearest work.
        """
        of = [self.table[self.classes[hop]] for hop in pairwise(path)]
        return self.latency(path) + max(c.wake_s for c in of), max(c.work_s for c in of)

    def latency(self, path: Sequence[int]) -> float:
        """Seconds of a path: what its links state, and the longest of what the classes say of those that do not."""
        hops = list(pairwise(path))
        stated = sum(self.latency_s[hop] for hop in hops)
        return stated + max(
            (self.table[self.classes[hop]].latency_s for hop in hops if not self.latency_s[hop]), default=0.0
        )

    def arriving(self, link: Link) -> tuple[float, float]:
        """At least what ``message`` gives for any path that ends with a link, beyond what links state."""
        of = self.table[self.classes[link.src, link.dst]]
        return (0.0 if link.latency_s else of.latency_s) + of.wake_s, of.work_s

    def pieces(self, num_bytes: int) -> tuple[int, ...]:
        """Lengths of messages worth trying for an array: neither dust, nor several that do not cut it at all.

        Examples:
            >>> from mycel.topology import load_topology
            >>> costs = link_costs(load_topology("dgx_h100"))
            >>> costs.pieces(1 << 10), costs.pieces(1 << 26)
            ((8192,), (32768, 131072, 524288))
        """
        worth = sorted({piece for name in set(self.classes.values()) for piece in self.table[name].piece_bytes})
        kept = [p for p in worth if num_bytes <= p * _MOST_PIECES] or [worth[-1]]
        return tuple(p for i, p in enumerate(kept) if i == 0 or kept[i - 1] < num_bytes)

    def processors(self) -> Costs:
        """What processors do for a message, of the dearest class; they copy and add where there are sockets."""
        used = [self.table[name] for name in sorted(set(self.classes.values()))]
        least = Costs(message_s=max(c.work_s for c in used), wake_s=max(c.wake_s for c in used))
        if any(c.is_socket for c in used):
            return least
        return replace(least, copy_s_per_gb=0.0, add_s_per_gb=0.0)


def link_costs(topology: Topology, *, links: str | None = None, overhead_s: float | None = None) -> LinkCosts:
    """What messages cost on a topology's links.

    A link is of the class that the topology states. For others its rate and its place hint at one: between processes
    of one machine it is memory; slow links, and those of relative capacities, are sockets. Of faster ones, those
    whose ends are in one node are NVLink (xGMI costs the same), and all others RDMA.

    Args:
        topology: the fabric.
        links: class of all links instead, a key of ``LINK_CLASSES``.
        overhead_s: instead of classes, one overhead for every message beyond the latency that its links state, and no
            work at the ends.

    Raises:
        UsageError: no class of that name, a negative overhead, or both.

    Examples:
        >>> from mycel.topology import load_topology
        >>> sorted(set(link_costs(load_topology("dgx_h100:nodes=2")).classes.values()))
        ['nvlink', 'rdma']
        >>> fabric = load_topology("ring:ranks=4,bandwidth=10 Gbit/s")
        >>> link_costs(fabric).message((0, 1)), link_costs(fabric, overhead_s=1e-6).message((0, 1))
        ((2.5e-05, 4e-06), (1e-06, 0.0))
    """
    if links is not None and links not in LINK_CLASSES:
        raise UsageError(f"unknown class of links {links!r}; known: {', '.join(LINK_CLASSES)}")
    if overhead_s is not None:
        if links is not None:
            raise UsageError(f"{overhead_s} s a message and links of class {links!r}: say one of the two")
        if not 0 <= overhead_s < float("inf"):
            raise UsageError(f"an overhead of {overhead_s} s a message: must be zero or more")
        flat = LinkClass(latency_s=0.0, wake_s=overhead_s, work_s=0.0, piece_bytes=LINK_CLASSES["tcp"].piece_bytes)
        return LinkCosts(
            classes=dict.fromkeys(topology.capacity, "flat"), table={"flat": flat}, latency_s=topology.latency_s
        )
    rate = bytes_per_second(topology)
    if links is not None:
        classes = dict.fromkeys(topology.capacity, links)
    else:
        classes = {(k.src, k.dst): k.link_class or _hinted(topology, k, rate) for k in topology.links}
    table = {name: link_class(topology, name) for name in LINK_CLASSES}
    return LinkCosts(classes=classes, table=table, latency_s=topology.latency_s)


def link_class(topology: Topology, name: str) -> LinkClass:
    """What messages cost on links of a class: what the topology states of it, and defaults.

    Args:
        topology: the fabric.
        name: a key of ``LINK_CLASSES``.
    """
    default = LINK_CLASSES[name]
    return next((_with(default, said) for said in topology.link_classes if said.name == name), default)


def _hinted(topology: Topology, link: Link, rate: float) -> str:
    node = topology.vertices[link.src].node
    is_inside = node is not None and node == topology.vertices[link.dst].node
    if is_inside and node == LOCALHOST:
        return "shared_memory"
    if topology.bytes_per_second_per_unit is None or link.capacity * rate < _SOCKETS_BELOW:
        return "tcp"
    return "nvlink" if is_inside else "rdma"


def _with(default: LinkClass, said: StatedClass) -> LinkClass:
    """A class's defaults with what the topology says of it."""
    return replace(
        default,
        latency_s=default.latency_s if said.latency_s is None else said.latency_s,
        wake_s=default.wake_s if said.wake_s is None else said.wake_s,
        work_s=default.work_s if said.work_s is None else said.work_s,
        piece_bytes=said.piece_bytes or default.piece_bytes,
        source="the topology, where it says so",
    )
