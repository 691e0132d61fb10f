"""The part of a model that is one stage: its own modules where they were, and nothing where the others were."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from mycel.parallel.chain import first_tensor, options_of

__all__ = ["Part", "StageModule", "part_of"]


class _Passing(nn.Module):
    """In the place of a module of another stage: hands on what it is given."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """What it is given, without a look at the rest."""
        return x


#: A model of which only some modules are left; names of parameters are those of the whole.
Part: TypeAlias = nn.Module


def part_of(model: nn.Module, names: Sequence[str], others: Sequence[str]) -> Part:
    """A model with only some of its modules.

    Nothing is copied but the objects that hold the modules: parameters are the whole model's, so what is done to the
    part is done to them. What belongs to no stage, such as the angles of rotated positions, stays.

    Args:
        model: the whole.
        names: of the modules that stay.
        others: of those that go.

    Examples:
        >>> import torch
        >>> whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
        >>> part = part_of(whole, ["1"], ["0"])
        >>> [name for name, _ in part.named_parameters()], part(torch.ones(1, 3)).shape
        (['1.weight', '1.bias'], torch.Size([1, 4]))
    """
    return _pruned(model, "", set(names), set(others))


def _pruned(module: nn.Module, prefix: str, kept: set[str], gone: set[str]) -> nn.Module:
    if not any(name.startswith(prefix) for name in gone):
        return module
    pruned = copy.copy(module)
    pruned._modules = {}
    for name, child in module._modules.items():
        path = prefix + name
        if child is None or path in kept:
            pruned._modules[name] = child
        elif path in gone:
            pruned._modules[name] = _Passing()
        else:
            pruned._modules[name] = _pruned(child, f"{path}.", kept, gone)
    return pruned


class StageModule(nn.Module):
    """A part as a stage of a pipeline: tensors in, one tensor out.

    Args:
        part: of the model.
        options: for its forward, besides what a step gives.
    """

    def __init__(self, part: Part, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.part = part
        self._options = {**options_of(part), **(options or {})}

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The part's result, of Hugging Face's the logits.

        Args:
            x: the batch, or what the stage before gave.
            kwargs: of the whole model.
        """
        result = first_tensor(self.part(x, **{**self._options, **kwargs}))
        if result is None:
            raise TypeError(f"{type(self.part).__name__} gave no tensor")
        return result
