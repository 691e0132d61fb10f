"""What every wing needs of ranks: groups of them, nodes of a mesh, exchanges with gradients and in the background.

Nothing here knows what travels or why: a thing that a second wing needs comes down to this floor.
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.comm", "torch")

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle, Packed
from mycel.comm.exchange import (
    all_gather_rows,
    copy_to_ranks,
    reduce_scatter_rows,
    start_exchange,
    sum_over_ranks,
    there_and_back,
)
from mycel.comm.groups import flat_group, subgroup
from mycel.comm.handle import Handle
from mycel.comm.meter import ByteMeter
from mycel.comm.nodes import equal_nodes, node_mesh, nodes_of, with_bandwidths
from mycel.comm.pending import Pending, keep_exchanges
from mycel.comm.some_ranks import SomeRanks
from mycel.comm.start import agree, group_or_all

__all__ = [
    "Bundle",
    "ByteMeter",
    "Handle",
    "InBackground",
    "Packed",
    "Pending",
    "SomeRanks",
    "agree",
    "all_gather_rows",
    "copy_to_ranks",
    "equal_nodes",
    "flat_group",
    "group_or_all",
    "keep_exchanges",
    "node_mesh",
    "nodes_of",
    "reduce_scatter_rows",
    "start_exchange",
    "subgroup",
    "sum_over_ranks",
    "there_and_back",
    "with_bandwidths",
]
