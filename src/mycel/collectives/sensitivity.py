"""Sensitivity of a bound: what one more unit on the links that bind would buy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from mycel.brief import brief
from mycel.collectives.bound import Bound, bound, cut_inverse_x
from mycel.collectives.spec import POINTED
from mycel.topology.model import Topology

__all__ = ["Gain", "sensitivity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What more capacity on some links would buy.

    Attributes:
        binding: links that bind and are alike, as ``(src, dst)``.
        alike: all links like them: between the same kinds of vertices, of the same capacity, both inside a node or
            both not.
        binding_only: ``algbw`` gained by one more unit on each of ``binding``, in the topology's unit.
        every: ``algbw`` gained by one more unit on each of ``alike``.
        then: what binds after that: links, as ``(src, dst)``.
    """

    binding: tuple[tuple[int, int], ...]
    alike: tuple[tuple[int, int], ...]
    binding_only: Fraction
    every: Fraction
    then: tuple[tuple[int, int], ...]

    __repr__ = brief


def sensitivity(best: Bound, *, most: int = 4) -> tuple[Gain, ...]:
    """What one more unit on the links that bind would buy, kind by kind.

    Where equal links bind by symmetry, a faster one of them buys nothing, because the next one binds; all of a kind
    together may buy something. Each kind costs the time of two bounds.

    Args:
        best: a bound.
        most: kinds to try, those with most binding links first.

    Examples:
        >>> from mycel.collectives.spec import Collective
        >>> from mycel.topology.load import load_topology
        >>> best = bound(load_topology("star:ranks=3"), Collective(name="all_gather", num_ranks=3))
        >>> gain, = sensitivity(best)
        >>> len(gain.binding), len(gain.alike), gain.binding_only, gain.every
        (1, 6, Fraction(0, 1), Fraction(3, 2))
    """
    topology = best.topology
    alike: dict[object, list[tuple[int, int]]] = {}
    for ends in topology.capacity:
        alike.setdefault(_kind(topology, ends), []).append(ends)
    binding: dict[object, list[tuple[int, int]]] = {}
    for ends in best.cut:
        binding.setdefault(_kind(topology, ends), []).append(ends)
    gains = []
    for kind in sorted(binding, key=lambda kind: -len(binding[kind]))[:most]:
        every = bound(_raised(topology, alike[kind]), best.collective)
        gains.append(
            Gain(
                binding=tuple(binding[kind]),
                alike=tuple(alike[kind]),
                binding_only=_gained(best, binding[kind]),
                every=every.algbw - best.algbw,
                then=every.cut,
            )
        )
    return tuple(gains)


def _kind(topology: Topology, ends: tuple[int, int]) -> object:
    src, dst = (topology.vertices[end] for end in ends)
    inside = src.node is not None and src.node == dst.node
    return frozenset((src.kind, dst.kind)), topology.capacity[ends], inside


def _gained(best: Bound, links: Collection[tuple[int, int]]) -> Fraction:
    faster = _raised(best.topology, links)
    collective = best.collective
    # Faster links never do harm. Where a cut says that they do no good either, nothing else need be solved: a few
    # faster links leave switches unbalanced, which would cost a linear programme.
    is_one_forest = collective.name != "all_reduce" and collective.name not in POINTED
    if is_one_forest and cut_inverse_x(faster, collective) == best.inverse_x:
        return Fraction(0)
    return bound(faster, collective).algbw - best.algbw


def _raised(fabric: Topology, raised: Collection[tuple[int, int]]) -> Topology:
    chosen = set(raised)
    links = tuple(replace(k, capacity=k.capacity + ((k.src, k.dst) in chosen)) for k in fabric.links)
    return replace(fabric, links=links)
