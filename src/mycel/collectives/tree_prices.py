"""What prices of links prove about all_reduce: its oracle, which knows neither linear programmes nor symmetries.

Give every link a price per unit. Each part of an array that is added up along an in-tree and copied along an out-tree
of the same root pays at least for the cheapest such pair, where from rank to rank the cheapest way is taken. No link
can be paid for more than its capacity. So any prices at all prove

    rate <= (sum of capacity * price) / (least over roots of: cheapest out-tree + cheapest in-tree)

and the best ones, which the dual of the linear programme gives (``mycel.collectives.allreduce_bound``), prove the
optimum. How the prices were found does not matter: classes of links that look alike but are not may cost tightness,
and never truth.

Cheapest trees for all roots come from one run of Edmonds' algorithm. In rounds, every set (single ranks at first)
pays for its cheapest link in, the prices of all links into it fall by that, and sets that free links now join in
circles become one. A root's cheapest tree costs what all sets without it have paid: there is a tree of free links
that enters each of them once.

References:
    J. Edmonds, "Optimum branchings", Journal of Research of the National Bureau of Standards 71B, 1967. Y. J. Chu,
    T. H. Liu, "On the shortest arborescence of a directed graph", Scientia Sinica 14, 1965.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import IntArray
from mycel.topology.model import Topology

__all__ = ["cheapest_trees", "rate_at_prices"]

Floats = npt.NDArray[np.float64]

#: Ways that cost less than this are worked out exactly in floating point, with a part for links that cost nothing.
_EXACT = 1 << 40
#: What such a link counts for: so little that as many as a way can have make no unit, and a power of two.
_FREE = 2.0**-12


def rate_at_prices(topology: Topology, prices: Sequence[int]) -> Fraction | None:
    """The rate of all_reduce (``algbw``) that prices prove to be the most, exactly.

    Args:
        topology: the fabric; its switches are taken to forward only.
        prices: of each link, non-negative whole numbers.

    Returns:
        The rate, or ``None`` if these prices prove nothing: trees that cost nothing, or more than can be counted.

    Examples:
        >>> from mycel.topology.builders import star
        >>> star_of_4 = star(num_ranks=4, bandwidth="3 GB/s")
        >>> rate_at_prices(star_of_4, [1] * 8)  # 24 GB/s in all; three ways in and three out over two links each
        Fraction(2, 1)
    """
    worth = sum(price * link.capacity for price, link in zip(prices, topology.links, strict=True))
    if not 0 < max(prices) * len(topology.vertices) < _EXACT:
        return None
    distance = _ways(topology, prices)
    least = int((cheapest_trees(distance) + cheapest_trees(distance.T)).min())
    return Fraction(worth, least) if least else None


def _ways(topology: Topology, prices: Sequence[int]) -> Floats:
    """The cheapest way between each two ranks that are not joined free of charge; shape ``[places, places]``."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components, dijkstra

    count = len(topology.vertices)
    tail, head = (np.array([getattr(link, end) for link in topology.links]) for end in ("src", "dst"))
    price = np.array(prices, dtype=np.float64)
    free = price == 0
    joined = csr_array((np.ones(free.sum()), (tail[free], head[free])), shape=(count, count))
    places, place = connected_components(joined, connection="strong")
    # The cheapest link from place to place. Those that cost nothing must not look as if there were none.
    pairs = place[tail].astype(np.int64) * places + place[head]
    order = np.lexsort((price, pairs))
    first = order[np.unique(pairs[order], return_index=True)[1]]
    first = first[place[tail[first]] != place[head[first]]]
    unit = min(_FREE, 2.0 ** -int(places).bit_length())
    between = csr_array(
        (np.where(price[first] > 0, price[first], unit), (place[tail[first]], place[head[first]])),
        shape=(places, places),
    )
    with_ranks = np.unique(place[list(topology.ranks)])
    return np.asarray(np.floor(dijkstra(between, indices=with_ranks)[:, with_ranks]), dtype=np.float64)


def cheapest_trees(distance: Floats) -> IntArray:
    """Of each vertex, what the cheapest tree from it to all others costs.

    Args:
        distance: from each vertex to each, whole numbers; shape ``[vertices, vertices]``.

    Returns:
        Costs by root, shape ``[vertices]``.

    Examples:
        >>> cheapest_trees(np.array([[0.0, 1.0, 5.0], [2.0, 0.0, 1.0], [9.0, 9.0, 0.0]]))
        array([ 2,  3, 10])
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    left = distance.copy()
    member = np.arange(len(left))
    paid_by_own, paid = np.zeros(len(left), dtype=np.int64), 0
    while len(left) > 1:
        np.fill_diagonal(left, np.inf)
        least = left.min(axis=0)
        left -= least
        paid += int(least.sum())
        paid_by_own += least.astype(np.int64)[member]
        count, joins = connected_components(csr_array(left == 0), connection="strong")
        order = np.argsort(joins, kind="stable")
        begin = np.searchsorted(joins[order], np.arange(count))
        left = np.minimum.reduceat(np.minimum.reduceat(left[order], begin, axis=0)[:, order], begin, axis=1)
        member = joins[member]
    return paid - paid_by_own
