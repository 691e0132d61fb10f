"""``OverlappedColwise`` and ``OverlappedRowwise``: linear layers of torch's tensor parallelism that overlap."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from mycel.errors import UsageError
from mycel.overlap.all_gather_matmul import all_gather_matmul
from mycel.overlap.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = ["OverlappedColwise", "OverlappedRowwise"]

_log = logging.getLogger(__name__)


class _Overlapped(ParallelStyle):
    """What both styles are: which way parameters are sharded, and which class a layer becomes.

    Args:
        dim: along which rows are sharded.
        tiles: as of the operator.
    """

    weight: Placement
    bias: Placement
    kind: type[nn.Linear]

    def __init__(self, *, dim: int = 0, tiles: int | None = None) -> None:
        super().__init__()
        self.dim, self.tiles = dim, tiles
        self.replaced: list[str] = []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if type(module) is not nn.Linear:
            raise UsageError(f"{name} of a {type(module).__name__}: it is for torch.nn.Linear")
        if device_mesh.ndim != 1:
            raise UsageError(
                f"{name} over a mesh of {device_mesh.ndim} dimensions: give the tensor-parallel one of it"
            )
        for key, placement in (("weight", self.weight), ("bias", self.bias)):
            parameter = getattr(module, key)
            if parameter is not None:
                sharded = distribute_tensor(parameter.detach(), device_mesh, [placement])
                module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.__class__ = self.kind
        module.__dict__["_overlap"] = (self.dim, self.tiles, device_mesh)
        said = f"Linear({module.in_features} -> {module.out_features}), {self.weight} of {device_mesh.size()}"
        self.replaced.append(said)
        _log.info("%s: %s", name, said)
        return module


class OverlappedColwise(_Overlapped):
    """A linear layer whose output columns are divided; rows of ranks are gathered while others are multiplied.

    As ``ColwiseParallel(input_layouts=Shard(dim))``: the layer takes this rank's rows and gives all rows of its own
    columns, an ordinary tensor. Parameters are ``DTensor``, sharded as there, so that checkpoints are the same.

    Args:
        dim: along which the input's rows are sharded; 0 is sent as it lies, others are copied first.
        tiles: in how many parts rows travel; if not given, as the model of cost says.

    Attributes:
        replaced: which layers it was applied to.

    Raises:
        UsageError: applied to what is no ``torch.nn.Linear``, or over a mesh of several dimensions.

    Examples:
        On every rank of a mesh::

            styles = {"up": OverlappedColwise(), "down": OverlappedRowwise()}
            parallelize_module(mlp, mesh, styles)
            styles["up"].replaced  # what was found
    """

    weight, bias = Shard(0), Shard(0)


class OverlappedRowwise(_Overlapped):
    """A linear layer whose input columns are divided; sums of rows travel while other rows are multiplied.

    As ``RowwiseParallel(output_layouts=Shard(dim))``: the layer takes all rows of its own columns and gives this
    rank's rows of the sum, an ordinary tensor. Parameters are ``DTensor``, sharded as there.

    Args:
        dim: along which the output's rows are sharded; 0 is sent as it lies, others are copied.
        tiles: in how many parts rows are made and sent; if not given, as the model of cost says.

    Attributes:
        replaced: which layers it was applied to.

    Raises:
        UsageError: applied to what is no ``torch.nn.Linear``, or over a mesh of several dimensions.

    Examples:
        On every rank of a mesh::

            parallelize_module(attention, mesh, {"wo": OverlappedRowwise(dim=1)})  # [batch, sequence, features]
    """

    weight, bias = Shard(1), Replicate()


class _ColwiseLinear(nn.Linear):
    """Made of a ``torch.nn.Linear`` by ``OverlappedColwise``."""

    _overlap: tuple[int, int | None, DeviceMesh]

    def forward(self, input: Tensor) -> Tensor:
        """All rows of this rank's columns."""
        dim, tiles, mesh = self._overlap
        group, rows, local = mesh.get_group(), None, input
        if isinstance(input, DTensor):
            local = input.to_local()
            rows = _chunks(input.shape[dim], mesh.size())
        bias = None if self.bias is None else _local(self.bias)
        product = all_gather_matmul(
            local.movedim(dim, 0), _local(self.weight).t(), bias, group=group, rows=rows, tiles=tiles
        )
        return product.movedim(0, dim)


class _RowwiseLinear(nn.Linear):
    """Made of a ``torch.nn.Linear`` by ``OverlappedRowwise``."""

    _overlap: tuple[int, int | None, DeviceMesh]

    def forward(self, input: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        dim, tiles, mesh = self._overlap
        group: dist.ProcessGroup = mesh.get_group()
        local = input.to_local() if isinstance(input, DTensor) else input
        bias = None if self.bias is None else _local(self.bias)
        kept = matmul_reduce_scatter(
            local.movedim(dim, 0), _local(self.weight).t(), bias=bias, group=group, tiles=tiles
        )
        return kept.movedim(0, dim)


OverlappedColwise.kind = _ColwiseLinear
OverlappedRowwise.kind = _RowwiseLinear


def _local(parameter: Any) -> Tensor:
    """This rank's part; a bias that all have alike gets the same gradient on all."""
    local: Tensor = parameter.to_local(grad_placements=parameter.placements)
    return local


def _chunks(total: int, size: int) -> list[int]:
    each = -(-total // size)
    return [max(0, min(each, total - rank * each)) for rank in range(size)]
