"""Which fabric a process group runs on, and at which addresses its ranks are reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mycel.collectives.program import Channel
from mycel.errors import UsageError
from mycel.runtime.places import chosen_places, places_by_host
from mycel.runtime.transport.address import Address, names_of_hosts
from mycel.settings import Settings
from mycel.topology.builders import hosts, loopback
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from mycel.topology.wiring import read_wiring

__all__ = ["Fabric"]

#: Where the ranks of this process's job are in a larger topology, as its hosts have said.
_found: dict[tuple[Topology, int], tuple[int, ...]] = {}


class Fabric:
    """The topology between a group's ranks, and the address of every channel.

    Args:
        settings: what the environment asks for.
        group: global ranks of the group, in group order.
        world_size: ranks in the whole job.
        known_as: numbers by which other groups of this process know the members; their global ranks if not given.

    Attributes:
        members: these numbers, in group order.

    Raises:
        UsageError: the given topology has fewer ranks than the job, or the ranks that were chosen of it do not fit.
        TopologyError: the topology or wiring file is malformed.
    """

    def __init__(
        self, settings: Settings, group: Sequence[int], world_size: int, known_as: Sequence[int] | None = None
    ) -> None:
        self._group = tuple(group)
        self.members: tuple[int, ...] = tuple(known_as or group)
        self._wiring = read_wiring(settings.wiring) if settings.wiring is not None else None
        self._whole: Topology | None = None
        self._world_size = world_size
        #: The topology's rank of each rank of the job; ``None`` while hosts, which say it, are not known.
        self._places: Sequence[int] | None = None
        if settings.topology is not None:
            self._whole = load_topology(settings.topology).without_computing()  # sockets end at ranks
            self._places = self._chosen(settings, self._whole)

    def _chosen(self, settings: Settings, whole: Topology) -> Sequence[int] | None:
        """Where each rank of the job is, as far as the environment says it."""
        if settings.ranks is not None:
            return chosen_places(whole, settings.ranks, self._world_size)
        if whole.num_ranks == self._world_size:
            return range(self._world_size)
        if whole.num_ranks < self._world_size:
            raise UsageError(
                f"{settings.topology} describes {whole.num_ranks} ranks, but the world size is {self._world_size}; "
                "start as many processes as the topology has ranks, or unset MYCEL_TOPOLOGY"
            )
        if self._wiring is not None:
            raise UsageError(
                f"{settings.wiring} wires all {whole.num_ranks} ranks of {settings.topology}, but the world size is "
                f"{self._world_size}; say with MYCEL_RANKS which of them the job has"
            )
        return None

    @property
    def described(self) -> bool:
        """Whether the group's topology is part of one that was given, not assumed."""
        return self._whole is not None

    def pinned(self, global_rank: int) -> tuple[str, ...]:
        """Addresses that the wiring gives paths which end at a rank; it listens on them too."""
        if self._wiring is None or self._whole is None:
            return ()
        if self._places is None:
            return ()
        vertex = self._whole.ranks[self._places[global_rank]]
        return tuple(dict.fromkeys(ip for path, ip in self._wiring.paths.items() if path[-1] == vertex))

    def topology(self, addresses: Sequence[Address]) -> Topology:
        """The group's topology: the given one's part, or one inferred from which ranks share a machine."""
        if self._whole is not None:
            places = self._places_of_members(self._whole, addresses)
            present = sorted(places)
            part = self._whole if len(present) == self._whole.num_ranks else self._whole.subset(present)
            return part.reordered([present.index(place) for place in places])
        return _assumed(tuple(names_of_hosts(addresses)))

    def _places_of_members(self, whole: Topology, addresses: Sequence[Address]) -> list[int]:
        """The topology's rank of each member.

        Where hosts say it, the first group of all ranks finds it for all, and other groups remember.
        """
        places = self._places
        if places is None and len(self._group) == self._world_size:
            hosts = sorted(zip(self._group, names_of_hosts(addresses), strict=True), key=lambda pair: pair[0])
            places = places_by_host(whole, [host for _, host in hosts])
            _found[whole, self._world_size] = places
        elif places is None:
            places = _found.get((whole, self._world_size))
        if places is None:
            raise UsageError(
                f"{whole.name} describes {whole.num_ranks} ranks, the world size is {self._world_size}, and no group "
                "of all ranks has said on which hosts they are: say with MYCEL_RANKS which ranks of it the job has"
            )
        return [places[rank] for rank in self._group]

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


@lru_cache(maxsize=128)  # a mesh has many groups, and the same machines again and again
def _assumed(names: tuple[str, ...]) -> Topology:
    """What is taken for the fabric between ranks of which only the machines are known, by name."""
    return loopback(num_ranks=len(names)) if len(set(names)) == 1 else hosts(names)
