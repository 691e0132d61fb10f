"""Sparse cuts of a fabric: parts that much has to leave over few links, found along the slowest vibrations.

Vertices stand along a line, in the order of an eigenvector of the fabric's Laplacian, or of a mixture of two: what
widely joined vertices hold differs little there. Each place on that line parts those before it from those behind; of
all places on all lines the one is taken at which the links would take longest. A torus is cut so across its longest
side, at every angle, whichever cables have failed.

What comes out is a cut, whose proof is what has to cross it over what its links carry; eigenvectors only say where to
look. Where more than two eigenvalues are one, the fabric has no directions of its own, and nothing is looked for:
another order of its vertices would find another cut.

References:
    M. Fiedler, "Algebraic connectivity of graphs", Czechoslovak Mathematical Journal 23(2), 1973. A. Pothen, H. D.
    Simon, K.-P. Liou, "Partitioning sparse matrices with eigenvectors of graphs", SIAM Journal on Matrix Analysis and
    Applications 11(3), 1990.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray

__all__ = ["sparsest_cut"]

Floats = npt.NDArray[np.float64]

#: Eigenvectors that are looked along, and mixtures of each two of them.
_VECTORS, _ANGLES = 4, 16
#: Vertices up to which all eigenvectors are found at once.
_MOST_DENSE = 500
#: Parts of the larger eigenvalue by which two differ, else they count as one.
_APART = 1e-6


def sparsest_cut(graph: FlowGraph, capacity: IntArray, starts: IntArray, demands: IntArray) -> BoolArray | None:
    """The links that leave a set of vertices, or enter it, which what has to cross keeps busy longest.

    Args:
        graph: the fabric.
        capacity: of each link.
        starts: vertices from which flows start, shape ``[sources]``.
        demands: units from each to each rank, shape ``[sources, ranks]``.

    Returns:
        Of each link, whether it crosses the cut found; ``None`` where none was looked for.
    """
    pairs: _Alike | _Pairs
    if len(starts) == len(graph.ranks) and (demands[~np.eye(len(starts), dtype=np.bool_)] == demands[0, -1]).all():
        pairs = _Alike(graph.ranks, int(demands[0, -1]))
    else:
        row, column = np.nonzero(demands)
        pairs = _Pairs(starts[row], graph.ranks[column], demands[row, column], graph.num_vertices)
    links = _Pairs(graph.tail, graph.head, capacity, graph.num_vertices)
    best: tuple[float, BoolArray] | None = None
    for line in _lines(graph, capacity):
        place = np.empty(graph.num_vertices, dtype=np.int64)
        place[np.argsort(line, kind="stable")] = np.arange(graph.num_vertices)
        for across, width, is_out in zip(pairs.over(place), links.over(place), (True, False), strict=True):
            times = np.divide(across, width, out=np.zeros(len(width)), where=width > 0)
            worst = int(np.argmax(times))
            if best is None or times[worst] > best[0] * (1 + _APART):
                before, behind = (graph.tail, graph.head) if is_out else (graph.head, graph.tail)
                best = float(times[worst]), (place[before] <= worst) & (place[behind] > worst)
    return None if best is None else best[1]


class _Alike:
    """The same amount from every rank to every other."""

    def __init__(self, ranks: IntArray, amount: int) -> None:
        self.ranks, self.amount = ranks, amount

    def over(self, place: IntArray) -> tuple[Floats, Floats]:
        """As ``_Pairs.over``."""
        before = np.cumsum(np.bincount(place[self.ranks], minlength=len(place)))[:-1]
        across = (before * (len(self.ranks) - before) * self.amount).astype(np.float64)
        return across, across


class _Pairs:
    """Amounts from vertex to vertex."""

    def __init__(self, tail: IntArray, head: IntArray, amount: IntArray, count: int) -> None:
        self.tail, self.head, self.amount, self.count = tail, head, amount.astype(np.float64), count

    def over(self, place: IntArray) -> tuple[Floats, Floats]:
        """What goes over each place of a line forwards, and backwards, shape ``[vertices - 1]``."""
        tail, head = place[self.tail], place[self.head]
        found: list[Floats] = []
        for start, stop in ((tail, head), (head, tail)):
            is_so = start < stop
            steps: Floats = np.bincount(start[is_so], self.amount[is_so], minlength=self.count).astype(np.float64)
            steps -= np.bincount(stop[is_so], self.amount[is_so], minlength=self.count)
            found.append(np.cumsum(steps)[:-1])
        return found[0], found[1]


def _lines(graph: FlowGraph, capacity: IntArray) -> Iterator[Floats]:
    """Numbers of vertices, along which they stand."""
    vectors = _slowest(graph, capacity)
    yield from vectors
    for one, other in combinations(vectors, 2):
        for step in range(1, _ANGLES):
            angle = np.pi * step / _ANGLES
            yield np.cos(angle) * one + np.sin(angle) * other


def _slowest(graph: FlowGraph, capacity: IntArray) -> list[Floats]:
    """Eigenvectors of the Laplacian's smallest eigenvalues, zero and those of which there are many excepted."""
    values, vectors = _eigen(graph, capacity / capacity.max())
    groups: list[list[int]] = []
    for number in range(1, len(values)):
        if groups and values[number] - values[groups[-1][-1]] <= _APART * values[number]:
            groups[-1].append(number)
        else:
            groups.append([number])
    if len(values) < graph.num_vertices:
        groups.pop()  # which may go on behind those that were found
    kept = [number for group in groups if len(group) <= 2 for number in group]
    return [vectors[:, number] for number in kept[:_VECTORS]]


def _eigen(graph: FlowGraph, width: Floats) -> tuple[Floats, Floats]:
    """The smallest eigenvalues, in rising order, and their vectors, one a column."""
    from scipy.sparse import coo_array, diags_array
    from scipy.sparse.linalg import eigsh

    count = graph.num_vertices
    joined = coo_array((width / 2, (graph.tail, graph.head)), shape=(count, count)).tocsr()
    joined = joined + joined.T
    laplacian = diags_array(joined.sum(axis=1)) - joined
    if count <= _MOST_DENSE:
        values, vectors = np.linalg.eigh(laplacian.toarray())
        return values[: _VECTORS + 2], vectors[:, : _VECTORS + 2]
    # Nearest to a number below zero, where the matrix can be inverted.
    below = -1e-3 * float(laplacian.diagonal().mean())
    start = np.random.default_rng(0).standard_normal(count)
    values, vectors = eigsh(laplacian.tocsc(), k=_VECTORS + 2, sigma=below, which="LM", v0=start)
    order = np.argsort(values)
    return values[order], vectors[:, order]
