"""Values on their way from mesh to mesh, rank by rank, as messages of the process group."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from mycel.controller.current import current
from mycel.controller.messages import replace

__all__ = ["arrive", "land", "set_out"]

#: Messages under way from here, and what they read from.
_UNDER_WAY: list[tuple[dist.Work, torch.Tensor]] = []
#: Values that go from a rank to itself, in order.
_LOCAL: list[Any] = []


def set_out(value: Any, target: tuple[int, ...], ahead: int) -> None:
    """A program: send this rank's value to the rank in the same place of another mesh.

    Args:
        value: tensors, or what pickle takes, in which tensors lie in lists, tuples and dicts.
        target: the other mesh's ranks.
        ahead: messages that may be under way from here.
    """
    here = current()
    to = target[here.rank]
    if to == here.global_rank:
        _LOCAL.append(value)
        return
    tensors: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> _Place:
        tensors.append(tensor.detach().contiguous())
        return _Place(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    frame = torch.frombuffer(bytearray(pickle.dumps(replace(value, torch.Tensor, place))), dtype=torch.uint8)
    parts = (torch.tensor([frame.numel()]), frame, *(tensor for tensor in tensors if tensor.numel()))
    _UNDER_WAY.extend((dist.isend(part, to), part) for part in parts)  # type: ignore[misc]  # None only outside
    land(ahead)


def arrive(source: tuple[int, ...]) -> Any:
    """A program: what the rank in the same place of another mesh has sent."""
    here = current()
    sender = source[here.rank]
    if sender == here.global_rank:
        return _LOCAL.pop(0)
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, sender)
    frame = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(frame, sender)

    def fill(place: _Place) -> torch.Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if tensor.numel():
            dist.recv(tensor, sender)
        return tensor

    return replace(pickle.loads(frame.numpy().tobytes()), _Place, fill)


class _Place:
    """In the place of a tensor that comes by itself."""

    __slots__ = ("dtype", "number", "shape")

    def __init__(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return _Place, (self.number, self.shape, self.dtype)


def land(ahead: int) -> None:
    """Wait until no more than so many messages are under way from here."""
    while len(_UNDER_WAY) > ahead:
        work, _ = _UNDER_WAY.pop(0)
        work.wait()
