"""Weights of channels: how much of a link each of those that share it should have.

A forest meets its bound only if every channel moves at a rate in proportion to what it carries: where two channels
share a busy link, one with three units of the array and one with one, equal halves of the link leave the first
behind, and everything that waits for it. What a channel carries follows from the transfers, so every schedule has its
weights, and programs (``Program.weights``), paces (``mycel.runtime.pacing``) and simulated links take them from here.

References:
    A. Parekh, R. Gallager, "A generalized processor sharing approach to flow control in integrated services
    networks", IEEE/ACM Transactions on Networking 1(3), 1993 (sharing a link by weights).
"""

from __future__ import annotations

import numpy as np

from mycel.collectives.program import Channel
from mycel.collectives.schedule import Schedule

__all__ = ["channel_weights"]


def channel_weights(schedule: Schedule, vertex: int) -> dict[Channel, int]:
    """Units of the schedule's array that each channel of a rank (or a switch that computes) carries.

    Args:
        schedule: what runs.
        vertex: whose channels, those on which it sends and those on which it receives.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> ring = synthesize(load_topology("ring:ranks=3,bandwidth=1 GB/s"), "all_gather", "ring")
        >>> [(channel.src, channel.dst, weight) for channel, weight in channel_weights(ring, 0).items()]
        [(0, 1, 2), (2, 0, 2)]
    """
    transfers = schedule.parts.of(vertex).transfers.values()
    chunks = np.array([t.chunk for t in transfers], dtype=np.int64)
    units = (schedule.chunk_stops[chunks] - schedule.chunk_starts[chunks]).tolist()
    weights: dict[Channel, int] = {}
    for t, num_units in zip(transfers, units, strict=True):
        channel = Channel(src=t.src, dst=t.dst, path=t.path)
        weights[channel] = weights.get(channel, 0) + num_units
    return weights
