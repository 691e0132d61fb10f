"""Netlink side of an emulated cluster: namespaces, cables, shaping and routing tables, written with pyroute2.

Addresses (all private, all inside the namespaces, so they never meet those of the machine):

==============  ===============================================================
10.64.0.0/12    both ends of every cable
10.80.0.0/12    addresses that pin a path, on the loopback interface of the rank they lead to
10.96.0.0/16    the rank addresses that ordinary routing knows, on ``RANK_INTERFACE``
10.97.0.0/16    the unshaped management network
==============  ===============================================================
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from mycel.emulate.namespaces import NamespaceThread, write_sysctl
from mycel.emulate.routing import PinnedTree

__all__ = ["MANAGEMENT_INTERFACE", "RANK_INTERFACE", "Cable", "Host", "management_address", "rank_address"]

#: Interface that holds a rank's routed address.
RANK_INTERFACE = "mycel0"
#: Interface of a rank on the unshaped network.
MANAGEMENT_INTERFACE = "mgmt0"

#: Bytes that htb lets through at once. Larger lets small messages through unshaped, smaller costs rate.
BURST_BYTES = 8000
#: Bytes that a shaped link may be ahead of its rate: the burst, and the rest of a packet that begins within it. TCP
#: hands packets of up to 64 KB to the kernel, which are cut behind the shaper.
CREDIT_BYTES = BURST_BYTES + (1 << 16)

_CABLES = int(ipaddress.IPv4Address("10.64.0.0"))
_PINNED = int(ipaddress.IPv4Address("10.80.0.1"))
_RANKS = int(ipaddress.IPv4Address("10.96.0.1"))
_MANAGEMENT = int(ipaddress.IPv4Address("10.97.0.1"))
_LOOPBACK_INDEX = 1
_HTB_ROOT = 0x10000
_HTB_CLASS = 0x10001
_DROP_QDISC = 0x100000

_SYSCTLS = (
    # Vertices forward; packets may come and go by different ways; no second protocol adds traffic to shaped links.
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv4/conf/all/rp_filter", "0"),
    ("net/ipv4/conf/default/rp_filter", "0"),
    ("net/ipv4/conf/all/send_redirects", "0"),
    ("net/ipv4/conf/default/send_redirects", "0"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
    # One connection must not inherit what an earlier one learned about the path.
    ("net/ipv4/tcp_no_metrics_save", "1"),
    # Queues of the emulated switches drop nothing, so only the receivers' windows bound them. With the usual 6 MB a
    # connection, seven senders to one 100 Mbit/s port kept it 1 s behind; half a megabyte loses no rate.
    ("net/ipv4/tcp_rmem", "4096 131072 524288"),
)


def rank_address(rank: int) -> str:
    """Address of a rank on the shaped fabric."""
    return str(ipaddress.IPv4Address(_RANKS + rank))


def management_address(rank: int) -> str:
    """Address of a rank on the management network."""
    return str(ipaddress.IPv4Address(_MANAGEMENT + rank))


def pinned_address(number: int) -> str:
    """Address of the pinned tree of that number."""
    return str(ipaddress.IPv4Address(_PINNED + number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """Two adjacent vertices; whichever directions have a link share one veth pair.

    Attributes:
        number: position among the cables; gives the addresses.
        low: vertex of the smaller index.
        high: vertex of the larger index.
    """

    number: int
    low: int
    high: int

    def address(self, vertex: int) -> str:
        """Address of one end."""
        return str(ipaddress.IPv4Address(_CABLES + 2 * self.number + (vertex == self.high)))

    def other(self, vertex: int) -> int:
        """The vertex at the other end."""
        return self.low if vertex == self.high else self.high


@dataclass(slots=True, kw_only=True)
class Host:
    """One vertex of the cluster as the kernel sees it: a namespace with its interfaces and routes.

    Attributes:
        vertex: index in the topology.
        namespace: descriptor that holds the namespace.
        netlink: pyroute2 socket inside it.
        indices: interface index by name.
        cables: to each neighbour, by vertex.
    """

    vertex: int
    namespace: int
    netlink: Any  # pyroute2 ships no type information
    indices: dict[str, int] = field(default_factory=dict)
    cables: dict[int, Cable] = field(default_factory=dict)

    @classmethod
    def create(cls, thread: NamespaceThread, vertex: int) -> Host:
        """A fresh namespace with forwarding on and the loopback interface up."""
        namespace = thread.create()
        netlink = thread.run(namespace, _open_netlink)
        thread.at_end(netlink.close)
        netlink.link("set", index=_LOOPBACK_INDEX, state="up")
        return cls(vertex=vertex, namespace=namespace, netlink=netlink)

    def plug(self, cable: Cable, other: Host) -> None:
        """Lay the cable to another host; interfaces are called after the vertex at their far end."""
        self._veth(_interface(other.vertex), other, _interface(self.vertex))
        self.cables[other.vertex] = cable
        other.cables[self.vertex] = cable

    def plug_management(self, hub: Host, rank: int) -> None:
        """Connect to the unshaped network; the hub has a bridge for it."""
        port = f"rank{rank}"
        self._veth(MANAGEMENT_INTERFACE, hub, port)
        hub.learn_indices()
        hub.netlink.link("set", index=hub.indices[port], master=hub.indices[MANAGEMENT_INTERFACE], state="up")

    def add_bridge(self, name: str) -> None:
        """An empty bridge: as good as a dummy interface, and kernels more often have it."""
        self.netlink.link("add", ifname=name, kind="bridge")
        self.learn_indices()
        self.netlink.link("set", index=self.indices[name], state="up")

    def learn_indices(self) -> None:
        """Read the index of each interface."""
        self.indices = {link.get_attr("IFLA_IFNAME"): link["index"] for link in self.netlink.get_links()}

    def raise_cables(self) -> None:
        """Give our end of every cable its address and switch it on."""
        for other, cable in self.cables.items():
            index = self.indices[_interface(other)]
            self.netlink.addr("add", index=index, address=cable.address(self.vertex), prefixlen=31)
            self.netlink.link("set", index=index, state="up")

    def assign(self, name: str, address: str, prefix_length: int = 32) -> None:
        """Give one of our interfaces an address."""
        self.netlink.addr("add", index=self.indices[name], address=address, prefixlen=prefix_length)

    def assign_pinned(self, address: str) -> None:
        """Take packets for one more address."""
        self.netlink.addr("add", index=_LOOPBACK_INDEX, address=address, prefixlen=32)

    def switch_on(self, name: str) -> None:
        """Set an interface up."""
        self.netlink.link("set", index=self.indices[name], state="up")

    def route(self, address: str, via: int, source: str | None) -> None:
        """Send packets for an address over the cable to a neighbour.

        Args:
            address: of the destination.
            via: the neighbour's vertex.
            source: address that our own packets carry, where we send any.
        """
        extra = {} if source is None else {"prefsrc": source}
        self.netlink.route(
            "add",
            dst=f"{address}/32",
            gateway=self.cables[via].address(via),
            oif=self.indices[_interface(via)],
            **extra,
        )

    def route_tree(self, tree: PinnedTree, address: str, source: str | None) -> None:
        """Take our hop of a pinned tree, if we are on it."""
        if self.vertex in tree.next_hop:
            self.route(address, tree.next_hop[self.vertex], source)

    def shape(self, other: int, bytes_per_second: Fraction) -> None:
        """Limit what we send over the cable to a neighbour."""
        index = self.indices[_interface(other)]
        rate = max(1, round(bytes_per_second))
        self.netlink.tc("add", "htb", index, _HTB_ROOT, default=_HTB_CLASS & 0xFFFF)
        self.netlink.tc(
            "add-class",
            "htb",
            index,
            _HTB_CLASS,
            parent=_HTB_ROOT,
            rate=rate,
            ceil=rate,
            burst=BURST_BYTES,
            cburst=BURST_BYTES,
            quantum=BURST_BYTES,
        )

    def set_sending(self, other: int, *, up: bool) -> None:
        """Let packets to a neighbour pass, or drop them in silence as a broken cable does."""
        index = self.indices[_interface(other)]
        if up:
            self.netlink.tc("del", "pfifo", index, _DROP_QDISC, parent=_HTB_CLASS)
        else:
            self.netlink.tc("add", "pfifo", index, _DROP_QDISC, parent=_HTB_CLASS, limit=0)

    def sent(self) -> dict[int, tuple[int, int]]:
        """Bytes and packets sent to each neighbour; to be called inside the namespace."""
        lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]
        counted = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
        return {v: (int(counted[_interface(v)][8]), int(counted[_interface(v)][9])) for v in self.cables}

    def _veth(self, name: str, other: Host, other_name: str) -> None:
        self.netlink.link("add", ifname=name, kind="veth", peer={"ifname": other_name, "net_ns_fd": other.namespace})


def _interface(neighbour: int) -> str:
    return f"to{neighbour}"


def _open_netlink() -> Any:
    from pyroute2 import IPRoute

    for name, value in _SYSCTLS:
        write_sysctl(name, value)
    if not write_sysctl("net/ipv4/tcp_congestion_control", "cubic"):
        write_sysctl("net/ipv4/tcp_congestion_control", "reno")
    return IPRoute()
