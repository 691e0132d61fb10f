"""The ways bytes take between the ranks of a unit: all in one group, or full inside nodes and compressed between.

With nodes, only the ranks with the same place in each node talk between nodes. A reduce-scatter adds up inside the
node first, in full precision, so that each sum is quantised and sent between nodes once instead of once a rank; an
all-gather brings each shard into a node once, and the node hands it around.

References:
    G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
    arXiv 2306.10209, section 3.3 (quantised all-to-alls by level).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.meter import ByteMeter
from mycel.comm.nodes import equal_nodes, nodes_of
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["Route", "nodes_between"]


def nodes_between(topology: Topology) -> tuple[tuple[int, ...], ...] | None:
    """Ranks of each node, where the topology says that there are nodes of several ranks; otherwise ``None``.

    Raises:
        UsageError: nodes differ in size.

    Examples:
        >>> from mycel.topology.builders import ring, two_boxes
        >>> nodes_between(two_boxes(num_ranks=4)), nodes_between(ring(num_ranks=4))
        (((0, 1), (2, 3)), None)
    """
    if None in topology.ranks_by_node:
        return None
    nodes = nodes_of(topology)
    if len(nodes) < 2 or all(len(node) == 1 for node in nodes):
        return None
    return equal_nodes(topology, "compression between nodes")


class Route:
    """How a group's rows travel.

    Args:
        group: the ranks among which a unit is sharded.
        stats: counts bytes.
        nodes: global ranks of each node, together all ranks of the world and of the group. Making a route is a
            collective call then.
        timeout_s: of groups that are made; by default the backend's.

    Attributes:
        num_rows: as many as ranks.
        num_sent: rows of a reduce-scatter that travel compressed, and of an all-gather that arrive so: one for each
            node, or for each rank where there are no nodes. The own one is among them.
        own: its place.
        stats: bytes that have left this rank compressed, by the collectives' direct form.
        inside: counts those in full precision inside nodes.

    Raises:
        UsageError: the nodes are not those of the world, or the group is not the world.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stats: CommStats,
        nodes: Sequence[Sequence[int]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.group, self.num_rows = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.stats, self.inside = stats, ByteMeter()
        self._between, self._inside = group, None
        self.num_sent, self.own = self.num_rows, self.rank
        if nodes is None:
            return
        everybody = sorted(rank for node in nodes for rank in node)
        members = dist.get_process_group_ranks(group)
        if everybody != list(range(dist.get_world_size())) or sorted(members) != everybody:
            raise UsageError(
                f"nodes hold ranks {everybody}, the model is sharded over {members} of {dist.get_world_size()}: "
                "compression between nodes is for models sharded over the whole world"
            )
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for node in nodes:
            made = dist.new_group(list(node), timeout=timeout)
            if dist.get_rank() in node:
                self._inside = made
        for place in range(len(nodes[0])):
            ranks = [node[place] for node in nodes]
            made = dist.new_group(ranks, timeout=timeout)
            if dist.get_rank() in ranks:
                self._between, self.own = made, ranks.index(dist.get_rank())
        self.num_sent = len(nodes)
        self._rows = torch.tensor([[members.index(node[place]) for node in nodes] for place in range(len(nodes[0]))])

    def sources(self) -> list[int]:
        """The ranks, in the group, whose payloads ``gather`` brings; of ``exchange``, whose node they stand for."""
        if self._inside is None:
            return list(range(self.num_rows))
        column = self._rows[dist.get_rank(self._inside)]
        return [int(row) for row in column]

    def check_inside(self, group: dist.ProcessGroup, module: str) -> None:
        """Refuse a group, of those who keep a module's weights between its passes, that is in several nodes.

        Raises:
            UsageError: its gathers would leave nodes, in full precision.
        """
        if self._inside is None:
            return
        keepers, node = dist.get_process_group_ranks(group), dist.get_process_group_ranks(self._inside)
        if not set(keepers) <= set(node):
            raise UsageError(
                f"module {module!r} keeps the weights of its forward pass between ranks {keepers}, which are in "
                f"several nodes: fully_shard(..., reshard_after_forward={len(node)}), the ranks of a node, or less"
            )

    def gather(self, payload: Tensor) -> Tensor:
        """Payloads of ``sources()``, shape ``[num_sent, bytes]``."""
        heard = payload.new_empty(self.num_sent * len(payload))
        all_gather_single(heard, payload, group=self._between)
        self.stats.sent((self.num_sent - 1) * len(payload))
        return heard.view(self.num_sent, -1)

    def spread(self, rows: Tensor, output: Tensor) -> None:
        """Decoded rows of ``sources()`` to all ranks of the node; ``output`` gets those of everybody.

        Args:
            rows: shape ``[num_sent, row]``; where there are no nodes, a view of ``output``.
            output: shape ``[num_rows, row]``.
        """
        if self._inside is None:
            return
        heard = rows.new_empty((self._rows.numel(), rows.shape[1]))
        all_gather_single(heard.view(-1), rows.reshape(-1), group=self._inside)
        self.inside.add_even("gather", rows.numel() * rows.element_size(), self._inside)
        output[self._rows.view(-1).to(output.device)] = heard

    def add_inside(self, rows: Tensor) -> Tensor:
        """Sums over the node of the rows for ``sources()``, or the rows themselves: shape ``[num_sent, row]``.

        Args:
            rows: one for each rank of the group.
        """
        if self._inside is None:
            return rows
        ordered = rows[self._rows.view(-1).to(rows.device)]
        total = rows.new_empty((self.num_sent, rows.shape[1]))
        reduce_scatter_single(total.view(-1), ordered.view(-1), group=self._inside)
        self.inside.add_even("sum", total.numel() * total.element_size(), self._inside)
        return total

    def exchange(self, payloads: Tensor) -> Tensor:
        """To each of ``sources()`` its payload, and theirs back; shape ``[num_sent, bytes]`` both ways."""
        heard = torch.empty_like(payloads)
        dist.all_to_all_single(heard.view(-1), payloads.view(-1), group=self._between)
        self.stats.sent((self.num_sent - 1) * payloads.shape[1])
        return heard
