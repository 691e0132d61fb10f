"""A dispatcher for experts in slots: any other dispatcher, over slots in place of experts."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mycel.comm.groups import flat_group, is_in_order
from mycel.errors import UsageError
from mycel.moe.dispatch import Dispatched, SteppedDispatcher, make_dispatcher
from mycel.moe.dispatch.base import Steps
from mycel.moe.placement.replicas import ReplicaSum
from mycel.moe.placement.spread import SlotTable
from mycel.moe.slots import RoutingResult
from mycel.planning.placement import ExpertPlacement
from mycel.wire import WireCodec

__all__ = ["PlacedDispatcher"]


class PlacedDispatcher(SteppedDispatcher):
    """Sends tokens to the slots of a placement, which may change between steps, on all ranks at once.

    A layer made with ``ExpertParallel(mesh, dispatcher=PlacedDispatcher(placement, mesh))`` has a row of its
    parameters for each slot of the rank. Replicas begin equal and get equal gradients, so they stay equal.

    Args:
        placement: of the layer's experts; all later ones have its numbers of ranks and slots.
        mesh: the ranks; the placement's are its ranks in order.
        name: of the dispatcher that carries the tokens, as for ``make_dispatcher``.
        codec: of rows on the wire.

    Raises:
        UsageError: the placement is for another number of ranks, or the dispatcher cannot use mesh or codec.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        mesh: DeviceMesh,
        *,
        name: str | None = None,
        codec: WireCodec | None = None,
    ) -> None:
        if placement.num_ranks != mesh.size():
            raise UsageError(f"the placement is for {placement.num_ranks} ranks, the mesh has {mesh.size()}")
        if not is_in_order(mesh):
            raise UsageError("a placement wants a mesh whose ranks ascend, row by row")
        self.inner = make_dispatcher(name, placement.num_slots, mesh, codec=codec)
        self.num_ranks, self.meter = self.inner.num_ranks, self.inner.meter
        self.same_tokens = self.inner.same_tokens
        self.group = flat_group(mesh)
        self.rank = dist.get_rank(self.group)
        self._set(placement)

    def replace(self, placement: ExpertPlacement) -> None:
        """Route to another placement from now on. ``mycel.moe.placement.move_experts`` calls this and moves them.

        Raises:
            UsageError: it has other numbers of experts, ranks or slots.
        """
        old = self.placement
        if (placement.num_experts, placement.num_ranks, placement.slots_per_rank) != (
            old.num_experts,
            old.num_ranks,
            old.slots_per_rank,
        ):
            raise UsageError(
                f"a placement of {placement.num_experts} experts on {placement.num_ranks} ranks with "
                f"{placement.slots_per_rank} slots cannot follow one of {old.num_experts} on {old.num_ranks} with "
                f"{old.slots_per_rank}"
            )
        self._set(placement)

    def _set(self, placement: ExpertPlacement) -> None:
        self.placement = placement
        self.experts = placement.slots[self.rank]
        self.table = SlotTable(placement, None if self.same_tokens else self.rank)
        self.replicas = ReplicaSum(placement, self.group, self.meter)

    def tie(self, stacked: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters with a row for each slot, whose gradients are added up over replicas."""
        return self.replicas.tie(stacked)

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """See ``TokenDispatcher``."""
        return self.inner.dispatch_steps(x_TD, self.table.apply(routing))

    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """See ``TokenDispatcher``."""
        return self.inner.combine_steps(rows_RD, dispatched)
