"""Exchanges: the common form of methods in which partners add each other's sums at the same time.

In a round every rank sends what it holds, to as many partners as the method has, and adds what they send: it forms a
sum apart from the one that it is sending (``Transfer.places``). After the last round every rank holds everything,
where chains of transfers up a tree and down again take twice as many. All of the data goes along in every round.

Whether ranks then hold the same bits is another question: floating-point addition commutes, so both partners round
alike, but it does not associate. Where all ranks whose sums meet hold one sum already (recursive doubling), they do;
where a rank's partners hold other parts than its neighbour's (Swing, Trivance), they may differ in the last bits.
``mycel.collectives.verify.agreement`` says which of the two a schedule does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.collectives.synth.classics.strands import Edge, direct_paths
from mycel.topology.model import Topology

__all__ = ["Exchange", "from_exchanges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What happens to one share of the array.

    Attributes:
        rounds: edges of each round, all of which carry what their source held before it.
        first: edges along which ranks that stand back hand over their part before.
        last: edges along which they get the result.
    """

    rounds: Sequence[Sequence[Edge]]
    first: Sequence[Edge] = ()
    last: Sequence[Edge] = ()


def from_exchanges(
    topology: Topology, collective: Collective, method: str, exchanges: Sequence[Exchange]
) -> Schedule:
    """The all_reduce in which every share, of equal length, is exchanged in its own way.

    Args:
        topology: the fabric.
        collective: an all_reduce.
        method: name to put on it.
        exchanges: one a share.

    Raises:
        SynthesisError: two partners have no path between them that passes no other rank.
    """
    path, n = direct_paths(topology, method, "forest and tree"), collective.num_ranks
    shares = range(len(exchanges))
    place = [[0] * n for _ in shares]  # of each share, that each rank holds
    into: list[list[tuple[int, ...]]] = [[()] * n for _ in shares]  # what made it
    transfers: list[Transfer] = []
    steps = [
        (share, step, kind)
        for share, exchange in enumerate(exchanges)
        for step, kind in enumerate(("first", *("round",) * len(exchange.rounds), "last"))
    ]
    # Round by round, whatever the ranks wait for: each rank's sums are formed in the order of the transfers.
    for share, step, kind in sorted(steps, key=lambda s: (s[1], s[0])):
        exchange, made = exchanges[share], dict[int, tuple[int, ...]]()
        edges = exchange.rounds[step - 1] if kind == "round" else exchange.first if kind == "first" else exchange.last
        for src, dst in sorted(edges, key=lambda e: ((e[1] - e[0]) % n, e[0])):
            made[dst] = (*made.get(dst, ()), len(transfers))
            transfers.append(
                Transfer(
                    chunk=share,
                    src=src,
                    dst=dst,
                    reduce=kind != "last",
                    path=path(src, dst),
                    after=into[share][src],
                    places=(place[share][src], place[share][dst] + 1 if kind == "round" else 0),
                )
            )
        for dst, numbers in made.items():
            place[share][dst] += kind == "round"
            into[share][dst] = numbers
    return Schedule(
        collective=collective,
        topology=topology,
        method=method,
        num_units=len(exchanges),
        chunks=tuple(Chunk(start=share, stop=share + 1) for share in range(len(exchanges))),
        transfers=tuple(transfers),
    )
