"""What parts of a model hold, by parameters' names, for checkpoints and for ranks that come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.local.parts import Part
from mycel.data_parallel.local.state import as_saved, load_tensors, read_optimizer, write_optimizer
from mycel.errors import UsageError

__all__ = ["by_name", "load_parts", "state_of_parts"]


def by_name(part: Part, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Copies of a part's vectors, divided over ranks as its parameters are."""
    entries = zip(part.names, vectors, part.parameters, strict=True)
    return {name: as_saved(vector, parameter) for name, vector, parameter in entries}


def state_of_parts(parts: Sequence[Part], group: dist.ProcessGroup, *, own: bool) -> dict[str, Any]:
    """Shared parameters, outer optimizers' states, residuals and compressors' states.

    Args:
        own: this rank's own residuals; otherwise their mean over the group, for which all of its ranks call this.
    """
    state: dict[str, Any] = {"shared": {}, "outer": {}, "meetings": [part.meetings for part in parts]}
    state |= {"residuals": {}, "compressors": {}, "owner": [group.rank(), group.size()] if own else None}
    for part in parts:
        state["shared"] |= by_name(part, part.shared.parts)
        outer = read_optimizer(part.outer, part.names, part.parameters)
        state["outer"].setdefault("groups", outer["groups"])
        state["outer"].setdefault("state", {}).update(outer["state"])
        carried = part.carrier.state_dict(group, own=own)
        state["residuals"] |= carried["residuals"]
        for name, held in carried["compressors"].items():
            state["compressors"].setdefault(name, {}).update(held)
    return state


def load_parts(parts: Sequence[Part], state: dict[str, Any], group: dist.ProcessGroup) -> None:
    """The reverse of ``state_of_parts``.

    Raises:
        UsageError: the state is that of another model, of other fragments, or of compressed changes.
    """
    if len(state["meetings"]) != len(parts):
        raise UsageError(f"the saved local updates had {len(state['meetings'])} fragments, these have {len(parts)}")
    here = [group.rank(), group.size()]
    if state["residuals"] and state["owner"] not in (None, here):
        rank, size = state["owner"]
        raise UsageError(
            f"these residuals are those of rank {rank} of {size}, this is rank {here[0]} of {here[1]}: save with "
            "state_dict() for other ranks"
        )
    for part, meetings in zip(parts, state["meetings"], strict=True):
        load_tensors("shared parameters", state["shared"], part.names, part.shared.parts)
        write_optimizer(part.outer, part.names, state["outer"])
        part.carrier.load_state_dict(state)
        part.meetings, part.trained = meetings, -1
