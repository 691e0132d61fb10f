"""An optimizer's state between slices on ranks and whole tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.overlap.exchanges import Across
from mycel.overlap.flat import Flat, Tile

__all__ = ["gathered_state", "with_state"]

#: State by its own name, of a slice or of a parameter.
_State = dict[str, Any]


@torch.no_grad()
def gathered_state(
    order: Sequence[tuple[Flat, Tile]], states: Sequence[Mapping[str, Any]], across: Across
) -> dict[str, _State]:
    """Whole state by names of parameters; all ranks call it.

    Args:
        order: tiles, with the vectors that they are of.
        states: of this rank's slice of each.
        across: the ranks.
    """
    whole: dict[str, _State] = {}
    kinds = {k: isinstance(value, Tensor) and k != "step" for state in states for k, value in state.items()}
    for key, is_sliced in kinds.items():
        vectors: dict[int, list[Tensor]] = {}
        for (flat, _), state in zip(order, states, strict=True):
            if is_sliced:
                vectors.setdefault(id(flat), []).append(across.gather(state[key]).wait().reshape(-1))
            elif key in state:
                value = state[key]
                for piece in flat.pieces:
                    whole.setdefault(piece.name, {})[key] = value.clone() if isinstance(value, Tensor) else value
        for flat in {id(f): f for f, _ in order}.values():
            if id(flat) not in vectors:
                continue
            vector = torch.cat(vectors[id(flat)])
            for piece in flat.pieces:
                part = vector[piece.begin : piece.stop].view(piece.parameter.shape).clone()
                whole.setdefault(piece.name, {})[key] = part
    return whole


@torch.no_grad()
def with_state(order: Sequence[tuple[Flat, Tile]], whole: Mapping[str, Mapping[str, Any]]) -> list[_State]:
    """This rank's part of a state, for each tile.

    Args:
        order: tiles, with the vectors that they are of.
        whole: by names of parameters; empty before the first step.

    Raises:
        UsageError: a parameter has no state, or of another shape.
    """
    if not whole:
        return [{} for _ in order]
    vectors: dict[int, _State] = {}
    for flat in {id(f): f for f, _ in order}.values():
        made: _State = {}
        for piece in flat.pieces:
            if piece.name not in whole:
                raise UsageError(f"the state has nothing of {piece.name!r}; it is of {_some(list(whole))}")
            for key, value in whole[piece.name].items():
                if key == "step" or not isinstance(value, Tensor):
                    made[key] = value
                    continue
                if value.shape != piece.parameter.shape:
                    raise UsageError(
                        f"the state's {key} of {piece.name!r} has shape {list(value.shape)}, the parameter "
                        f"{list(piece.parameter.shape)}"
                    )
                if key not in made:
                    made[key] = torch.zeros_like(flat.values, dtype=value.dtype)
                made[key][piece.begin : piece.stop] = value.reshape(-1).to(flat.values.device)
        vectors[id(flat)] = made
    return [_slice(vectors[id(flat)], flat, tile) for flat, tile in order]


def _slice(vectors: _State, flat: Flat, tile: Tile) -> _State:
    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == flat.values.shape:
            return value[tile.own_begin : tile.own_begin + tile.each].clone()
        return value.clone() if isinstance(value, Tensor) else value

    return {key: own(value) for key, value in vectors.items()}


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
