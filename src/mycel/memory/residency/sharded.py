"""Units of a model that ``fully_shard`` has sharded: FSDP2's own, of which this rank's shards are near or far."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mycel.memory.residency.schedule import Parts
from mycel.memory.residency.slots import Shard, local

__all__ = ["sharded_parts", "shards_of"]

#: Bytes of parameter, gradient and AdamW's state over those of the parameter: of what FSDP2 was told to leave alone.
_WHOLE = 4


def sharded_parts(model: nn.Module, groups: dict[str, Any]) -> Parts:
    """Units of a sharded model; bytes are of this rank's shards, padded as FSDP2 has them.

    Args:
        model: the module.
        groups: FSDP2's, by name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = {name: list(group.fsdp_params) for name, group in groups.items()}
    sharded = {id(param.sharded_param) for params in units.values() for param in params}
    alone = sum(
        _nbytes(parameter) * (_WHOLE if parameter.requires_grad else 1)
        for parameter in model.parameters()
        if id(parameter) not in sharded
    )
    sizes = {name: [param._sharded_param_data.nbytes for param in params] for name, params in units.items()}
    return Parts(
        names=tuple(units),
        parameters=tuple(tuple(names[id(param.sharded_param)] for param in params) for params in units.values()),
        sizes=tuple(sum(-(-size // 64) * 64 for size in each) for each in sizes.values()),
        trained=tuple(
            sum(param._sharded_param_data.nbytes for param in params if param.sharded_param.requires_grad)
            for params in units.values()
        ),
        uses={name: (place,) for place, name in enumerate(units)},
        largest=max((size for each in sizes.values() for size in each), default=0),
        buffers=alone + sum(_nbytes(buffer) for buffer in model.buffers()),
        gathered=True,
    )


def shards_of(name: str, group: Any) -> list[Shard]:
    """This rank's shards of a group.

    Args:
        name: of the group.
        group: FSDP2's.
    """
    return [Shard(name, param) for param in group.fsdp_params]


def _nbytes(tensor: Tensor) -> int:
    return int(local(tensor).nbytes)
