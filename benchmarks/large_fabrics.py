"""Fabrics of 64 to 1,024 ranks as people have them: unlike boxes, rails, racks, tori, failed cables, no names.

What the builders give is stripped of its names and nodes, and vertices and links are put in an order drawn by chance,
so that a planner has nothing to go by but the links.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mycel.topology.builders import dgx_a100, dgx_h100, dragonfly, mi250, torus
from mycel.topology.model import Link, Topology, Vertex

__all__ = ["FABRICS", "FAILED", "Cables", "fabric"]

#: Cables up to this width are the network's: those that fail, in GB/s.
NETWORK_GBPS = 50
#: Part of the network's cables that fail.
FAILED = 0.01


@dataclass(slots=True)
class Cables:
    """Ranks and switches, and the cables between them.

    Attributes:
        is_rank: of each vertex.
        width: GB/s each way, by the ends of a cable, the smaller one first.
    """

    is_rank: list[bool] = field(default_factory=list)
    width: dict[tuple[int, int], int] = field(default_factory=dict)

    def rank(self) -> int:
        """A new rank."""
        self.is_rank.append(True)
        return len(self.is_rank) - 1

    def switch(self) -> int:
        """A new switch."""
        self.is_rank.append(False)
        return len(self.is_rank) - 1

    def join(self, a: int, b: int, gbps: int) -> None:
        """A cable, beside those that are there."""
        ends = min(a, b), max(a, b)
        self.width[ends] = self.width.get(ends, 0) + gbps

    def add(self, topology: Topology) -> list[int]:
        """Everything that a builder made; the ranks' numbers here."""
        base = len(self.is_rank)
        self.is_rank += [vertex.kind == "rank" for vertex in topology.vertices]
        for link in topology.links:
            if link.src < link.dst:
                self.join(base + link.src, base + link.dst, link.capacity)
        return [base + vertex for vertex in topology.ranks]

    def fail(self, share: float, rng: random.Random) -> None:
        """Take away some of the network's cables, those without which ranks would be cut off excepted."""
        network = sorted(ends for ends, gbps in self.width.items() if gbps <= NETWORK_GBPS)
        left = max(1, round(share * len(network)))
        for ends in rng.sample(network, len(network)):
            gbps = self.width.pop(ends)
            if not self._reaches_all_ranks():
                self.width[ends] = gbps
                continue
            left -= 1
            if not left:
                return

    def _reaches_all_ranks(self) -> bool:
        near: dict[int, list[int]] = {}
        for a, b in self.width:
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
        start = self.is_rank.index(True)
        seen, todo = {start}, [start]
        while todo:
            for other in near.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return all(vertex in seen for vertex, is_rank in enumerate(self.is_rank) if is_rank)

    def topology(self, name: str, rng: random.Random) -> Topology:
        """In an order drawn by chance, under numbers for names."""
        place = rng.sample(range(len(self.is_rank)), len(self.is_rank))
        kinds = sorted(zip(place, self.is_rank, strict=True))
        links = [
            Link(src=place[src], dst=place[dst], capacity=gbps)
            for (a, b), gbps in self.width.items()
            for src, dst in ((a, b), (b, a))
        ]
        rng.shuffle(links)
        return Topology(
            name=name,
            unit="GB/s",
            vertices=tuple(Vertex(kind="rank" if is_rank else "switch", label=str(v)) for v, is_rank in kinds),
            links=tuple(links),
        )


def built(topology: Topology) -> Cables:
    """The cables of a builder's fabric."""
    cables = Cables()
    cables.add(topology)
    return cables


def unlike_boxes(num_ranks: int) -> Cables:
    """Boxes of A100, H100 and MI250 in turn, whose network cables have a width of their own in every box."""
    rng, cables, boxes, made = random.Random(num_ranks), Cables(), 0, 0
    network = cables.switch()
    kinds = (dgx_a100(), dgx_h100(), mi250())
    while made < num_ranks:
        box = kinds[boxes % 3]
        if box.num_ranks > num_ranks - made:
            box = kinds[0]
        nic = rng.randint(10, NETWORK_GBPS)
        for rank in cables.add(box):
            cables.join(rank, network, nic)
        boxes, made = boxes + 1, made + box.num_ranks
    return cables


