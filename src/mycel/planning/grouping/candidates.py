"""Which groups of a topology's ranks may share sequences, and what they exchange for a token: by the wires between
them.

A group that shares a sequence exchanges rows of its tokens four times in a layer and pass (Ulysses: queries, keys,
values there, results back), each an ``all_to_all``; it takes what our bound of that collective on exactly these
ranks says. Ranks of a node are a group before those of several are: by default runs of ranks whose number divides
that of all, aligned, so that groups of one size are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mycel.collectives.bound import bound
from mycel.cost import bytes_per_second
from mycel.errors import UsageError
from mycel.planning.grouping.instance import Candidate
from mycel.topology.model import Topology

__all__ = ["aligned_groups", "candidates_of"]


def aligned_groups(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Runs of ranks of every size that divides their number, from multiples of it on.

    Args:
        num_ranks: of the job.

    Examples:
        >>> aligned_groups(4)
        ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3))
    """
    if num_ranks < 1:
        raise UsageError(f"{num_ranks} ranks: at least 1")
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return tuple(
        tuple(range(first, first + size)) for size in sizes for first in range(0, num_ranks - size + 1, size)
    )


def candidates_of(
    topology: Topology, bytes_per_token: float, groups: Iterable[Sequence[int]] | None = None
) -> tuple[Candidate, ...]:
    """Candidates with what they exchange, for ``SequenceInstance``.

    Args:
        topology: the fabric, with rates. bytes_per_token: of a sequence, of all layers and passes together: what a
        step exchanges by ``all_to_all``, four
            times ``2 * width * bytes a number * layers`` where backward exchanges as much as forward.
        groups: ranks of each; ``aligned_groups`` if not given.

    Returns:
        Candidates, with microseconds a token.

    Raises:
        UsageError: the topology has relative capacities, or a group has ranks that it has not.

    Examples:
        >>> from mycel.topology import load_topology
        >>> boxes = load_topology("dgx_a100:nodes=2")
        >>> whole, box = candidates_of(boxes, 1e6, [range(16), range(8)])
        >>> whole.comm_us_per_token > 3 * box.comm_us_per_token
        True
    """
    if topology.unit == "link":
        raise UsageError(
            f"{topology.name} has relative capacities: give it bandwidths such as '25 GB/s' to plan by them"
        )
    if not bytes_per_token >= 0:
        raise UsageError(f"{bytes_per_token} bytes a token: at least 0")
    chosen = aligned_groups(topology.num_ranks) if groups is None else tuple(tuple(group) for group in groups)
    found: list[Candidate] = []
    known: dict[object, float] = {}
    for ranks in chosen:
        unknown = [rank for rank in ranks if not 0 <= rank < topology.num_ranks]
        if unknown or not ranks or len(set(ranks)) != len(ranks):
            raise UsageError(
                f"group {list(ranks)}: {topology.name} has ranks 0 to {topology.num_ranks - 1}, each once in a group"
            )
        cost = 0.0
        if len(ranks) > 1:
            part = topology.subset(ranks)
            # The name and the numbers in the file differ between parts that are wired alike.
            key = (part.unit, part.num_ranks, tuple((v.kind) for v in part.vertices), _wires(part))
            if key not in known:
                rate = float(bound(part, "all_to_all").algbw) * bytes_per_second(part)
                known[key] = 1e6 / rate
            # The array of an all_to_all is what a rank holds: of each token its part of the group.
            cost = bytes_per_token / len(ranks) * known[key]
        found.append(Candidate(size=len(ranks), comm_us_per_token=cost, ranks=ranks))
    return tuple(found)


def _wires(part: Topology) -> tuple[tuple[int, int, int], ...]:
    place = {vertex: index for index, vertex in enumerate(range(len(part.vertices)))}
    return tuple(sorted((place[link.src], place[link.dst], link.capacity) for link in part.links))
