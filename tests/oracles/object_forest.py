"""Forests as objects: a tree is a tuple of edges, a schedule grows an edge at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm

from mycel.collectives.ordering import in_level_order
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.collectives.synth.array_forest import Forest
from mycel.topology.model import Topology

Edges = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTree:
    """A spanning out-tree; each edge, ``(src, dst, path)``, is one physical path; edges stand in order of growth."""

    root: int
    multiplicity: int
    edges: Edges

    def reversed(self) -> RoutedTree:
        """The in-tree: edges turned round, leaves first."""
        edges = tuple((dst, src, path[::-1]) for src, dst, path in reversed(self.edges))
        return RoutedTree(root=self.root, multiplicity=self.multiplicity, edges=edges)


def trees_of(forest: Forest) -> list[RoutedTree]:
    """A forest's trees, root by root."""
    place = forest.topology.rank_of
    trees = [
        RoutedTree(
            root=int(root),
            multiplicity=int(units),
            edges=tuple((place[path[0]], place[path[-1]], path) for path in (forest.arcs.paths[a] for a in row)),
        )
        for root, units, row in zip(forest.roots, forest.multiplicities, forest.trees, strict=True)
    ]
    return sorted(trees, key=lambda tree: tree.root)


def time_of(trees: Sequence[RoutedTree], forest: Forest) -> Fraction:
    """Walk every tree and add up every link: array parts over capacity of the slowest, in units of a weight of 1."""
    carried: dict[tuple[int, int], int] = {}
    shares = [0] * forest.topology.num_ranks
    for tree in trees:
        reached = {tree.root}
        for src, dst, path in tree.edges:
            assert src in reached and dst not in reached
            reached.add(dst)
            for a, b in pairwise(path):
                hop = (b, a) if forest.is_reversed else (a, b)
                carried[hop] = carried.get(hop, 0) + tree.multiplicity
        assert reached == set(range(forest.topology.num_ranks))
        shares[tree.root] += tree.multiplicity
    units = Fraction(sum(shares), sum(forest.weights))
    assert shares == [weight * units for weight in forest.weights]
    return max(Fraction(load, forest.topology.capacity[hop]) for hop, load in carried.items()) / units


def emit(
    topology: Topology,
    collective: Collective,
    weights: Sequence[int],
    up: list[RoutedTree] | None,
    down: list[RoutedTree] | None,
) -> Schedule:
    """The schedule that adds up along ``up`` and copies along ``down``."""
    pieces = _pieces(weights, up, down)
    divisor = gcd(*(stop - start for start, stop, _, _ in pieces))
    transfers: list[Transfer] = []
    for chunk, (_, _, adding, copying) in enumerate(pieces):
        into: dict[int, list[int]] = {}
        for src, dst, path in adding:
            after = tuple(into.get(src, ()))
            into.setdefault(dst, []).append(len(transfers))
            transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=True, path=path, after=after))
        for src, dst, path in copying:
            after = tuple(into.get(src, ()))
            into[dst] = [len(transfers)]
            transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=False, path=path, after=after))
    return Schedule(
        collective=collective,
        topology=topology,
        method="forest",
        num_units=pieces[-1][1] // divisor,
        chunks=tuple(Chunk(start=start // divisor, stop=stop // divisor) for start, stop, _, _ in pieces),
        transfers=in_level_order(transfers, lambda t: (t.chunk,)),
    )


def _pieces(
    weights: Sequence[int], up: list[RoutedTree] | None, down: list[RoutedTree] | None
) -> list[tuple[int, int, Edges, Edges]]:
    forests = [forest for forest in (up, down) if forest is not None]
    unit = [sum(tree.multiplicity for tree in forest) // sum(weights) for forest in forests]
    common = lcm(*unit)
    pieces: list[tuple[int, int, Edges, Edges]] = []
    start = 0
    for root in range(len(weights)):
        runs = []
        for forest, trees_a_share in zip(forests, unit, strict=True):
            reached, run = 0, []
            for tree in forest:
                if tree.root == root:
                    reached += tree.multiplicity * (common // trees_a_share)
                    run.append((reached, tree.edges))
            runs.append(run)
        cuts = sorted({0, *(stop for run in runs for stop, _ in run)})
        for low, high in pairwise(cuts):
            edges = iter([next(e for stop, e in run if stop > low) for run in runs])
            adding, copying = (() if trees is None else next(edges) for trees in (up, down))
            if pieces and low > 0 and pieces[-1][2:] == (adding, copying):
                pieces[-1] = (pieces[-1][0], start + high, adding, copying)
            else:
                pieces.append((start + low, start + high, adding, copying))
        start += cuts[-1]
    return pieces
