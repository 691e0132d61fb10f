"""Bounds of many jobs at once: seconds that no cut, order or placement goes below, and bytes by which none can fit.

Both keep the optimum: what they throw away could not have been the best.

A pipeline's time is at least the largest over stages of what comes before, ``M`` times its own work, and what comes
after (``mycel.planning.cuts``). Whatever the cut, with speeds ``v(s)`` of the stages and the whole work ``W`` of a
micro-batch, that is least where all stages are as late, at ``M W / sum of v(s) (1 - 1/M)^s``; where ranks differ,
``v(s)`` is the mean speed of the ``s``-th fastest part of the ranks, which no placement beats. Interleaved stages can
start after one layer of each rank before. Where replicas have unlike many micro-batches, each is bound so by its own
speeds; added up, ``M`` is the mean in front, and the most that one can have below.

What a rank holds is linear in its layers, so the layers that fit on every stage are known, and a cut fits where they
add up to the model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.planning.cluster import Cluster
from mycel.planning.search.groups import InnerPipeline, WidestLinks
from mycel.planning.search.stages import held_bytes
from mycel.planning.step.compute import head_seconds
from mycel.planning.step.links import Links
from mycel.planning.step.points import Numbers, Points
from mycel.planning.step.times import gradient_seconds, layer_times, optimizer_seconds
from mycel.topology.device import Device

__all__ = ["Room", "least_seconds", "room_of"]

#: Ranks that differ, up to which their speeds are put in order for every job.
_MOST_ORDERED = 64


@dataclass(frozen=True, kw_only=True)
class Room:
    """Whether jobs fit at all.

    Attributes:
        fits: some cut does.
        fullest_layers: of the fullest rank at least, since no other one holds more than fits.
        over_bytes: by which the fullest rank is over at least, whatever the cut; 0 where one fits.
    """

    fits: NDArray[np.bool_]
    fullest_layers: Numbers
    over_bytes: Numbers

    __repr__ = brief


def room_of(points: Points, memory_bytes: int) -> Room:
    """Whether jobs fit into ranks of a memory.

    Args:
        points: jobs.
        memory_bytes: of the ranks with the most.
    """
    count = len(points)
    inverse, spare = np.zeros(count), np.zeros(count)
    over = np.zeros(count)
    largest = int(points.pp.max(initial=1))
    most = np.zeros((count, largest))
    for stage in range(largest):
        rows = np.flatnonzero(points.pp > stage)
        part = points.take(rows)
        at = np.full(len(rows), float(stage))
        none = held_bytes(replace(part, held=np.zeros(len(rows))), at)
        each = held_bytes(replace(part, held=np.ones(len(rows))), at) - none
        # Of chunks each has a layer; the last stage may be the head alone.
        is_bare = (part.pp > 1) & (stage == part.pp - 1) & (part.chunks == 1)
        least = np.where(is_bare, 0.0, part.chunks)
        over[rows] = np.maximum(over[rows], none + least * each - memory_bytes)
        most[rows, stage] = np.clip(np.floor((memory_bytes - none) / each), 0.0, part.layers)
        inverse[rows] += 1.0 / each
        spare[rows] += (memory_bytes - none) / each
    short = (points.layers - spare) / inverse  # more bytes on every rank, with layers cut to pieces
    fits = (over <= 0) & (most.sum(axis=1) >= points.layers)
    low, high = np.ceil(points.layers / points.pp), points.layers.copy()
    while np.any(low < high):
        middle = np.floor((low + high) / 2.0)
        is_enough = np.minimum(most, middle[:, None]).sum(axis=1) >= points.layers
        low, high = np.where(is_enough, low, np.minimum(middle + 1.0, high)), np.where(is_enough, middle, high)
    return Room(
        fits=fits, fullest_layers=high, over_bytes=np.where(fits, 0.0, np.maximum(np.maximum(over, short), 1.0))
    )


def least_seconds(points: Points, cluster: Cluster, fullest_layers: Numbers) -> Numbers:
    """Seconds of a step that no cut, order or placement goes below.

    Args:
        points: jobs over all of the cluster's ranks.
        cluster: what they run on.
        fullest_layers: of the rank with the most.
    """
    if cluster.topology is not None:
        return _least(points, cluster, WidestLinks(topology=cluster.topology), fullest_layers)
    rates = cluster.machine.rates
    inner = InnerPipeline(rates=rates, points=points)
    both: Numbers = np.minimum(
        _least(points, cluster, rates, fullest_layers), _least(points, cluster, inner, fullest_layers)
    )
    return both


def _least(p: Points, cluster: Cluster, links: Links, fullest: Numbers) -> Numbers:
    c = cluster.fit.coefficients
    kinds = sorted(set(cluster.devices), key=lambda device: (device.name, device.flops))
    times = [layer_times(p, device, links, c) for device in kinds]
    ones = np.stack([one.forward + one.backward for one in times])
    one = ones.min(axis=0)
    batches = p.micro_batches
    # The head in terms of layers: as little as it is on any kind of rank.
    heads = np.stack([head_seconds(p, device, c) for device in kinds])
    work = p.layers * one + (heads * (one / ones)).min(axis=0)
    weights, later = _speeds(p, cluster, kinds, ones, one)
    share = np.where((p.sequence_parallel > 0) | (p.scattered > 0), p.tp, 1.0)
    # Some boundaries may be inside a node where others are not: of two neighbours, the fastest there are.
    rate = links.hop(p.tp * p.cp * p.dp, np.minimum(p.pp, 2.0), c.link_efficiency, c.boundary_efficiency)
    message = np.where(p.pp > 1, p.element_bytes * p.tokens * p.hidden / share / rate, 0.0)
    # Messages put every later stage off; where the speeds of stages differ that is left out.
    passed = 2.0 * message * (p.pp - weights) if len(kinds) == 1 else np.zeros(len(p))
    late = batches * (work + passed) / weights
    # ... and where messages alone leave the last stage no time, the formula holds no longer.
    left = np.maximum(1.0 - 1.0 / batches, 0.0) ** (p.pp - 1.0)
    late = np.where(late * left >= 2.0 * message * batches * (1.0 - left), late, batches * work / weights)
    # 1F1B has as many micro-batches under way as stages: one of so many waits until the one before is back.
    around = np.ceil(batches / p.pp) * (work + 2.0 * message * (p.pp - 1.0))
    late = np.maximum(late, around) if len(kinds) == 1 else late
    busy = np.where(p.chunks > 1, (batches * work + one * later) / weights, late)
    # All messages of a boundary go one after the other, each way. Some rank has at least so many whole layers.
    busy = np.maximum(busy, batches * p.chunks * message)
    whole = np.maximum(busy, batches * fullest * one)
    mean = replace(p, held=p.layers / p.pp, outer_parameters=np.where(p.pp > 1, 0.0, p.outer_parameters))
    gradients = gradient_seconds(mean, links, c, whole)
    fastest = max(kinds, key=lambda device: device.memory_gbps)
    update = optimizer_seconds(mean, fastest, c)
    waiting = whole * c.replica_wait * np.sqrt(2.0 * np.log(p.dp * p.cp))
    least: Numbers = whole + gradients + update + waiting + c.step_s
    return least


def _speeds(p: Points, cluster: Cluster, kinds: list[Device], ones: Numbers, one: Numbers) -> tuple[Numbers, Numbers]:
    """Sum over stages of speed times what its place leaves of it, and of speed times its number."""
    # The replica with the most micro-batches fills its pipeline best; all others have at least one.
    most = np.where(p.unequal > 0, (p.micro_batches - 1.0) * p.dp + 1.0, p.micro_batches)
    ratio = np.where(p.chunks > 1, 1.0, 1.0 - 1.0 / most)
    if len(kinds) == 1:
        series = np.where(ratio < 1.0, (1.0 - ratio**p.pp) / np.maximum(1.0 - ratio, 1e-300), p.pp)
        return series, p.pp * (p.pp - 1.0) / 2.0
    weights, later = np.zeros(len(p)), np.zeros(len(p))
    if cluster.num_ranks > _MOST_ORDERED:
        shares = np.array([cluster.devices.count(kind) for kind in kinds]) / cluster.num_ranks
        mean = (shares[:, None] * one / ones).sum(axis=0)
        # Fewer of the first places than the fastest could have: only the sum over all is certain.
        return mean * p.pp, np.zeros(len(p))
    kind_of = [kinds.index(device) for device in cluster.devices]
    speeds = -np.sort(-(one / ones)[kind_of], axis=0)  # ranks x jobs, the fastest first
    count = cluster.num_ranks
    for stages in np.unique(p.pp).astype(int):
        rows = np.flatnonzero(p.pp == stages)
        each = speeds[:, rows].reshape(stages, count // stages, len(rows)).mean(axis=1)
        numbers = np.arange(stages)[:, None]
        weights[rows] = (each * ratio[rows] ** numbers).sum(axis=0)
        later[rows] = (each * numbers).sum(axis=0)
    # The fastest first makes the sum of speed times number least, which keeps the bound.
    return weights, later
