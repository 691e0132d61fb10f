"""Trees grown along links: how much of one may be taken."""

from __future__ import annotations

import numpy as np
import pytest

from mycel.collectives.bound import find_optimum
from mycel.collectives.synth.along_links import _Packer
from mycel.collectives.synth.scales import fewest
from mycel.topology.load import load_topology


@pytest.mark.parametrize("fabric", ["dgx_a100:nodes=2", "mi250:nodes=1", "torus:dims=3x4", "fat_tree:k=4"])
@pytest.mark.parametrize("seed", range(3))
def test_as_many_paths_are_good_as_trying_every_number_finds(fabric, seed):
    topology = load_topology(fabric)
    best = find_optimum(topology, (1,) * topology.num_ranks, is_reversed=False)
    packer = _Packer(best.graph, *fewest(best))
    # Trees that are too many together leave too little after some of their paths.
    packer.sets = packer.sets[:0]
    packer.entry_arcs, packer.entry_sets, packer.num_inside, packer.outside = np.zeros((4, 0), dtype=np.int64)
    packer.is_watched = np.zeros(0, dtype=np.bool_)
    packer.has_rank = packer.has_rank[:, :0]
    packer.num_soft = packer.num_first = 0
    some_fail = False
    for root in np.random.default_rng(seed).permutation(topology.num_ranks).tolist():
        tree = packer.grow(root, int(packer.waiting[root]))
        counts = [count for count in range(len(tree.stops) + 1) if not packer.lacking(tree, count)]
        assert counts == list(range(len(counts)))
        count, why = packer.num_good_paths(tree, 0)
        assert count == counts[-1] and bool(why) == (count < len(tree.stops))
        if why:
            some_fail = True
            more = packer.bearable_paths(tree, packer.lacking(tree, count + 1))
            assert more.max() <= count
            packer.give_back([tree])
            break
    assert some_fail or not packer.waiting.any()
