"""Which parameters are matrices of hidden layers, and which are not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["matrix_groups"]


def matrix_groups(
    model: nn.Module, *, adamw: Sequence[str] = ("*head*",), adamw_options: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for ``Dion`` and ``Muon``: matrices, and the rest for AdamW.

    The rest are vectors, tensors of more dimensions, weights of ``nn.Embedding`` (and what is tied to them) and
    whatever ``adamw`` names: rows of first and last layers belong to tokens, and are not one map.

    Args:
        model: plain, in DDP, or sharded by ``fully_shard``.
        adamw: patterns, as of file names, of matrices that AdamW moves too.
        adamw_options: of the second group, such as its ``lr``.

    Returns:
        Groups with parameters' names.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 4, bias=False))
        >>> [[name for name, _ in group["params"]] for group in matrix_groups(model, adamw_options={"lr": 1e-3})]
        [['1.weight', '2.weight'], ['0.weight', '1.bias']]
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [
        (name, parameter)
        for name, parameter in named
        if parameter.dim() == 2
        and id(parameter) not in tables
        and not any(fnmatchcase(name, pattern) for pattern in adamw)
    ]
    chosen = {name for name, _ in matrices}
    rest = [(name, parameter) for name, parameter in named if name not in chosen]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices})
    if rest:
        groups.append({"params": rest, "algorithm": "adamw", **(adamw_options or {})})
    return groups
