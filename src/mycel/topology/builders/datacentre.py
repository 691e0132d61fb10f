"""Fabrics of whole halls: fat tree, dragonfly."""

from __future__ import annotations

from mycel.errors import TopologyError
from mycel.topology.builders.assembly import Assembly, Bandwidth, Latency, positive
from mycel.topology.model import Topology

__all__ = ["dragonfly", "fat_tree"]


def fat_tree(
    *,
    k: int = 4,
    host: Bandwidth = "100 GB/s",
    edge: Bandwidth = "50 GB/s",
    core: Bandwidth = "50 GB/s",
    latency: Latency = 0.0,
) -> Topology:
    """The three-level tree of k-port switches: k pods, ``k**3 / 4`` hosts, ``k**2 / 4`` core switches.

    Without oversubscription all three bandwidths are equal; the defaults are 2:1 oversubscribed at the edge.

    Args:
        k: ports of a switch; even, at least 2.
        host: from a host to its edge switch.
        edge: from an edge switch to each aggregation switch of its pod.
        core: from an aggregation switch to each of its core switches.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    References:
        Al-Fares, Loukissas, Vahdat: A Scalable, Commodity Data Center Network Architecture, SIGCOMM 2008,
        section 3.

    Examples:
        >>> fat_tree(k=4).num_ranks, len(fat_tree(k=4).switches)
        (16, 20)
    """
    if positive(k, "fat_tree: k", 2) % 2:
        raise TopologyError(f"fat_tree: k must be even, got {k}")
    half = k // 2
    fabric = Assembly(f"fat_tree_{k}")
    cores = [fabric.switch(f"core{number}") for number in range(half * half)]
    for pod in range(k):
        aggregation = [fabric.switch(f"pod{pod}/aggregation{number}") for number in range(half)]
        for group, switch in enumerate(aggregation):
            for number in range(half):
                fabric.connect(switch, cores[group * half + number], core, latency)
        for number in range(half):
            below = fabric.switch(f"pod{pod}/edge{number}")
            for switch in aggregation:
                fabric.connect(below, switch, edge, latency)
            for slot in range(half):
                fabric.connect(fabric.rank(f"pod{pod}/{number * half + slot}"), below, host, latency)
    return fabric.topology()


def dragonfly(
    *,
    num_groups: int = 3,
    num_routers: int = 2,
    num_ranks_per_router: int = 2,
    host: Bandwidth = "25 GB/s",
    local: Bandwidth = "25 GB/s",
    between: Bandwidth = "25 GB/s",
    latency: Latency = 0.0,
) -> Topology:
    """Groups of fully connected routers, and one cable between any two groups.

    A group's cables to the others are dealt to its routers in order, as evenly as their number allows.

    Args:
        num_groups: at least 1.
        num_routers: in each group.
        num_ranks_per_router: ranks on each router.
        host: from a rank to its router.
        local: between two routers of a group.
        between: between two groups.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    References:
        Kim, Dally, Scott, Abts: Technology-Driven, Highly-Scalable Dragonfly Topology, ISCA 2008, section 3.

    Examples:
        >>> dragonfly().num_ranks, len(dragonfly().links)
        (12, 36)
    """
    positive(num_groups, "dragonfly: num_groups")
    positive(num_routers, "dragonfly: num_routers")
    positive(num_ranks_per_router, "dragonfly: num_ranks_per_router")
    fabric = Assembly(f"dragonfly_{num_groups}x{num_routers}x{num_ranks_per_router}")
    routers: list[list[str]] = []
    for group in range(num_groups):
        routers.append([])
        for number in range(num_routers):
            router = fabric.switch(f"group{group}/router{number}")
            for other in routers[group]:
                fabric.connect(other, router, local, latency)
            routers[group].append(router)
            for slot in range(num_ranks_per_router):
                rank = fabric.rank(f"group{group}/{number * num_ranks_per_router + slot}")
                fabric.connect(rank, router, host, latency)
    for a in range(num_groups):
        for b in range(a + 1, num_groups):
            # b is a's (b-1)-th other group, a is b's a-th.
            ends = (
                routers[a][(b - 1) * num_routers // (num_groups - 1)],
                routers[b][a * num_routers // (num_groups - 1)],
            )
            fabric.connect(*ends, between, latency)
    return fabric.topology()
