"""Which ranks of a described cluster the ranks of a job are, where the job runs on a part of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["chosen_places", "places_by_host"]


def chosen_places(topology: Topology, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """The places that a person chose with ``MYCEL_RANKS``.

    Args:
        topology: of the cluster.
        ranks: of the topology, in the order of the job's ranks.
        world_size: ranks of the job.

    Raises:
        UsageError: they are not as many as the job has, or the topology has no such rank.
    """
    if len(ranks) != world_size:
        raise UsageError(f"MYCEL_RANKS names {len(ranks)} ranks of the topology, but the world size is {world_size}")
    if max(ranks) >= topology.num_ranks:
        raise UsageError(
            f"MYCEL_RANKS: no rank {max(ranks)}, {topology.name} has ranks 0 to {topology.num_ranks - 1}"
        )
    return tuple(ranks)


def places_by_host(topology: Topology, hosts: Sequence[str]) -> tuple[int, ...]:
    """Each rank on the node that is called as its host is, in the order in which the file names the node's ranks.

    Where no host of the job is a node of the file (containers have names of their own), nodes are taken in the order
    of the file, and that is warned of.

    Args:
        topology: of the cluster; more ranks than the job has.
        hosts: what the host of each rank calls itself, by rank.

    Returns:
        The topology's rank of each rank of the job.

    Raises:
        UsageError: some hosts are nodes and some are not, two would be one node, or a node has too few ranks.
    """
    nodes = _ranks_by_node(topology)
    names = list(dict.fromkeys(hosts))
    found = {name: node for name in names if (node := _node_of(name, nodes)) is not None}
    if not found:
        return _in_order(topology, nodes, hosts)
    if len(found) < len(names):
        strange = next(name for name in names if name not in found)
        raise UsageError(
            f"host {strange} is no node of {topology.name}, whose nodes are {_listed(nodes)}, though {names[0]} "
            "and others may be: name it there, or say with MYCEL_RANKS which ranks of it the job has"
        )
    if len(set(found.values())) < len(found):
        raise UsageError(
            f"hosts {', '.join(found)} would be one node of {topology.name}: say with MYCEL_RANKS which ranks of it "
            "the job has"
        )
    taken: dict[str, int] = {}
    places = []
    for name in hosts:
        node = found[name]
        index = taken[node] = taken.get(node, -1) + 1
        if index >= len(nodes[node]):
            raise UsageError(
                f"{hosts.count(name)} ranks are on {name}, but node {node} of {topology.name} has "
                f"{len(nodes[node])}: "
                "start as many there, or say with MYCEL_RANKS which ranks of the topology the job has"
            )
        places.append(nodes[node][index])
    return tuple(places)


def _ranks_by_node(topology: Topology) -> dict[str, list[int]]:
    """Ranks by the name of their node, in the order of the file; those without one are one node's."""
    nodes: dict[str, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        nodes.setdefault(topology.vertices[vertex].node or "", []).append(rank)
    return nodes


def _node_of(host: str, nodes: dict[str, list[int]]) -> str | None:
    """The node of a host by its full name, or by what stands before the first dot where only one begins so."""
    for form in (str.lower, lambda name: name.lower().partition(".")[0]):
        alike = [node for node in nodes if node and form(node) == form(host)]
        if len(alike) == 1:
            return alike[0]
    return None


def _in_order(topology: Topology, nodes: dict[str, list[int]], hosts: Sequence[str]) -> tuple[int, ...]:
    """Nodes in the order of the file for hosts in the order of their ranks; without room, ranks in that order."""
    free, found = {node: list(ranks) for node, ranks in nodes.items()}, {}
    for name in dict.fromkeys(hosts):
        node = next((node for node, ranks in free.items() if len(ranks) >= hosts.count(name)), None)
        if node is None:
            break
        found[name] = free.pop(node)
    is_complete = len(found) == len(set(hosts))
    places = tuple(found[name].pop(0) for name in hosts) if is_complete else tuple(range(len(hosts)))
    first = topology.label(topology.ranks[places[0]])
    warnings.warn(
        f"{topology.name} describes {topology.num_ranks} ranks and this job has {len(hosts)}; no host of the job is "
        f"a node of it, so {'nodes' if is_complete else 'ranks'} are taken in its order, rank 0 as {first}. Say with "
        f"MYCEL_RANKS (as 0-{len(hosts) - 1}) which ranks of the topology they are",
        RuntimeWarning,
        stacklevel=2,
    )
    return places


def _listed(nodes: dict[str, list[int]]) -> str:
    names = [node or "(no node named)" for node in nodes]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
