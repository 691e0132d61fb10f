"""Checkpoints of planned models: names are those of the model without a plan, whoever holds what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mycel.parallel.planned.experts import SharedExperts

__all__ = ["load_state", "state_of"]

#: Flat names of the optimizer's state, so that states of several stages go into one object.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SOME = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def state_of(
    parts: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    experts: SharedExperts | None = None,
) -> dict[str, dict[str, Any]]:
    """Parameters and optimizer state of a rank's stages.

    Args:
        parts: of the model, by stage.
        optimizers: by stage.
        experts: where ranks share them: their stacks are shares of whole ones then.

    Returns:
        ``model`` and ``optimizer``, each by name.
    """
    found: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for stage, part in parts.items():
        found["model"].update(get_model_state_dict(part))
        if stage in optimizers:
            found["optimizer"].update(get_optimizer_state_dict(part, optimizers[stage], options=_FLAT))
    if experts is not None:
        for state in found.values():
            experts.as_whole(state)
    return found


def load_state(
    parts: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    states: Mapping[str, Any],
    experts: SharedExperts | None = None,
) -> None:
    """Take over parameters and optimizer state.

    Args:
        parts: of the model, by stage.
        optimizers: by stage.
        states: as ``state_of`` gives them.
        experts: as of ``state_of``.
    """
    if experts is not None:
        states = {what: experts.as_own(state) for what, state in states.items()}
    for stage, part in parts.items():
        names = set(get_model_state_dict(part))
        own = {name: value for name, value in states["model"].items() if name in names}
        set_model_state_dict(part, own, options=_SOME)
        if stage in optimizers:
            own = {n: v for n, v in states["optimizer"].items() if any(f".{name}." in f"{n}." for name in names)}
            set_optimizer_state_dict(part, optimizers[stage], own, options=_FLAT)
