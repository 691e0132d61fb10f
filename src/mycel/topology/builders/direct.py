"""Fabrics without switches: ring, torus, mesh, hypercube, fully connected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from mycel.errors import TopologyError
from mycel.topology.builders.assembly import Assembly, Bandwidth, Latency, positive
from mycel.topology.limits import MAX_LINKS, MAX_VERTICES
from mycel.topology.model import Topology

__all__ = ["full_mesh", "hypercube", "mesh", "ring", "torus"]


def ring(*, num_ranks: int = 8, bandwidth: Bandwidth = 1, latency: Latency = 0.0) -> Topology:
    """Ranks in a circle, each with a cable to either neighbour. Two ranks have one cable.

    Args:
        num_ranks: at least 2.
        bandwidth: of each cable, each way.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> len(ring(num_ranks=8, bandwidth="200 Mbit/s").links)
        16
    """
    count = positive(num_ranks, "ring: num_ranks", 2)
    fabric = Assembly(f"ring_{count}")
    _lattice(fabric, (count,), bandwidth, latency, wrap=True)
    return fabric.topology()


def torus(*, dims: Sequence[int] = (4, 4), bandwidth: Bandwidth = 1, latency: Latency = 0.0) -> Topology:
    """Ranks on a grid of any number of dimensions, each of which closes to a ring.

    A dimension of length 2 has one cable between its two ends, not two; a length of 1 adds nothing.

    Args:
        dims: ranks along each dimension; the last varies fastest in rank order.
        bandwidth: of each cable, each way.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> torus(dims=(2, 4)).num_ranks, len(torus(dims=(2, 4)).links)
        (8, 24)
    """
    fabric = Assembly(f"torus_{'x'.join(map(str, dims))}")
    _lattice(fabric, tuple(dims), bandwidth, latency, wrap=True)
    return fabric.topology()


def mesh(*, dims: Sequence[int] = (4, 4), bandwidth: Bandwidth = 1, latency: Latency = 0.0) -> Topology:
    """A torus whose dimensions do not close: an open grid.

    Args:
        dims: ranks along each dimension; the last varies fastest in rank order.
        bandwidth: of each cable, each way.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> len(mesh(dims=(2, 3)).links)
        14
    """
    fabric = Assembly(f"mesh_{'x'.join(map(str, dims))}")
    _lattice(fabric, tuple(dims), bandwidth, latency, wrap=False)
    return fabric.topology()


def hypercube(*, dim: int = 4, bandwidth: Bandwidth = 1, latency: Latency = 0.0) -> Topology:
    """``2 ** dim`` ranks; a cable between any two whose numbers differ in one bit.

    Args:
        dim: at least 1.
        bandwidth: of each cable, each way.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> len(hypercube(dim=3).links)
        24
    """
    if positive(dim, "hypercube: dim") >= MAX_VERTICES.bit_length():
        raise TopologyError(f"hypercube: dim {dim} means 2**{dim} ranks; at most {MAX_VERTICES} are allowed")
    fabric = Assembly(f"hypercube_{2**dim}")
    ranks = [fabric.rank(str(number)) for number in range(2**dim)]
    for number in range(2**dim):
        for bit in range(dim):
            if not number >> bit & 1:
                fabric.connect(ranks[number], ranks[number | 1 << bit], bandwidth, latency)
    return fabric.topology()


def full_mesh(*, num_ranks: int = 8, bandwidth: Bandwidth = 1, latency: Latency = 0.0) -> Topology:
    """A cable between any two ranks.

    Args:
        num_ranks: at least 2.
        bandwidth: of each cable, each way.
        latency: of each cable, in seconds or as text.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> len(full_mesh(num_ranks=4).links)
        12
    """
    count = positive(num_ranks, "full_mesh: num_ranks", 2)
    if count * (count - 1) > MAX_LINKS:
        raise TopologyError(f"full_mesh: {count} ranks have {count * (count - 1)} links, more than {MAX_LINKS} links")
    fabric = Assembly(f"full_mesh_{count}")
    ranks: list[str] = []
    for number in range(count):
        rank = fabric.rank(str(number))
        for other in ranks:
            fabric.connect(other, rank, bandwidth, latency)
        ranks.append(rank)
    return fabric.topology()


def _lattice(fabric: Assembly, dims: tuple[int, ...], bandwidth: Bandwidth, latency: Latency, *, wrap: bool) -> None:
    for length in dims:
        positive(length, "dims: each length")
    if not 2 <= prod(dims) <= MAX_VERTICES:
        raise TopologyError(
            f"dims {'x'.join(map(str, dims))} hold {prod(dims)} rank(s); from 2 to {MAX_VERTICES} work"
        )
    points = list(product(*map(range, dims)))
    labels = {point: fabric.rank("/".join(map(str, point))) for point in points}
    for point in points:
        for axis, length in enumerate(dims):
            if point[axis] + 1 < length or (wrap and length > 2):
                beside = (*point[:axis], (point[axis] + 1) % length, *point[axis + 1 :])
                fabric.connect(labels[point], labels[beside], bandwidth, latency)
