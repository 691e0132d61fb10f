"""Expert parallelism: replicas of a stage share the experts of its layers, and send each other tokens.

Ranks are taken from those that hold the same stage and read different tokens. Everything but experts is on all of
them; of experts each has some, whose gradient is the mean over the losses of those that share, as tokens bring it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mycel.errors import UsageError
from mycel.moe import apply as apply_experts
from mycel.moe import expert_parameter_names
from mycel.moe.hugging_face.blocks import find_blocks
from mycel.parallel.gradients import sum_gradients

__all__ = ["SharedExperts", "check_experts"]


def check_experts(model: nn.Module, degree: int) -> None:
    """That a model's experts can be shared.

    Args:
        model: the whole.
        degree: ranks that share them.

    Raises:
        UsageError: they cannot.
    """
    try:
        find_blocks(model, routers=False)
        if not hasattr(model, "set_experts_implementation"):
            raise UsageError(f"{type(model).__name__} has no set_experts_implementation, as models of transformers 5")
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UsageError(
                "each rank keeps some of the experts that it has, and these have no numbers yet: load them"
            )
    except UsageError as error:
        raise UsageError(f"ep={degree}: {error}; or search with --limit ep=1") from None


class SharedExperts:
    """A model of whose experts each rank has some.

    Args:
        model: the whole, before it is cut into stages; all ranks of the mesh hold the same.
        mesh: of the replicas of this rank's stages, ``(copies, ep)``: those of a row share the experts.

    Raises:
        UsageError: its experts are not understood.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        apply_experts(model, parallel=mesh["ep"])
        self.degree = mesh["ep"].size()
        self._mesh = mesh
        self._names = frozenset(expert_parameter_names(model))

    def among(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        """Those that are experts', in order.

        Args:
            named: parameters by the whole model's names, which stages keep.
        """
        return [parameter for name, parameter in named if name in self._names]

    def sum_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """The mean over ranks that have the same experts.

        Experts to which no token came have a gradient of 0 and not none: copies may have got some, and in the whole
        model's stack others did.

        Args:
            named: parameters of this rank, experts' and others.
        """
        mine, copies = self.among(named), self._mesh["copies"]
        for parameter in mine:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if copies.size() > 1:
            sum_gradients(mine, copies.get_group(), divisor=copies.size())

    def as_whole(self, state: MutableMapping[str, Any]) -> None:
        """Stacks of experts here become shares of those of the whole model, in place; they keep their memory.

        Args:
            state: of parameters by name, or of an optimizer with flat names.
        """
        for name, value in self._stacks(state):
            state[name] = DTensor.from_local(value, self._mesh["ep"], [Shard(0)], run_check=False)

    def as_own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of ``as_whole``.

        Args:
            state: likewise.
        """
        return {**state, **{name: v.to_local() for name, v in self._stacks(state) if isinstance(v, DTensor)}}

    def _stacks(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name, value in list(state.items()):
            is_own = name in self._names or any(f".{known}." in f".{name}" for known in self._names)
            if is_own and isinstance(value, Tensor) and value.dim() > 1:
                yield name, value
