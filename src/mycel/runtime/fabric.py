"""Which fabric a process group runs on, and at which addresses its ranks are reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from mycel.collectives.program import Channel
from mycel.errors import UsageError
from mycel.runtime.transport.rendezvous import Address
from mycel.settings import Settings
from mycel.topology.builders import hosts, loopback
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from mycel.topology.wiring import own_ip, read_wiring, route_to

__all__ = ["Fabric", "own_address"]


def own_address(settings: Settings, global_rank: int) -> tuple[Address, str]:
    """What this rank publishes, and the local address it listens on.

    The machine is identified by host name and network namespace, since ranks of one host but different namespaces
    do not share a loopback interface.
    """
    namespace = Path("/proc/self/ns/net")
    host = f"{socket.gethostname()}/{namespace.readlink() if namespace.exists() else ''}"
    ip, bind = own_ip(settings, global_rank), "0.0.0.0"
    if ip is None:
        try:
            ip = route_to(settings.master_address or "127.0.0.1")
        except OSError:
            ip = "127.0.0.1"
        if ip.startswith("127."):
            bind = ip
    return Address(host=host, ip=ip, port=0, pid=os.getpid()), bind


class Fabric:
    """The topology between a group's ranks, and the address of every channel.

    Args:
        settings: what the environment asks for.
        group: global ranks of the group, in group order.
        world_size: ranks in the whole job.

    Raises:
        UsageError: the given topology is for another number of ranks.
        TopologyError: the topology or wiring file is malformed.
    """

    def __init__(self, settings: Settings, group: Sequence[int], world_size: int) -> None:
        self._group = tuple(group)
        self._wiring = read_wiring(settings.wiring) if settings.wiring is not None else None
        self._whole: Topology | None = None
        if settings.topology is not None:
            whole = load_topology(settings.topology).without_computing()  # sockets end at ranks
            if whole.num_ranks != world_size:
                raise UsageError(
                    f"{settings.topology} describes {whole.num_ranks} ranks, but the world size is {world_size}; "
                    "start as many processes as the topology has ranks, or unset MYCEL_TOPOLOGY"
                )
            self._whole = whole

    @property
    def described(self) -> bool:
        """Whether the group's topology is part of one that was given, not assumed."""
        return self._whole is not None

    def topology(self, addresses: Sequence[Address]) -> Topology:
        """The group's topology: the given one's part, or one inferred from which ranks share a machine."""
        if self._whole is not None:
            present = sorted(self._group)
            part = self._whole if len(present) == self._whole.num_ranks else self._whole.subset(present)
            return part.reordered([present.index(rank) for rank in self._group])
        names = [address.host for address in addresses]
        if len(set(names)) == 1:
            return loopback(num_ranks=len(names))
        return hosts(names)

    def address_of(self, topology: Topology, addresses: Sequence[Address]) -> Callable[[Channel], str]:
        """At which address a channel's destination is reached over the channel's path."""
        pinned: dict[tuple[str, ...], str] = {}
        if self._wiring is not None and self._whole is not None:
            for path, address in self._wiring.paths.items():
                pinned[tuple(self._whole.label(vertex) for vertex in path)] = address

        def lookup(channel: Channel) -> str:
            labels = tuple(topology.label(vertex) for vertex in channel.path)
            return pinned.get(labels, addresses[channel.dst].ip)

        return lookup
