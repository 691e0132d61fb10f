"""Spanning trees for large fabrics: grow whole trees greedily, prove them afterwards, learn from what fails.

``packing`` proves every arc of every tree by a maximum flow; here one proof serves for a whole tree, or for many.
A tree grows breadth first (by latency, where links have any) over the capacity that is left, scarce links first.
Then a maximum flow to every rank says whether the rest can still be packed. If it cannot, the set of ranks that
would starve is remembered, the trees are taken back, and from then on trees enter that set no more often than it can
afford.

With a symmetry only one tree of each orbit of roots is grown; its images use the same number of links of each
orbit, so capacities are kept by orbit.

The last trees take what the others left and can be deep. So some trees, the deepest among them, are taken back and
grown again in another order, as long as that pays.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973 (what remains is packable iff every rank is served).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import BoolArray, IntArray, build_rows, violated_sets
from mycel.collectives.synth.logical_arcs import LogicalArcs
from mycel.compiled import compiled

__all__ = ["PackedTree", "farthest", "flatten", "longest_way", "orbits_of_arcs", "pack_speculatively"]

Progress = Callable[[str, int, int], None]
Preference = Literal["narrow", "scarce", "wide"]

#: Which arcs of a vertex come first: the narrowest to begin with (alike roots then grow alike trees, which fit
#: together), those with least capacity left, or those with most.
_PREFERENCES: tuple[Preference, ...] = ("narrow", "scarce", "wide")

#: Sets learned at one failure, sets kept in all, and failures of one tree before it must carry less.
_SETS_A_FAILURE = 8
_MOST_SETS = 400
_PATIENCE = 24
#: Trees times ranks up to which all orders of growth are tried.
_TRY_ALL = 50_000
#: Most trees proven together.
_LARGEST_BATCH = 64
#: Times that some trees are grown again: at most so many, and fewer where roots times arcs are many.
_MOST_TRIES = 500
_TRIED_ARCS = 8_000_000
#: Most trees besides the deepest that one try takes back, and tries in vain after which no more are made.
_COMPANY = 5
_VAIN_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTree:
    """A spanning out-tree; with a symmetry, one of its orbit.

    Attributes:
        root: a rank.
        multiplicity: units of the root's share that use it.
        arcs: indices of logical arcs in the order of growth; shape ``[num_ranks - 1]``.
    """

    root: int
    multiplicity: int
    arcs: IntArray


def orbits_of_arcs(
    arcs: LogicalArcs, images: IntArray, rank_images: IntArray
) -> tuple[IntArray, npt.NDArray[np.int32]] | None:
    """Which arcs a symmetry takes to each other.

    Args:
        arcs: between ranks.
        images: powers of the automorphism on vertices, shape ``[order, num_vertices]``.
        rank_images: the same on ranks, shape ``[order, num_ranks]``.

    Returns:
        The orbit of each arc, shape ``[num_arcs]``, and the image of each arc under each power, shape
        ``[order, num_arcs]``; ``None`` if the arcs are not as symmetric as the fabric.
    """
    place = {path: arc for arc, path in enumerate(arcs.paths)}
    once = images[1 % len(images)].tolist()
    moved = [place.get(tuple([once[v] for v in path]), -1) for path in arcs.paths]
    step = np.array(moved, dtype=np.int64)
    if (step < 0).any() or not np.array_equal(arcs.capacity[step], arcs.capacity):
        return None
    # Where one step takes ends to ends, so do all of its powers.
    if not np.array_equal(arcs.head[step], rank_images[1 % len(images)][arcs.head]):
        return None
    table = np.empty((len(images), len(moved)), dtype=np.int32)
    table[0] = np.arange(len(moved))
    for power in range(1, len(images)):
        table[power] = step[table[power - 1]]
    return np.unique(table.min(axis=0), return_inverse=True)[1].astype(np.int64), table


def pack_speculatively(
    num_ranks: int,
    arcs: LogicalArcs,
    lengths: IntArray,
    demand: IntArray,
    *,
    orbit: IntArray | None = None,
    rank_images: IntArray | None = None,
    progress: Progress | None = None,
) -> list[PackedTree] | None:
    """Trees such that they and their images are a packing; ``None`` if the search got stuck.

    Args:
        num_ranks: vertices of the logical graph.
        arcs: its links.
        lengths: what each of them adds to the depth of a tree, positive; shape ``[num_arcs]``.
        demand: trees wanted at each root; equal within an orbit.
        orbit: of each arc; each is its own if not given.
        rank_images: image of each rank under each power of the symmetry, shape ``[order, num_ranks]``.
        progress: called with ``("trees", packed, total)``.
    """
    orbit = np.arange(len(lengths)) if orbit is None else orbit
    rank_images = np.arange(num_ranks)[None] if rank_images is None else rank_images
    best: list[PackedTree] | None = None
    for preference in _PREFERENCES:
        packer = _Packer(num_ranks, arcs, lengths, demand, orbit, rank_images, preference)
        trees = packer.run(progress)
        if trees is not None and (best is None or packer.cost(trees) < packer.cost(best)):
            best, packed = trees, packer
        if best is not None and len(best) * num_ranks > _TRY_ALL:
            break
    return None if best is None else _flatten(packed, best, progress)


def flatten(
    num_ranks: int, arcs: LogicalArcs, lengths: IntArray, demand: IntArray, trees: Sequence[PackedTree]
) -> list[PackedTree]:
    """A packing that somebody made, with some of its trees grown again if that makes it shallower.

    Arguments are those of ``pack_speculatively``; no symmetry is used.
    """
    identity = np.arange(num_ranks, dtype=np.int64)[None]
    packer = _Packer(num_ranks, arcs, lengths, demand, np.arange(len(lengths)), identity, "narrow")
    packer.exchange([], trees)
    return _flatten(packer, list(trees), None)


def _flatten(packer: _Packer, trees: list[PackedTree], progress: Progress | None) -> list[PackedTree]:
    """Grow some trees again, the deepest and a few at random, until none is deeper than ranks are apart."""
    draw = np.random.default_rng(0)
    roots = np.flatnonzero(packer.demand > 0)
    least = farthest(packer.num_ranks, packer.tail, packer.head, packer.lengths, np.intersect1d(roots, packer.roots))
    cost = packer.cost(trees)
    tries = min(_MOST_TRIES, _TRIED_ARCS // (len(packer.roots) * len(packer.tail)))
    in_vain = 0
    for done in range(tries):
        depths = np.array([packer.depth(tree) for tree in trees])
        if depths.max() <= least or in_vain == _VAIN_TRIES:
            break
        in_vain += 1
        deepest = int(draw.choice(np.flatnonzero(depths == depths.max())))
        rest = np.delete(np.arange(len(trees)), deepest)
        company = draw.permutation(rest)[: draw.integers(0, _COMPANY + 1)]
        chosen = {deepest, *company.tolist()}
        taken = [tree for place, tree in enumerate(trees) if place in chosen]
        before = packer.left.copy(), packer.waiting.copy()
        packer.exchange(taken, [])
        packer.shuffle(draw)
        grown = packer.run(None)
        if grown is not None:
            proposal = [tree for place, tree in enumerate(trees) if place not in chosen] + grown
            if packer.cost(proposal) <= cost:
                in_vain = in_vain if packer.cost(proposal) == cost else 0
                trees, cost = proposal, packer.cost(proposal)
                before = packer.left, packer.waiting
        packer.left, packer.waiting = before
        if progress is not None:
            progress("shallower trees", done + 1, tries)
    return trees


class _Packer:
    """The packing while it grows."""

    def __init__(
        self,
        num_ranks: int,
        arcs: LogicalArcs,
        lengths: IntArray,
        demand: IntArray,
        orbit: IntArray,
        rank_images: IntArray,
        preference: Preference,
    ) -> None:
        self.num_ranks = num_ranks
        self.tail, self.head, self.orbit, self.lengths = arcs.tail, arcs.head, orbit, lengths
        self.left = np.zeros(int(orbit.max()) + 1, dtype=np.int64)
        self.left[orbit] = arcs.capacity
        self.demand = demand
        self.waiting = demand.copy()
        self.images = rank_images
        self.roots = np.unique(rank_images.min(axis=0))
        self.preference = preference
        self.capacity = arcs.capacity
        self.any_order = np.arange(len(arcs.tail))
        self.sets = np.zeros((0, num_ranks), dtype=np.bool_)
        self.copies = np.zeros((num_ranks, 0), dtype=np.bool_)
        self.learn(self.tight_sets())
        self.num_tight = len(self.sets)

    def depth(self, tree: PackedTree) -> int:
        """Length of the longest way from the root."""
        return longest_way(self.num_ranks, self.tail, self.head, self.lengths, tree.root, tree.arcs)

    def cost(self, trees: Sequence[PackedTree]) -> tuple[int, int, int]:
        """What is kept small: (depth of the deepest tree)^2 x (number of trees).

        Every step costs a latency, every tree makes messages shorter. Between equal ones, how many trees are that
        deep, and the sum of depths.
        """
        depths = [self.depth(tree) for tree in trees]
        deepest = max(depths)
        return deepest**2 * len(trees), depths.count(deepest), sum(depths)

    def exchange(self, back: Sequence[PackedTree], out: Sequence[PackedTree]) -> None:
        """Give back some trees, which then wait to be grown, and take others as grown."""
        for trees, sign in ((back, 1), (out, -1)):
            for tree in trees:
                np.add.at(self.left, self.orbit[tree.arcs], sign * tree.multiplicity)
                self.waiting[self.images[:, tree.root]] += sign * tree.multiplicity

    def shuffle(self, draw: np.random.Generator) -> None:
        """Another order of growth."""
        self.any_order = draw.permutation(len(self.tail))
        self.roots = draw.permutation(self.roots)
        self.preference = _PREFERENCES[draw.integers(len(_PREFERENCES))]

    def violated(self, stretch: int = 1, extra: int = 0, most: int = _SETS_A_FAILURE) -> list[IntArray]:
        found, sets = violated_sets(
            self.num_ranks,
            *(self.tail, self.head, self.left[self.orbit] * stretch, self.waiting * stretch + extra),
            *(self.roots, most),
        )
        return list(sets[:found])

    def tight_sets(self) -> list[IntArray]:
        """The smallest sets without slack around each root: those that get too little if everybody gives more."""
        if int(self.left[self.orbit].sum() + self.waiting.sum() + 1) * self.num_ranks**2 >= 1 << 61:
            return []
        return self.violated(self.num_ranks, 1, len(self.roots))

    def learn(self, sets: list[IntArray]) -> bool:
        """Remember sets of more than one rank that are new; whether there was one."""
        known = {bytes(row) for row in self.sets}
        new = [row for row in sets if row.sum() > 1 and bytes(row) not in known]
        if not new or len(self.sets) + len(new) > _MOST_SETS:
            return False
        self.sets = np.concatenate([self.sets, np.array(new)])
        # Rank v is in the image under power p of a set iff the image of v under power -p is in the set.
        back = self.images[-np.arange(len(self.images)) % len(self.images)]
        self.copies = np.ascontiguousarray(self.sets[:, back].reshape(-1, self.num_ranks).T)
        return True

    def run(self, progress: Progress | None) -> list[PackedTree] | None:
        """All trees, a batch proven at a time."""
        trees: list[PackedTree] = []
        total, failures, batch, share = int(self.waiting[self.roots].sum()), 0, 1, 1
        while self.waiting.any():
            before = self.left.copy(), self.waiting.copy()
            grown: list[PackedTree] = []
            for root in self.roots[self.waiting[self.roots] > 0][:batch].tolist():
                tree = self.grow(root, -(-int(self.waiting[root]) // share))
                if tree is None:
                    break
                grown.append(tree)
            is_complete = bool(grown)
            lacking = self.violated() if grown else []
            if is_complete and not lacking:
                trees += grown
                failures, share, batch = 0, 1, min(2 * batch, _LARGEST_BATCH)
                if progress is not None:
                    progress("trees", total - int(self.waiting[self.roots].sum()), total)
                continue
            self.left, self.waiting = before
            is_new = self.learn(lacking)
            failures += 1
            if batch > 1:
                batch //= 4 if batch > 4 else batch
            elif not is_new or failures > _PATIENCE:
                share *= 2
                failures = 0
                if share > 2 * int(self.waiting.max()):
                    return None
        return trees

    def grow(self, root: int, multiplicity: int) -> PackedTree | None:
        """One tree and its images, taken from what is left; ``None`` (and nothing taken) if it does not span."""
        keys = {"narrow": self.capacity, "scarce": self.left[self.orbit], "wide": -self.left[self.orbit]}
        order = self.any_order[np.argsort(keys[self.preference][self.any_order], kind="stable")]
        self.waiting[self.images[:, root]] -= multiplicity
        left = self.left.copy()
        budget = _budgets(self.tail, self.head, self.orbit, left, self.waiting, self.sets) // multiplicity
        arcs = self.tail[order], self.head[order], self.lengths[order], self.orbit[order]
        images = len(self.images)
        size, used = _grow_whole(
            *(self.num_ranks, *arcs, left, multiplicity, root), self.copies, images, budget, self.num_tight
        )
        if size < self.num_ranks:
            self.waiting[self.images[:, root]] += multiplicity
            return None
        self.left = left
        return PackedTree(root=root, multiplicity=multiplicity, arcs=order[used])


@compiled
def _budgets(
    tail: IntArray, head: IntArray, orbit: IntArray, left: IntArray, waiting: IntArray, sets: BoolArray
) -> IntArray:
    """What enters each set beyond what is to enter it for the roots outside that still wait."""
    budget = np.zeros(len(sets), dtype=np.int64)
    for c in range(len(sets)):
        inside = sets[c]
        for a in range(len(tail)):
            if inside[head[a]] and not inside[tail[a]]:
                budget[c] += left[orbit[a]]
        for v in range(len(waiting)):
            if not inside[v]:
                budget[c] -= waiting[v]
    return budget


@compiled
def _grow_whole(
    num_ranks: int,
    tail: IntArray,
    head: IntArray,
    lengths: IntArray,
    orbit: IntArray,
    left: IntArray,
    multiplicity: int,
    root: int,
    copies: BoolArray,
    order: int,
    budget: IntArray,
    num_tight: int,
) -> tuple[int, IntArray]:
    """Grow a tree breadth first, first over arcs that enter tight sets for the first time, then over all.

    Args:
        num_ranks: vertices.
        tail, head, lengths, orbit: of the arcs, best first.
        left: capacity left in each orbit; changed.
        multiplicity: what the tree carries.
        root: where it starts.
        copies: ranks in each image of each set, shape ``[num_ranks, num_sets * order]``.
        order: images of a set.
        budget: how often the tree may enter images of each set.
        num_tight: sets at the front that have no slack at all.

    Returns:
        Ranks reached, and arcs used.
    """
    start, slot, _ = build_rows(num_ranks, tail, head)
    num_sets = len(budget)
    entered = copies[root].copy()
    need = np.zeros(num_sets, dtype=np.int64)
    for i in range(len(entered)):
        if not entered[i]:
            need[i // order] += 1
    spent = np.zeros(num_sets, dtype=np.int64)
    fresh = np.zeros(num_sets, dtype=np.int64)
    cost = np.zeros(num_sets, dtype=np.int64)
    depth = np.full(num_ranks, -1, dtype=np.int64)
    depth[root] = 0
    members = np.empty(num_ranks, dtype=np.int64)
    members[0] = root
    used = np.empty(num_ranks - 1, dtype=np.int64)
    size = 1
    steps = np.unique(lengths)
    for phase in range(0 if num_tight > 0 else 1, 2):
        level = 0  # ranks at most so far from the root have been reached
        while size < num_ranks:
            beyond = -1
            for i in range(size):
                for step in steps:
                    reach = depth[members[i]] + step
                    if reach > level and (beyond < 0 or reach < beyond):
                        beyond = reach
            if beyond < 0:
                break
            level = beyond
            position = 0
            while position < size:
                x = members[position]
                position += 1
                is_reached = False
                for step in steps:
                    is_reached = is_reached or depth[x] + step == level
                if not is_reached:
                    continue
                for place in range(start[x], start[x + 1]):
                    a = slot[place] >> 1
                    if slot[place] & 1 or depth[x] + lengths[a] != level:
                        continue
                    y = head[a]
                    if depth[y] >= 0 or left[orbit[a]] < multiplicity:
                        continue
                    cost[:] = 0
                    fresh[:] = 0
                    is_first = False
                    for i in range(copies.shape[1]):
                        if copies[y, i] and not copies[x, i]:
                            c = i // order
                            cost[c] += 1
                            if not entered[i]:
                                fresh[c] += 1
                                is_first = is_first or c < num_tight
                    allowed = phase == 1 or is_first
                    for c in range(num_sets):
                        allowed = allowed and (cost[c] == 0 or spent[c] + cost[c] + need[c] - fresh[c] <= budget[c])
                    if not allowed:
                        continue
                    for c in range(num_sets):
                        spent[c] += cost[c]
                        need[c] -= fresh[c]
                    for i in range(copies.shape[1]):
                        entered[i] = entered[i] or copies[y, i]
                    left[orbit[a]] -= multiplicity
                    depth[y] = level
                    members[size] = y
                    used[size - 1] = a
                    size += 1
    return size, used


@compiled
def longest_way(num_ranks: int, tail: IntArray, head: IntArray, lengths: IntArray, root: int, arcs: IntArray) -> int:
    """Depth of a tree by the lengths of its arcs, which stand in the order of growth."""
    depth = np.zeros(num_ranks, dtype=np.int64)
    deepest = 0
    for a in arcs:
        depth[head[a]] = depth[tail[a]] + lengths[a]
        deepest = max(deepest, depth[head[a]])
    return deepest


@compiled
def farthest(num_ranks: int, tail: IntArray, head: IntArray, lengths: IntArray, roots: IntArray) -> int:
    """The longest of all shortest ways from some ranks: no tree from the worst of them is less deep."""
    worst = 0
    far = np.empty(num_ranks, dtype=np.int64)
    for root in roots:
        far[:] = 1 << 60
        far[root] = 0
        changed = True
        while changed:
            changed = False
            for a in range(len(tail)):
                if far[tail[a]] + lengths[a] < far[head[a]]:
                    far[head[a]] = far[tail[a]] + lengths[a]
                    changed = True
        worst = max(worst, far.max())
    return worst
