"""Shallow trees grown along the links themselves, through switches, with no switch replaced first.

Replacing switches by links between ranks (``bulk``, ``splitting``) fixes who may send to whom before a tree is grown,
and with unlike neighbours what is left is rings. Here a tree goes from a rank through any switches to any rank that
it does not hold yet, breadth first, over the capacity that is left. What remains can still be packed iff every rank
is still served by a flow: each path takes as much into a switch as out of it, so that switches stay balanced and can
be split off completely, and Edmonds' theorem does the rest. So one flow to every rank proves a batch of trees, as in
``speculative``; a set of vertices that would starve is remembered, and entered no more often than it can afford.

References:
    A. Frank, "On connectivity properties of Eulerian digraphs", Annals of Discrete Mathematics 41, 1989 (complete
    splittings). J. Edmonds, "Edge-disjoint branchings", 1973 (what remains is packable iff every rank is served).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import numpy as np
import numpy.typing as npt

from mycel.collectives.bound import Optimum
from mycel.collectives.clusters import clusters
from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, violated_sets
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.link_trees import LinkTree, grow_tree
from mycel.collectives.synth.logical_arcs import LogicalArcs
from mycel.collectives.synth.parents import exchange_parents
from mycel.topology.model import Topology

__all__ = ["grow_along_links"]

Progress = Callable[[str, int, int], None]

#: Sets learned at one failure, and sets kept in all.
_SETS_A_FAILURE = 16
_MOST_SETS = 2000
#: How often trees are taken back for the sake of one that finds no way, and how many, twice as many each time.
_TIMES_BACK = 4
_TAKEN_BACK = 16
#: Most trees proved together.
_LARGEST_BATCH = 64
#: Times that some trees are grown again, at most, and fewer where there is much to look at; in vain, and then no
#: more; others than the deepest each time; and a depth that is good enough.
_MOST_TRIES = 500
_TRIED_VERTICES = 500_000
_VAIN_TRIES = 60
_COMPANY = 5
_SHALLOW = 4
#: Deeper than so many times log2 of the ranks, trees exchange parents.
_DEEP = 2


def grow_along_links(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, *, progress: Progress | None = None
) -> Forest | None:
    """A forest within capacities that are balanced at switches and serve every rank; ``None`` if the search fails.

    Args:
        topology: the fabric.
        best: its solved bound.
        capacity: whole units of each arc of ``best.graph``.
        demand: whole units of each root.
        progress: called with ``("trees", packed, total)``, and then with ``("shallower trees", tried, most)``.
    """
    graph = best.graph
    packer = _Packer(graph, capacity, demand)
    trees = packer.run(progress)
    if trees is None:
        return None
    trees = packer.flatten(trees, progress)
    arcs, rows = _logical(graph, trees)
    return Forest(
        topology=topology,
        is_reversed=best.is_reversed,
        weights=best.weights,
        arcs=arcs,
        roots=np.array([tree.root for tree in trees], dtype=np.int64),
        multiplicities=np.array([tree.multiplicity for tree in trees], dtype=np.int64),
        trees=rows,
        order=1,
    )


def _logical(graph: FlowGraph, trees: list[LinkTree]) -> tuple[LogicalArcs, npt.NDArray[np.int32]]:
    """The different paths that trees are made of, and the trees as rows of them."""
    links = np.concatenate([tree.links for tree in trees])
    lengths = np.concatenate([np.diff(tree.stops, prepend=0) for tree in trees])
    begin = np.cumsum(lengths) - lengths
    # Paths are told apart link by link: those that agreed so far, and then differ, get numbers of their own.
    name = np.zeros(len(lengths), dtype=np.int64)
    for position in range(int(lengths.max())):
        goes_on = lengths > position
        link = np.zeros(len(lengths), dtype=np.int64)
        link[goes_on] = links[begin[goes_on] + position] + 1
        name = np.unique(name * (len(graph.tail) + 1) + link, return_inverse=True)[1].reshape(-1).astype(np.int64)
    first = np.unique(name, return_index=True)[1]
    multiplicities = np.repeat([tree.multiplicity for tree in trees], len(graph.ranks) - 1)
    capacity = np.zeros(len(first), dtype=np.int64)
    np.add.at(capacity, name, multiplicities)
    rank_of = {v: r for r, v in enumerate(graph.ranks.tolist())}
    paths = {}
    for start, length, size in zip(begin[first].tolist(), lengths[first].tolist(), capacity.tolist(), strict=True):
        way = links[start : start + length]
        paths[int(graph.tail[way[0]]), *graph.head[way].tolist()] = size
    return LogicalArcs.of(paths, rank_of), name.reshape(len(trees), -1).astype(np.int32)


class _Packer:
    """The packing while it grows."""

    def __init__(self, graph: FlowGraph, capacity: IntArray, demand: IntArray) -> None:
        self.graph = graph
        self.left = capacity.copy()
        self.demand = demand
        self.waiting = demand.copy()
        self.is_rank = np.zeros(graph.num_vertices, dtype=np.bool_)
        self.is_rank[graph.ranks] = True
        self.sets = np.zeros((0, graph.num_vertices), dtype=np.bool_)
        self.places: dict[bytes, list[int]] = {}  # of each set among all
        self.is_watched = np.zeros(0, dtype=np.bool_)
        self.entry_arcs, self.entry_sets, self.num_inside, self.outside = np.zeros((4, 0), dtype=np.int64)
        self.has_rank = np.zeros((len(graph.ranks), 0), dtype=np.bool_)
        self.learn(clusters(graph, capacity), is_watched=True)
        self.num_soft = len(self.sets)
        self.learn(self.tight_sets())
        self.num_first = len(self.sets)
        self.carried = int(demand.max())  # by the last tree that was grown path by path

    def violated(self, stretch: int = 1, extra: int = 0, most: int = _SETS_A_FAILURE) -> list[BoolArray]:
        """Sets of vertices that what is left does not serve."""
        graph = self.graph
        demand = np.zeros(graph.num_vertices, dtype=np.int64)
        demand[graph.ranks] = self.waiting * stretch + extra
        found, sets = violated_sets(
            graph.num_vertices, graph.tail, graph.head, self.left * stretch, demand, graph.ranks, most
        )
        return list(sets[:found])

    def tight_sets(self) -> list[BoolArray]:
        """The smallest sets without slack around each rank: those that get too little if everybody gives more."""
        n = len(self.graph.ranks)
        if int(self.left.sum() + self.waiting.sum() + 1) * n**2 >= 1 << 61:
            return []
        return self.violated(n, 1, n)

    def learn(self, sets: list[BoolArray], *, is_watched: bool = False) -> bool:
        """Remember sets that are new and hold more than a rank; whether trees grow otherwise from now on.

        Args:
            sets: to remember.
            is_watched: they are looked at in every tree from now on.
        """
        new = [row for row in sets if row.sum() > 1 and row.tobytes() not in self.places]
        if len(self.sets) + len(new) > _MOST_SETS:
            new = []
        graph, num_watched = self.graph, int(self.is_watched.sum())
        if is_watched:
            for row in sets:
                self.is_watched[self.places.get(row.tobytes(), [])] = True
        is_other = bool(new) or int(self.is_watched.sum()) > num_watched
        if new:
            rows = np.array(new)
            arcs, which = np.nonzero((~rows[:, graph.tail] & rows[:, graph.head]).T)
            both = np.append(self.entry_arcs, arcs)
            order = np.argsort(both, kind="stable")
            self.entry_arcs = both[order]
            self.entry_sets = np.append(self.entry_sets, which + len(self.sets))[order]
            for place, row in enumerate(new, len(self.sets)):
                self.places.setdefault(row.tobytes(), []).append(place)
            self.sets = np.concatenate([self.sets, rows])
            self.is_watched = np.append(self.is_watched, np.full(len(new), is_watched))
            has_rank = rows[:, graph.ranks].T  # [ranks, sets]
            self.has_rank = np.concatenate([self.has_rank, has_rank], axis=1)
            self.num_inside = np.append(self.num_inside, has_rank.sum(axis=0))
            self.outside = np.append(self.outside, self.waiting.sum() - self.waiting @ has_rank)
        return is_other

    def forget(self) -> None:
        """Forget the sets that were learned on the way: of trees that exist, they only stand in the way of others."""
        count = self.num_first
        kept = {key: [place for place in places if place < count] for key, places in self.places.items()}
        self.places = {key: places for key, places in kept.items() if places}
        known = self.entry_sets < count
        self.entry_arcs, self.entry_sets = self.entry_arcs[known], self.entry_sets[known]
        self.sets, self.is_watched, self.has_rank = (
            self.sets[:count],
            self.is_watched[:count],
            self.has_rank[:, :count],
        )
        self.num_inside, self.outside = self.num_inside[:count], self.outside[:count]

    def wait(self, root: int, units: int) -> None:
        """A tree of so many units waits again; or, of a negative number, no longer."""
        self.waiting[root] += units
        self.outside += units * ~self.has_rank[root]

    def run(self, progress: Progress | None) -> list[LinkTree] | None:
        """All trees, a batch proved at a time."""
        trees: list[LinkTree] = []
        total, batch, times_back = int(self.waiting.sum()), 1, 0
        in_order = np.arange(len(self.waiting))
        while self.waiting.any():
            grown: list[LinkTree] = []
            for root in in_order[self.waiting[in_order] > 0][:batch].tolist():
                tree = self.grow(root, int(self.waiting[root]))
                if tree.is_whole:
                    grown.append(tree)
                    continue
                self.give_back([tree])
                break
            good = self.num_good(grown)
            self.give_back(grown[good:])
            batch = min(2 * batch, _LARGEST_BATCH) if good == batch else max(1, good)
            trees += grown[:good]
            if not good:
                root = int(in_order[self.waiting[in_order] > 0][0])
                tree_or_none = self.grow_carefully(root)
                if tree_or_none is not None:
                    trees.append(tree_or_none)
                elif times_back == _TIMES_BACK or not trees:
                    return None
                else:
                    back = _TAKEN_BACK << times_back
                    times_back += 1
                    self.give_back(trees[-back:])
                    del trees[-back:]
                    self.forget()
                    in_order = np.append(root, np.delete(in_order, np.flatnonzero(in_order == root)))
            if progress is not None:
                progress("trees", total - int(self.waiting.sum()), total)
        return trees

    def flatten(self, trees: list[LinkTree], progress: Progress | None) -> list[LinkTree]:
        """Take back the deepest tree and a few others and grow them again, as long as that makes it less deep.

        They take what they gave back, so that nothing needs to be proved. Trees that are very deep got what was left,
        and would again: these exchange parents with others in the end.
        """
        self.forget()
        draw = np.random.default_rng(0)
        trees = list(trees)
        tries = min(_MOST_TRIES, _TRIED_VERTICES // (self.graph.num_vertices * (1 + len(self.sets) // 64)))
        in_vain = 0
        for done in range(tries):
            depths = np.array([tree.depth for tree in trees])
            if depths.max() <= _SHALLOW or in_vain == _VAIN_TRIES:
                break
            deepest = int(depths.argmax())
            others = np.delete(np.arange(len(trees)), deepest)
            company = draw.permutation(others)[: draw.integers(1, _COMPANY + 1)]
            chosen = [deepest, *company.tolist()]
            taken = [trees[i] for i in chosen]
            self.give_back(taken)
            grown: list[LinkTree] = []
            for tree in taken:
                grown.append(self.grow(tree.root, tree.multiplicity))
                if not grown[-1].is_whole:
                    break
            new, old = (sorted((tree.depth for tree in some), reverse=True) for some in (grown, taken))
            if grown[-1].is_whole and new < old:
                in_vain = 0
                for i, tree in zip(chosen, grown, strict=True):
                    trees[i] = tree
            else:
                in_vain += 1
                self.give_back(grown)
                self.give_back(taken, -1)
            if progress is not None:
                progress("shallower trees", done + 1, tries)
        return exchange_parents(self.graph, trees, enough=_DEEP * log2(len(self.graph.ranks)))

    def num_good(self, grown: list[LinkTree]) -> int:
        """How many trees, from the first on, leave enough for all others; all of them are taken."""
        low, high = 0, len(grown) + 1
        middle = len(grown)
        while high - low > 1:
            self.give_back(grown[middle:])
            lacking = self.violated()
            self.give_back(grown[middle:], -1)
            if lacking:
                self.learn(lacking)
                high = middle
            else:
                low = middle
            middle = (low + high) // 2
        return low

    def give_back(self, trees: list[LinkTree], sign: int = 1) -> None:
        """Trees are taken back, or taken again."""
        for tree in trees:
            np.add.at(self.left, tree.links, sign * tree.multiplicity)
            self.wait(tree.root, sign * tree.multiplicity)

    def grow_carefully(self, root: int) -> LinkTree | None:
        """One tree, each of its paths proved: those after the first that may not be taken are grown again.

        Carries half as much where it gets stuck: where neither a path nor a set was gained, it would grow the same
        again. It begins with twice what the last one carried: with thousands of units that wait, as many halvings for
        every tree would be most of the work.
        """
        multiplicity, kept = min(int(self.waiting[root]), 2 * self.carried), None
        while True:
            tree = self.grow(root, multiplicity, kept)
            known = 0 if kept is None else len(kept.stops)
            count, lacking = self.num_good_paths(tree, known)
            if tree.is_whole and not lacking:
                self.carried = multiplicity
                return tree
            self.give_back([tree])
            kept = tree.first(count)
            if not self.learn(lacking, is_watched=True) and count == known:
                if multiplicity == 1:
                    return None
                multiplicity, kept = -(-multiplicity // 2), None

    def num_good_paths(self, tree: LinkTree, known: int) -> tuple[int, list[BoolArray]]:
        """How many of a tree's first paths leave enough for all that waits, and who starves after one more.

        Sets that starve after many paths say after which they do first, so that few numbers have to be tried.

        Args:
            tree: taken.
            known: so many do.
        """
        count, why = len(tree.stops), []
        while count > known:
            lacking = self.lacking(tree, count)
            if not lacking:
                break
            bearable = self.bearable_paths(tree, lacking)
            count = max(known, int(bearable.min()))
            why = [row for row, most in zip(lacking, bearable.tolist(), strict=True) if most <= count]
        return count, why

    def bearable_paths(self, tree: LinkTree, sets: list[BoolArray]) -> IntArray:
        """After how many of a tree's first paths each of some sets is still served while it goes on from there.

        Args:
            tree: taken.
            sets: that starve after all of its paths.
        """
        graph, rows = self.graph, np.array(sets)
        ends = graph.head[tree.links[tree.stops - 1]]
        enters = ~rows[:, graph.tail] & rows[:, graph.head]
        room = enters @ self.left - ~rows[:, graph.ranks] @ self.waiting
        begun = np.concatenate([rows[:, [graph.ranks[tree.root]]], rows[:, ends]], axis=1)
        needs = ~np.logical_or.accumulate(begun, axis=1)
        entries = np.cumsum(enters[:, tree.links[::-1]], axis=1)[:, ::-1]
        # Entries by the paths that follow the first 0, 1, ...: those are given back.
        begin = np.concatenate([[0], tree.stops[:-1]])
        after = np.concatenate([entries[:, begin], np.zeros((len(rows), 1), dtype=np.int64)], axis=1)
        served: BoolArray = room[:, None] + tree.multiplicity * (after - needs) >= 0
        bearable: IntArray = np.count_nonzero(served, axis=1) - 1
        return bearable

    def lacking(self, tree: LinkTree, count: int) -> list[BoolArray]:
        """Sets that would starve if the first ``count`` paths of a tree were taken and it went on from there.

        What it still carries may come from any of its members: from a vertex of its own, with an arc to each.
        """
        graph, n = self.graph, self.graph.num_vertices
        rest = tree.links[tree.stops[count - 1] if count else 0 :]
        left = self.left + tree.multiplicity * np.bincount(rest, minlength=len(self.left))
        members = np.append(graph.ranks[tree.root], graph.head[tree.links[tree.stops[:count] - 1]])
        demand = np.zeros(n + 1, dtype=np.int64)
        demand[graph.ranks] = self.waiting
        demand[n] = tree.multiplicity
        found, sets = violated_sets(
            n + 1,
            np.append(graph.tail, np.full(len(members), n)),
            np.append(graph.head, members),
            np.append(left, np.full(len(members), tree.multiplicity)),
            *(demand, graph.ranks, _SETS_A_FAILURE),
        )
        return list(sets[:found, :n])

    def grow(self, root: int, multiplicity: int, kept: LinkTree | None = None) -> LinkTree:
        """A tree, taken from what is left; it need not span.

        Args:
            root: where it starts.
            multiplicity: what it carries.
            kept: its beginning.
        """
        graph = self.graph
        self.wait(root, -multiplicity)
        entering = np.zeros(len(self.sets), dtype=np.int64)
        np.add.at(entering, self.entry_sets, self.left[self.entry_arcs])
        budget = (entering - self.outside) // multiplicity
        # What can hardly be entered too often need not be looked at, unless it was.
        counts = self.is_watched | (budget < 2 * self.num_inside)
        entries = counts[self.entry_sets]
        entry_start = np.searchsorted(self.entry_arcs[entries], np.arange(len(self.left) + 1))
        out = np.zeros(graph.num_vertices, dtype=np.int64)
        np.add.at(out, graph.tail, self.left)
        order = np.lexsort((-out[graph.head], -self.left, graph.tail))
        start = np.searchsorted(graph.tail[order], np.arange(graph.num_vertices + 1))
        none = np.zeros(0, dtype=np.int64)
        depth, links, stops = grow_tree(
            self.is_rank,
            int(graph.ranks[root]),
            len(graph.ranks),
            none if kept is None else kept.links,
            none if kept is None else kept.stops,
            start,
            order,
            graph.tail,
            graph.head,
            self.left,
            multiplicity,
            self.sets,
            entry_start,
            self.entry_sets[entries],
            budget,
            self.num_soft,
            self.num_first,
        )
        is_whole = len(stops) == len(graph.ranks) - 1
        return LinkTree(
            root=root, multiplicity=multiplicity, links=links, stops=stops, depth=int(depth), is_whole=is_whole
        )
