"""An emulated cluster: every rank and every switch of a topology in a network namespace of its own.

Two adjacent vertices share one veth pair; each direction is shaped on the sending side, by htb, to the capacity of
its link. A direction without a link carries nothing: no route uses it. Latencies of the topology are not emulated;
the delay of a hop is what this machine's kernel takes, some tens of microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import TracebackType

from mycel.emulate.fabric import (
    MANAGEMENT_INTERFACE,
    RANK_INTERFACE,
    Cable,
    Host,
    management_address,
    pinned_address,
    rank_address,
)
from mycel.emulate.namespaces import NamespaceThread
from mycel.emulate.routing import default_next_hops, merge_paths, switch_paths
from mycel.emulate.support import check_support
from mycel.errors import EmulationError, UsageError
from mycel.topology.model import Topology
from mycel.topology.wiring import Wiring

__all__ = ["EmulatedCluster", "LinkCounters"]

logger = logging.getLogger(__name__)

#: Paths pinned for one ordered pair of ranks, at most.
MAX_PATHS = 64

#: Above this rate for one link, shaping no longer decides how fast packets go (bytes a second).
_CREDIBLE_RATE = Fraction(10**10, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """What one direction of a cable has carried.

    The kernel hands on large packets uncut, with one header for many segments, and counts them so; the shaping
    counts the headers of all segments.

    Attributes:
        num_bytes: with headers, as the kernel counts them.
        num_packets: uncut ones count once.

    Examples:
        >>> before, after = (LinkCounters(num_bytes=n, num_packets=n // 1500) for n in (3000, 9000))
        >>> after.num_bytes - before.num_bytes  # carried meanwhile
        6000
    """

    num_bytes: int
    num_packets: int


class EmulatedCluster:
    """The namespaces, cables and routes of one topology; a context manager.

    Everything hangs on descriptors of this process: when it ends, however it ends, the kernel removes the cluster.

    Args:
        topology: the fabric; its unit must be a rate.
        max_paths: pinned paths for each ordered pair of ranks, shortest first.

    Attributes:
        topology: the fabric.
        wiring: addresses of the ranks and of the pinned paths.

    Raises:
        EmulationError: this machine cannot emulate a cluster; the message says what is missing.
        UsageError: capacities are only relative (unit ``link``).

    Examples:
        Two programs, one after the other, on the same links::

            with EmulatedCluster(mycel.load_topology("star:ranks=4,bandwidth=200 Mbit/s")) as cluster:
                launch(cluster, ["python", "train.py"])
                launch(cluster, ["python", "evaluate.py"])
    """

    def __init__(self, topology: Topology, *, max_paths: int = MAX_PATHS) -> None:
        per_unit = topology.bytes_per_second_per_unit
        if per_unit is None:
            raise UsageError(
                f"{topology.name}: capacities in unit 'link' are only relative and cannot be emulated; "
                "give the topology a unit, for example 'Mbit/s'"
            )
        check_support()
        self.topology = topology
        self._links = {(link.src, link.dst): link.capacity * per_unit for link in topology.links}
        fastest = max(self._links.values())
        if fastest > _CREDIBLE_RATE:
            logger.warning(
                "%s: a link of %.0f Gbit/s is faster than this machine moves packets; scale the capacities down",
                topology.name,
                float(fastest * 8 / 10**9),
            )
        paths = [
            path
            for src in topology.ranks
            for dst in topology.ranks
            if src != dst
            for path in switch_paths(topology, src, dst, max_paths=max_paths)
        ]
        self._trees = merge_paths(paths)
        self.wiring = Wiring(
            addresses=tuple(rank_address(rank) for rank in range(topology.num_ranks)),
            paths={path: pinned_address(number) for number, tree in enumerate(self._trees) for path in tree.paths},
        )
        self._down: set[tuple[int, int]] = set()
        self.thread = NamespaceThread()
        try:
            self.thread.call(self._build)
        except BaseException:
            self.thread.close()
            raise

    def __enter__(self) -> EmulatedCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the cluster. May be called twice."""
        self.thread.close()

    def namespace(self, rank: int) -> int:
        """Descriptor that holds the namespace of a rank."""
        return self._hosts[self.topology.ranks[rank]].namespace

    def counters(self) -> Mapping[tuple[int, int], LinkCounters]:
        """What each link has carried since the cluster was built, by ``(src, dst)`` vertices."""
        found = {}
        for host in self._hosts.values():
            for neighbour, (num_bytes, num_packets) in self.thread.run(host.namespace, host.sent).items():
                if (host.vertex, neighbour) in self._links:
                    found[host.vertex, neighbour] = LinkCounters(num_bytes=num_bytes, num_packets=num_packets)
        return found

    def set_link(self, src: int, dst: int, *, up: bool) -> None:
        """Break one direction of a cable, or mend it. A broken one drops packets in silence.

        Args:
            src: vertex the packets leave.
            dst: vertex they do not reach.
            up: ``False`` to break, ``True`` to mend.

        Raises:
            UsageError: there is no such link.
        """
        if (src, dst) not in self._links:
            raise UsageError(f"{self.topology.name}: no link from vertex {src} to vertex {dst}")
        if up == ((src, dst) in self._down):
            self.thread.call(partial(self._hosts[src].set_sending, dst, up=up))
            (self._down.discard if up else self._down.add)((src, dst))

    # -- building: by the thread, since a netlink socket stays with the thread that opened it ---------------

    def _build(self) -> None:
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            self._hosts = {vertex: Host.create(self.thread, vertex) for vertex in range(len(self.topology.vertices))}
            self._lay_cables()
            self._lay_management()
            self._assign_addresses()
            self._write_routes()
        except (NetlinkError, OSError) as error:
            raise EmulationError(
                f"{self.topology.name}: the kernel refused a part of the cluster: {error}"
            ) from error

    def _lay_cables(self) -> None:
        pairs = sorted({(min(pair), max(pair)) for pair in self._links})
        for number, (low, high) in enumerate(pairs):
            self._hosts[low].plug(Cable(number=number, low=low, high=high), self._hosts[high])
        for host in self._hosts.values():
            if self.topology.vertices[host.vertex].kind == "rank":
                host.add_bridge(RANK_INTERFACE)
            else:
                host.learn_indices()
            host.raise_cables()
        for (src, dst), rate in self._links.items():
            self._hosts[src].shape(dst, rate)

    def _lay_management(self) -> None:
        hub = Host.create(self.thread, -1)
        hub.add_bridge(MANAGEMENT_INTERFACE)
        for rank, vertex in enumerate(self.topology.ranks):
            host = self._hosts[vertex]
            host.plug_management(hub, rank)
            host.learn_indices()
            host.assign(MANAGEMENT_INTERFACE, management_address(rank), 16)
            host.switch_on(MANAGEMENT_INTERFACE)

    def _assign_addresses(self) -> None:
        for rank, vertex in enumerate(self.topology.ranks):
            self._hosts[vertex].assign(RANK_INTERFACE, rank_address(rank))
        for number, tree in enumerate(self._trees):
            self._hosts[tree.destination].assign_pinned(pinned_address(number))

    def _write_routes(self) -> None:
        source = {vertex: rank_address(rank) for rank, vertex in enumerate(self.topology.ranks)}
        for rank, destination in enumerate(self.topology.ranks):
            for vertex, via in default_next_hops(self.topology, destination).items():
                self._hosts[vertex].route(rank_address(rank), via, source.get(vertex))
        for number, tree in enumerate(self._trees):
            for vertex in tree.next_hop:
                self._hosts[vertex].route_tree(tree, pinned_address(number), source.get(vertex))
