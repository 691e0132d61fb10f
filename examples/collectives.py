"""Well-known collectives in mycel's language, at most twelve lines each.

``mycel build examples/collectives.py:ring --topology ring:ranks=8 -o ring.json`` makes a verified schedule of one.
"""

from __future__ import annotations

from itertools import permutations

from mycel.collectives.language import Array, collective


@collective("all_reduce", "all_gather", "reduce_scatter")
def ring(array: Array) -> None:
    """Every share once round to be added up, and once more round."""
    n = array.num_ranks
    for owner, chunk in enumerate(array.cut(n)):
        turn = [(owner + step) % n for step in range(1, n + 1)]
        if array.collective.reduces:
            chunk.add(*turn)
        if array.collective.name != "reduce_scatter":
            chunk.copy(owner, *turn[:-1])


@collective("all_reduce", instances=2)
def both_ways(array: Array) -> None:
    """A ring with half of the array, and one the other way round with the other half."""
    n, way = array.num_ranks, 1 - 2 * array.instance
    for owner, chunk in enumerate(array.cut(n)):
        turn = [(owner + way * step) % n for step in range(1, n + 1)]
        chunk.add(*turn)
        chunk.copy(owner, *turn[:-1])


@collective("all_reduce")
def halving_doubling(array: Array) -> None:
    """Recursive halving and doubling; ranks beyond a power of two hand over their part before."""
    low = 1 << (array.num_ranks.bit_length() - 1)
    bits = [low >> step for step in range(1, low.bit_length())]
    for extra in range(low, array.num_ranks):
        array.block().add(extra, extra - low)
    for owner, chunk in enumerate(array.cut(low)):
        edges = [(r, r ^ d) for d in bits for r in range(low) if d <= r ^ owner < 2 * d]
        for far, near in edges:
            chunk.add(far, near)
        for far, near in edges[::-1]:
            chunk.copy(near, far)
    for extra in range(low, array.num_ranks):
        array.block().copy(extra - low, extra)


@collective("all_reduce", instances=2)
def double_tree(array: Array) -> None:
    """Half of the array up and down a tree, and half through its double, whose leaves are the other's inner ranks."""
    n, turned = array.num_ranks, array.instance
    mirror = [(n - place if n % 2 == 0 else place % n) if turned else place - 1 for place in range(n + 1)]
    bits = sorted(range(1, n + 1), key=lambda place: place & -place)
    above = {place: (place ^ (place & -place)) | (place & -place) << 1 for place in bits}
    edges = [(place, up if up <= n else place ^ (place & -place)) for place, up in above.items()]
    for child, parent in edges:
        if parent:
            array.block().add(mirror[child], mirror[parent])
    for child, parent in edges[::-1]:
        if parent:
            array.block().copy(mirror[parent], mirror[child])


@collective("all_reduce")
def hierarchical(array: Array) -> None:
    """Added up inside nodes, then between the ranks of one place, and copied the same way back."""
    nodes = array.nodes
    for home, share in enumerate(array.cut(len(nodes))):
        for place, chunk in enumerate(share.split(len(nodes[0]))):
            column = [ranks[place] for ranks in nodes[home + 1 :] + nodes[: home + 1]]
            rows = [(rank, ranks[place]) for ranks in nodes for rank in ranks if rank != ranks[place]]
            for rank, own in rows:
                chunk.add(rank, own)
            chunk.add(*column)
            chunk.copy(column[-1], *column[:-1])
            for rank, own in rows:
                chunk.copy(own, rank)


@collective("all_reduce")
def all_pairs(array: Array) -> None:
    """Everybody adds up its share from all others, and sends it to all."""
    for owner, chunk in enumerate(array.cut(array.num_ranks)):
        others = [rank for rank in array.ranks if rank != owner]
        for rank in others:
            chunk.add(rank, owner)
        for rank in others:
            chunk.copy(owner, rank)


@collective("all_reduce")
def doubling(array: Array) -> None:
    """Partners add each other's sums of the whole array; ranks beyond a power of two hand over theirs before."""
    low, whole = 1 << (array.num_ranks.bit_length() - 1), array.block()
    for extra in range(low, array.num_ranks):
        whole.add(extra, extra - low)
    for bit in range(low.bit_length() - 1):
        with array.step():
            for rank in range(low):
                whole.add(rank, rank ^ (1 << bit))
    for extra in range(low, array.num_ranks):
        whole.copy(extra - low, extra)


@collective("all_to_all")
def two_step(array: Array) -> None:
    """First to the rank of the own node that has the receiver's place, then between nodes."""
    nodes = array.nodes
    for home, node in enumerate(nodes):
        for src in node:
            for there in nodes:
                for place, dst in enumerate(there):
                    stops = dict.fromkeys((src, nodes[home][place], dst))
                    if len(stops) > 1:
                        array.block(src, dst).copy(*stops)


@collective("all_reduce")
def one_shot(array: Array) -> None:
    """Everybody sends all it has to everybody, who adds it to what it had: one step."""
    with array.step():
        for src, dst in permutations(array.ranks, 2):
            array.block().add(src, dst)
