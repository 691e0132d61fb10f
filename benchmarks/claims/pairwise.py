"""All-gather forests as the ForestColl paper describes them, over networkx: what our synthesis is timed against.

Binary search for the optimum with one max-flow a rank, edge splitting pair by pair with two max-flows a rank, and
packing of trees with one max-flow an edge. Written from the description, without any of our shortcuts (one cut for
all ranks, whole switches at once, trees grown whole, symmetry), and none of the authors' code.

References:
    L. Zhao, S. Maleki, Z. Yang, H. Pourreza, A. Krishnamurthy, "ForestColl: Throughput-Optimal Collective
    Communications on Heterogeneous Network Fabrics", arXiv 2402.06787, section 5. K. Bérczi, A. Frank, "Packing
    arborescences", in: S. Iwata (ed.), RIMS Kokyuroku Bessatsu B23, 2010.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

import networkx as nx

from mycel.topology.model import Topology

Capacities = dict[tuple[int, int], int]
Tree = tuple[int, int, Capacities]


class OutOfTimeError(Exception):
    """The baseline did not finish in the time it was given."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the baseline found, and the processor seconds of its stages."""

    inverse_x: Fraction
    num_trees: int
    search_s: float
    switches_s: float
    packing_s: float


def max_flow(arcs: Iterable[tuple[Hashable, Hashable, float]], source: Hashable, sink: Hashable) -> float:
    graph = nx.DiGraph()
    graph.add_nodes_from((source, sink))
    for tail, head, capacity in arcs:
        if tail != head:
            found = graph.get_edge_data(tail, head)
            graph.add_edge(tail, head, capacity=capacity + (found["capacity"] if found else 0))
    return float(nx.maximum_flow_value(graph, source, sink))


def search(capacity: Capacities, ranks: tuple[int, ...]) -> Fraction:
    """1/x*, by halving an interval until one fraction of a possible denominator is left in it."""
    n = len(ranks)
    enters = [sum(c for (_, head), c in capacity.items() if head == rank) for rank in ranks]
    low, high = Fraction(n - 1, min(enters)), Fraction(n - 1)
    largest = min(enters)  # no cut that binds has more capacity than the tightest rank's

    def enough(inverse_x: Fraction) -> bool:
        p, q = inverse_x.numerator, inverse_x.denominator
        arcs = [(tail, head, p * c) for (tail, head), c in capacity.items()] + [("s", rank, q) for rank in ranks]
        return all(max_flow(arcs, "s", rank) >= n * q for rank in ranks)

    if enough(low):
        return low
    while high - low >= Fraction(1, largest**2):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return ((low + high) / 2).limit_denominator(largest)


def split_switches(capacity: Capacities, topology: Topology, k: int, alive: Callable[[], None]) -> Capacities:
    """Links between ranks only: every pair of arcs through a switch is replaced as far as no cut gets too small."""
    ranks, need = topology.ranks, topology.num_ranks * k
    arcs = dict(capacity)
    for switch in topology.switches:
        for out in [head for tail, head in list(arcs) if tail == switch]:
            for into in [tail for tail, head in list(arcs) if head == switch]:
                most = min(arcs.get((into, switch), 0), arcs.get((switch, out), 0))
                for rank in ranks:
                    alive()
                    if most == 0:
                        break
                    base = [(a, b, c) for (a, b), c in arcs.items()] + [("s", r, k) for r in ranks]
                    # Cuts that lose both arcs: with s, into and out on one side, and those with s and the switch.
                    for near, far in (({"s", into, out}, {switch, rank}), ({"s", switch}, {into, out, rank})):
                        if near & far:
                            continue
                        name = {**dict.fromkeys(near, "near"), **dict.fromkeys(far, "far")}
                        merged = [(name.get(a, a), name.get(b, b), c) for a, b, c in base]
                        most = min(most, int(max_flow(merged, "near", "far")) - need)
                if most > 0:
                    arcs[into, switch] -= most
                    arcs[switch, out] -= most
                    if into != out:
                        arcs[into, out] = arcs.get((into, out), 0) + most
                arcs = {arc: c for arc, c in arcs.items() if c > 0}
    if any(switch in arc for arc in arcs for switch in topology.switches):
        raise ValueError(f"{topology.name}: a switch could not be split off")
    return arcs


def pack(arcs: Capacities, ranks: tuple[int, ...], k: int, alive: Callable[[], None]) -> list[Tree]:
    """Root, multiplicity and edges of every tree."""
    left = dict(arcs)
    growing: list[tuple[int, int, frozenset[int], tuple[tuple[int, int], ...]]] = [
        (rank, k, frozenset({rank}), ()) for rank in ranks
    ]
    done = []
    while growing:
        root, count, reached, edges = growing.pop(0)
        if len(reached) == len(ranks):
            done.append((root, count, dict.fromkeys(edges, count)))
            continue
        for tail, head in sorted(left):
            if left[tail, head] == 0 or tail not in reached or head in reached:
                continue
            alive()
            others = [(i, m, members) for i, (_, m, members, _) in enumerate(growing) if len(members) < len(ranks)]
            flow = [(a, b, c) for (a, b), c in left.items() if c > 0]
            flow += [(tail, f"s{i}", m) for i, m, _ in others]
            flow += [(f"s{i}", member, m) for i, m, members in others for member in members]
            room = int(max_flow(flow, tail, head)) - sum(m for _, m, _ in others)
            taken = min(count, left[tail, head], room)
            if taken > 0:
                break
        else:
            raise ValueError("no arc can be added to a tree")
        left[tail, head] -= taken
        if taken < count:
            growing.insert(0, (root, count - taken, reached, edges))
        growing.insert(0, (root, taken, reached | {head}, (*edges, (tail, head))))
    return done


def grow(topology: Topology, limit_s: float) -> Result:
    """A forest for all_gather that meets the optimum.

    Raises:
        OutOfTimeError: it takes more than ``limit_s`` processor seconds.
    """
    begin = time.process_time()

    def alive() -> None:
        if time.process_time() - begin > limit_s:
            raise OutOfTimeError

    best = search(dict(topology.capacity), topology.ranks)
    searched = time.process_time()
    divisor = gcd(best.denominator, *topology.capacity.values())
    scale, k = Fraction(best.numerator, divisor), best.denominator // divisor
    capacity = {arc: int(c * scale) for arc, c in topology.capacity.items()}
    arcs = split_switches(capacity, topology, k, alive)
    split = time.process_time()
    trees = pack(arcs, topology.ranks, k, alive)
    packed = time.process_time()
    used: Capacities = {}
    for _, _, edges in trees:
        for arc, count in edges.items():
            used[arc] = used.get(arc, 0) + count
    counts = {rank: sum(count for root, count, _ in trees if root == rank) for rank in topology.ranks}
    if set(counts.values()) != {k} or any(used[arc] > arcs.get(arc, 0) for arc in used):
        raise ValueError(f"{topology.name}: the packed trees are not what they should be")
    return Result(best, len(trees), searched - begin, split - searched, packed - split)
