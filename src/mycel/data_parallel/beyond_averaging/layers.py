"""Which weights HD-PiSSA trains, and what belongs to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from mycel.comm.sharded import is_sharded
from mycel.data_parallel.beyond_averaging.directions import move, witness
from mycel.errors import UsageError

__all__ = ["Layer", "choose"]


@dataclass(slots=True, kw_only=True)
class Layer:
    """A weight that is trained.

    Attributes:
        name: of the weight.
        modules: whose weight it is; several where it is tied.
        directions: of all ranks, shape ``[directions, inputs + outputs]``.
        own: which of them are this rank's.
        change: what the optimizer steps, zero between steps, shape ``[this rank's directions, inputs + outputs]``.
        residual: what rounding has taken from a weight of half precision so far, in float32.
    """

    name: str
    modules: list[nn.Linear]
    directions: Tensor
    own: slice
    change: nn.Parameter
    residual: Tensor | None

    @property
    def weight(self) -> Tensor:
        return self.modules[0].weight

    def watch(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor | None:
        """A forward hook: the backward pass finds the gradient of ``change`` on its way."""
        if not torch.is_grad_enabled():
            return None
        return witness(output, args[0] if args else named["input"], self.change, self.directions[self.own])

    def move(self, changes: Tensor) -> None:
        """Move the weight by all ranks' changes; what rounding takes is added the next time."""
        if self.residual is None:
            move(self.weight, self.directions, changes)
            return
        exact = self.weight.to(changes.dtype) + self.residual
        move(exact, self.directions, changes)
        self.weight.copy_(exact)
        self.residual.copy_(exact - self.weight)


def choose(model: nn.Module, layers: str | Sequence[str], skip: str | Sequence[str]) -> dict[str, list[nn.Linear]]:
    """Modules of every chosen weight, by the weight's name.

    Args:
        layers: patterns of names of modules, as in file names.
        skip: patterns of those left out.

    Raises:
        UsageError: no layer is chosen, or one cannot be trained alone.
    """
    layers, skip = ((p,) if isinstance(p, str) else p for p in (layers, skip))
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    named = {name for name in linears if _matches(name, layers) and not _matches(name, skip)}
    wanted = {id(linears[name].weight) for name in named if linears[name].weight.requires_grad}
    chosen: dict[int, tuple[str, list[nn.Linear]]] = {}
    for name, module in linears.items():
        if id(module.weight) in wanted:
            chosen.setdefault(id(module.weight), (f"{name}.weight".lstrip("."), []))[1].append(module)
    if not chosen:
        raise UsageError(
            f"hd_pissa: no nn.Linear whose weight requires gradients is named by {list(layers)} and not by "
            f"{list(skip)}; there are {', '.join(list(linears)[:4]) or 'none'}{' ...' if len(linears) > 4 else ''}"
        )
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in chosen and type(module) is not nn.Linear:
                other = chosen[id(parameter)][0].removesuffix(".weight")
                raise UsageError(
                    f"hd_pissa: the weight of {other} is also that of {name}, a {type(module).__name__}, whose part "
                    f"of the gradient would be missing; leave it out with skip=[{other!r}]"
                )
    for name, modules in chosen.values():
        if is_sharded(modules[0].weight):
            raise UsageError(f"hd_pissa: {name} is sharded, and whole matrices are needed; do not call fully_shard")
    return dict(chosen.values())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
