"""The groups of a plan: of every rank its pipeline, its replicas, and those it shares matrices and sequences with.

Torch numbers the ranks of a group in ascending order, whatever order they are given in. So a plan's own numbers are
kept beside the groups: which row of the order a member of a pipeline has, which part of the batch a replica reads,
which part of a tensor a rank of tensor parallelism holds, which tokens of a sequence one of context parallelism has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.pipeline.order import Order
from mycel.planning.plan import Plan

__all__ = ["Groups", "groups_of", "order_of_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where a rank is in a plan's mesh, and with whom.

    Attributes:
        place: in the pipeline.
        replica: which pipeline it is in, of those that have the same share of matrices: ``dp`` parts of the batch,
            each by ``cp`` parts of its sequences.
        data: which part of the batch it reads.
        shard: which part of shared matrices' inputs and results it holds, in the plan's order.
        mesh: of the ranks at its place: ``dp * cp``, which is called ``dp``, by ``tp``.
        pipe: group of its pipeline.
        pipe_places: place of each member of that group.
        shards: number in the plan's order of each member of the group of its tensor parallelism.
        context: group of the ranks it shares sequences with; ``None`` where each has whole ones.
        contexts: number in the plan's order of each member of that group.
        experts: of the replicas of its stages, ``copies`` by ``ep``: rows share experts; ``None`` where each has all.
    """

    place: int
    replica: int
    data: int
    shard: int
    mesh: DeviceMesh
    pipe: dist.ProcessGroup
    pipe_places: tuple[int, ...]
    shards: tuple[int, ...]
    context: dist.ProcessGroup | None = None
    contexts: tuple[int, ...] = (0,)
    experts: DeviceMesh | None = None

    @property
    def dp(self) -> DeviceMesh:
        """Of the replicas of its stages, those that have other tokens of the same sequences among them."""
        return self.mesh["dp"]

    @property
    def tp(self) -> DeviceMesh:
        """Of the ranks that its stages' matrices are shared by."""
        return self.mesh["tp"]


def groups_of(plan: Plan, device_type: str) -> Groups | None:
    """Make all groups of a plan; every rank of the job has to call this at the same point.

    Args:
        plan: for as many ranks as the job has.
        device_type: such as ``cpu``.

    Returns:
        Those of this rank; ``None`` where the plan does not use it.

    Raises:
        UsageError: groups that torch cannot make.
    """
    rank, mesh = dist.get_rank(), plan.job.mesh
    places = np.array(plan.ranks).reshape(mesh.pp, mesh.dp * mesh.cp, mesh.tp)
    own: Groups | None = None
    found: dict[int, DeviceMesh] = {}
    for place in range(mesh.pp):
        made = DeviceMesh(device_type, torch.tensor(_ascending(places[place], place)), mesh_dim_names=("dp", "tp"))
        if rank in places[place]:
            found[place] = made
    for replica in range(mesh.dp * mesh.cp):
        for shard in range(mesh.tp):
            members = [int(places[place, replica, shard]) for place in range(mesh.pp)]
            pipe = dist.new_group(members)
            if rank not in members:
                continue
            place = members.index(rank)
            beside = sorted(int(other) for other in places[place, replica])
            own = Groups(
                place=place,
                replica=replica,
                data=replica // mesh.cp,
                shard=shard,
                mesh=found[place],
                pipe=pipe,
                pipe_places=tuple(members.index(member) for member in sorted(members)),
                shards=tuple(places[place, replica].tolist().index(other) for other in beside),
            )
    for members in _that_share_sequences(plan):
        group = dist.new_group(members)
        if own is not None and rank in members:
            own = replace(own, context=group, contexts=tuple(members.index(member) for member in sorted(members)))
    for place in range(mesh.pp if mesh.ep > 1 else 0):
        for shard in range(mesh.tp):
            rows = _ascending(places[place, :, shard].reshape(-1, mesh.ep), place)
            shared = DeviceMesh(device_type, torch.tensor(rows), mesh_dim_names=("copies", "ep"))
            if own is not None and (own.place, own.shard) == (place, shard):
                own = replace(own, experts=shared)
    return own


def _that_share_sequences(plan: Plan) -> list[list[int]]:
    """Ranks of every group of context parallelism, in the plan's order; none where sequences are whole."""
    mesh = plan.job.mesh
    places = np.array(plan.ranks).reshape(mesh.pp * mesh.dp, mesh.cp, mesh.tp)
    return [list(map(int, row)) for row in places.swapaxes(1, 2).reshape(-1, mesh.cp)] if mesh.cp > 1 else []


def _ascending(ranks: np.ndarray[tuple[int, ...], np.dtype[np.int64]], place: int) -> list[list[int]]:
    """The ranks of a place, replicas by shards, so that rows and columns ascend as torch's groups do."""
    rows = sorted(sorted(map(int, row)) for row in ranks)
    for column in zip(*rows, strict=True):
        if list(column) != sorted(column):
            raise UsageError(
                f"at place {place} of the pipeline replicas {rows} cross: torch numbers the ranks of groups in "
                "ascending order, and so parts of a matrix would be mixed up; swap ranks so that columns ascend"
            )
    return rows


def order_of_group(order: Order, places: tuple[int, ...]) -> Order:
    """An order with its rows as a group numbers its ranks.

    Args:
        order: by places of the pipeline.
        places: of each rank of the group.

    Examples:
        >>> print(order_of_group(Order.from_csv("0F0,0B0\\n1F0,1B0\\n"), (1, 0)).to_csv(), end="")
        1F0,1B0
        0F0,0B0
    """
    return replace(order, rows=tuple(order.rows[place] for place in places))
