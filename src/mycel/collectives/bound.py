"""Bound: the least time a collective can take on a fabric, exactly, with the links that say so.

Let a set B of vertices hold some but not all that its ranks need. What is missing must enter B, so time is at
least (missing bytes) / (capacity into B). The largest such ratio over all sets, 1/x, is found exactly
(``mycel.collectives.worst_cut``).

The bound is met by a forest of spanning trees (``mycel.collectives.synth.forest``) wherever every switch can send
on as much as it receives; where one cannot, ``mycel.collectives.balance`` gives the exact optimum instead. All-reduce
divides the links between two forests (``mycel.collectives.allreduce_bound``). All_to_all, gather and scatter copy
nothing, and are flows (``mycel.collectives.flow_bound``).

References:
    L. Zhao, S. Pal, T. Chugh, W. Wang, J. Fantl, P. Basu, J. Khoury, A. Krishnamurthy, "ForestColl: Throughput-
    Optimal Collective Communications on Heterogeneous Network Fabrics", arXiv 2402.06787 (optimality by cuts).
    J. Edmonds, "Edge-disjoint branchings", 1973 (broadcast).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

from mycel.arguments import the
from mycel.brief import brief
from mycel.collectives.allreduce_bound import Division, divide_links, limit_of_cuts
from mycel.collectives.balance import balance
from mycel.collectives.cutting_planes import unbalanced_switches
from mycel.collectives.flow_bound import solve_flow
from mycel.collectives.in_network_bound import divide_with_switches
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.orientation import with_whole_trees
from mycel.collectives.partition_bound import Groups
from mycel.collectives.spec import POINTED, Collective, CollectiveName, as_collective
from mycel.collectives.worst_cut import largest_ratio
from mycel.errors import UsageError
from mycel.topology.model import Topology
from mycel.units import RATE_UNITS

__all__ = ["Bound", "Optimum", "bound", "cut_inverse_x", "find_division", "find_optimum", "root_weights"]


#: Part of a rate that floating point cannot tell from all of it.
_DIGITS = Fraction(2, 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The best a collective can do on a fabric.

    Attributes:
        collective: which.
        topology: where.
        inverse_x: time, in array parts over capacity: with N ranks, ``N / inverse_x`` is ``algbw`` (for broadcast
            and reduce, where one rank has or gets everything, ``1 / inverse_x`` is; with uneven blocks, whose part is
            a unit of weight, their ``total_weight`` takes the place of N, for all_to_all an N-th of it).
        algbw: array size over least time, in the topology's unit.
        cut: links that bind, ``(src, dst)`` vertices in the direction that data crosses them.
        by_dual: the proof is a weighted combination of cuts (unbalanced switches, all_reduce) or prices of links
            (all_to_all, gather, scatter); the priced links are ``cut``.
        composition: of all_reduce, the ``algbw`` of reduce-scatter and then all-gather over equal shares, which is
            ``algbw`` itself on homogeneous fabrics; ``None`` for other collectives.
        reached: ``algbw`` of a schedule known to exist; less than ``algbw`` where nothing is shown to meet the bound
            (large fabrics, of parts that look alike and are not or with many switches that copy and add). What is
            planned may reach more than the search for the bound has seen: ``beside`` says so.
        groups: of all_reduce, groups of vertices whose links alone prove the bound, which then holds for every
            schedule; empty where none were found, and for other collectives.
        without_computing: of all_reduce on a fabric with switches that copy and add, the ``algbw`` if they only
            forwarded; ``algbw`` itself where they gain nothing. ``None`` on other fabrics and for other collectives.

    The bound of all_reduce with ``groups`` holds for every schedule that moves partial sums. Without, it holds for
    every schedule that adds each part of the array up a tree to some rank, or some switch that adds, and copies it
    down a tree from there; each tree may branch in any computing switches (with more than two of those on a fabric:
    in all of them or in none, and a schedule that mixes may do better). The other bounds hold for every schedule in
    which switches only forward; where every switch has as much capacity in as out, they are cuts, and hold with
    switches that copy and add as well.

    Examples:
        >>> from mycel.topology import load_topology
        >>> best = bound(load_topology("two_boxes:ranks=4,inside=400 Mbit/s,between=100 Mbit/s"), "all_gather")
        >>> best.algbw, best.cut  # in Mbit/s, and the links into the node that cannot be filled faster
        (Fraction(400, 1), ((6, 0), (6, 1)))
        >>> print(best.explain().split(", because")[0])
        all_gather over 4 ranks of two_boxes: at most 400 Mbit/s
    """

    collective: Collective
    topology: Topology
    inverse_x: Fraction
    algbw: Fraction
    reached: Fraction
    cut: tuple[tuple[int, int], ...]
    by_dual: bool = False
    composition: Fraction | None = None
    groups: Groups = ()
    without_computing: Fraction | None = None

    __repr__ = brief

    @property
    def is_exact(self) -> bool:
        """Whether something is known to meet the bound."""
        return self.reached >= self.algbw

    @property
    def is_met(self) -> bool:
        """Whether something meets the bound to nine digits: exactly, or flows found in floating point."""
        return self.reached >= self.algbw * (1 - _DIGITS)

    def beside(self, rate: Fraction) -> Bound:
        """The same bound, beside a schedule: what that reaches is reached.

        Args:
            rate: ``algbw`` of a verified schedule of this collective on this fabric.

        Examples:
            >>> from mycel.topology import load_topology
            >>> best = bound(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather")
            >>> best.beside(best.algbw / 2).reached == best.algbw  # a slow one takes nothing from what is known
            True
        """
        return replace(self, reached=max(self.reached, rate))

    def seconds(self, num_bytes: int) -> float:
        """The least time of an array of so many bytes, latencies left out.

        Args:
            num_bytes: of the whole array, as ``algbw`` counts it.

        Raises:
            UsageError: capacities are relative, so that nothing says how many bytes a second they are.

        Examples:
            >>> from mycel.topology import load_topology
            >>> bound(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather").seconds(2_000_000_000)
            0.75
        """
        if self.topology.unit == "link":
            raise UsageError(f"{self.topology.name} has relative capacities: give it bandwidths such as '25 GB/s'")
        return float(num_bytes / (self.algbw * RATE_UNITS[self.topology.unit]))

    def explain(self) -> str:
        """Which links bind, in words."""
        fabric, unit = self.topology, self.topology.unit
        links = [f"{fabric.label(s)} -> {fabric.label(d)} ({fabric.capacity[s, d]})" for s, d in self.cut]
        shown = ", ".join(links[:8]) + (f" and {len(links) - 8} more" if len(links) > 8 else "")
        total = sum(fabric.capacity[hop] for hop in self.cut)
        c = self.collective
        where = f"{c.name} over {c.num_ranks} ranks of {fabric.name}{c.blocks_in_words}"
        rate = f"{float(self.algbw):.6g} {unit}"
        if c.name in POINTED:
            why = f"every way from rank to rank takes its share of the links that bind: {shown}"
        elif c.name == "all_reduce":
            count = "1 of them binds" if len(links) == 1 else f"{len(links)} of them bind"
            why = f"adding up and spreading share the links, and {count}: {shown}"
        elif self.by_dual:
            why = f"the switches cannot use all of their links; the links that bind: {shown}"
        else:
            noun, verb = ("link", "binds") if len(links) == 1 else ("links", "bind")
            why = f"{len(links)} {noun} of {total} {unit} in all {verb}: {shown}"
        sentence = f"{where}: at most {rate}, because {why}."
        if self.groups:
            sentence += f" {self._explain_groups()}"
        if self.is_met and not self.is_exact:
            sentence += " It is reached to nine digits: flows that meet it were found in floating point."
        elif not self.is_exact:
            least = f"{float(self.reached):.6g} {unit}"
            sentence += f" Nothing is shown to meet that: {least} is known to be reached, and more may be."
        if self.composition not in (None, self.without_computing) and self.composition < self.algbw:
            less = f"{float(self.composition):.6g} {unit}"
            sentence += f" Reduce-scatter and then all-gather over equal shares would guarantee {less}."
        if self.without_computing is not None:
            sentence += f" {self._explain_computing(self.without_computing)}"
        return sentence

    def _explain_groups(self) -> str:
        count = len(self.groups)
        if count == 2:
            return "No schedule of any kind does better: each element passes between two groups of ranks both ways."
        return (
            f"No schedule of any kind does better: between {count} groups of ranks, each element passes from one to "
            f"another at least {2 * (count - 1)} times."
        )

    def _explain_computing(self, without: Fraction) -> str:
        fabric = self.topology
        labels = [fabric.label(vertex) for vertex in fabric.compute_vertices[fabric.num_ranks :]]
        shown = ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
        which = f"{'Switch' if len(labels) == 1 else 'Switches'} {shown}"
        rate = f"{float(without):.6g} {fabric.unit}"
        if without == self.algbw:
            return f"{which} could copy and add, which gains nothing here."
        verb = "copies and adds" if len(labels) == 1 else "copy and add"
        times = f"{float(self.algbw / without):.4g}"
        return f"{which} {verb}; if switches only forwarded, it would be {rate}, {times} times less."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The solved problem behind a bound, as synthesis needs it: data spreads from roots along the graph's arcs.

    Attributes:
        graph: the fabric; turned round where the collective reduces.
        is_reversed: whether it was.
        weights: share of each rank as a root.
        inverse_x: optimal, exact.
        capacities: the part of each arc to use, balanced at every switch; achieves ``inverse_x_achieved``.
        inverse_x_achieved: equal to ``inverse_x``, except if a dual solution could not be rounded to its proof.
        arcs: indices of the arcs (topology links) that bind.
        by_dual: see ``Bound``.
    """

    graph: FlowGraph
    is_reversed: bool
    weights: tuple[int, ...]
    inverse_x: Fraction
    capacities: tuple[Fraction, ...]
    inverse_x_achieved: Fraction
    arcs: tuple[int, ...]
    by_dual: bool


def root_weights(collective: Collective) -> tuple[int, ...]:
    """How much of the array each rank is the root of: its block's weight, or all of it at the collective's root."""
    if collective.root is None:
        return collective.weights or (1,) * collective.num_ranks
    return tuple(int(rank == collective.root) for rank in range(collective.num_ranks))


def bound(topology: Topology, collective: Collective | CollectiveName) -> Bound:
    """The least time of a collective on a fabric, exactly.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks; a name is enough where the root is rank 0 and all
            blocks are equal.

    Returns:
        The bound: its rate exactly, and the links that bind.

    Raises:
        UsageError: an unknown name, or a collective over another number of ranks.
        SynthesisError: capacities too large or too finely divided for exact 64-bit flows, or switches of which no
            balanced part connects the ranks.

    Examples:
        >>> from mycel.topology.model import Link, Vertex
        >>> ring = Topology(
        ...     name="ring",
        ...     unit="link",
        ...     vertices=tuple(Vertex(kind="rank", label=f"r{i}") for i in range(4)),
        ...     links=tuple(Link(src=i, dst=(i + s) % 4, capacity=1) for i in range(4) for s in (1, 3)),
        ... )
        >>> bound(ring, "all_gather").inverse_x
        Fraction(3, 2)
    """
    topology = the(Topology, topology, "a topology", hint="mycel.load_topology reads one")
    collective = as_collective(collective, topology.num_ranks)
    if collective.num_ranks != topology.num_ranks:
        raise UsageError(
            f"{collective.name} over {collective.num_ranks} ranks, but {topology.name} has {topology.num_ranks}"
        )
    weights = root_weights(collective)
    if collective.name in POINTED:
        return _bound_flow(topology, collective)
    if collective.name == "all_reduce":
        return _bound_all_reduce(topology, collective)
    best = find_optimum(topology, weights, is_reversed=collective.reduces)
    return Bound(
        collective=collective,
        topology=topology,
        inverse_x=best.inverse_x,
        algbw=sum(weights) / best.inverse_x,
        reached=sum(weights) / best.inverse_x_achieved,
        cut=_links(topology, best.arcs),
        by_dual=best.by_dual,
    )


def _bound_flow(topology: Topology, collective: Collective) -> Bound:
    best = solve_flow(topology, collective)
    return Bound(
        collective=collective,
        topology=topology,
        inverse_x=best.inverse_x,
        algbw=Fraction(collective.total_weight, collective.num_parts) / best.inverse_x,
        reached=Fraction(collective.total_weight, collective.num_parts) / best.inverse_x_reached,
        cut=_links(topology, [arc for arc, price in enumerate(best.prices) if price]),
        by_dual=True,
    )


def _bound_all_reduce(topology: Topology, collective: Collective) -> Bound:
    best, composition = find_division(topology)
    limit, reached, groups, binding, without = best.limit, best.reached, best.groups, best.binding, None
    if len(topology.compute_vertices) > topology.num_ranks:
        network = divide_with_switches(topology, without=best.reached)
        without = best.reached
        if network.is_proved:
            limit, reached = network.limit, max(network.algbw, best.reached)
            groups, binding = (), network.binding or best.binding
        else:
            cuts = limit_of_cuts(topology)
            limit, reached, groups, binding = cuts.limit, network.limit, cuts.groups, cuts.binding
    return Bound(
        collective=collective,
        topology=topology,
        inverse_x=collective.num_ranks / limit,
        algbw=limit,
        reached=reached,
        cut=_links(topology, binding),
        by_dual=True,
        composition=composition,
        groups=groups,
        without_computing=without,
    )


def find_division(topology: Topology) -> tuple[Division, Fraction]:
    """How all_reduce best divides the links, and the ``algbw`` of its composition.

    Raises:
        SynthesisError: as ``bound``.
    """
    return _find_division(topology)


@lru_cache(maxsize=2)  # as with ``_find_optimum``: a schedule asks again what its bound has asked
def _find_division(topology: Topology) -> tuple[Division, Fraction]:
    weights = (1,) * topology.num_ranks
    gather, scatter = (find_optimum(topology, weights, is_reversed=reverse) for reverse in (False, True))
    total = gather.inverse_x_achieved + scatter.inverse_x_achieved
    rate = topology.num_ranks / total
    composition = Division(
        limit=rate,
        reached=rate,
        shares=(1 / total,) * topology.num_ranks,
        spread=tuple(c * gather.inverse_x_achieved / total for c in gather.capacities),
        reduce=tuple(c * scatter.inverse_x_achieved / total for c in scatter.capacities),
    )
    made = partial(with_whole_trees, topology, composition=composition)
    found = divide_links(topology, composition=composition, with_whole_trees=partial(made, is_try=True))
    return made(found), rate


def _links(topology: Topology, arcs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((topology.links[arc].src, topology.links[arc].dst) for arc in arcs)


def find_optimum(topology: Topology, weights: Sequence[int], *, is_reversed: bool) -> Optimum:
    """Solve the cut problem, and the balance problem where a switch is unbalanced.

    Args:
        topology: the fabric.
        weights: share of each rank as a root; non-negative integers, not all zero.
        is_reversed: turn every link round first (collectives that reduce).

    Raises:
        SynthesisError: as ``bound``.
    """
    return _find_optimum(topology, tuple(weights), is_reversed)


@lru_cache(maxsize=8)  # a bound and then a schedule, both phases of an all-reduce: each is asked for several times
def _find_optimum(topology: Topology, weights: tuple[int, ...], is_reversed: bool) -> Optimum:
    graph = FlowGraph.of(topology, is_reversed=is_reversed)
    capacity = [link.capacity for link in topology.links]
    inverse_x, side = largest_ratio(graph, capacity, weights)
    arcs = tuple(np.flatnonzero(~side[graph.tail] & side[graph.head]).tolist())
    capacities = tuple(Fraction(c) for c in capacity)
    achieved, by_dual = inverse_x, False
    if unbalanced_switches(graph, capacity):
        best = balance(graph, capacity, weights, x_cut=1 / inverse_x)
        capacities, achieved = best.capacities, 1 / best.x
        if achieved != inverse_x:
            by_dual, inverse_x, arcs = True, max(inverse_x, 1 / best.x_limit), best.binding
    return Optimum(
        graph=graph,
        is_reversed=is_reversed,
        weights=weights,
        inverse_x=inverse_x,
        capacities=capacities,
        inverse_x_achieved=achieved,
        arcs=arcs,
        by_dual=by_dual,
    )


def cut_inverse_x(topology: Topology, collective: Collective) -> Fraction:
    """What the cuts alone say: no schedule has a smaller ``inverse_x``, and where switches are balanced one has it.

    For collectives of one forest: not for all_reduce, nor for those that copy nothing.
    """
    graph = FlowGraph.of(topology, is_reversed=collective.reduces)
    return largest_ratio(graph, [link.capacity for link in topology.links], root_weights(collective))[0]
