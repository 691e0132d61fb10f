"""Small clusters behind switches: star, two nodes, one machine, machines by name."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.errors import TopologyError
from mycel.topology.builders.assembly import Assembly, Bandwidth, Latency, positive
from mycel.topology.model import LOCALHOST, Topology

__all__ = ["hosts", "loopback", "star", "two_boxes"]


def star(
    *, num_ranks: int = 8, bandwidth: Bandwidth = "400 Mbit/s", latency: Latency = 0.0, computes: bool = False
) -> Topology:
    """Ranks round one switch.

    Args:
        num_ranks: at least 2.
        bandwidth: of each rank's cable, each way.
        latency: of each cable, in seconds or as text.
        computes: the switch can copy and add (SHARP).

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> star(num_ranks=4).unit, star(num_ranks=4).links[0].capacity
        ('Mbit/s', 400)
    """
    fabric = Assembly(f"star_{positive(num_ranks, 'star: num_ranks', 2)}")
    switch = fabric.switch("switch", computes=computes)
    for number in range(num_ranks):
        fabric.connect(fabric.rank(str(number)), switch, bandwidth, latency)
    return fabric.topology()


def two_boxes(
    *,
    num_ranks: int = 8,
    inside: Bandwidth = "400 Mbit/s",
    between: Bandwidth = "50 Mbit/s",
    latency: Latency = 0.0,
    between_latency: Latency | None = None,
    shared_uplink: bool = False,
) -> Topology:
    """Two machines: every rank on its node's switch, and a slower way between the nodes.

    Args:
        num_ranks: in both nodes together; the left one gets the odd rank.
        inside: of each rank's cable to its node's switch.
        between: of each rank's own cable to the switch between the nodes, or, with ``shared_uplink``, of each
            node's only one.
        latency: of the cables inside, in seconds or as text.
        between_latency: of the cables between; ``None``: as inside.
        shared_uplink: each node has one cable to the switch between the nodes instead of one a rank.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> two_boxes().num_ranks, len(two_boxes().links), len(two_boxes(shared_uplink=True).links)
        (8, 32, 20)
    """
    count = positive(num_ranks, "two_boxes: num_ranks", 2)
    slow = latency if between_latency is None else between_latency
    fabric = Assembly("shared_uplink" if shared_uplink else "two_boxes")
    uplinks: list[str] = []
    for node, size in (("left", count - count // 2), ("right", count // 2)):
        ranks = [fabric.rank(f"{node}/{number}", node) for number in range(size)]
        switch = fabric.switch(f"{node}/switch", node)
        for rank in ranks:
            fabric.connect(rank, switch, inside, latency)
        uplinks += [switch] if shared_uplink else ranks
    core = fabric.switch("core")
    for end in uplinks:
        fabric.connect(end, core, between, slow)
    return fabric.topology()


def loopback(*, num_ranks: int, bandwidth: Bandwidth = "5 GB/s", latency: Latency = "20us") -> Topology:
    """Processes of one machine: a star whose cables are as fast as memory copies through the kernel are.

    The defaults are of the order of what sockets on one current machine do; only their ratio to the other links of
    a larger fabric matters for a plan.

    Args:
        num_ranks: at least 2.
        bandwidth: of each process, each way.
        latency: of half a message's way, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> loopback(num_ranks=2).unit
        'GB/s'
    """
    fabric = Assembly(f"loopback_{positive(num_ranks, 'loopback: num_ranks', 2)}")
    switch = fabric.switch("switch", LOCALHOST)
    for number in range(num_ranks):
        fabric.connect(fabric.rank(str(number), LOCALHOST), switch, bandwidth, latency)
    return fabric.topology()


def hosts(
    names: Sequence[str],
    *,
    inside: Bandwidth = "5 GB/s",
    between: Bandwidth = "1 GB/s",
    latency: Latency = "20us",
    between_latency: Latency = "50us",
) -> Topology:
    """What may be assumed of a cluster of which nothing is known but where each rank runs.

    Ranks of one host meet at a fast switch; every host has one slower cable to a switch between the hosts. On one
    host it is ``loopback``.

    Args:
        names: host of each rank, in rank order; ranks of a host need not stand together.
        inside: of each rank's cable to its host's switch.
        between: of each host's cable to the others.
        latency: of the cables inside, in seconds or as text.
        between_latency: of the cables between.

    Raises:
        TopologyError: fewer than two ranks, an empty name, or an argument that makes no sense.

    Examples:
        >>> [v.label for v in hosts(["a", "b", "a"]).vertices]
        ['a/0', 'b/0', 'a/1', 'a/switch', 'network']
    """
    if len(names) < 2 or isinstance(names, str):
        raise TopologyError(f"hosts: names must be a list of at least 2 hosts, one a rank; got {names!r}")
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise TopologyError(f"hosts: rank {position}: {name!r} is not a host's name")
    if len(set(names)) == 1:
        return loopback(num_ranks=len(names), bandwidth=inside, latency=latency)
    fabric = Assembly(f"hosts_{len(set(names))}")
    members: dict[str, list[str]] = {}
    for name in names:
        of_host = members.setdefault(name, [])
        of_host.append(fabric.rank(f"{name}/{len(of_host)}", name))
    uplinks: list[str] = []
    for name, ranks in members.items():
        if len(ranks) == 1:
            uplinks += ranks
            continue
        switch = fabric.switch(f"{name}/switch", name)
        for rank in ranks:
            fabric.connect(rank, switch, inside, latency)
        uplinks.append(switch)
    network = fabric.switch("network")
    for uplink in uplinks:
        fabric.connect(uplink, network, between, between_latency)
    return fabric.topology()
