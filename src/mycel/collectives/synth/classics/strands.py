"""Strands: the common form of the classics. A share of the data goes up one tree of ranks, and down another.

Ring, halving and doubling, trees, Bruck's algorithm: each sends every block along a tree of its own, and differs
from the others in the trees. So a method only says which trees; this module puts paths under their edges and
dependencies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mycel.collectives.ordering import in_level_order
from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import POINTED, Collective, check_ranks
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Edge", "Strand", "check_served", "direct_paths", "from_strands", "from_trees", "mirrored", "spread"]

#: A message between ranks, ``(src, dst)``.
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """One share of a block.

    Attributes:
        block: block of the collective's array; every block has equally many strands, each an equal part of it.
        up: edges (child, parent) by which it is reduced to one rank, each after those into its source.
        down: edges (parent, child) by which it is copied from there, each after that into its source.
    """

    block: int
    up: tuple[Edge, ...] = ()
    down: tuple[Edge, ...] = ()


def mirrored(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """A tree turned round: last edge first, each in the other direction."""
    return tuple((dst, src) for src, dst in reversed(edges))


def spread(owner: int, steps: Iterable[Callable[[int], Iterable[int]]]) -> tuple[Edge, ...]:
    """Who gets a block in each step, and from whom, where all who have it send to partners that have not.

    Args:
        owner: rank that has it at first.
        steps: of each, a rank's partners.

    Examples:
        >>> spread(1, [lambda rank: [rank ^ 2], lambda rank: [rank ^ 1]])
        ((1, 3), (1, 0), (3, 2))
    """
    holders, edges = [owner], []
    for partners in steps:
        for src in tuple(holders):
            for dst in partners(src):
                if dst not in holders:
                    holders.append(dst)
                    edges.append((src, dst))
    return tuple(edges)


def check_served(topology: Topology, collective: Collective, method: str, serves: Sequence[str]) -> None:
    """Refuse what a method is not for.

    Raises:
        UsageError: the collective is over another number of ranks than the fabric has.
        SynthesisError: the method does not serve the collective.
    """
    check_ranks(topology, collective)
    if collective.name not in serves:
        raise SynthesisError(f"{method} does not serve {collective.name}; it serves {', '.join(serves)}")


def direct_paths(topology: Topology, method: str, others: str) -> Callable[[int, int], tuple[int, ...]]:
    """Best paths between ranks that pass no other rank, by source and destination; ``SynthesisError`` for none.

    Args:
        topology: the fabric.
        method: that asks, for the message.
        others: methods that need no such paths, for the message.
    """
    routes = Routes(topology, relays=False)

    def path(src: int, dst: int) -> tuple[int, ...]:
        try:
            return routes.vertices(src, dst)
        except KeyError:
            raise SynthesisError(
                f"{method} on {topology.name}: rank {src} has no path to rank {dst} that passes no other rank; "
                f"{others} need none"
            ) from None

    return path


def from_trees(
    topology: Topology, collective: Collective, method: str, trees: Sequence[tuple[Edge, ...]]
) -> Schedule:
    """The schedule in which what each rank owns goes down its tree, after it was added up along the same tree.

    Args:
        topology: the fabric.
        collective: what to move; only up if it is a reduce_scatter, only down if nothing is added.
        method: name to put on it.
        trees: of each rank, edges (parent, child) from it to all others.

    Raises:
        SynthesisError: as for ``from_strands``.
    """
    strands = [
        Strand(
            block=owner if collective.num_blocks > 1 else 0,
            up=mirrored(down) if collective.reduces else (),
            down=() if collective.name == "reduce_scatter" else down,
        )
        for owner, down in enumerate(trees)
    ]
    return from_strands(topology, collective, method, strands)


def from_strands(topology: Topology, collective: Collective, method: str, strands: Sequence[Strand]) -> Schedule:
    """The schedule in which every strand goes its way.

    Args:
        topology: the fabric.
        collective: what to move.
        method: name to put on it.
        strands: sorted by block.

    Raises:
        SynthesisError: two ranks that should exchange messages have no path between them that passes no other rank.
    """
    n = collective.num_ranks
    path = direct_paths(topology, method, "flow and direct" if collective.name in POINTED else "forest and tree")
    weights = collective.block_weights
    strands = [strand for strand in strands if weights[strand.block]]
    ends = list(accumulate(weights[strand.block] for strand in strands))
    transfers: list[Transfer] = []
    for chunk, strand in enumerate(strands):
        into: dict[int, list[int]] = {}
        for reduce, edges in ((True, strand.up), (False, strand.down)):
            for src, dst in edges:
                number = len(transfers)
                transfers.append(
                    Transfer(
                        chunk=chunk,
                        src=src,
                        dst=dst,
                        reduce=reduce,
                        path=path(src, dst),
                        after=tuple(into.get(src, ())),
                    )
                )
                into[dst] = [*into.get(dst, ()), number] if reduce else [number]
    return Schedule(
        collective=collective,
        topology=topology,
        method=method,
        num_units=ends[-1],
        chunks=tuple(Chunk(start=start, stop=stop) for start, stop in pairwise([0, *ends])),
        transfers=in_level_order(transfers, lambda t: ((t.dst - t.src) % n, t.src)),
    )