def rails(num_boxes: int, *, boxes_a_leaf: int = 16, spine: int = NETWORK_GBPS) -> Cables:
    """H100 boxes on eight rails: a leaf a rail and group of boxes, leaves on eight spines with half the width.

    Args:
        num_boxes: in groups of ``boxes_a_leaf``.
        boxes_a_leaf: ranks that a leaf has.
        spine: of the cable between a leaf and a spine, GB/s; the ranks of a leaf have twice what its spines have.
    """
    cables = Cables()
    groups = -(-num_boxes // boxes_a_leaf)
    leaves = [[cables.switch() for _ in range(8)] for _ in range(groups)]
    spines = [cables.switch() for _ in range(8)]
    for box in range(num_boxes):
        for rail, rank in enumerate(cables.add(dgx_h100())):
            cables.join(rank, leaves[box // boxes_a_leaf][rail], 2 * len(spines) * spine // boxes_a_leaf)
    for leaf in (leaf for group in leaves for leaf in group):
        for other in spines:
            cables.join(leaf, other, spine)
    return cables


def racks(num_racks: int) -> Cables:
    """Racks of 72 GPUs on one switch each, with a cable of 50 GB/s a GPU between racks."""
    cables = Cables()
    network = cables.switch()
    for _ in range(num_racks):
        inside = cables.switch()
        for _ in range(72):
            rank = cables.rank()
            cables.join(rank, inside, 900)
            cables.join(rank, network, 50)
    return cables


def _torus(*dims: int) -> Cables:
    return built(torus(dims=dims, bandwidth="50 GB/s"))


#: Fabrics by name, ``+`` with failed cables: how they are made, and of how many ranks.
FABRICS: dict[str, tuple[Callable[[], Cables], int]] = {
    "unlike_64": (lambda: unlike_boxes(64), 64),
    "a100_64": (lambda: built(dgx_a100(num_nodes=8)), 64),
    "h100_64": (lambda: built(dgx_h100(num_nodes=8)), 64),
    "rails_64": (lambda: rails(8, boxes_a_leaf=4, spine=12), 64),
    "dragonfly_64": (lambda: built(dragonfly(num_groups=8, num_routers=4)), 64),
    "torus_4x4x4": (lambda: _torus(4, 4, 4), 64),
    "unlike_256": (lambda: unlike_boxes(256), 256),
    "a100_256": (lambda: built(dgx_a100(num_nodes=32)), 256),
    "h100_256": (lambda: built(dgx_h100(num_nodes=32)), 256),
    "rails_256": (lambda: rails(32), 256),
    "dragonfly_256": (lambda: built(dragonfly(num_groups=16, num_routers=4, num_ranks_per_router=4)), 256),
    "torus_8x8x4": (lambda: _torus(8, 8, 4), 256),
    "torus_8x8x8": (lambda: _torus(8, 8, 8), 512),
    "racks_576": (lambda: racks(8), 576),
    "unlike_1024": (lambda: unlike_boxes(1024), 1024),
    "a100_1024": (lambda: built(dgx_a100(num_nodes=128)), 1024),
    "h100_1024": (lambda: built(dgx_h100(num_nodes=128)), 1024),
    "rails_1024": (lambda: rails(128), 1024),
    "dragonfly_1024": (lambda: built(dragonfly(num_groups=32, num_routers=8, num_ranks_per_router=4)), 1024),
    "torus_16x8x8": (lambda: _torus(16, 8, 8), 1024),
}


def fabric(name: str, seed: int) -> Topology:
    """One of ``FABRICS``, in the order of a seed; with ``+`` at the end, 1 % of its network cables have failed.

    Which cables have failed does not depend on the seed: fabrics of all seeds are the same but for their numbers.
    """
    make, _ = FABRICS[name.removesuffix("+")]
    cables = make()
    if name.endswith("+"):
        cables.fail(FAILED, random.Random(9))
    return cables.topology(name, random.Random(seed))
