"""Hierarchical: rings inside the boxes, and rings between the ranks that have the same place in each box.

all_reduce is a reduce_scatter inside each box, an all_reduce of each share between boxes, and an all_gather inside:
all interfaces of a box carry a share of what leaves it, and the slow links carry each byte as often as needed only.

References:
    M. Cho, U. Finkler, M. Serrano, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy", IBM J. Research and Development 63(6), 2019, section 3.
"""

from __future__ import annotations

from itertools import pairwise

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "equal_boxes", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def equal_boxes(topology: Topology, method: str) -> list[list[int]]:
    """Ranks by box, in the order of ranks.

    Args:
        topology: the fabric.
        method: for messages.

    Raises:
        SynthesisError: a rank without a box, fewer than two boxes, or boxes of different size.
    """
    boxes: dict[str, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        box = topology.vertices[vertex].box
        if box is None:
            raise SynthesisError(f"{method} on {topology.name}: rank {rank} has no box")
        boxes.setdefault(box, []).append(rank)
    sizes = {len(ranks) for ranks in boxes.values()}
    if len(boxes) < 2 or len(sizes) > 1:
        found = ", ".join(f"{box!r}: {len(ranks)}" for box, ranks in boxes.items())
        raise SynthesisError(
            f"{method} on {topology.name}: needs two boxes or more with equally many ranks; found {found}"
        )
    return list(boxes.values())


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Rings inside boxes and between them.

    Raises:
        SynthesisError: another collective, no equal boxes, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "hierarchical", SERVES)
    boxes = equal_boxes(topology, "hierarchical")
    strands = []
    for owner in range(collective.num_ranks):
        home = next(number for number, ranks in enumerate(boxes) if owner in ranks)
        place = boxes[home].index(owner)
        inside = [ranks[place:] + ranks[:place] for ranks in boxes]
        between = [ranks[0] for ranks in inside[home:] + inside[:home]]
        up: list[Edge] = []
        down: list[Edge] = []
        if collective.reduces:
            up += [edge for ranks in inside for edge in pairwise([*ranks[1:], ranks[0]])]
            up += pairwise([*between[1:], owner])
        if collective.name != "reduce_scatter":
            down += pairwise(between)
            down += [edge for ranks in inside for edge in pairwise(ranks)]
        strands.append(Strand(block=owner if collective.num_blocks > 1 else 0, up=tuple(up), down=tuple(down)))
    return from_strands(topology, collective, "hierarchical", strands)
